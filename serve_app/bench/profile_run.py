"""Profiles a running endpoint: from its address to the file that the planner reads.

Owns: the joining of client, prober and profile. Must not know: the command line.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime

from serve_app.bench.client import StreamClient
from serve_app.bench.load import EncodedSession, LoadRecord, run_closed
from serve_app.bench.machine import describe_machine
from serve_app.bench.profile import Fit, Prober, ProfilePlan, measure_profile
from serve_app.bench.prompts import TokenCounter
from serve_app.bench.runner import Report
from serve_app.bench.target import Target, check_target, resolve_model
from serve_app.capacity.profile import SCHEMA, MachineProfile


def profile_endpoint(
    target: Target,
    plan: ProfilePlan,
    *,
    target_stall_s: float,
    count_tokens: TokenCounter | None,
    report: Report,
    allow_remote: bool = False,
) -> tuple[MachineProfile, Fit]:
    """Measure and fit. ``target_stall_s`` is the engine's setting, which the planner's scheduler is given too.

    Raises BenchError when the endpoint may not be asked, does not answer, or is too small to tell costs apart.
    """
    check_target(target, allow_remote=allow_remote)
    resolved, fit = asyncio.run(_profile(target, plan, count_tokens, report))
    machine = describe_machine()
    profile = MachineProfile(
        schema=SCHEMA,
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=f"{machine.processor}, {machine.num_threads} threads",
        model=resolved.model,
        times=fit.times,
        overhead_s=fit.overhead_s,
        residual=fit.residual,
        gains=fit.gains,
        max_chunk_tokens=plan.max_chunk_tokens,
        target_stall_s=target_stall_s,
    )
    return profile, fit


async def _profile(
    target: Target, plan: ProfilePlan, count_tokens: TokenCounter | None, report: Report
) -> tuple[Target, Fit]:
    resolved = await resolve_model(target)
    url = resolved.url("completions")
    key, trust = resolved.api_key, resolved.trust
    async with StreamClient(url, api_key=key, timeout_s=plan.max_load_s, trust=trust) as client:

        async def send(sessions: Sequence[EncodedSession], num_clients: int) -> LoadRecord:
            return await run_closed(client, sessions, num_clients, plan.max_load_s, lambda: None)

        return resolved, await measure_profile(Prober(resolved, plan, count_tokens, send), plan, report)
