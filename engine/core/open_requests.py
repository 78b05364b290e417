"""The requests that callers wait for, and what each of them has received so far.

Owns: the book from sequence ids to open requests, and each request's queue of deltas. Must not know: the engine's
state, how messages travel.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from engine.core.generation import GenerationDelta, GenerationRequest, RequestAccount
from engine.core.output_processor import AnswerProcessor
from engine.errors import EngineError
from engine.request import EngineRequest, FinishReason, TokenOutput
from engine.text.tokenizer import Tokenizer


class OpenRequest:
    """One client request with its ``n`` answers, from submission to its last delta or its error."""

    def __init__(self, request: GenerationRequest, tokenizer: Tokenizer) -> None:
        self.request = request
        self.sequences = _sequences(request, tokenizer.eos_token_ids)
        self.has_delivered = False
        self.num_submissions = 0
        self.ended = False
        self.error: EngineError | None = None
        self._tokenizer = tokenizer
        self._undelivered: deque[GenerationDelta | EngineError] = deque()
        self._news = asyncio.Event()
        self._begin()

    def begin_again(self) -> None:
        """Forget what came of the request but was not delivered: another engine computes it anew."""
        assert not self.has_delivered, "what a caller has seen cannot be taken back"
        self._begin()

    def _begin(self) -> None:
        self.answers = {
            sequence.request_id: AnswerProcessor(self.request, index, self._tokenizer)
            for index, sequence in enumerate(self.sequences)
        }
        self._undelivered.clear()

    @property
    def untold_ids(self) -> tuple[str, ...]:
        """Sequences of which the engine has not told that it is done with them."""
        return tuple(sequence_id for sequence_id, answer in self.answers.items() if not answer.is_told)

    def take(self, output: TokenOutput, now_s: float) -> bool:
        """Add ``output`` to its answer; True when a stop string has completed it and the engine has to be told."""
        answer = self.answers[output.request_id]
        if answer.finished:
            return False
        was_complete = answer.text_complete
        delta = answer.process(output, now_s)
        if delta is not None:
            self._leave(delta)
        self.ended = all(answer.finished for answer in self.answers.values())
        return answer.text_complete and not (was_complete or answer.is_told)

    def note_account(self, output: TokenOutput) -> None:
        """Take in what the engine tells of a sequence after the request has ended here."""
        self.answers[output.request_id].note_account(output)

    def fail(self, error: EngineError, now_s: float) -> None:
        """End the request with ``error``; answers that lack nothing but the engine's account are complete, though."""
        if self.ended:
            return
        self.ended = True
        unfinished = [answer for answer in self.answers.values() if not answer.finished]
        if all(answer.text_complete for answer in unfinished):
            for answer in unfinished:
                self._leave(answer.finish(now_s))
        else:
            self.error = error
            self._leave(error)

    def account(self, now_s: float) -> RequestAccount:
        """How the request ended, with what the engine has told until now."""
        default = FinishReason.CANCELLED if self.error is None else FinishReason.ERROR
        answers = tuple(answer.account(default, now_s) for answer in self.answers.values())
        return RequestAccount(self.request.request_id, answers)

    async def next_delta(self) -> GenerationDelta:
        """The next delta. Raises the error that ended the request."""
        while not self._undelivered:
            self._news.clear()
            await self._news.wait()
        item = self._undelivered.popleft()
        if isinstance(item, EngineError):
            raise item
        self.has_delivered = True
        return item

    def _leave(self, item: GenerationDelta | EngineError) -> None:
        self._undelivered.append(item)
        self._news.set()


class OpenRequests:
    """All open requests, by their own id and by their sequences' ids."""

    def __init__(self) -> None:
        self._by_id: dict[str, OpenRequest] = {}
        self._by_sequence: dict[str, OpenRequest] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[OpenRequest]:
        return iter(tuple(self._by_id.values()))

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def get(self, request_id: str) -> OpenRequest | None:
        """The open request ``request_id``."""
        return self._by_id.get(request_id)

    def of_sequence(self, sequence_id: str) -> OpenRequest | None:
        """The open request that ``sequence_id`` is an answer of."""
        return self._by_sequence.get(sequence_id)

    def holds(self, opened: OpenRequest) -> bool:
        """Whether this very request is in the book."""
        return self._by_id.get(opened.request.request_id) is opened

    def add(self, opened: OpenRequest) -> None:
        """Enter a request."""
        self._by_id[opened.request.request_id] = opened
        self._by_sequence.update(dict.fromkeys(opened.answers, opened))

    def remove(self, opened: OpenRequest) -> bool:
        """Strike a request out; False when it was not in the book."""
        if not self.holds(opened):
            return False
        del self._by_id[opened.request.request_id]
        for sequence_id in opened.answers:
            del self._by_sequence[sequence_id]
        return True


def _sequences(request: GenerationRequest, eos_token_ids: tuple[int, ...]) -> tuple[EngineRequest, ...]:
    sampling = request.sampling
    if not sampling.ignore_eos:
        # The tokenizer's files may name more ends than the model's configuration, which is all that the engine reads.
        stops = dict.fromkeys((*sampling.stop_token_ids, *eos_token_ids))
        sampling = replace(sampling, stop_token_ids=tuple(stops))
    first = EngineRequest(
        request_id=request.request_id if request.n == 1 else f"{request.request_id}/0",
        prompt_token_ids=request.prompt_token_ids,
        sampling=sampling,
        received_s=request.received_s,
        priority=request.priority,
        user=request.user,
        cache_salt=request.cache_salt,
        deadline_s=request.deadline_s,
        embeds=request.embeds,
    )
    others = (
        replace(
            first,
            request_id=f"{request.request_id}/{index}",
            fork_of=first.request_id,
            sampling=sampling if sampling.seed is None else replace(sampling, seed=sampling.seed + index),
        )
        for index in range(1, request.n)
    )
    return (first, *others)
