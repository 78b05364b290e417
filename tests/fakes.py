"""A model runner without a model, and a clock that a test turns: real types, driven by the real scheduler.

``FakeRunner`` keeps a KV pool of its own and answers from what it *reads there through the block table*, so a block
that is shared wrongly, reused too early or not copied changes the answer, as it would on a device. ``expected_answer``
is what a request must get whatever happens around it. With ``num_state_entries`` it also keeps a recurrent state for
each slot, which must be that of the row's own tokens, and saves and loads it as told; with ``window`` a second pool, of
which a row reads what its tokens see.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from engine.batch import BatchRow, SampledToken, StepBatch, StepOutput
from engine.errors import EngineError
from engine.interfaces import ModelFacts
from engine.memory.window_blocks import HOLE, WindowConfig
from engine.request import EngineRequest, TokenLogprobs, TokenOutput
from engine.scheduler import Scheduler
from tests.builders import EOS, VOCABULARY_SIZE


class FakeClock:
    """Seconds that pass only when told to."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        assert seconds >= 0.0
        self.now_s += seconds


def next_token(token_ids: Sequence[int], seed: int, output_index: int, greedy: bool) -> int:
    """The fake model: any change of the context, and for sampled rows of seed or index, changes the token."""
    text = repr((list(token_ids), None if greedy else (seed, output_index)))
    return int.from_bytes(blake2b(text.encode(), digest_size=4).digest(), "little") % VOCABULARY_SIZE


def repeating_token(token_ids: Sequence[int], seed: int, output_index: int, greedy: bool) -> int:
    """A fake model that can be guessed: a few tokens that mostly follow from the two before, so that texts repeat."""
    text = repr((list(token_ids[-2:]), output_index % 7 == 3 and (len(token_ids), None if greedy else seed)))
    return 1 + int.from_bytes(blake2b(text.encode(), digest_size=4).digest(), "little") % 5


def expected_answer(
    request: EngineRequest,
    seed: int | None = None,
    max_model_len: int = 128,
    choose: Callable[[Sequence[int], int, int, bool], int] = next_token,
) -> tuple[int, ...]:
    """The answer that a request gets alone. ``seed`` is needed for a sampled request that names none."""
    sampling = request.sampling
    seed = sampling.seed if seed is None else seed
    token_ids = list(request.prompt_token_ids)
    answer: list[int] = []
    while len(answer) < sampling.max_tokens and len(token_ids) < max_model_len:
        token = choose(token_ids, 0 if seed is None else seed, len(answer), sampling.greedy)
        token_ids.append(token)
        answer.append(token)
        if (token == EOS and not sampling.ignore_eos) or token in sampling.stop_token_ids:
            break
    return tuple(answer)


def fixed_step_time(batch: StepBatch) -> float:
    """20 ms a step and 1 ms a token."""
    return 0.020 + 0.001 * batch.num_tokens


@dataclass
class FakePendingStep:
    """Runs when its result is asked for, or when a later step runs."""

    runner: FakeRunner
    batch: StepBatch
    token_ids: list[list[int]]
    block_ids: list[list[int]]
    window_block_ids: list[list[int]]
    output: StepOutput | None = None

    def result(self) -> StepOutput:
        return self.runner.finish(self)


@dataclass
class FakeRunner:
    """Implements ``ModelRunner``. ``faults`` maps a step index to what the step raises, or to failures of single rows.

    Steps run as late as they may, in order: what a wrong scheduler overwrites meanwhile is seen.
    """

    clock: FakeClock
    num_blocks: int = 64
    block_size: int = 4
    max_steps_in_flight: int = 1
    step_time: Callable[[StepBatch], float] = fixed_step_time
    faults: dict[int, Exception | dict[str, EngineError]] = field(default_factory=dict)
    checks_kv: bool = True
    num_state_entries: int = 0
    choose: Callable[[Sequence[int], int, int, bool], int] = next_token
    window: WindowConfig | None = None
    batches: list[StepBatch] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    closed: bool = False

    def __post_init__(self) -> None:
        self._pool: list[list[int | None]] = [[None] * self.block_size for _ in range(self.num_blocks)]
        self._window_pool: list[list[int | None]] = [
            [None] * self.block_size for _ in range(self.window.num_blocks if self.window else 0)
        ]
        # A state is the tokens that went into it.
        self._states: list[list[int]] = [[] for _ in range(self.num_state_entries)]
        self._last_token: dict[str, int] = {}
        self._queue: list[FakePendingStep] = []
        self._broken: set[str] = set()

    @property
    def facts(self) -> ModelFacts:
        return ModelFacts(
            name="fake",
            revision="test",
            architecture="fake",
            vocab_size=VOCABULARY_SIZE,
            max_model_len=128,
            num_layers=1,
            kv_bytes_per_token=8,
            weights_bytes=1024,
            eos_token_ids=(EOS,),
            device="fake",
            compute_dtype="int",
        )

    def launch(self, batch: StepBatch) -> FakePendingStep:
        assert not self.closed
        assert len(self._queue) < self.max_steps_in_flight, "more steps in flight than the runner allows"
        step = FakePendingStep(
            self,
            batch,
            [[*row.token_ids, *row.draft_token_ids] for row in batch.rows],
            [list(row.block_ids) for row in batch.rows],
            [list(row.window_block_ids) for row in batch.rows],
        )
        self._check_rows(step)
        self.batches.append(batch)
        self._queue.append(step)
        return step

    def finish(self, step: FakePendingStep) -> StepOutput:
        while step.output is None:
            oldest = self._queue.pop(0)
            fault = self.faults.get(oldest.batch.step_index)
            if isinstance(fault, Exception):
                # Rows that were launched on top of this step compute nonsense, as on a device.
                self._broken |= {row.request_id for row in oldest.batch.rows}
                raise fault
            self._broken |= {row.request_id for row in oldest.batch.rows} & set(fault or ())
            oldest.output = self._run(oldest, fault or {})
        return step.output

    def release(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._last_token.pop(request_id, None)
            self._broken.discard(request_id)
        self.released += request_ids

    def close(self) -> None:
        self.closed = True

    def _check_rows(self, step: FakePendingStep) -> None:
        rows = step.batch.rows
        assert rows, "an empty step"
        assert len({row.slot for row in rows}) == len(rows), "two rows in one slot"
        assert len({row.request_id for row in rows}) == len(rows), "two rows of one request"
        for row, token_ids, block_ids in zip(rows, step.token_ids, step.block_ids, strict=True):
            end = row.start + row.num_tokens
            assert row.num_tokens >= 1
            assert len(block_ids) * self.block_size >= end, "the block table is too short"
            assert all(0 <= block_id < self.num_blocks for block_id in block_ids)
            num_missing = end - len(token_ids)
            assert not row.draft_token_ids or (num_missing == 0 and row.samples), "guesses on top of an unknown token"
            assert num_missing <= 0 or (num_missing == 1 and row.samples), "the host is too far behind"

    def _run(self, step: FakePendingStep, failures: dict[str, EngineError]) -> StepOutput:
        for copy in step.batch.block_copies:
            self._pool[copy.target] = list(self._pool[copy.source])
        for load in step.batch.state_loads:
            self._states[load.slot] = list(self._states[load.entry])
        tokens, further = {}, {}
        tables = zip(step.token_ids, step.block_ids, step.window_block_ids, strict=True)
        for row, (token_ids, block_ids, window_block_ids) in zip(step.batch.rows, tables, strict=True):
            end = row.start + row.num_tokens
            is_broken = row.request_id in self._broken
            if len(token_ids) < end:
                token_ids.append(
                    self._last_token.get(row.request_id, EOS) if is_broken else self._last_token[row.request_id]
                )
            if self.checks_kv and not is_broken:
                self._write_and_check(row, token_ids, block_ids)
            if self.window is not None and not is_broken:
                self._write_and_check_window(row, token_ids, window_block_ids, self.window.window_tokens)
            if self._states:
                self._advance_state(step.batch, row, token_ids, is_broken)
            if row.samples and row.request_id not in failures:
                tokens[row.request_id], *rest = self._sample(row, token_ids)
                further[row.request_id] = tuple(rest)
        elapsed_s = self.step_time(step.batch)
        self.clock.advance(elapsed_s)
        return StepOutput(step.batch.step_index, tokens, elapsed_s, failures, further)

    def _sample(self, row: BatchRow, token_ids: list[int]) -> list[SampledToken]:
        """After the newest token, and after each guess as long as they come true."""
        sampled: list[SampledToken] = []
        first = row.start + row.num_tokens - len(row.draft_token_ids)
        for index, draft in enumerate((*row.draft_token_ids, None)):
            token = self.choose(token_ids[: first + index], row.seed, row.output_index + index, row.sampling.greedy)
            wants_logprobs = row.sampling.num_logprobs is not None
            sampled.append(SampledToken(token, TokenLogprobs(token, -1.0) if wants_logprobs else None))
            if token != draft:
                break
        self._last_token[row.request_id] = sampled[-1].token_id
        return sampled

    def _write_and_check_window(self, row: BatchRow, token_ids: list[int], table: list[int], window: int) -> None:
        end = row.start + row.num_tokens
        assert len(table) * self.block_size >= end, "the window's table is too short"
        for position in range(row.start, end):
            block_id = table[position // self.block_size]
            assert block_id != HOLE, f"{row.request_id} writes to a block that it gave back"
            self._window_pool[block_id][position % self.block_size] = token_ids[position]
        seen = range(max(0, row.start + 1 - window), end)
        assert all(table[p // self.block_size] != HOLE for p in seen), f"{row.request_id} sees a block that is gone"
        read = [self._window_pool[table[p // self.block_size]][p % self.block_size] for p in seen]
        assert read == [token_ids[p] for p in seen], f"{row.request_id} reads another's keys and values in its window"

    def _advance_state(self, batch: StepBatch, row: BatchRow, token_ids: list[int], is_broken: bool) -> None:
        if row.start == 0:
            self._states[row.slot] = []
        end = row.start + row.num_tokens
        before = self._states[row.slot]
        assert is_broken or before == token_ids[: row.start], f"{row.request_id} goes on from another's state"
        self._states[row.slot] = [*before, *token_ids[row.start : end]]
        for save in batch.state_saves:
            if save.slot == row.slot:
                assert row.start < save.num_tokens <= end, "a state is saved outside its row"
                self._states[save.entry] = token_ids[: save.num_tokens]

    def _write_and_check(self, row: BatchRow, token_ids: list[int], block_ids: list[int]) -> None:
        end = row.start + row.num_tokens
        for position in range(row.start, end):
            self._pool[block_ids[position // self.block_size]][position % self.block_size] = token_ids[position]
        read = [self._pool[block_ids[p // self.block_size]][p % self.block_size] for p in range(end)]
        assert read == token_ids[:end], f"{row.request_id} reads another's keys and values at step {len(self.batches)}"


@dataclass
class Harness:
    """Scheduler, runner and clock in the order of the engine core's loop, with every output kept by request."""

    scheduler: Scheduler
    runner: FakeRunner
    clock: FakeClock
    checks: bool = True
    requests: dict[str, EngineRequest] = field(default_factory=dict)
    outputs: dict[str, list[TokenOutput]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._flying: list[tuple[StepBatch, FakePendingStep]] = []

    def add(self, *requests: EngineRequest) -> None:
        for request in requests:
            self.scheduler.add(request, self.clock.now_s)
            self.requests[request.request_id] = request
            self.outputs[request.request_id] = []
        self._check()

    def cancel(self, request_id: str) -> bool:
        found = self.scheduler.cancel(request_id, self.clock.now_s)
        self._check()
        return found

    def launch(self) -> StepBatch | None:
        """Schedule and launch one step."""
        batch = self.scheduler.schedule(self.clock.now_s)
        self.runner.release(self.scheduler.take_released())
        if batch is not None:
            self._flying.append((batch, self.runner.launch(batch)))
        self._check()
        return batch

    def land(self) -> list[TokenOutput]:
        """Take in the oldest launched step's result."""
        batch, pending = self._flying.pop(0)
        try:
            output = pending.result()
        except EngineError as error:
            outputs = self.scheduler.fail_batch(batch, error, self.clock.now_s)
        else:
            outputs = self.scheduler.update(batch, output, self.clock.now_s)
        self.keep(outputs)
        self._check()
        return outputs

    def step(self) -> StepBatch | None:
        """One turn of the loop: keep as many steps in flight as the runner allows."""
        self.keep(self.scheduler.expire(self.clock.now_s))
        batch = self.launch()
        if self._flying and (batch is None or len(self._flying) == self.runner.max_steps_in_flight):
            self.land()
        return batch

    def run(self, max_steps: int = 10_000) -> None:
        """Until nobody waits or runs."""
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished and not self._flying:
                self.runner.release(self.scheduler.take_released())
                return
            is_flying = bool(self._flying)
            assert self.step() is not None or is_flying or not self.scheduler.has_unfinished, "nobody moves"
        raise AssertionError(f"not done after {max_steps} steps")

    def keep(self, outputs: Sequence[TokenOutput]) -> None:
        for output in outputs:
            self.outputs.setdefault(output.request_id, []).append(output)

    def users(self, batch: StepBatch | None) -> list[str]:
        """Whose rows a batch holds."""
        return [] if batch is None else [self.requests[row.request_id].user for row in batch.rows]

    def answer(self, request_id: str) -> tuple[int, ...]:
        """All tokens given out for a request."""
        return tuple(token for output in self.outputs[request_id] for token in output.token_ids)

    def last(self, request_id: str) -> TokenOutput:
        """The output that ended a request."""
        assert self.outputs[request_id][-1].finish_reason is not None, f"{request_id} has not ended"
        return self.outputs[request_id][-1]

    def _check(self) -> None:
        if self.checks:
            self.scheduler.check_invariants()


def make_harness(config: object = None, *, checks: bool = True, **runner: object) -> Harness:
    """A harness whose runner fits the scheduler's configuration."""
    from tests.builders import make_config

    config = make_config() if config is None else config
    clock = FakeClock()
    values: dict[str, object] = {
        "num_blocks": config.num_blocks,  # type: ignore[attr-defined]
        "block_size": config.block_size,  # type: ignore[attr-defined]
        "max_steps_in_flight": config.max_steps_in_flight,  # type: ignore[attr-defined]
    }
    if config.num_state_snapshots is not None:  # type: ignore[attr-defined]
        values["num_state_entries"] = config.slots + config.num_state_snapshots  # type: ignore[attr-defined]
    values["window"] = config.window  # type: ignore[attr-defined]
    return Harness(Scheduler(config), FakeRunner(clock, **(values | runner)), clock, checks)  # type: ignore[arg-type]
