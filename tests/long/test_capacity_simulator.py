"""The simulated fleet: exact where theory is, near a fluid model where only that is, and honest about its shortcuts."""

from __future__ import annotations

import heapq
from dataclasses import replace

import pytest

from engine.scheduler.step_cost import StepLoad
from serve_app.capacity.dispatch import CentralLine, Pinned
from serve_app.capacity.machine import MachineSpec, SimulatedCall, SimulatedMachine
from serve_app.capacity.one_slot import applies_to, simulate_one_slot
from serve_app.capacity.perf_model import FittedTimes, RateTimes, RooflineTimes, StepTimes, chunk_s, decode_rows_s
from serve_app.capacity.simulator import Load, Simulation, simulate
from serve_app.capacity.workload import Workload, plan_sessions, poisson_arrivals_s
from serve_app.cli.plan_router import RouterDispatch
from serve_app.latency import summarize

RATES = RateTimes(3000.0, 100.0, (1.0, 1.7, 2.0, 2.25))
GAINLESS = RateTimes(3000.0, 100.0)


def office(long_share: float = 0.25, **changes: object) -> Workload:
    prompts = {6000: 1 - long_share, 24000: long_share} if long_share else {6000: 1.0}
    call = {
        "name": "call",
        "prompt_tokens": {"kind": "mixture", "values": prompts},
        "output_tokens": {"kind": "lognormal", "mean": 700, "cv": 0.6},
        **changes,
    }
    return Workload.model_validate({"name": "office", "sessions": [call]})


def spec(slots: int = 1, times: StepTimes = RATES, **changes: object) -> MachineSpec:
    """Decoding gets a third of the time beside a prompt."""
    stall_s = 3 * decode_rows_s(times, max(1, slots // 2))
    made = MachineSpec("m", times, slots, longest_call_tokens=40_000, target_stall_s=stall_s, prefix_cache=False)
    return replace(made, **changes)  # type: ignore[arg-type]


def run(macs: int, machine: MachineSpec, per_hour: float = 750.0, num: int = 60, **changes: object) -> Simulation:
    load = Load(office(), per_hour / 3600, num, seed="7", warmup_share=0.0)
    return simulate([machine] * macs, replace(load, **changes), steps_at_once=8)  # type: ignore[arg-type]


def waits_s(simulation: Simulation) -> dict[int, float]:
    return {result.session_index: result.timing.queue_s or 0.0 for result in simulation.results}


def first_come_waits_s(macs: int, load: Load) -> dict[int, float]:
    """M/G/c by hand: each call takes the machine that is free first, for as long as it takes alone."""
    free_s, waits = [0.0] * macs, {}
    arrivals = poisson_arrivals_s(load.seed, load.sessions_per_s, load.num_sessions)
    sessions = plan_sessions(load.workload, load.seed, load.num_sessions)
    for at_s, session in zip(arrivals, sessions, strict=True):
        begins_s = max(at_s, heapq.heappop(free_s))
        call = session.calls[0]
        # The first token comes with the end of the prompt.
        heapq.heappush(free_s, begins_s + call.prompt_tokens / 3000 + (call.output_tokens - 1) / 100)
        waits[session.index] = begins_s - at_s
    return waits


@pytest.mark.parametrize("macs", [3, 5])
def test_one_slot_is_first_come_first_served_to_the_last_digit(macs: int) -> None:
    load = Load(office(), 750 / 3600, 200, seed="7")
    expected = first_come_waits_s(macs, load)
    for index, wait_s in waits_s(run(macs, spec(1))).items():
        assert wait_s == pytest.approx(expected[index], abs=1e-6)


@pytest.mark.parametrize("times", [RATES, FittedTimes(0.004, 0.006, 1e-6, 0.01, 3e-4, 1e-8)], ids=["rates", "fitted"])
def test_the_shortcut_for_one_slot_gives_the_simulators_results(times: StepTimes) -> None:
    machines = [spec(1, times)] * 3
    load = Load(office(), 700 / 3600, 200, seed="7", warmup_share=0.1)
    slow, quick = simulate(machines, load), simulate_one_slot(machines, load)
    assert len(slow.results) == len(quick.results) == 180
    expected = {result.session_index: result.timing for result in slow.results}
    for result in quick.results:
        timing = expected[result.session_index]
        assert result.timing.chunk_times_s == pytest.approx(timing.chunk_times_s, abs=1e-6)
        assert result.timing.queue_s == pytest.approx(timing.queue_s, abs=1e-6)
    assert quick.duration_s == pytest.approx(slow.duration_s)
    assert sum(use.busy_s for use in quick.uses) == pytest.approx(sum(use.busy_s for use in slow.uses))


def test_the_shortcut_is_for_plain_calls_only() -> None:
    assert applies_to(office())
    assert not applies_to(office(calls=2))
    assert not applies_to(office(shared_prefix={"tokens": 10}))


def test_one_slot_gains_nothing_from_batching() -> None:
    assert waits_s(run(3, spec(1, RATES))) == waits_s(run(3, spec(1, GAINLESS)))


def test_equal_arguments_give_equal_results() -> None:
    assert run(3, spec(2), num=40).results == run(3, spec(2), num=40).results


def test_every_call_is_answered_once_with_its_length() -> None:
    simulation = run(3, spec(4), num=60)
    lengths = {session.index: session.calls[0].output_tokens for session in plan_sessions(office(), "7", 60)}
    assert sorted(result.session_index for result in simulation.results) == list(range(60))
    assert all(result.timing.num_output_tokens == lengths[result.session_index] for result in simulation.results)


def test_an_answer_alone_takes_what_the_rates_say() -> None:
    simulation = run(1, spec(4), per_hour=1.0, num=8)
    for result in simulation.results:
        timing = result.timing
        assert timing.queue_s == 0.0
        assert timing.ttft_s == pytest.approx(timing.num_prompt_tokens / 3000, rel=0.01)
        assert timing.tpot_s == pytest.approx(0.01, rel=1e-6)


def mean_wait_s(simulation: Simulation) -> float:
    summary = summarize(waits_s(simulation).values())
    assert summary is not None
    return summary.mean


def test_waits_fall_with_machines_and_slots_and_rise_with_load() -> None:
    base = mean_wait_s(run(4, spec(2)))
    assert mean_wait_s(run(5, spec(2))) < base
    assert mean_wait_s(run(4, spec(1))) > base
    assert mean_wait_s(run(4, spec(2), per_hour=1200)) > base
    assert mean_wait_s(run(4, spec(2, GAINLESS))) > base


def test_time_has_no_unit_of_its_own() -> None:
    slow = RateTimes(300.0, 10.0, RATES.batch_gain)
    stretched = run(3, spec(2, slow), per_hour=75)
    assert mean_wait_s(stretched) == pytest.approx(10 * mean_wait_s(run(3, spec(2))), rel=0.02)


def test_taking_several_steps_at_once_changes_little() -> None:
    machine, load = spec(2), Load(office(), 750 / 3600, 50, seed="7", warmup_share=0.0)
    exact, coarse = (simulate([machine] * 3, load, steps_at_once=number) for number in (1, 8))
    ends = [summarize(r.timing.e2e_s for r in each.results) for each in (exact, coarse)]
    assert ends[0] is not None
    assert ends[1] is not None
    assert ends[1].mean == pytest.approx(ends[0].mean, rel=0.02)
    assert ends[1].p95 == pytest.approx(ends[0].p95, rel=0.04)


def test_pinned_sessions_wait_longer_than_one_line() -> None:
    load = Load(office(), 750 / 3600, 200, seed="7")
    pinned = simulate([spec(1)] * 5, load, Pinned())
    assert mean_wait_s(pinned) > 3 * mean_wait_s(simulate([spec(1)] * 5, load))


def test_the_fleets_router_does_nearly_as_well_as_one_line_and_keeps_conversations_where_they_are_cached() -> None:
    load = Load(office(0.0, calls=4, new_tokens=300, think_s=5.0), 0.06, 20, seed="7", warmup_share=0.0)
    machine = spec(2, prefix_cache=True)
    routed, central = (simulate([machine] * 4, load, each, 8) for each in (RouterDispatch(), CentralLine()))
    assert len(routed.results) == len(central.results) == 80
    cached = [sum(result.num_cached_tokens for result in each.results) for each in (routed, central)]
    assert cached[0] > 1.5 * cached[1]
    assert mean_wait_s(routed) < 3.0


def test_a_small_memory_makes_calls_wait_for_blocks() -> None:
    roomy, tight = run(2, spec(4), num=40), run(2, spec(4, kv_tokens=32_000), num=40)
    assert sum(result.waited_for_blocks_s for result in roomy.results) == 0.0
    assert sum(result.waited_for_blocks_s for result in tight.results) > 5.0


def test_agents_find_their_conversation_cached_and_think_between_calls() -> None:
    workload = office(0.0, calls=4, new_tokens=500, think_s=2.0)
    simulation = simulate([spec(4, prefix_cache=True)], Load(workload, 0.01, 10, warmup_share=0.0))
    assert len(simulation.results) == 40
    later = [result for result in simulation.results if result.num_cached_tokens]
    assert len(later) >= 30
    assert all(result.num_cached_tokens >= 5900 for result in later)


def test_a_shared_head_is_read_once() -> None:
    workload = office(0.0, shared_prefix={"tokens": 5000})
    simulation = simulate([spec(2, prefix_cache=True)], Load(workload, 0.02, 20, warmup_share=0.0))
    cached = [result.num_cached_tokens for result in simulation.results]
    assert cached[0] == 0
    assert min(cached[1:]) >= 4900


def test_an_arrival_stops_a_jump_at_the_end_of_a_step() -> None:
    machine = SimulatedMachine(spec(2))
    machine.add(SimulatedCall("a", (7,) * 300, 1001, 0.0), 0.0)
    assert machine.start(0.0) == pytest.approx(0.1)
    assert machine.finish(0.1) == []
    assert machine.start(0.1) == pytest.approx(0.1 + 10.0)
    machine.add(SimulatedCall("b", (8,) * 300, 50, 3.333), 3.333)
    assert machine.ends_s == pytest.approx(3.34)


def test_rates_add_up() -> None:
    assert decode_rows_s(RATES, 1) == pytest.approx(0.01)
    assert decode_rows_s(RATES, 2) == pytest.approx(2 / 170)
    assert decode_rows_s(RATES, 9) == pytest.approx(9 / 225)
    assert chunk_s(RATES, 300) == pytest.approx(0.1)


def test_fitted_coefficients_are_the_schedulers_model() -> None:
    times = FittedTimes(0.01, 0.001, 1e-6, 0.002, 1e-4, 1e-8)
    load = StepLoad(4, 1000, 100, 5000)
    assert times.step_s(load) == pytest.approx(0.01 + 0.004 + 0.001 + 0.002 + 0.01 + 0.00005)
    assert times.gains((1, 4), 0.0) == {1: 1.0, 4: pytest.approx(4 * 0.011 / 0.014)}


def test_a_roofline_is_bytes_or_arithmetic_whichever_is_longer() -> None:
    times = RooflineTimes(1e11, 1e13, 5e9, 1e5, 1.6e10, 1e5, bandwidth_efficiency=1.0, flops_efficiency=1.0)
    assert decode_rows_s(times, 1) == pytest.approx(0.05)
    assert decode_rows_s(times, 2) == pytest.approx(0.05)  # the weights are read once for both
    assert chunk_s(times, 1000) > 1.6
