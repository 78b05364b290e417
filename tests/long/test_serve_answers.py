"""OpenAI's answers written from deltas: whole and streamed say the same, logprobs have each endpoint's shape."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.ingress import sse
from serve_app.ingress.answers import AnswerHead, ChatShape, CompletionShape
from serve_app.protocol import ChoiceDelta, Deltas, LogprobEntry, Timings, TokenText, Usage

HEAD = AnswerHead("id-1", "m", 1_700_000_000)
USAGE = Usage(4, 2, 1)


def token(text: str, logprob: float = -0.5) -> TokenText:
    return TokenText(text, text.encode(), logprob)


ENTRIES = (
    LogprobEntry(token("He", -0.1), (token("He", -0.1), token("A", -2.0))),
    LogprobEntry(TokenText("\ufffd", b"\xf0\x9f", -0.2), ()),
    LogprobEntry(TokenText("\ufffd", b"\x98\x80", -0.3), ()),
)


def joined(chunks: list[dict[str, Any]], index: int) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content", "") if "delta" in choice else choice["text"] for choice in choices)


@given(st.lists(st.lists(st.tuples(st.integers(0, 2), st.text(max_size=5)), max_size=4), max_size=6))
def test_streamed_and_whole_answers_have_the_same_texts(script: list[list[tuple[int, str]]]) -> None:
    messages = [Deltas(tuple(ChoiceDelta(i, text, (1,)) for i, text in dict(parts).items())) for parts in script]
    messages.append(Deltas(tuple(ChoiceDelta(i, finish_reason="stop") for i in range(3)), USAGE))
    for make in (ChatShape, CompletionShape):
        whole = make(HEAD).whole(messages)
        shape = make(HEAD)
        chunks = [chunk for message in messages for chunk in shape.chunks(message)]
        assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
        for choice in whole["choices"]:
            text = choice["message"]["content"] if "message" in choice else choice["text"]
            assert joined(chunks, choice["index"]) == text
            ends = [c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
            assert [end for end in ends if end] == ["stop"]
            assert ends[-1] == "stop"


@pytest.mark.parametrize("make", [ChatShape, CompletionShape])
def test_a_stream_that_counts_as_it_goes_says_in_each_chunk_how_many_tokens_there_are(make: Any) -> None:
    shape = make(AnswerHead("id-1", "m", 1_700_000_000, include_usage=True, counts_as_it_goes=True))
    messages = [
        Deltas((ChoiceDelta(0, "a", (1, 2)),), prompt_usage=Usage(4, 0, 1)),
        Deltas((ChoiceDelta(0, "b", (3,)), ChoiceDelta(1, "c", (4,)))),
        Deltas((ChoiceDelta(0, "d", (5,), finish_reason="stop"),), Usage(4, 5, 1)),
    ]
    counts = [
        [(chunk["usage"]["prompt_tokens"], chunk["usage"]["completion_tokens"]) for chunk in shape.chunks(message)]
        for message in messages
    ]
    assert [set(each) for each in counts] == [{(4, 2)}, {(4, 4)}, {(4, 5)}]


def test_logprobs_of_a_chat() -> None:
    message = Deltas((ChoiceDelta(0, "He😀", (1, 2, 3), ENTRIES, "stop"),), USAGE)
    written = ChatShape(HEAD, logprobs=True).whole([message])["choices"][0]["logprobs"]
    assert written["refusal"] is None
    assert written["content"][0] == {
        "token": "He",
        "logprob": -0.1,
        "bytes": [72, 101],
        "top_logprobs": [
            {"token": "He", "logprob": -0.1, "bytes": [72, 101]},
            {"token": "A", "logprob": -2.0, "bytes": [65]},
        ],
    }
    assert bytes(b for entry in written["content"] for b in entry["bytes"]).decode() == "He😀"
    streamed = list(ChatShape(HEAD, logprobs=True).chunks(message))
    assert streamed[1]["choices"][0]["logprobs"] == written
    assert streamed[2]["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}


def test_logprobs_of_a_completion_have_offsets_that_go_on_from_chunk_to_chunk() -> None:
    parts = [
        Deltas((ChoiceDelta(0, "He", (1,), ENTRIES[:1]),)),
        Deltas((ChoiceDelta(0, "😀", (2, 3), ENTRIES[1:], "stop"),), USAGE),
    ]
    whole = CompletionShape(HEAD, logprobs=True).whole(parts)["choices"][0]["logprobs"]
    assert whole == {
        "tokens": ["He", "\ufffd", "\ufffd"],
        "token_logprobs": [-0.1, -0.2, -0.3],
        "top_logprobs": [{"He": -0.1, "A": -2.0}, {}, {}],
        "text_offset": [0, 2, 3],
    }
    shape = CompletionShape(HEAD, logprobs=True)
    streamed = [chunk["choices"][0]["logprobs"]["text_offset"] for part in parts for chunk in shape.chunks(part)]
    assert [offset for offsets in streamed for offset in offsets] == whole["text_offset"]


def test_a_token_without_text_still_brings_its_logprobs() -> None:
    chunks = list(ChatShape(HEAD, logprobs=True).chunks(Deltas((ChoiceDelta(0, "", (2,), ENTRIES[1:2]),))))
    assert chunks[1]["choices"][0]["delta"] == {"content": ""}
    assert len(chunks[1]["choices"][0]["logprobs"]["content"]) == 1


def test_the_usage_chunk_says_where_the_time_went() -> None:
    timings = Timings(queued_s=0.5, first_token_s=1.5, total_s=2.0, waited_s={"slots": 0.5})
    last = Deltas((ChoiceDelta(0, finish_reason="stop"),), USAGE, timings)
    for make in (ChatShape, CompletionShape):
        *_, usage = make(AnswerHead("id", "m", 0, include_usage=True)).chunks(last)
        assert usage["timings"]["queued_s"] == 0.5
        assert usage["timings"]["waited_s"] == {"slots": 0.5}


def test_usage_is_null_until_the_last_chunk_when_asked_for() -> None:
    shape = ChatShape(AnswerHead("id", "m", 0, include_usage=True))
    chunks = list(shape.chunks(Deltas((ChoiceDelta(0, "x", (1,), (), "length"),), USAGE)))
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}


@pytest.mark.parametrize(
    "text", ["plain", "two\nlines\r\n\r\n", "你好 👩\u200d👧", "data: [DONE]\n\n", "\u2028", "half \ud800"]
)
def test_an_event_is_one_line_of_valid_utf8(text: str) -> None:
    frame = sse.event({"text": text})
    assert frame.startswith(b"data: ")
    assert frame.endswith(b"\n\n")
    assert b"\n" not in frame[:-2]
    assert b"\r" not in frame
    assert json.loads(frame[6:].decode()) == {"text": text.encode("utf-8", "replace").decode()}
