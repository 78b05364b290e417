"""A model without weights for tests of the engine core: a runner whose tokens can be foretold, and its tokenizer."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from engine.batch import BatchRow, SampledToken, StepBatch, StepOutput
from engine.core.async_engine import AsyncEngine
from engine.core.engine_core import EngineCore
from engine.core.generation import GenerationRequest
from engine.interfaces import ModelFacts, ModelRunner, PendingStep
from engine.request import SamplingParams
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.scheduler import Scheduler
from engine.text.parts import TokenizerParts
from engine.text.tokenizer import Tokenizer

NUM_LETTERS = 26
WATCHED = ("engine_said", "engine_running", "engine_lost")
EOS = 256
FACTS = ModelFacts(
    name="chain",
    revision="1",
    architecture="chain",
    vocab_size=257,
    max_model_len=512,
    num_layers=1,
    kv_bytes_per_token=1,
    weights_bytes=1,
    eos_token_ids=(EOS,),
    device="cpu",
    compute_dtype="float32",
)


def next_token(context: Sequence[int]) -> int:
    """The token that follows ``context``: a letter that depends on every token of it and on their order."""
    state = 7
    for token in context:
        state = (state * 31 + token + 1) % 1_000_003
    return ord("a") + state % NUM_LETTERS


def answer(prompt: Sequence[int], num_tokens: int) -> tuple[int, ...]:
    """What the chain model says to ``prompt`` when nothing disturbs it."""
    context = list(prompt)
    for _ in range(num_tokens):
        context.append(next_token(context))
    return tuple(context[len(prompt) :])


def answer_text(prompt: Sequence[int], num_tokens: int) -> str:
    """The same as text: one letter a token."""
    return bytes(answer(prompt, num_tokens)).decode()


def letter_tokenizer() -> Tokenizer:
    """One token per byte, and an end-of-sequence token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {_byte_symbol(byte): byte for byte in range(256)}
    assert sorted(vocabulary) == alphabet
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    return Tokenizer(TokenizerParts(backend, (EOS,)))


def _byte_symbol(byte: int) -> str:
    """The printable character that byte-level tokenizers write for ``byte`` (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in printable:
        return chr(byte)
    return chr(256 + sum(other not in printable for other in range(byte)))


async def until(engine: AsyncEngine, condition: Callable[[], bool]) -> None:
    """Wait until ``condition`` holds, looking again whenever the engine says or does something."""
    news = asyncio.Event()

    def watch(name: str) -> Callable[..., None]:
        original = getattr(AsyncEngine, name)

        def told(*arguments: Any, **more: Any) -> None:
            original(engine, *arguments, **more)
            news.set()

        return told

    for name in WATCHED:
        setattr(engine, name, watch(name))
    try:
        async with asyncio.timeout(30):
            while not condition():
                news.clear()
                await news.wait()
    finally:
        for name in WATCHED:
            delattr(engine, name)


class ChainRunner:
    """Computes steps of the chain model. With ``gate`` every launch first takes one permit from it.

    ``step_s`` makes a step take that long. Like a device with a step in flight it chooses a row's token from its own
    last one where the host does not know that yet.
    """

    def __init__(
        self,
        *,
        max_steps_in_flight: int = 1,
        gate: threading.Semaphore | None = None,
        step_s: float = 0.0,
        facts: ModelFacts = FACTS,
    ) -> None:
        self.facts = facts
        self.max_steps_in_flight = max_steps_in_flight
        self.batches: list[tuple[str, ...]] = []
        self.released: list[str] = []
        self.closed_on: int | None = None
        self._gate = gate
        self._step_s = step_s
        self._last_sampled: dict[str, int] = {}

    def launch(self, batch: StepBatch) -> PendingStep:
        if self._gate is not None:
            self._gate.acquire()
        if self._step_s:
            threading.Event().wait(self._step_s)
        assert len({row.slot for row in batch.rows}) == len(batch.rows), "two rows in one slot"
        self.batches.append(tuple(row.request_id for row in batch.rows))
        tokens = {row.request_id: SampledToken(self._sample(row)) for row in batch.rows if row.samples}
        return _Done(StepOutput(batch.step_index, tokens, elapsed_s=0.001))

    def release(self, request_ids: Sequence[str]) -> None:
        self.released += request_ids
        for request_id in request_ids:
            self._last_sampled.pop(request_id, None)

    def close(self) -> None:
        self.closed_on = threading.get_ident()

    def _sample(self, row: BatchRow) -> int:
        end = row.start + row.num_tokens
        context = list(row.token_ids[:end])
        if len(context) < end:
            context.append(self._last_sampled[row.request_id])
        assert len(context) == end, "a row whose tokens are not known"
        token = self._last_sampled[row.request_id] = next_token(context)
        return token


@dataclass(frozen=True, slots=True)
class _Done:
    output: StepOutput

    def result(self) -> StepOutput:
        return self.output


def make_core(
    runner: ModelRunner | None = None,
    *,
    slots: int = 4,
    num_blocks: int = 256,
    max_waiting_requests: int = 64,
    clock: Callable[[], float] = time.monotonic,
    prefix_cache: Literal["shared", "per-user", "off"] = "shared",
) -> EngineCore:
    """A core with the real scheduler and, unless one is given, a chain runner."""
    runner = runner or ChainRunner()
    config = SchedulerConfig(
        slots=slots,
        num_blocks=num_blocks,
        block_size=8,
        max_model_len=runner.facts.max_model_len,
        eos_token_ids=runner.facts.eos_token_ids,
        max_waiting_requests=max_waiting_requests,
        prefix_cache=prefix_cache,
        max_steps_in_flight=runner.max_steps_in_flight,
    )
    return EngineCore(Scheduler(config), runner, clock, slots_asked=str(slots))


def make_request(
    request_id: str, prompt: str = "hello", max_tokens: int = 8, *, deadline_s: float | None = None, **more: Any
) -> GenerationRequest:
    """A greedy request; ``more`` are fields of the request or of its sampling parameters."""
    own = {field.name for field in fields(GenerationRequest)}
    sampling = {name: more.pop(name) for name in tuple(more) if name not in own}
    return GenerationRequest(
        request_id=request_id,
        prompt_token_ids=tuple(prompt.encode()),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, **sampling),
        received_s=time.monotonic(),
        deadline_s=deadline_s,
        **more,
    )
