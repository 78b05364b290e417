"""Reading recorded streams: what counts as a chunk, when, and what counts as a failure."""

from __future__ import annotations

import json

import pytest

from serve_app.bench.client import StreamRecord, read_answer


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def text(piece: str, finish_reason: str | None = None) -> bytes:
    return event({"choices": [{"text": piece, "finish_reason": finish_reason}]})


def delta(**fields: str | None) -> bytes:
    return event({"choices": [{"delta": fields}]})


USAGE = event(
    {
        "choices": [],
        "usage": {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 6}},
    }
)
DONE = b"data: [DONE]\n\n"


def record(*pieces: tuple[float, bytes], error: str | None = None) -> StreamRecord:
    return StreamRecord(1.0, list(pieces), 9.0, error)


def test_a_whole_answer() -> None:
    answer = read_answer(record((2.0, text("a")), (3.0, text("b", "length")), (3.5, USAGE + DONE)))
    assert answer.text == "ab"
    assert answer.chunk_times_s == (2.0, 3.0)
    assert answer.finish_reason == "length"
    assert (answer.num_prompt_tokens, answer.num_output_tokens, answer.num_cached_tokens) == (9, 4, 6)
    assert answer.error is None


def test_a_chunk_counts_when_its_last_byte_is_there() -> None:
    first, second = text("a"), text("b")
    pieces = ((2.0, first + second[:10]), (2.5, second[10:20]), (3.0, second[20:] + DONE))
    assert read_answer(record(*pieces)).chunk_times_s == (2.0, 3.0)


def test_events_that_arrive_together_have_one_time() -> None:
    assert read_answer(record((2.0, text("a") + text("b") + DONE))).chunk_times_s == (2.0, 2.0)


def test_a_role_and_an_empty_text_are_no_token() -> None:
    pieces = ((1.5, delta(role="assistant", content="")), (2.0, delta(content="x")), (2.5, delta(content=None) + DONE))
    assert read_answer(record(*pieces)).chunk_times_s == (2.0,)


def test_hidden_reasoning_is_text_like_any_other() -> None:
    pieces = ((2.0, delta(reasoning_content="hm")), (3.0, delta(reasoning="hm")), (4.0, delta(content="x") + DONE))
    assert read_answer(record(*pieces)).chunk_times_s == (2.0, 3.0, 4.0)


def test_comments_blank_lines_and_crlf_are_passed_over() -> None:
    pieces = ((1.2, b": keep-alive\r\n\r\n"), (2.0, text("a").replace(b"\n", b"\r\n")), (3.0, b"event: x\r\n" + DONE))
    answer = read_answer(record(*pieces))
    assert (answer.text, answer.error) == ("a", None)


@pytest.mark.parametrize(
    ("pieces", "error"),
    [
        ([(2.0, text("a"))], "without [DONE]"),
        ([(2.0, text("")), (3.0, DONE)], "no text"),
        ([(2.0, text("a") + event({"error": {"message": "boom"}}) + DONE)], "boom"),
        ([(2.0, b"data: {broken\n\n" + DONE)], "unreadable"),
        ([(2.0, b"data: [1]\n\n" + DONE)], "unreadable"),
        ([], "without [DONE]"),
    ],
)
def test_failures(pieces: list[tuple[float, bytes]], error: str) -> None:
    found = read_answer(record(*pieces)).error
    assert found is not None
    assert error in found


def test_the_first_cause_of_a_failure_is_kept() -> None:
    assert read_answer(record((2.0, text("a")), error="connection lost")).error == "connection lost"
