"""Answers calls with an engine: prompts in, messages out.

Owns: one call from its arrival to its last message. Must not know: Ray, HTTP, how the engine was made.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager

from engine.core.async_engine import AsyncEngine
from engine.core.generation import GenerationDelta
from engine.text.tokenizer import Tokenizer
from serve_app.protocol import Deltas, GenerateCall, Usage
from serve_app.replica.admission_batcher import AdmissionBatcher
from serve_app.replica.embedding import embed, require_embeddings
from serve_app.replica.fold import CallFolder
from serve_app.replica.prompts import PreparedCall, ReceivedCall, echo_texts, prepare_calls, require_room_in_queue
from serve_app.replica.stream import batches
from serve_app.telemetry.record import ReplicaName
from serve_app.telemetry.recorder import OpenCall, Recorder

# Tokenizing a long prompt takes tens of milliseconds: off the event loop, and no more at once than leaves it a core.
NUM_TEXT_THREADS = 2


class CallRunner:
    """Everything that a replica does for calls. Belongs to the engine's event loop."""

    def __init__(
        self,
        engine: AsyncEngine,
        tokenizer: Tokenizer,
        *,
        flush_interval_s: float,
        max_waiting_requests: int,
        max_messages_per_s: float = math.inf,
        recorder: Recorder | None = None,
    ) -> None:
        self._recorder = recorder or Recorder(ReplicaName(), engine.holds)
        engine.on_account = self._recorder.account
        self._engine = engine
        self._tokenizer = tokenizer
        self._flush_interval_s = flush_interval_s
        self._max_messages_per_s = max_messages_per_s
        self._num_streaming = 0
        self._max_waiting_requests = max_waiting_requests
        self._batcher: AdmissionBatcher[ReceivedCall, PreparedCall] = AdmissionBatcher(
            self._prepare_wave,
            size_of=lambda received: received.num_text_bytes,
            is_full=self._is_full,
            num_threads=NUM_TEXT_THREADS,
        )
        self.num_open = 0

    async def generate(self, call: GenerateCall) -> AsyncGenerator[Deltas, None]:
        """Yield the answer: the first token at once, then what came in each flush interval, the rest at the end.

        Raises RequestError and AdmissionRefusedError before the first message. Closing or cancelling it frees the slots
        within a step.
        """
        self.num_open += 1
        opened = self._recorder.open(call)
        error: BaseException | None = None
        try:
            if call.count_only:
                prepared = await self._prepare(opened)
                yield Deltas((), Usage(sum(len(request.prompt_token_ids) for request in prepared.requests)))
                return
            if call.embeds:
                async with aclosing(await self._embed(opened)) as vectors:
                    async for message in vectors:
                        yield message
                return
            folder, streams = await self._open(opened)
            with self._streaming():
                async with aclosing(batches(streams, self._interval_s)) as arriving:
                    async for arrived in arriving:
                        opened.note(arrived)
                        yield folder.fold(arrived)
        except BaseException as reason:
            error = reason
            raise
        finally:
            self.num_open -= 1
            opened.close(error)

    def close(self) -> None:
        """Let go of the threads."""
        self._batcher.close()

    @contextmanager
    def _streaming(self) -> Iterator[None]:
        self._num_streaming += 1
        try:
            yield
        finally:
            self._num_streaming -= 1

    def _interval_s(self) -> float:
        """How long tokens are gathered: as configured, and longer when the calls together would send too many."""
        return max(self._flush_interval_s, self._num_streaming / self._max_messages_per_s)

    async def _open(self, opened: OpenCall) -> tuple[CallFolder, list[AsyncGenerator[GenerationDelta, None]]]:
        call = opened.call
        status = self._engine.status()
        require_room_in_queue(call, status.scheduler.slots + self._max_waiting_requests)
        prepared = await self._prepare(opened)
        opened.prepared([request.request_id for request in prepared.requests])
        echo = echo_texts(call, self._tokenizer) if call.echo else ()
        folder = CallFolder(self._tokenizer, call.num_prompts, call.n, echo, prepared.reading)
        return folder, [self._engine.generate(request) for request in prepared.requests]

    async def _embed(self, opened: OpenCall) -> AsyncGenerator[Deltas, None]:
        call, status = opened.call, self._engine.status()
        require_embeddings(call, status.model)
        prepared = await self._prepare(opened)
        opened.prepared([request.request_id for request in prepared.requests])
        return embed(
            self._engine,
            prepared.requests,
            dimensions=call.dimensions,
            num_at_once=status.scheduler.slots,
            flush_interval_s=self._flush_interval_s,
            note=opened.note,
        )

    async def _prepare(self, opened: OpenCall) -> PreparedCall:
        return await self._batcher.prepare(ReceivedCall(opened.call, opened.received_s))

    def _prepare_wave(self, calls: Sequence[ReceivedCall]) -> Sequence[PreparedCall | Exception]:
        return prepare_calls(calls, self._tokenizer, self._engine.status().model.max_model_len)

    def _is_full(self) -> bool:
        scheduler = self._engine.status().scheduler
        return scheduler.num_running >= scheduler.slots or scheduler.num_waiting > 0
