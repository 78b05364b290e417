"""Log lines: for people and for programs, with everything about a call but what was said."""

from __future__ import annotations

import dataclasses
import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.request import FinishReason, Timeline
from serve_app.telemetry.logs import PACKAGES, CallLog, LogConfig, configure_logs, sentence_of
from tests.telemetry_samples import make_answer, make_record


@pytest.fixture(autouse=True)
def _loggers_as_before() -> Iterator[None]:
    kept = {name: (lg.handlers[:], lg.level, lg.propagate) for name in PACKAGES if (lg := logging.getLogger(name))}
    yield
    for name, (handlers, level, propagate) in kept.items():
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


def written(config: LogConfig, monkeypatch: pytest.MonkeyPatch, *records: object) -> str:
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    configure_logs(config, "test")
    log = CallLog(with_texts=config.texts)
    for record in records:
        log.finished(record)  # type: ignore[arg-type]
    return stream.getvalue()


def test_a_json_line_tells_the_whole_timeline_and_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    record = dataclasses.replace(make_record(), texts=("the secret answer",))
    text = written(LogConfig(format="json"), monkeypatch, record)
    line = json.loads(text)
    assert (line["event"], line["request_id"], line["key"], line["outcome"]) == (
        "call_finished",
        "chatcmpl-1",
        "anna",
        "ok",
    )
    assert line["time"].endswith("Z")
    (answer,) = line["answers"]
    assert answer["waited_s"] == {"slots": 0.5, "prefill_turn": 0.5, "blocks": 2.0}
    assert (answer["queue_s"], answer["prefill_s"], answer["decode_s"], answer["slot"]) == (1.0, 2.0, 7.0, 2)
    assert "secret" not in text


def test_texts_are_written_when_they_were_switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    record = dataclasses.replace(make_record(), texts=("the secret answer",))
    line = json.loads(written(LogConfig(format="json", texts=True), monkeypatch, record))
    assert line["answered"] == ["the secret answer"]
    assert line["asked"] == [{"role": "user", "content": "the secret question"}]


def test_a_line_for_people(monkeypatch: pytest.MonkeyPatch) -> None:
    text = written(LogConfig(), monkeypatch, make_record())
    assert text.count("\n") == 1
    assert "chatcmpl-1 key=anna ok after 10000 ms on mac-1 route=cached" in text
    assert "waited 3000 ms (slots 500 ms, prefill_turn 500 ms, blocks 2000 ms)" in text
    assert (
        "prefill 2000 ms (100 tokens, 64 cached), decode 7000 ms (10 tokens), slot 2, preempted 1 times, stop" in text
    )


def test_a_call_that_was_never_computed_has_a_sentence_too() -> None:
    refused = make_answer(finish=FinishReason.ERROR, timeline=Timeline(100.0, finished_s=100.0))
    assert sentence_of(make_record(refused, outcome="queue_full")).endswith("waited 0 ms, error")
    both = sentence_of(make_record(make_answer(0), make_answer(1)))
    assert "answer 0 waited" in both
    assert "answer 1 waited" in both


def test_lines_go_to_a_file_where_a_folder_is_given(tmp_path: Path) -> None:
    configure_logs(LogConfig(folder=str(tmp_path / "logs"), format="json"), "replica-1")
    logging.getLogger("engine.core").warning("something %s", "odd")
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("serve_app.replica").exception("it failed")
    odd, failed = map(json.loads, (tmp_path / "logs" / "replica-1.log").read_text().splitlines())
    assert (odd["level"], odd["logger"], odd["message"]) == ("warning", "engine.core", "something odd")
    assert "ValueError: broken" in failed["error"]
