"""A whole bench run from plan to document: measure, judge, describe.

Owns: the joining of runner, verdict and document. Must not know: the command line.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from engine.model_source import resolve_model as resolve_files
from serve_app.bench.client import get_json
from serve_app.bench.document import SCHEMA, RunDocument, TargetFacts
from serve_app.bench.machine import Machine, describe_machine
from serve_app.bench.plan import BenchPlan, Level
from serve_app.bench.prompts import TokenCounter
from serve_app.bench.results import LoadResult
from serve_app.bench.runner import Report, TargetBench, TargetRuns, run_plan
from serve_app.bench.sweep import Search, SweepResult, sweep
from serve_app.bench.target import Target, check_target, resolve_model
from serve_app.bench.verdict import judge


def measure(
    targets: Sequence[Target],
    plan: BenchPlan,
    *,
    count_tokens: TokenCounter | None,
    report: Report,
    allow_remote: bool = False,
    commands: Mapping[str, tuple[str, ...]] | None = None,
) -> tuple[RunDocument, ...]:
    """Run ``plan`` at ``targets`` and return one document each.

    ``commands``: how each target was started, by label. Raises BenchError when a target may not or cannot be tested.
    """
    for target in targets:
        check_target(target, allow_remote=allow_remote)
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    machine = describe_machine()
    return asyncio.run(_measure(targets, plan, count_tokens, report, started_at, machine, commands or {}))


async def _measure(
    targets: Sequence[Target],
    plan: BenchPlan,
    count_tokens: TokenCounter | None,
    report: Report,
    started_at: str,
    machine: Machine,
    commands: Mapping[str, tuple[str, ...]],
) -> tuple[RunDocument, ...]:
    resolved = [await resolve_model(target) for target in targets]
    measured = await run_plan(resolved, plan, count_tokens, report)
    documents = []
    for each in measured:
        facts = await _facts(each.target, commands.get(each.target.label, ()))
        documents.append(_document(each, facts, plan, machine, started_at))
    return tuple(documents)


async def _facts(target: Target, command: tuple[str, ...]) -> TargetFacts:
    status = await get_json(f"{target.base_url}/status", api_key=target.api_key, trust=target.trust)
    return TargetFacts(
        label=target.label,
        base_url=target.base_url,
        model=target.model,
        eos_ban=target.eos_ban,
        num_slots_intended=target.num_slots,
        status=status,
        command=command,
    )


def _document(each: TargetRuns, facts: TargetFacts, plan: BenchPlan, machine: Machine, started_at: str) -> RunDocument:
    return RunDocument(
        schema=SCHEMA,
        started_at=started_at,
        command=command_line(),
        target=facts,
        plan=plan,
        machine=machine,
        runs=each.runs,
        answers=each.answers,
        verdict=judge(each.target, plan, each.runs, each.answers, machine.num_threads),
    )


def measure_sweep(
    target: Target,
    plan: BenchPlan,
    search: Search,
    *,
    count_tokens: TokenCounter | None,
    report: Report,
    allow_remote: bool = False,
) -> tuple[SweepResult, RunDocument]:
    """Search for the highest rate at which ``plan.service_level`` is met, and document every load of the search."""
    check_target(target, allow_remote=allow_remote)
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    machine = describe_machine()

    async def run() -> tuple[SweepResult, RunDocument]:
        bench = TargetBench(await resolve_model(target), plan, count_tokens)
        await bench.warm_up()

        async def one(level: Level) -> LoadResult:
            run = await bench.run_load(level, 0, lambda share: report(f"{target.label}, {level}", share))
            return run.result

        found = await sweep(one, search, plan.service_level, plan.max_total_s)
        tried = replace(plan, levels=tuple(Level(rate_per_s=each.rate_per_s) for each in found.tried) or plan.levels)
        measured = await bench.finish()
        return found, _document(measured, await _facts(measured.target, ()), tried, machine, started_at)

    return asyncio.run(run())


def command_line() -> tuple[str, ...]:
    """The command that is running, without the folder it lies in."""
    return (Path(sys.argv[0]).name, *sys.argv[1:])


def token_counter(model: str | None) -> tuple[TokenCounter | None, tuple[int, ...]]:
    """Count tokens with the files of ``model`` ("demo", folder, GGUF, hub id), and its end-of-text tokens.

    Without a model prompts have one word per token planned, which is exact for most byte-level BPE vocabularies.
    """
    if model is None:
        return None, ()
    from engine.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(resolve_files(model))
    return (lambda text: len(tokenizer.encode(text))), tokenizer.eos_token_ids
