"""Whether a run's figures may be quoted.

Owns: the rules and their limits; each broken one is a sentence with the limit and the value. Must not know: how a run
is made or shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from serve_app.bench.document import AnswerCheck, LevelRun, Verdict
from serve_app.bench.plan import BenchPlan
from serve_app.bench.target import Target

MIN_LOAD_S = 5.0
MIN_ANSWERS = 3
MAX_IDLE_CORES_SHARE = 0.2
MAX_OTHERS_SHARE = 0.15
MAX_CLIENT_LAG_S = 0.02
MAX_LATENESS_S = 0.05


def judge(
    target: Target, plan: BenchPlan, runs: Sequence[LevelRun], answers: AnswerCheck | None, num_threads: int | None
) -> Verdict:
    """Apply every rule to a run; ``num_threads`` are the machine's logical cores."""
    reasons = [*_judge_whole(plan, runs, answers)]
    for run in runs:
        title = str(run.level) + (f", run {run.repeat + 1}" if plan.num_repeats > 1 else "")
        rules = (*_judge_answers(run), *_judge_slots(target, run), *_judge_machine(run, num_threads or 1))
        reasons += [f"{title}: {reason}" for reason in rules]
    return Verdict(not reasons, tuple(reasons))


def _judge_whole(plan: BenchPlan, runs: Sequence[LevelRun], answers: AnswerCheck | None) -> Iterator[str]:
    num_planned = len(list(plan.loads()))
    if len(runs) < num_planned:
        yield f"only {len(runs)} of {num_planned} loads fitted into {plan.max_total_s:.0f} s"
    if answers is not None and answers.num_equal < answers.num_checked:
        num_differ = answers.num_checked - answers.num_equal
        yield f"{num_differ} of {answers.num_checked} answers differ from the same request sent alone"


def _judge_answers(run: LevelRun) -> Iterator[str]:
    summary, result = run.result.summary, run.result
    num_answered = summary.num_requests - summary.num_failed
    if summary.num_failed:
        first = f" (first: {result.errors[0][0]})" if result.errors else ""
        yield f"{summary.num_failed} of {summary.num_requests} requests failed{first}"
    if result.cut_off:
        yield "the load was cut off by its time limit"
    if summary.duration_s < MIN_LOAD_S or num_answered < MIN_ANSWERS:
        yield f"too short: {num_answered} answers in {summary.duration_s:.1f} s"
    if result.num_wrong_length:
        yield f"{result.num_wrong_length} answers are not as long as asked (see --ban-eos)"
    if any(call.counted_by == "chunks" and call.timing is not None for call in result.calls):
        yield "the endpoint reports no usage, so tokens are counted by chunks"


def _judge_slots(target: Target, run: LevelRun) -> Iterator[str]:
    if target.num_slots is None:
        return
    if not run.slots:
        yield f"{target.num_slots} slots are meant, and the endpoint does not report its slots"
    elif {sample.num_slots for sample in run.slots} != {target.num_slots}:
        seen = ", ".join(str(number) for number in sorted({sample.num_slots for sample in run.slots}))
        yield f"{target.num_slots} slots are meant, and the endpoint reports {seen}"


def _judge_machine(run: LevelRun, num_threads: int) -> Iterator[str]:
    if run.idle_cores > MAX_IDLE_CORES_SHARE * num_threads:
        yield f"the machine was busy before the load began: {run.idle_cores:.1f} of {num_threads} cores"
    others_s, duration_s = run.cpu.others_s, run.result.summary.duration_s
    if others_s is not None and others_s > MAX_OTHERS_SHARE * num_threads * duration_s:
        yield f"other programs used {others_s / duration_s:.1f} of {num_threads} cores meanwhile"
    lag_s, lateness_s = run.result.client_lag_s, run.result.lateness_s
    if lag_s is not None and lag_s.p99 > MAX_CLIENT_LAG_S:
        yield f"the client itself was too busy: its timers came {lag_s.p99 * 1000:.0f} ms late (p99)"
    if lateness_s is not None and lateness_s.p99 > MAX_LATENESS_S:
        yield f"requests were sent up to {lateness_s.p99 * 1000:.0f} ms late (p99)"
