"""Answers inside a grammar: whatever is sampled from the masks is valid, and nothing else is."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest

from engine.errors import InvalidParameterError, RequestFailedError
from engine.request import Grammar
from engine.text.parts import TokenizerParts
from engine.text.structured import GrammarCompiler, GrammarMatcher
from engine.text.tokenizer import Tokenizer
from tests.unit.text_samples import byte_level

NUM_LOGITS = 400  # more than tokens: models pad their vocabularies
END = 340
TEXT = {"type": "string", "maxLength": 6}

SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False},
    {"type": "object", "properties": {"a": TEXT, "b": {"type": "boolean"}}, "additionalProperties": False},
    {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 3},
    {"enum": ["fox", "dog", 3, None]},
    {"type": ["string", "null"], "maxLength": 4},
    {"anyOf": [{"type": "integer", "minimum": 10, "maximum": 20}, {"const": "none"}]},
    {"type": "string", "pattern": "^[a-c]{2,4}$"},
    {"type": "string", "format": "date"},
    {"type": "array", "prefixItems": [{"const": 1}, TEXT], "items": False},
    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 100},
    {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"v": {"enum": [1, 2]}, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}},
                "required": ["v", "next"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    },
    {
        "oneOf": [
            {
                "type": "object",
                "properties": {"kind": {"const": kind}},
                "required": ["kind"],
                "additionalProperties": False,
            }
            for kind in ("cat", "dog")
        ]
    },
]


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(TokenizerParts(byte_level(), (END,)))


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tokenizer(), vocab_size=NUM_LOGITS)


def schema_grammar(schema: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(schema))


def allowed(matcher: GrammarMatcher) -> list[int]:
    masks = np.full((1, compiler().mask_width), -1, dtype=np.int32)
    matcher.fill_mask(masks, 0)
    return np.flatnonzero(np.unpackbits(masks[0].view(np.uint8), bitorder="little")).tolist()


def sample(grammar: Grammar, seed: int, max_tokens: int = 400) -> str | None:
    """A random answer, or None if it has no end within ``max_tokens``."""
    rng = random.Random(seed)
    matcher = compiler().matcher(grammar)
    row: list[int] = []
    while len(row) < max_tokens:
        choices = allowed(matcher)
        assert (END in choices) == matcher.accepting
        assert max(choices) < tokenizer().vocab_size
        token_id = rng.choice(choices)
        if token_id == END:
            return tokenizer().decode(row)
        matcher.accept(token_id)
        row.append(token_id)
    return None


def accepts(grammar: Grammar, text: str) -> bool:
    matcher = compiler().matcher(grammar)
    for token_id in tokenizer().encode(text):
        if token_id not in allowed(matcher):
            return False
        matcher.accept(token_id)
    return matcher.accepting


@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
def test_every_answer_follows_its_schema(schema: dict[str, Any]) -> None:
    answers = [answer for seed in range(12) if (answer := sample(schema_grammar(schema), seed)) is not None]
    assert answers
    for answer in answers:
        jsonschema.validate(json.loads(answer), schema, format_checker=jsonschema.FormatChecker())


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (Grammar("json_object"), '{"a": [1, "x"]}', "[1]"),
        (Grammar("regex", r"\d{3}-[a-c]+"), "123-abc", "12-abc"),
        (Grammar("choice", '["the fox", "the \\"dog\\" 🙂\\n"]'), 'the "dog" 🙂\n', "the"),
        (Grammar("grammar", 'start: "a" number\nnumber: /[0-9]+/'), "a12", "a"),
        (Grammar("grammar", 'root ::= "a" number\nnumber ::= [0-9]+'), "a12", "a"),
        (schema_grammar(True), "[{}]", "nothing"),
    ],
    ids=["object", "regex", "choice", "lark", "gbnf", "any"],
)
def test_kinds(grammar: Grammar, good: str, bad: str) -> None:
    assert accepts(grammar, good)
    assert not accepts(grammar, bad)


def test_random_answers_of_other_kinds() -> None:
    assert {sample(Grammar("choice", '["a", "bb"]'), seed) for seed in range(20)} == {"a", "bb"}
    answer = sample(Grammar("regex", "[a-c]{2}[0-9]"), 1)
    assert answer is not None
    assert re.fullmatch("[a-c]{2}[0-9]", answer)


def test_white_space_is_bounded() -> None:
    (space,), (line,), (tab,) = (tokenizer().encode(text) for text in " \n\t")
    for before, repeated, most in (((), space, 1), ((line,), space, 32), ((line,), tab, 8)):
        matcher = compiler().matcher(Grammar("json_object"))
        matcher.accept(tokenizer().encode("{")[0])
        for token in before:
            matcher.accept(token)
        count = 0
        while repeated in allowed(matcher):
            matcher.accept(repeated)
            count += 1
        assert count == most
        assert not {space, line, tab} & set(allowed(matcher))
    assert accepts(Grammar("json_object"), '{\n    "a": [\n        1\n    ]\n}')
    assert not accepts(Grammar("json_object"), "{\n\n}")
    assert not accepts(schema_grammar({"x-guidance": {"whitespace_pattern": "[x]"}}), "{x}")


def test_the_end() -> None:
    matcher = compiler().matcher(schema_grammar({"const": 1}))
    assert not matcher.finished
    matcher.accept(tokenizer().encode("1")[0])
    assert matcher.accepting
    assert allowed(matcher) == [END]


def test_only_the_matchers_own_row_is_written() -> None:
    masks = np.full((3, compiler().mask_width), -1, dtype=np.int32)
    compiler().matcher(schema_grammar({"const": 1})).fill_mask(masks, 1)
    assert (masks[[0, 2]] == -1).all()
    assert (masks[1] != -1).any()


def test_matchers_of_one_grammar_are_independent() -> None:
    grammar = schema_grammar({"enum": ["ab", "cd"]})
    first, second = compiler().matcher(grammar), compiler().matcher(grammar)
    for token_id in tokenizer().encode('"a'):
        first.accept(token_id)
    assert tokenizer().encode("c")[0] not in allowed(first)
    assert accepts(grammar, '"cd"')
    second.accept(tokenizer().encode('"')[0])
    assert tokenizer().encode("c")[0] in allowed(second)


def test_a_token_outside_the_grammar_ends_the_request() -> None:
    matcher = compiler().matcher(schema_grammar({"const": 1}))
    with pytest.raises(RequestFailedError, match="left its grammar"):
        matcher.accept(tokenizer().encode("2")[0])


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"properties": {"a": {"properties": {"b": {"not": {}}}}}}, "/properties/a/properties/b: .*not"),
        ({"items": {"anyOf": [{}, {"type": "array", "uniqueItems": True}]}}, "/items/anyOf/1: .*uniqueItems"),
        ({"properties": {"a": {"type": "string", "format": "frob"}}}, "/properties/a: .*frob"),
        ({"properties": {"a": {"type": "string", "pattern": "(?=a)b"}}}, "/properties/a: .*look-around"),
        ({"properties": {"a": {"$ref": "#/$defs/none"}}}, "/properties/a: .*none"),
        ({"$defs": {"n": {"if": {}}}, "properties": {"a": {"$ref": "#/$defs/n"}}}, "/properties/a: .*if"),
        ({"properties": {"a": {"$ref": "https://example.com/schema"}}}, "/properties/a: .*example.com"),
        ({"properties": {"a": 5}}, "/properties/a: .*object or boolean"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "top level: .*use anyOf"),
        ({"type": "frob"}, "top level: .*frob"),
        ({"x-guidance": {"lenient": True}, "not": {}}, "top level: .*not"),
        ({"allOf": [{"type": "integer"}, {"type": "string"}]}, "top level: Unsatisfiable"),
        (False, "top level: Unsatisfiable"),
        (5, "object or boolean"),
    ],
)
def test_what_a_schema_asks_in_vain_is_named_with_its_place(schema: Any, named: str) -> None:
    with pytest.raises(InvalidParameterError, match=named) as caught:
        compiler().check(schema_grammar(schema))
    assert caught.value.param == "response_format"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("json_schema", "{"),
        Grammar("json_schema", '{"a": "\ud83d"}'),
        Grammar("json_schema", '{"items": ' * 500 + "{}" + "}" * 500),
        Grammar("regex", "(a"),
        Grammar("regex", "(?=a)b"),
        Grammar("regex", "\ud83d"),
        Grammar("choice", "[]"),
        Grammar("choice", '["a", ""]'),
        Grammar("choice", "[1]"),
        Grammar("choice", '{"a": 1}'),
        Grammar("grammar", 'start: "a" missing'),
        Grammar("grammar", "not a grammar"),
        Grammar("grammar", ""),
    ],
    ids=range(13),
)
def test_what_is_no_grammar_is_the_clients_error(grammar: Grammar) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        compiler().matcher(replace(grammar, param="guided"))
    assert caught.value.param == "guided"
    assert "\n" not in str(caught.value)


def test_threads_may_share_a_compiler() -> None:
    fresh = GrammarCompiler(tokenizer(), vocab_size=NUM_LOGITS)
    grammar = schema_grammar(SCHEMAS[10])
    row = tokenizer().encode('{"v": 1, "next": {"v": 2, "next": null}}')

    def work(_: int) -> bool:
        matcher = fresh.matcher(grammar)
        masks = np.zeros((1, fresh.mask_width), dtype=np.int32)
        for token_id in row:
            matcher.fill_mask(masks, 0)
            matcher.accept(token_id)
        return matcher.finished

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(work, range(200)))


@pytest.mark.parametrize("text", ["start: start", "start: a\na: b\nb: a", 'start: x\nx: x "a"'])
def test_a_grammar_in_which_no_answer_begins_is_refused(text: str) -> None:
    with pytest.raises(InvalidParameterError, match="cannot be followed"):
        compiler().check(Grammar("grammar", text, "structured_outputs"))


# Chains of rules, terminals and references, which llguidance follows by recursion: a crash would be this process's end.
CHAINS = """
import json, sys
from engine.errors import InvalidParameterError
from engine.request import Grammar
from engine.text.structured import MAX_PARTS, check_grammar

def chains(n):
    for name in ("a", "A"):
        rules = [f'{name}{i}: "x" {name}{i + 1}' for i in range(n)]
        yield Grammar("grammar", "\\n".join([f"start: {name}0", *rules, f'{name}{n}: "z"']))
    steps = {f"a{i}": {"properties": {"x": {"$ref": f"#/$defs/a{i + 1}"}}, "type": "object"} for i in range(n)}
    yield Grammar("json_schema", json.dumps({"$ref": "#/$defs/a0", "$defs": {**steps, f"a{n}": {"type": "string"}}}))

for grammar in chains(MAX_PARTS // 4):
    check_grammar(grammar)
for grammar in chains(MAX_PARTS):
    try:
        check_grammar(grammar)
    except InvalidParameterError as error:
        print(error.message)
"""


def test_a_long_chain_of_rules_ends_no_process() -> None:
    done = subprocess.run([sys.executable, "-c", CHAINS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-500:]
    assert done.stdout.count("is the most") == 3
