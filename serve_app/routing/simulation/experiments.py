"""The questions put to the simulation: how many Macs an office needs, and whether a large fleet stays even. Pure.

Owns: machines, loads and the service level of each experiment. Must not know: how results are printed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from serve_app.routing.simulation.machine import MachineKind
from serve_app.routing.simulation.rules import Policy, PowerOfTwo, RoundRobin, Rule, Sticky
from serve_app.routing.simulation.run import Outcome, run
from serve_app.routing.simulation.traffic import Traffic, requests

# The office's service level: waiting, from sending to the start of reading.
MAX_MEAN_WAIT_S = 3.0
MAX_P95_WAIT_S = 10.0
TOKENS_PER_CONVERSATION = 10_500
# How much faster k decodes are together: a dense 27B model in 8 bits, MLX, on an M-series Max.
DENSE_GAINS = (0.0, 1.0, 1.75, 2.3, 2.8)
MAX_MACHINES = 24


@dataclass(frozen=True, slots=True)
class OfficeCase:
    """One row of the office arithmetic: single-slot Macs that keep ``num_kept`` conversations."""

    requests_per_hour: float
    long_share: float
    num_kept: int

    @property
    def kind(self) -> MachineKind:
        """The Mac."""
        return MachineKind(slots=1, num_tokens_cached=self.num_kept * TOKENS_PER_CONVERSATION)

    @property
    def traffic(self) -> Traffic:
        """The load."""
        return Traffic(self.requests_per_hour, long_share=self.long_share)

    @property
    def fewest_possible(self) -> int:
        """Macs below which there would be more work than time even with every prompt's repeated part cached."""
        traffic, kind = self.traffic, self.kind
        read_s = 0.1 * traffic.prompt_tokens / kind.prefill_tokens_per_s
        busy_s = read_s + traffic.output_tokens / kind.decode_tokens_per_s
        return int(traffic.requests_per_hour * busy_s / 3600) + 1


OFFICE_CASES = tuple(
    OfficeCase(rate, long_share, num_kept)
    for rate in (500, 750, 1500)
    for long_share in (0.0, 0.25, 0.5)
    for num_kept in (8, 32)
)


def machines_needed(case: OfficeCase, rule: Callable[[int], Rule], num_requests: int) -> tuple[int, Outcome]:
    """Return the fewest Macs with which ``rule`` keeps the service level, and how they do."""
    for num in range(case.fewest_possible, MAX_MACHINES):
        outcome = run(rule(num), [case.kind] * num, requests(case.traffic, num_requests))
        if outcome.wait_mean_s < MAX_MEAN_WAIT_S and outcome.wait_p95_s < MAX_P95_WAIT_S:
            return num, outcome
    return MAX_MACHINES, outcome


@dataclass(frozen=True, slots=True)
class FleetCase:
    """A large fleet of four-slot Macs: a hundred people to a Mac, ten conversations to a system prompt."""

    num_machines: int
    num_requests: int
    requests_per_hour: float = 500.0

    @property
    def traffic(self) -> Traffic:
        """The load."""
        return Traffic(
            self.requests_per_hour * self.num_machines,
            num_live=100 * self.num_machines,
            num_head_tokens=2_000,
            num_groups=10 * self.num_machines,
        )

    @property
    def kinds(self) -> list[MachineKind]:
        """The Macs."""
        return [MachineKind(slots=4, gains=DENSE_GAINS, num_tokens_cached=300_000)] * self.num_machines


def all_rules(num_machines: int, num_routers: int) -> dict[str, Rule]:
    """Return each rule by its name."""
    return {
        "policy": Policy(num_machines, num_routers),
        "sticky": Sticky(),
        "power of two": PowerOfTwo(),
        "round robin": RoundRobin(),
    }


def compare(case: FleetCase, num_routers: int, names: Sequence[str] = ()) -> Iterator[tuple[str, Outcome]]:
    """Yield each rule's name (of ``names``, or all) and how the fleet does under it, for the very same requests."""
    for name, rule in all_rules(case.num_machines, num_routers).items():
        if not names or name in names:
            yield name, run(rule, case.kinds, requests(case.traffic, case.num_requests))


def mixed_fleet() -> list[MachineKind]:
    """Two fast Macs and two slow ones with fewer slots, as an office has them."""
    fast = MachineKind(slots=8, prefill_tokens_per_s=3_000, decode_tokens_per_s=80, gains=(*DENSE_GAINS, 3.2, 3.5))
    slow = MachineKind(slots=2, prefill_tokens_per_s=600, decode_tokens_per_s=30, gains=DENSE_GAINS)
    return [fast, fast, slow, slow]
