"""gpt-oss's channels in growing text: the same parts however it is cut."""

from __future__ import annotations

import pytest

from engine.text.harmony import HarmonyReader
from engine.text.thinking import HARMONY_MARKS, Parted, find_thinking_marks
from engine.text.tool_formats import HARMONY, find_tool_format
from engine.text.tools import ToolCall
from tests.unit.test_text_tools import TOOLS, everywhere

TEMPLATE = "tools <|start|> <|channel|> <|message|> functions"
ANALYSIS = "<|channel|>analysis<|message|>Hm, 1 < 2."
FINAL = "<|channel|>final<|message|>Yes."
CALL = '<|channel|>commentary to=functions.find <|constrain|>json<|message|>{"text": "x <y>"}'
PREAMBLE = "<|channel|>commentary<|message|>I look."
NEXT = "<|end|><|start|>assistant"
FOUND = (ToolCall("find", '{"text": "x <y>"}'),)


def read(text: str, cuts: list[int], whole: bool = True) -> Parted:
    reader, parts = HarmonyReader(TOOLS), Parted()
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        parts += reader.feed(text[start:end])
    return parts + reader.finish(whole)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (ANALYSIS + NEXT + FINAL, Parted("Hm, 1 < 2.", "Yes.")),
        (FINAL, Parted("", "Yes.")),
        (ANALYSIS, Parted("Hm, 1 < 2.")),
        (ANALYSIS + NEXT + CALL, Parted("Hm, 1 < 2.", "", FOUND)),
        # A grammar begins without a header, and hidden marks leave theirs out of one.
        ('{"a": "<|x"}', Parted("", '{"a": "<|x"}')),
        (CALL.replace("<|constrain|>", ""), Parted("", "", FOUND)),
        # The recipient may stand in the role's part, and what is said on the way is for the reader.
        (
            f"{PREAMBLE}{NEXT} to=functions.find<|channel|>commentary json{CALL[CALL.index('<|message|>') :]}",
            Parted("", "I look.", FOUND),
        ),
        (f"{PREAMBLE}{NEXT}{FINAL}", Parted("", "I look.\n\nYes.")),
        (CALL.replace("find", "gone"), Parted("", '{"text": "x <y>"}')),
        (CALL.replace('"}', '"'), Parted("", '{"text": "x <y>"')),
        ("", Parted()),
        ("<|channel|>final", Parted()),
    ],
    ids=range(12),
)
def test_parts(text: str, parts: Parted) -> None:
    for cuts in everywhere(text):
        assert read(text, cuts) == parts


@pytest.mark.parametrize("length", range(CALL.index("{") + 1, len(CALL)))
def test_a_call_that_was_cut_is_text(length: int) -> None:
    parts = read(CALL[:length], [], whole=False)
    assert parts.calls == ()
    assert parts.answer == CALL[CALL.index("{") : length]


def test_what_is_thinking_is_known_at_any_moment() -> None:
    reader = HarmonyReader(())
    seen = []
    for piece in ("<|channel|>analysis", "<|message|>", "Hm", "<|end|>", f"<|start|>assistant{FINAL}", "!"):
        reader.feed(piece)
        seen.append(reader.thinks)
    assert seen == [False, True, True, False, False, False]


def test_the_template_says_so() -> None:
    assert find_thinking_marks(TEMPLATE) == HARMONY_MARKS
    assert find_tool_format(TEMPLATE).name == HARMONY
