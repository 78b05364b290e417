"""Closed forms: what can be said of a load without simulating it.

Owns: M/M/c, M/G/1, and the rate at which slots saturate a machine. Must not know: schedulers or machines' specs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class QueueWait:
    """Waiting in line: the share that waits at all, the mean of everyone's wait, and its 95th percentile."""

    probability: float
    mean_s: float
    p95_s: float


def erlang_c(num_servers: int, offered_load: float) -> float:
    """Probability that an arrival waits in M/M/c with offered load a = rate x service time; 1 when a >= c (Erlang)."""
    if offered_load >= num_servers:
        return 1.0
    # The recursion of Erlang's B keeps every term between 0 and 1, where a ** c / c! overflows for large c.
    blocking = 1.0
    for servers in range(1, num_servers + 1):
        blocking = offered_load * blocking / (servers + offered_load * blocking)
    share_idle = 1 - offered_load / num_servers
    return blocking / (share_idle + (1 - share_idle) * blocking)


def mmc_wait(num_servers: int, rate_per_s: float, service_s: float) -> QueueWait:
    """M/M/c: exponential service of mean ``service_s``, one line for all servers. Infinite when unstable."""
    offered_load = rate_per_s * service_s
    if offered_load >= num_servers:
        return QueueWait(1.0, math.inf, math.inf)
    probability = erlang_c(num_servers, offered_load)
    drain_s = service_s / (num_servers - offered_load)
    p95_s = 0.0 if probability <= 0.05 else math.log(probability / 0.05) * drain_s
    return QueueWait(probability, probability * drain_s, p95_s)


def mg1_mean_wait_s(rate_per_s: float, service_s: float, squared_cv: float) -> float:
    """Mean wait of one server with any service times (Pollaczek and Khinchine). Infinite when unstable."""
    utilisation = rate_per_s * service_s
    if utilisation >= 1:
        return math.inf
    return utilisation * service_s * (1 + squared_cv) / 2 / (1 - utilisation)


def mgc_mean_wait_s(num_servers: int, rate_per_s: float, service_s: float, squared_cv: float) -> float:
    """Mean wait of c servers with one line: that of M/M/c times (1 + cv^2) / 2 (Lee and Longton's approximation)."""
    return mmc_wait(num_servers, rate_per_s, service_s).mean_s * (1 + squared_cv) / 2


def saturated_service_s(prefill_s: float, decode_s: float, gain: float) -> float:
    """Machine seconds a call costs when all slots are full: prompts one by one, answers ``gain`` times faster."""
    return prefill_s + decode_s / gain
