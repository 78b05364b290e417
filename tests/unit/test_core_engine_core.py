"""The step: order, pipelining, and who suffers from a failure."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from engine.core.engine_core import MAX_FAILED_STEPS, EngineCore
from engine.core.faults import FaultKind, FaultPlan, FaultyRunner
from engine.errors import EngineDeadError, RequestCancelledError, StepFailedError
from engine.request import EngineRequest, FinishReason, SamplingParams, TokenOutput
from tests.core_fakes import ChainRunner, answer, make_core

GREEDY_8 = SamplingParams(max_tokens=8, temperature=0.0)


@dataclass
class Result:
    """Everything a core said of one request."""

    token_ids: tuple[int, ...] = ()
    last: TokenOutput | None = None


def request(request_id: str, prompt: str = "hello", sampling: SamplingParams = GREEDY_8) -> EngineRequest:
    return EngineRequest(request_id, tuple(prompt.encode()), sampling, received_s=0.0)


def drain(core: EngineCore, results: dict[str, Result] | None = None, max_turns: int = 500) -> dict[str, Result]:
    """Step until nothing is left."""
    results = {} if results is None else results
    for _ in range(max_turns):
        if not core.has_work:
            return results
        collect(results, core.step())
    raise AssertionError("the core does not come to an end")


def collect(results: dict[str, Result], outputs: list[TokenOutput]) -> None:
    for output in outputs:
        result = results.setdefault(output.request_id, Result())
        assert result.last is None, "output after the end"
        result.token_ids += output.token_ids
        if output.finish_reason is not None:
            result.last = output


@pytest.mark.parametrize("depth", [1, 2])
def test_answers_do_not_depend_on_who_shares_the_batch(depth: int) -> None:
    runner = ChainRunner(max_steps_in_flight=depth)
    core = make_core(runner, slots=4)
    prompts = {f"r{i}": "abcdefghij" * (i % 5) + chr(ord("a") + i) for i in range(16)}
    for request_id, prompt in prompts.items():
        core.add(request(request_id, prompt, SamplingParams(max_tokens=3 + len(prompt) % 7, temperature=0.0)))
    results = drain(core)
    for request_id, prompt in prompts.items():
        assert results[request_id].token_ids == answer(prompt.encode(), 3 + len(prompt) % 7)
        assert results[request_id].last.finish_reason is FinishReason.LENGTH
    assert max(len(rows) for rows in runner.batches) == 4
    assert sorted(set(runner.released)) == sorted(prompts)


def test_the_next_step_is_launched_before_the_last_is_read() -> None:
    unread: list[int] = []

    class Watching(ChainRunner):
        def launch(self, batch):
            step = super().launch(batch)
            unread.append(batch.step_index)
            depths.append(len(unread))
            return Read(step)

    class Read:
        def __init__(self, step) -> None:
            self.step = step

        def result(self):
            output = self.step.result()
            unread.remove(output.step_index)
            return output

    depths: list[int] = []
    core = make_core(Watching(max_steps_in_flight=2))
    core.add(request("a"))
    drain(core)
    assert set(depths) == {1, 2}
    assert not unread


def test_cancel_frees_the_slot_before_the_next_step() -> None:
    runner = ChainRunner()
    core = make_core(runner, slots=1)
    core.add(request("a"))
    core.add(request("b"))
    core.step()
    assert runner.batches[-1] == ("a",)
    assert core.cancel("a")
    core.step()
    assert runner.batches[-1] == ("b",)
    assert "a" in runner.released
    assert not core.cancel("a")


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("kind", [FaultKind.RAISE, FaultKind.RAISE_IN_RESULT, FaultKind.OUT_OF_MEMORY])
def test_a_poisoned_step_ends_the_requests_in_it_and_no_other(kind: FaultKind, depth: int) -> None:
    runner = ChainRunner(max_steps_in_flight=depth)
    core = make_core(FaultyRunner(runner, [FaultPlan(kind, at_step=3)]), slots=2)
    for request_id in "abcd":
        core.add(request(request_id, request_id))
    results = drain(core)
    for request_id in "ab":
        assert isinstance(results[request_id].last.error, StepFailedError)
        assert "injected" in results[request_id].last.error.message
    for request_id in "cd":
        assert results[request_id].token_ids == answer(request_id.encode(), 8)
    assert core.snapshot().scheduler.num_blocks_free + core.snapshot().scheduler.num_blocks_cached == 256


def test_a_failed_row_ends_its_request_alone() -> None:
    core = make_core(FaultyRunner(ChainRunner(), [FaultPlan(FaultKind.FAIL_ROW, at_step=2)]))
    for request_id in "abcd":
        core.add(request(request_id, request_id))
    results = drain(core)
    assert isinstance(results["a"].last.error, StepFailedError)
    for request_id in "bcd":
        assert results[request_id].token_ids == answer(request_id.encode(), 8)


@pytest.mark.parametrize("depth", [1, 2])
def test_failed_steps_in_a_row_end_the_engine(depth: int) -> None:
    faults = [FaultPlan(FaultKind.RAISE_IN_RESULT, at_step=4, num_steps=100)]
    core = make_core(FaultyRunner(ChainRunner(max_steps_in_flight=depth), faults), slots=1)
    for number in range(10):
        core.add(request(f"r{number}", "x" * (number + 1)))
    results: dict[str, Result] = {}
    with pytest.raises(EngineDeadError, match="3 steps in a row"):
        drain(core, results)
    # Each failure that counts took the requests of its own step, so two were told before the third gave up.
    assert sum(result.last is not None for result in results.values()) == MAX_FAILED_STEPS - 1


def test_a_good_step_forgives() -> None:
    faults = [FaultPlan(FaultKind.RAISE, at_step=step) for step in range(1, 40, 2)]
    core = make_core(FaultyRunner(ChainRunner(), faults), slots=1)
    for number in range(5):
        core.add(request(f"r{number}", "x" * (number + 1)))
    assert len(drain(core)) == 5


def test_fail_all_and_deadlines() -> None:
    now_s = [0.0]
    core = make_core(clock=lambda: now_s[0])
    core.add(EngineRequest("late", (1, 2), GREEDY_8, 0.0, deadline_s=5.0))
    core.add(EngineRequest("other", (1, 2), GREEDY_8, 0.0))
    core.step()
    now_s[0] = 6.0
    results: dict[str, Result] = {}
    collect(results, core.step())
    assert results["late"].last.finish_reason is FinishReason.ERROR
    collect(results, core.fail_all(RequestCancelledError("The engine is stopping.")))
    assert isinstance(results["other"].last.error, RequestCancelledError)
    drain(core)
    assert not core.has_work


def test_close_reads_what_is_in_flight() -> None:
    runner = ChainRunner(max_steps_in_flight=2)
    core = make_core(runner)
    core.add(request("a"))
    core.step()
    core.close()
    assert runner.closed_on is not None
