"""Machines of one slot behind one line, without stepping through them.

Owns: the shortcut that replaces the simulator where nothing is left to schedule: one call at a time, first come first
served, so a call begins when the machine that is free first is free (Kiefer and Wolfowitz). It gives the simulator's
results to the last digit, a hundred times as fast, so rare long waits can be counted instead of guessed. Must not know:
sessions of several calls, caches or other dispatch, where this does not hold.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from engine.scheduler.step_cost import StepLoad, num_causal_pairs
from serve_app.capacity.machine import MachineSpec, MachineUse
from serve_app.capacity.simulator import Load, SimulatedResult, Simulation
from serve_app.capacity.workload import PlannedCall, Workload, plan_session, poisson_arrivals_s
from serve_app.latency import RequestTiming


def applies_to(workload: Workload) -> bool:
    """Whether every session is one call that shares nothing with others."""
    return all(each.shared_prefix is None and each.calls.mean == 1 for each in workload.sessions)


def simulate_one_slot(specs: Sequence[MachineSpec], load: Load) -> Simulation:
    """Serve ``load`` by machines of one slot each, all alike."""
    spec = specs[0]
    free = [(0.0, index) for index in range(len(specs))]
    uses = [MachineUse() for _ in specs]
    results, last_end_s = [], 0.0
    arrivals_s = poisson_arrivals_s(load.seed, load.sessions_per_s, load.num_sessions)
    for session_index, at_s in enumerate(arrivals_s):
        session = plan_session(load.workload, load.seed, session_index)
        call = session.calls[0]
        free_s, machine = heapq.heappop(free)
        begins_s = max(at_s, free_s)
        first_s = begins_s + prompt_s(spec, call)
        ends_s = first_s + answer_s(spec, call)
        heapq.heappush(free, (ends_s, machine))
        last_end_s = max(last_end_s, ends_s)
        uses[machine].busy_s += ends_s - begins_s
        uses[machine].row_s += ends_s - begins_s
        uses[machine].prefill_s += first_s - begins_s
        if session_index >= load.num_sessions * load.warmup_share:
            timing = RequestTiming(at_s, (first_s, ends_s), call.prompt_tokens, call.output_tokens, begins_s - at_s)
            results.append(SimulatedResult(session_index, session.class_name, machine, timing, 0, 0.0))
    return Simulation(tuple(results), last_end_s, tuple(uses))


def prompt_s(spec: MachineSpec, call: PlannedCall) -> float:
    """Reading a prompt beside nobody, in equal chunks and a last one, as the simulated machine does."""
    num_steps = math.ceil(call.prompt_tokens / spec.max_chunk_tokens)
    pairs = num_causal_pairs(0, call.prompt_tokens) // num_steps
    chunk = math.ceil(call.prompt_tokens / num_steps)
    last = call.prompt_tokens - chunk * (num_steps - 1)
    seconds = spec.times.step_s(StepLoad(0, 0, last, pairs))
    return seconds + (num_steps - 1) * spec.times.step_s(StepLoad(0, 0, chunk, pairs)) if num_steps > 1 else seconds


def answer_s(spec: MachineSpec, call: PlannedCall) -> float:
    """Decoding an answer alone, after its first token, at the mean context on the way."""
    num_steps = call.output_tokens - 1
    if num_steps == 0:
        return 0.0
    context = call.prompt_tokens + 1 + (num_steps - 1) // 2
    return num_steps * spec.times.step_s(StepLoad(1, context))
