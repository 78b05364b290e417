"""Tokens become text, stop strings end answers, counts add up: however the tokens are grouped."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from engine.core.generation import GenerationDelta
from engine.core.output_processor import AnswerProcessor
from engine.request import FinishReason, Timeline, TokenLogprobs, TokenOutput
from tests.core_fakes import EOS, letter_tokenizer, make_request

TEXT = "one two three four"
TIMELINE = Timeline(1.0, 2.0, 3.0, 4.0, 5.0)


def run(
    token_groups: Sequence[Sequence[int]], finish: FinishReason = FinishReason.LENGTH, **request: object
) -> list[GenerationDelta]:
    """Feed the groups; the last one carries ``finish``."""
    answer = AnswerProcessor(make_request("a", **request), 0, letter_tokenizer())
    deltas = []
    for number, group in enumerate(token_groups, 1):
        last = number == len(token_groups)
        output = TokenOutput(
            "a",
            tuple(group),
            tuple(TokenLogprobs(token, -1.0) for token in group),
            finish if last else None,
            num_cached_tokens=3,
            timeline=TIMELINE if last else None,
        )
        if (delta := answer.process(output, now_s=9.0)) is not None:
            deltas.append(delta)
    return deltas


def groups(text: str, size: int) -> list[bytes]:
    data = text.encode()
    return [data[start : start + size] for start in range(0, len(data), size)]


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_text_and_counts_without_stop_strings(size: int) -> None:
    deltas = run(groups(TEXT, size))
    assert "".join(delta.text for delta in deltas) == TEXT
    assert bytes(token for delta in deltas for token in delta.token_ids).decode() == TEXT
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    last = deltas[-1]
    assert (last.finish_reason, last.stop_reason, last.timeline) == (FinishReason.LENGTH, None, TIMELINE)
    assert (last.num_prompt_tokens, last.num_output_tokens, last.num_cached_tokens) == (5, len(TEXT), 3)


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_a_stop_string_cuts_the_answer(size: int) -> None:
    deltas = run(groups(TEXT, size), stop=("zzz", "three", "four"))
    assert "".join(delta.text for delta in deltas) == "one two "
    last = deltas[-1]
    assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, "three")
    # Tokens up to the one that completed the match count, and no other, whatever came together with it.
    assert last.num_output_tokens == len("one two three")
    assert sum(len(delta.logprobs) for delta in deltas) == len("one two three")
    assert last.timeline == TIMELINE
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_half_a_stop_string_is_text_in_the_end(size: int) -> None:
    deltas = run(groups(TEXT, size), stop=("four!",))
    assert "".join(delta.text for delta in deltas) == TEXT
    assert deltas[-1].finish_reason is FinishReason.LENGTH


def test_the_token_that_ends_an_answer_is_counted_but_not_shown() -> None:
    (delta,) = run([[*b"hi", EOS]], FinishReason.STOP)
    assert (delta.text, delta.num_output_tokens, delta.stop_reason) == ("hi", 3, None)
    (delta,) = run([b"hi."], FinishReason.STOP, stop_token_ids=(ord("."),))
    assert (delta.text, delta.num_output_tokens, delta.stop_reason) == ("hi", 3, ord("."))


def test_no_delta_holds_half_a_character() -> None:
    text = "žluťoučký 👩‍👧 你好"
    deltas = run(groups(text, 1))
    assert "".join(delta.text for delta in deltas) == text
    assert all("\ufffd" not in delta.text for delta in deltas)


def test_a_character_that_is_never_finished_is_shown_in_the_end() -> None:
    deltas = run([b"a", "ž".encode()[:1]])
    assert "".join(delta.text for delta in deltas) == "a\ufffd"
