"""What sending a request to each replica would cost, in seconds. Pure.

Owns: the formulas, for all replicas at once. Must not know: where figures come from, or how a choice is made of costs.

    wait         until a slot is free: departures it takes x usual answer / slots    (as engine/scheduler/forecast.py)
    turn         reading what was there before: unread tokens / prefill speed
    reread       reading what is not cached: (prompt - cached) / prefill speed
    disturbance  the same, for everybody who runs or waits there: while this prompt is read, they get less
    answer       a usual answer beside the others that decode there: it spreads load, and prefers faster machines
    silence      grows with every second that a replica has reported less lately than others: its figures may be wrong

Without the disturbance every request does what is best for itself, and a fleet that is nearly full goes over: a busy
home sends its conversations away, to be read again elsewhere, which makes elsewhere busy (docs/routing.md has figures).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# Reports come every second or two; after this a replica counts as silent, and each further second costs as much again.
SILENT_AFTER_S = 4.0
SILENCE_WEIGHT = 2.0


@dataclass(frozen=True, slots=True)
class Load:
    """The replicas as columns. ``num_requests``: in slots and waiting. ``alone_s``: a usual answer decoded alone,
    ``row_s``: what each row beside it adds. ``age_s``: since the last report."""

    slots: Floats
    num_requests: Floats
    num_unread_tokens: Floats
    prefill_tokens_per_s: Floats
    alone_s: Floats
    row_s: Floats
    age_s: Floats


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds for each replica."""

    wait_s: Floats
    turn_s: Floats
    reread_s: Floats
    disturbance_s: Floats
    answer_s: Floats
    silence_s: Floats
    total_s: Floats


def costs_of(load: Load, num_prompt_tokens: int, num_cached_tokens: Floats) -> Costs:
    """Return what a prompt of that length costs at each replica, of which it has ``num_cached_tokens``."""
    departures = np.maximum(load.num_requests + 1.0 - load.slots, 0.0)
    answer_s = load.alone_s + load.row_s * np.minimum(load.num_requests, load.slots - 1.0)
    wait_s = departures * answer_s / load.slots
    turn_s = load.num_unread_tokens / load.prefill_tokens_per_s
    reread_s = np.maximum(num_prompt_tokens - num_cached_tokens, 0.0) / load.prefill_tokens_per_s
    # All of them are silent when the controller is gone: that is no reason to prefer any.
    age_s = load.age_s - load.age_s.min()
    silence_s = np.maximum(age_s - SILENT_AFTER_S, 0.0) * SILENCE_WEIGHT
    disturbance_s = reread_s * load.num_requests
    total_s = wait_s + turn_s + reread_s + disturbance_s + answer_s + silence_s
    return Costs(wait_s, turn_s, reread_s, disturbance_s, answer_s, silence_s, total_s)
