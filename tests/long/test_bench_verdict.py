"""When figures may be quoted, and the document that carries them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from serve_app.bench.document import (
    SCHEMA,
    AnswerCheck,
    LevelRun,
    RunDocument,
    TargetFacts,
    Verdict,
    read_document,
    to_json,
    write_document,
)
from serve_app.bench.errors import BenchError
from serve_app.bench.machine import CpuUse, describe_machine
from serve_app.bench.plan import BenchPlan, Level
from serve_app.bench.report import markdown_report, markdown_table
from serve_app.bench.results import CallResult, LoadResult
from serve_app.bench.status_probe import SlotSample, read_slots
from serve_app.bench.target import Target
from serve_app.bench.verdict import judge
from serve_app.bench.workload_files import DEFAULT_WORKLOAD
from serve_app.latency import RequestTiming, Summary, summarize_load

LEVEL = Level(num_clients=4)
PLAN = BenchPlan(workload=DEFAULT_WORKLOAD, levels=(LEVEL,))
TARGET = Target("ours", "http://127.0.0.1:8000", "demo", num_slots=4)
SAME = AnswerCheck(2, 2)


def call(number: int, **changes: object) -> CallResult:
    timing = RequestTiming(0.0, (1.0, 2.0, 3.0 + number), 100, 64)
    result = CallResult(number, 0, "question", number, 64, 0.001, timing, "length", None, "usage", "text", None)
    return replace(result, **changes)  # type: ignore[arg-type]


def run(*, duration_s: float = 20.0, num_failed: int = 0, **changes: object) -> LevelRun:
    calls = tuple(call(number) for number in range(8))
    timings = [each.timing for each in calls if each.timing is not None]
    result = LoadResult(
        summary=summarize_load(timings, num_failed, duration_s),
        full_load_tokens_per_s=30.0,
        client_lag_s=Summary(9, 0.001, 0, 0.001, 0.001, 0.001, 0.001, 0.001),
        lateness_s=None,
        num_wrong_length=0,
        num_cached_tokens=None,
        errors=(("HTTP 500: boom", num_failed),) if num_failed else (),
        cut_off=False,
        calls=calls,
    )
    level_run = LevelRun(LEVEL, 0, "7/0", result, (SlotSample(0.5, 4, 4, 0),), CpuUse(0.1, 15.0, 0.5), 0.1)
    on_result = {name: value for name, value in changes.items() if hasattr(result, name)}
    on_run = {name: value for name, value in changes.items() if name not in on_result}
    return replace(level_run, result=replace(result, **on_result), **on_run)  # type: ignore[arg-type]


def reasons(level_run: LevelRun, answers: AnswerCheck | None = SAME) -> str:
    return " / ".join(judge(TARGET, PLAN, [level_run], answers, 2).reasons)


def test_a_clean_run_is_valid() -> None:
    assert judge(TARGET, PLAN, [run()], SAME, 2) == Verdict(True, ())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_failed": 2}, "2 of 10 requests failed (first: HTTP 500: boom)"),
        ({"duration_s": 2.0}, "too short: 8 answers in 2.0 s"),
        ({"cut_off": True}, "cut off"),
        ({"num_wrong_length": 3}, "3 answers are not as long as asked"),
        ({"calls": (call(0, counted_by="chunks"),)}, "no usage"),
        ({"slots": (SlotSample(0.5, 2, 2, 0),)}, "4 slots are meant, and the endpoint reports 2"),
        ({"slots": ()}, "does not report its slots"),
        ({"idle_cores": 1.0}, "busy before the load began: 1.0 of 2 cores"),
        ({"cpu": CpuUse(0.1, 15.0, 20.0)}, "other programs used 1.0 of 2 cores"),
        ({"client_lag_s": Summary(9, 0, 0, 0, 0, 0, 0.09, 0.09)}, "the client itself was too busy"),
        ({"lateness_s": Summary(9, 0, 0, 0, 0, 0, 0.09, 0.09)}, "sent up to 90 ms late"),
    ],
)
def test_each_rule_names_what_broke_it(changes: dict[str, object], reason: str) -> None:
    found = reasons(run(**changes))  # type: ignore[arg-type]
    assert reason in found
    assert not judge(TARGET, PLAN, [run(**changes)], SAME, 2).valid  # type: ignore[arg-type]


def test_answers_that_depend_on_the_batch_are_no_result() -> None:
    assert "1 of 2 answers differ" in reasons(run(), AnswerCheck(2, 1, (3, "a", "b")))


def test_loads_that_did_not_happen_are_named() -> None:
    verdict = judge(TARGET, replace(PLAN, num_repeats=3), [run()], SAME, 2)
    assert "only 1 of 3 loads" in verdict.reasons[0]


def test_slots_that_nobody_asked_for_are_not_judged() -> None:
    assert judge(replace(TARGET, num_slots=None), PLAN, [run(slots=())], SAME, 2).valid


@pytest.mark.parametrize(
    ("document", "sample"),
    [
        (None, None),
        ({"replicas": []}, None),
        ({"slots": 4, "num_running": 3, "num_waiting": 1}, SlotSample(1.0, 4, 3, 1)),
        (
            {
                "replicas": [
                    {"engine": {"slots_asked": "4", "scheduler": {"slots": 4, "num_running": 3, "num_waiting": None}}},
                    {"engine": {"scheduler": {"slots": 8, "num_running": 1, "num_waiting": 2}}},
                    {"engine": None},
                ]
            },
            SlotSample(1.0, 12, 4, 2),
        ),
    ],
)
def test_slots_are_found_wherever_a_status_document_has_them(document: object, sample: SlotSample | None) -> None:
    assert read_slots(document, 1.0) == sample


def document(label: str = "ours", *runs: LevelRun) -> RunDocument:
    return RunDocument(
        schema=SCHEMA,
        started_at="2026-01-01T00:00:00+00:00",
        command=("metalslots", "bench", "--slo", "ttft:1 2"),
        target=TargetFacts(label, "http://127.0.0.1:8000", "demo", "ignore_eos", 4, {"slots": 4}),
        plan=PLAN,
        machine=describe_machine(),
        runs=runs or (run(),),
        answers=SAME,
        verdict=Verdict(True, ()),
    )


def test_a_document_survives_its_file(tmp_path: Path) -> None:
    written = document()
    write_document(written, tmp_path / "deep" / "run.json")
    read = read_document(tmp_path / "deep" / "run.json")
    assert to_json(read) == to_json(written)
    assert read.plan == PLAN
    assert read.runs[0].result.calls == written.runs[0].result.calls


def test_a_foreign_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"label": "x"}')
    with pytest.raises(BenchError, match=SCHEMA):
        read_document(path)
    with pytest.raises(BenchError, match="cannot be read"):
        read_document(tmp_path / "missing.json")


def test_no_key_is_written() -> None:
    assert "secret" not in repr(replace(TARGET, api_key="secret"))
    assert "api_key" not in str(to_json(document()))


def test_the_table_sets_endpoints_side_by_side() -> None:
    lines = markdown_table([document("ours"), document("theirs")]).splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["ours", "theirs"]
    assert len({line.count("|") for line in lines}) == 1
    assert "4 clients" in lines[2]


def test_several_runs_show_median_and_range() -> None:
    runs = tuple(replace(run(duration_s=duration_s), repeat=i) for i, duration_s in enumerate((16.0, 20.0, 32.0)))
    (row,) = markdown_table([document("ours", *runs)]).splitlines()[2:]
    assert "25.6 (16.0..32.0)" in row


def test_the_report_says_how_to_repeat_it() -> None:
    text = markdown_report([document()], title="T")
    assert "metalslots bench --slo 'ttft:1 2'" in text
    assert "seed 7" in text
    assert "Verdict, ours: valid, 2 of 2 answers as when sent alone" in text
