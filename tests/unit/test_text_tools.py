"""Tool calls in growing text: the same calls however the text is cut, and never half a call."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from typing import Any

import jsonschema
import pytest

from engine.errors import RequestFailedError
from engine.request import Grammar
from engine.text.bare_calls import BareCallReader
from engine.text.structured import GrammarCompiler, check_grammar
from engine.text.tool_formats import find_tool_format
from engine.text.tool_grammars import answer_or_calls_grammar, calls_grammar, strict_calls_grammar
from engine.text.tools import (
    ArrayCallReader,
    CallReader,
    MarkedCallReader,
    Piece,
    ToolCall,
)
from tests.core_fakes import letter_tokenizer


def tool(name: str, **properties: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


TOOLS = [tool("add", a={"type": "integer"}, b={"type": "integer"}), tool("find", text={"type": "string"})]
JSON = find_tool_format("")
# By template: what a model of that family writes for find(text="x <y>").
FAMILIES = {
    "json": (
        "tools <tool_call> tool_call.name",
        '<tool_call>\n{"name": "find", "arguments": {"text": "x <y>"}}\n</tool_call>',
    ),
    "qwen3_coder": (
        "tools <tool_call>\n<function=",
        "<tool_call>\n<function=find>\n<parameter=text>\nx <y>\n</parameter>\n</function>\n</tool_call>",
    ),
    "glm47": (
        "tools <tool_call> <arg_key>",
        "<tool_call>find\n<arg_key>text</arg_key>\n<arg_value>x <y></arg_value>\n</tool_call>",
    ),
    "mistral": ("tools [TOOL_CALLS]", '[TOOL_CALLS]find[ARGS]{"text": "x <y>"}'),
    "pythonic": ("tools <|tool_call_start|>", '<|tool_call_start|>[find(text="x <y>")]<|tool_call_end|>'),
    "kimi_k2": (
        "tools <|tool_calls_section_begin|>",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.find:0<|tool_call_argument_begin|>"
        '{"text": "x <y>"}<|tool_call_end|><|tool_calls_section_end|>',
    ),
}


def read(reader: CallReader, text: str, cuts: list[int], whole: bool = True) -> list[Piece]:
    """The pieces, with neighbouring texts joined."""
    pieces: list[Piece] = []
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        pieces += reader.feed(text[start:end])
    joined: list[Piece] = []
    for piece in [*pieces, *reader.finish(whole)]:
        if joined and isinstance(piece, str) and isinstance(joined[-1], str):
            joined[-1] += piece
        elif piece:
            joined.append(piece)
    return joined


def everywhere(text: str) -> list[list[int]]:
    """Ways to cut: not at all, after each character, at random."""
    draw = random.Random(1)
    return [
        [],
        list(range(1, len(text))),
        *(sorted(draw.sample(range(len(text)), min(3, len(text)))) for _ in range(20)),
    ]


FOUND = ToolCall("find", '{"text": "x <y>"}')
CALL = FAMILIES["json"][1]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_of_models_is_read(family: str) -> None:
    template, text = FAMILIES[family]
    tool_format = find_tool_format(template)
    assert tool_format.name == family
    for cuts in everywhere(text):
        assert read(MarkedCallReader(tool_format, TOOLS), text, cuts) == [FOUND]
        said = read(MarkedCallReader(tool_format, TOOLS), f"I look. \n{text}", cuts)
        assert said == ["I look.", FOUND]


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("plain text with < and <tool and a tail ", ["plain text with < and <tool and a tail "]),
        (f"{CALL}\n{CALL}", [FOUND, FOUND]),
        (f"a {CALL} b {CALL}\n", ["a", FOUND, "b", FOUND]),
        ('<tool_call>{"name": "find", "arguments": "{\\"text\\": \\"x <y>\\"}"}</tool_call>', [FOUND]),
        ('<tool_call>{"name": "find"}</tool_call>', [ToolCall("find", "{}")]),
        ("<tool_call>{broken}</tool_call> so", ["<tool_call>{broken}</tool_call> so"]),
        (
            '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
            ['<tool_call>{"name": "other", "arguments": {}}</tool_call>'],
        ),
        (
            '<tool_call>{"name": "find", "arguments": [1]}</tool_call>',
            ['<tool_call>{"name": "find", "arguments": [1]}</tool_call>'],
        ),
        (CALL.removesuffix("</tool_call>"), [FOUND]),
        ("  \n", ["  \n"]),
        ("", []),
    ],
    ids=range(11),
)
def test_calls_and_text(text: str, pieces: list[Piece]) -> None:
    for cuts in everywhere(text):
        assert read(MarkedCallReader(JSON, TOOLS), text, cuts) == pieces


@pytest.mark.parametrize("length", range(1, len(CALL) - len("</tool_call>")))
def test_a_call_that_was_cut_is_text(length: int) -> None:
    text = f"so {CALL}{CALL[:length]}"
    said = read(MarkedCallReader(JSON, TOOLS), text, [], whole=False)
    assert said[:2] == ["so", FOUND]
    assert all(isinstance(piece, str) for piece in said[2:])


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999", "[" * 100_000], ids=lambda number: number[:9])
def test_arguments_that_are_no_json_and_ones_too_deep_to_read_are_text(number: str) -> None:
    body = f'{{"name": "find", "arguments": {{"text": {number}}}}}'
    for reader, text in (
        (MarkedCallReader(JSON, TOOLS), f"<tool_call>{body}</tool_call>"),
        (BareCallReader(TOOLS), body),
        (ArrayCallReader(["find"]), body),
    ):
        assert "".join(map(str, read(reader, text, [10]))) == text


def test_an_array_of_calls_is_read_call_by_call() -> None:
    text = (
        '[ {"name": "add", "arguments": {"a": 1, "b": {"c": "}]"}}},\n{"name": "find", "arguments": {"text": "x <y>"}}]'
    )
    for cuts in everywhere(text):
        calls = read(ArrayCallReader(["add", "find"]), text, cuts)
        assert calls == [ToolCall("add", '{"a": 1, "b": {"c": "}]"}}'), FOUND]
    reader = ArrayCallReader(["add", "find"])
    assert len(reader.feed(text[: text.index(",\n")])) == 1
    assert reader.feed(text[text.index(",\n") : -5]) == []
    assert [type(piece) for piece in reader.finish(False)] == [str]


BARE_CALL = '{"name": "find", "parameters": {"text": "x <y>"}}'


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        (BARE_CALL, [FOUND]),
        (f"<|python_tag|>{BARE_CALL}", [FOUND]),
        (f"\n{BARE_CALL}; {BARE_CALL}\n", [FOUND, FOUND]),
        (f"{BARE_CALL}\nso", [FOUND, "so"]),
        (f"I call {BARE_CALL}", [f"I call {BARE_CALL}"]),
        ('{"name": "gone", "parameters": {}}', ['{"name": "gone", "parameters": {}}']),
        ('{"answer": {"a": 1}} is what I found', ['{"answer": {"a": 1}} is what I found']),
        ("<|python_tag|>find.call()", ["<|python_tag|>find.call()"]),
        (BARE_CALL[:-1], [BARE_CALL[:-1]]),
        ("  ", ["  "]),
        ("", []),
    ],
    ids=range(11),
)
def test_an_answer_that_is_nothing_but_a_call(text: str, pieces: list[Piece]) -> None:
    assert find_tool_format('tools "parameters"').name == "bare"
    for cuts in everywhere(text):
        assert read(BareCallReader(TOOLS), text, cuts) == pieces


@pytest.mark.parametrize("strict", [True, False])
def test_an_answer_in_a_format_or_calls_in_its_place(strict: bool) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "additionalProperties": False}
    tools = TOOLS if strict else [{"type": "function", "function": {"name": "find", "parameters": {}}}]
    texts = {
        "": '<tool_call>\n{"name": "find", "arguments": {"text": "x"}}\n</tool_call>',
        "tools": BARE_CALL,
        "tools [TOOL_CALLS]": '[TOOL_CALLS]find[ARGS]{"text": "x"}',
    }
    for template, call in texts.items():
        grammar = answer_or_calls_grammar(schema, tools, find_tool_format(template), None)
        check_grammar(grammar)
        for text, is_allowed in (('{"a": true}', True), (call, True), ("Well", False), ('{"b": true}', False)):
            assert allows(grammar, text) == is_allowed, (template, text)


def allows(grammar: Grammar, text: str) -> bool:
    """Whether ``text`` is a whole answer, byte by byte."""
    matcher = GrammarCompiler(letter_tokenizer(), vocab_size=257).matcher(grammar)
    try:
        for token in text.encode():
            matcher.accept(token)
    except RequestFailedError:
        return False
    return matcher.accepting


@pytest.mark.parametrize("parallel", [True, False])
def test_the_grammar_of_forced_calls_carries_each_tools_own_definitions(parallel: bool) -> None:
    recursive = {
        "type": "object",
        "properties": {"next": {"$ref": "#"}, "kind": {"$ref": "#/$defs/kind"}},
        "$defs": {"kind": {"enum": ["a"]}},
    }
    tools = [TOOLS[0], {"type": "function", "function": {"name": "walk", "parameters": recursive}}]
    grammar = calls_grammar(tools, parallel=parallel)
    check_grammar(grammar)
    schema = json.loads(grammar.text)
    good = [{"name": "walk", "arguments": {"next": {"kind": "a"}}}]
    jsonschema.validate(good, schema)
    for wrong in ([], [{"name": "walk", "arguments": {"next": {"kind": "b"}}}], [{"name": "no", "arguments": {}}]):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)
    assert jsonschema.Draft202012Validator(schema).is_valid(good * 2) == parallel


def test_strict_calls_leave_text_free() -> None:
    check_grammar(strict_calls_grammar(TOOLS, JSON, starts_with_token=False))


def test_parsers_load_without_mlx() -> None:
    program = (
        "import sys; from engine.text.tool_formats import find_tool_format as f;"
        "assert f('tools <arg_key>').name == 'glm47';"
        "assert not [m for m in sys.modules if m.split('.')[0] in ('mlx', 'mlx_lm')]"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
