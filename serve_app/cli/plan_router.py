"""The fleet's real routing policy, put in front of simulated machines.

Owns: what a replica would report and when, and the chain of hashes that a real prompt would have. Must not know: how
the policy chooses, or how the simulator runs. It stands here because capacity may not import the router above it.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from serve_app.capacity.machine import MachineSpec, SimulatedCall, SimulatedMachine
from serve_app.capacity.perf_model import chunk_s, decode_rows_s
from serve_app.protocol import PrefixChain
from serve_app.routing.policy import RoutingPolicy, RoutingRequest
from serve_app.routing.report import ReplicaReport, reported_answers_s, tag_of

REPORT_PERIOD_S = 1.0
# A usual answer's length is learnt as replicas learn it.
ANSWER_WEIGHT = 0.1
NUM_PREFIXES = 512


@dataclass(slots=True)
class _Replica:
    """What a replica knows of itself."""

    usual_output_tokens: float | None = None
    sequence: int = 0
    open_tags: set[int] = field(default_factory=set)
    prefixes: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def keep(self, hashes: Sequence[int]) -> None:
        for name in hashes:
            self.prefixes[name] = None
            self.prefixes.move_to_end(name)
        while len(self.prefixes) > NUM_PREFIXES:
            self.prefixes.popitem(last=False)


class RouterDispatch:
    """One router in front of all machines, which report once a second. A call never waits in a line of the fleet's."""

    def __init__(self) -> None:
        self._policy = RoutingPolicy()
        self._replicas: list[_Replica] = []
        self._chains: dict[int, list[tuple[int, int]]] = {}
        self._next_report_s = 0.0

    def choose(
        self, call: SimulatedCall, session: int, machines: Sequence[SimulatedMachine], now_s: float
    ) -> int | None:
        """The policy's choice, from the last reports and what the router itself has sent since."""
        if now_s >= self._next_report_s:
            self._report(machines, now_s)
        chain = self._chain_of(call, session)
        decision = self._policy.choose(RoutingRequest(call.call_id, chain, chain.conversation), now_s)
        assert decision is not None, "the fleet has no machine"
        index = int(decision.chosen.replica)
        self._policy.taken(call.call_id, decision.chosen.replica, now_s)
        replica = self._replicas[index]
        replica.open_tags.add(tag_of(call.call_id))
        replica.keep(chain.hashes)
        return index

    def changed(self, index: int, machines: Sequence[SimulatedMachine]) -> None:
        """Machines speak for themselves when they report."""

    def answered(self, call: SimulatedCall, index: int) -> None:
        """The call came back to the router, and the replica has learnt how long an answer is."""
        replica = self._replicas[index]
        usual = replica.usual_output_tokens
        replica.usual_output_tokens = (
            call.num_output_tokens if usual is None else usual + ANSWER_WEIGHT * (call.num_output_tokens - usual)
        )
        replica.open_tags.discard(tag_of(call.call_id))
        self._policy.came_back(call.call_id, str(index))

    def _report(self, machines: Sequence[SimulatedMachine], now_s: float) -> None:
        self._next_report_s = now_s + REPORT_PERIOD_S
        if not self._replicas:
            self._replicas = [_Replica() for _ in machines]
        for index, (machine, replica) in enumerate(zip(machines, self._replicas, strict=True)):
            replica.sequence += 1
            num_running = machine.num_open - machine.num_waiting
            answer_s, answer_row_s = _answers_s(machine.spec, num_running, replica.usual_output_tokens)
            report = ReplicaReport(
                sequence=replica.sequence,
                slots=machine.spec.slots,
                num_running=num_running,
                num_waiting=machine.num_waiting,
                num_unread_tokens=machine.num_unread_tokens,
                prefill_tokens_per_s=_prefill_rate(machine.spec),
                answer_s=answer_s,
                answer_row_s=answer_row_s,
                answer_tokens=replica.usual_output_tokens,
                open_tags=frozenset(replica.open_tags),
                prefixes=frozenset(replica.prefixes) if machine.spec.prefix_cache else frozenset(),
            )
            self._policy.report(str(index), str(index), report, now_s)

    def _chain_of(self, call: SimulatedCall, session: int) -> PrefixChain:
        """The beginnings of a prompt: the shared head, then one link for each call that the session has made."""
        links = self._chains.setdefault(session, [])
        if not links and call.cache_key:
            links.append((_name(call.cache_key), call.num_shared_tokens))
        links.append((_name(f"{session}/{len(links)}"), len(call.prompt_token_ids)))
        return PrefixChain(
            hashes=tuple(name for name, _ in links),
            num_tokens=tuple(num_tokens for _, num_tokens in links),
            conversation=_name(str(session)),
            num_prompt_tokens=len(call.prompt_token_ids),
        )


def _answers_s(
    spec: MachineSpec, num_running: int, usual_output_tokens: float | None
) -> tuple[float | None, float | None]:
    """A usual answer beside what runs, and what each further row adds to it; nothing before the first has ended."""
    if usual_output_tokens is None:
        return None, None
    return reported_answers_s(partial(decode_rows_s, spec.times), usual_output_tokens, num_running, spec.slots)


def _prefill_rate(spec: MachineSpec) -> float:
    return spec.max_chunk_tokens / chunk_s(spec.times, spec.max_chunk_tokens)


def _name(text: str) -> int:
    return random.Random(text).getrandbits(64)
