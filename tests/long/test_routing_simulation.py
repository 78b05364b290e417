"""The simulation itself against closed forms, and the policy against other rules on small fleets."""

from __future__ import annotations

import math

import pytest

from serve_app.protocol import PrefixChain
from serve_app.routing.simulation.experiments import FleetCase, compare, mixed_fleet
from serve_app.routing.simulation.machine import Job, Machine, MachineKind
from serve_app.routing.simulation.rules import Policy, PowerOfTwo, RoundRobin, Sticky
from serve_app.routing.simulation.run import run
from serve_app.routing.simulation.traffic import Traffic, requests


def job(number: int, num_prompt_tokens: int = 3000, num_output_tokens: float = 100.0, sent_s: float = 0.0) -> Job:
    prefix = PrefixChain((number,), (num_prompt_tokens,), number, num_prompt_tokens)
    return Job(f"q{number}", prefix, number, num_output_tokens, sent_s)


def drain(machine: Machine) -> dict[str, float]:
    ended: dict[str, float] = {}
    while (next_s := machine.next_event_s()) < math.inf:
        ended.update((done.request_id, done.finished_s) for done in machine.advance(next_s))
    return ended


def test_one_slot_serves_one_after_the_other() -> None:
    machine = Machine(MachineKind())
    for number in range(3):
        machine.add(job(number))
    assert drain(machine) == pytest.approx({"q0": 2.0, "q1": 4.0, "q2": 6.0}, abs=1e-3)


def test_slots_share_decoding_and_a_prompt_takes_two_thirds() -> None:
    machine = Machine(MachineKind(slots=2, gains=(0.0, 1.0, 1.5)))
    machine.add(job(0))
    machine.add(job(1))
    # Read 1 s; then beside it 1.5 s of reading, in which 50 tokens come; then 50 and 100 tokens at 75 a second each,
    # and the last 50 alone.
    assert drain(machine) == pytest.approx({"q0": 2.5 + 50 / 75, "q1": 2.5 + 50 / 75 + 0.5}, abs=1e-3)


def test_a_repeated_prompt_is_not_read_again() -> None:
    machine = Machine(MachineKind())
    machine.add(job(0))
    drain(machine)
    again = job(0, sent_s=machine.now_s)
    machine.add(again)
    assert drain(machine)["q0"] == pytest.approx(3.0, abs=1e-3)
    assert again.num_cached_tokens == 3000


def test_a_report_says_what_is_there() -> None:
    machine = Machine(MachineKind(slots=2, gains=(0.0, 1.0, 1.5)))
    for number in range(3):
        machine.add(job(number))
    machine.advance(0.5)
    said = machine.report()
    assert (said.num_running, said.num_waiting, said.num_unread_tokens) == (2, 1, 1500 + 0 + 3000)
    assert len(said.open_tags) == 3


def test_random_service_on_one_machine_waits_as_queueing_theory_says() -> None:
    """Pollaczek and Khinchine: Wq = rho S (1 + cv^2) / (2 (1 - rho)), here with rho 0.7."""
    kind = MachineKind(num_tokens_cached=0)
    traffic = Traffic(280, long_share=0.0)
    outcome = run(RoundRobin(), [kind], requests(traffic, 12_000))
    service_s, rho = 9.0, 0.7
    cv2 = (0.6 * 7.0 / service_s) ** 2
    assert outcome.wait_mean_s == pytest.approx(rho * service_s * (1 + cv2) / 2 / (1 - rho), rel=0.15)


def test_on_an_offices_load_the_policy_waits_less_than_a_sticky_rule_that_sees_everything() -> None:
    """Four single-slot Macs at 750 calls an hour: the office's arithmetic has the sticky rule need a fifth."""
    kind, traffic = MachineKind(num_tokens_cached=84_000), Traffic(750)
    policy = run(Policy(4), [kind] * 4, requests(traffic, 2_000))
    sticky = run(Sticky(), [kind] * 4, requests(traffic, 2_000))
    assert policy.wait_p95_s < 10.0 < sticky.wait_p95_s


def test_a_fleet_with_several_routers_and_old_reports_stays_even() -> None:
    outcomes = dict(compare(FleetCase(num_machines=12, num_requests=1_500), num_routers=4))
    policy = outcomes["policy"]
    assert policy.load_ratio <= 1.3
    for name in ("round robin", "power of two"):
        assert outcomes[name].num_computed_prompt_tokens >= 1.5 * policy.num_computed_prompt_tokens
        assert outcomes[name].ttft_p95_s > policy.ttft_p95_s


def test_mixed_machines_get_what_they_can_bear() -> None:
    kinds, traffic = mixed_fleet(), Traffic(700, num_live=200)
    policy = run(Policy(4, 2), kinds, requests(traffic, 800))
    blind = run(PowerOfTwo(), kinds, requests(traffic, 800))
    assert policy.e2e_mean_s < 0.75 * blind.e2e_mean_s
