"""Drives a model runner with hand-made steps: sequences, block tables with holes, chunks of any size."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from engine.batch import BatchRow, BlockCopy, SampledToken, StepBatch, StepOutput
from engine.interfaces import ModelRunner, PendingStep
from engine.request import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


@dataclass
class Sequence:
    """One request as a scheduler would keep it."""

    request_id: str
    token_ids: list[int]
    sampling: SamplingParams = GREEDY
    seed: int = 0
    num_prompt_tokens: int = 0
    num_computed: int = 0
    num_in_flight: int = 0
    slot: int = -1
    block_ids: list[int] = field(default_factory=list)
    sampled: list[SampledToken] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.num_prompt_tokens or len(self.token_ids)

    @property
    def output(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]


class Driver:
    """Gives out shuffled blocks, so that every block table has holes and no order; or, if asked, in ascending order."""

    def __init__(
        self, runner: ModelRunner, num_blocks: int, block_size: int, seed: int = 0, *, shuffled: bool = True
    ) -> None:
        self.runner = runner
        self.block_size = block_size
        self.free = list(range(num_blocks - 1, -1, -1))
        if shuffled:
            random.Random(seed).shuffle(self.free)
        self.free_slots = list(range(64))
        self.num_steps = 0

    def row(self, sequence: Sequence, num_tokens: int) -> BatchRow:
        end = sequence.num_computed + num_tokens
        if sequence.slot < 0:
            sequence.slot = self.free_slots.pop(0)
        while len(sequence.block_ids) * self.block_size < end:
            sequence.block_ids.append(self.free.pop())
        return BatchRow(
            request_id=sequence.request_id,
            slot=sequence.slot,
            start=sequence.num_computed,
            num_tokens=num_tokens,
            token_ids=sequence.token_ids,
            block_ids=sequence.block_ids,
            num_prompt_tokens=sequence.num_prompt_tokens,
            sampling=sequence.sampling,
            seed=sequence.seed,
            samples=end == len(sequence.token_ids) + sequence.num_in_flight,
            output_index=len(sequence.output) + sequence.num_in_flight,
        )

    def step(self, work: Iterable[tuple[Sequence, int]], copies: tuple[BlockCopy, ...] = ()) -> StepOutput:
        """Run one step; ``work`` says how many tokens of which sequence."""
        work = list(work)
        return self.read(self.launch(work, copies), [sequence for sequence, _ in work])

    def launch(self, work: Iterable[tuple[Sequence, int]], copies: tuple[BlockCopy, ...] = ()) -> PendingStep:
        """Start one step; the tokens that it samples count as in flight until they are read."""
        work = list(work)
        batch = StepBatch(self.num_steps, tuple(self.row(sequence, count) for sequence, count in work), copies)
        self.num_steps += 1
        pending = self.runner.launch(batch)
        for row, (sequence, count) in zip(batch.rows, work, strict=True):
            sequence.num_computed += count
            sequence.num_in_flight += row.samples
        return pending

    def read(self, pending: PendingStep, sequences: Iterable[Sequence]) -> StepOutput:
        """Take a step's tokens."""
        output = pending.result()
        for sequence in sequences:
            if sequence.request_id in output.tokens:
                token = output.tokens[sequence.request_id]
                sequence.sampled.append(token)
                sequence.token_ids.append(token.token_id)
                sequence.num_in_flight -= 1
        return output

    def decode_overlapped(self, sequences: list[Sequence], num_steps: int) -> None:
        """Decode steps of all sequences, each started before the one before it is read."""
        before = self.launch([(sequence, 1) for sequence in sequences])
        for _ in range(num_steps - 1):
            after = self.launch([(sequence, 1) for sequence in sequences])
            self.read(before, sequences)
            before = after
        self.read(before, sequences)

    def finish(self, sequence: Sequence) -> None:
        """Give the blocks back and let the runner forget the request."""
        self.free[:0] = sequence.block_ids
        sequence.block_ids = []
        sequence.num_computed = 0
        self.free_slots.insert(0, sequence.slot)
        sequence.slot = -1
        self.runner.release([sequence.request_id])

    def generate(
        self,
        sequences: list[Sequence],
        num_rows: int,
        num_tokens: int,
        chunk: Callable[[int], int] = lambda remaining: remaining,
        stop: frozenset[int] = frozenset(),
    ) -> None:
        """Generate up to ``num_tokens`` for every sequence, ``num_rows`` at a time, joining and leaving as they end."""
        waiting, running = list(sequences), []
        while waiting or running:
            while waiting and len(running) < num_rows:
                running.append(waiting.pop(0))
            work = [(s, n if (n := len(s.token_ids) - s.num_computed) == 1 else chunk(n)) for s in running]
            self.step(work)
            for sequence in [s for s in running if len(s.output) == num_tokens or stop.intersection(s.output[-1:])]:
                running.remove(sequence)
                self.finish(sequence)
