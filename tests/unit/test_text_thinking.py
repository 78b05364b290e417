"""Thinking and answer, parted alike however the text is cut."""

from __future__ import annotations

import pytest

from engine.text.thinking import KNOWN_MARKS, ThinkingReader, find_thinking_marks, is_open_at_end

MARKS = KNOWN_MARKS[0]


def read(text: str, is_open: bool, step: int) -> tuple[str, str]:
    reader = ThinkingReader(MARKS, is_open)
    parts = [reader.feed(text[start : start + step]) for start in range(0, len(text), step)] + [reader.finish(True)]
    return "".join(part.thinking for part in parts), "".join(part.answer for part in parts)


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("text", "is_open", "thinking", "answer"),
    [
        ("<think>\nhm, 1 < 2\n</think>\n\nYes. ", False, "hm, 1 < 2", "Yes. "),
        ("\n<think>\n\n</think>\n\nYes.", False, "", "Yes."),
        ("hm </th ink\n\nso</think>\nYes.", True, "hm </th ink\n\nso", "Yes."),
        ("Yes, <think>no</think>.", False, "", "Yes, <think>no</think>."),
        (" <thin air", False, "", " <thin air"),
        ("<think>cut in the mid", False, "cut in the mid", ""),
        ("<think>cut at the </thi", False, "cut at the </thi", ""),
        ("<thi", False, "", "<thi"),
        ("", True, "", ""),
    ],
    ids=range(9),
)
def test_parts(text: str, is_open: bool, thinking: str, answer: str, step: int) -> None:
    assert read(text, is_open, step) == (thinking, answer)


def test_marks_are_found_in_templates() -> None:
    assert find_thinking_marks("{% if enable_thinking %}<think></think>") == MARKS
    assert find_thinking_marks("{{ messages }}") is None
    assert is_open_at_end("<|im_start|>assistant\n<think>\n", MARKS)
    assert not is_open_at_end("assistant\n<think>\n\n</think>\n\n", MARKS)
