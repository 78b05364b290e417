"""Keeps an answer inside a grammar: which tokens may come next.

Owns: grammars of all kinds as llguidance reads them, their refusal in a client's words, one matcher per request.
Must not know: logits, rows, how a mask reaches the device.

White space between JSON tokens is bounded to what people write, a space or an indented new line: a model left free to
indent may do nothing else until its last token.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from
from llguidance.numpy import fill_next_token_bitmask
from numpy.typing import NDArray

from engine.errors import InvalidParameterError, RequestFailedError
from engine.request import Grammar
from engine.text.tokenizer import Tokenizer

T = TypeVar("T")

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# Not left to a schema's own "x-guidance", which could switch off that unknown keywords are refused.
_JSON_OPTIONS: JsonCompileOptions = {
    "whitespace_pattern": r"(?: |\n(?: {0,32}|\t{0,8}))",
    "whitespace_flexible": True,
    "lenient": False,
    "coerce_one_of": False,
}
# Where a JSON Schema holds further schemas: by name, in a list, alone.
_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties")
_DEFINITIONS = ("$defs", "definitions")
_CACHED_GRAMMARS = 64
# llguidance (1.9.1) follows rules and references by recursion, with up to 10 KB of stack for each of a chain, and a
# stack that runs out ends the process. So many fit into the compiling thread; nothing recurses later.
MAX_PARTS = 10_000
STACK_BYTES = 256 * 2**20
_stack_size_lock = threading.Lock()


class GrammarMatcher:
    """Follows one answer. Used by one thread at a time."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    @property
    def finished(self) -> bool:
        """Whether nothing but an end token can follow."""
        return self._matcher.is_stopped()

    @property
    def accepting(self) -> bool:
        """Whether the text so far is a whole answer."""
        return self._matcher.is_accepting()

    def fill_mask(self, masks: NDArray[np.int32], row: int) -> None:
        """Write into ``masks[row]`` which tokens may come next; end tokens are among them once the text is whole.

        ``masks`` is int32 [rows, ceil(vocabulary / 32)], C-contiguous; token t is bit ``t % 32`` of word ``t // 32``.
        Raises RequestFailedError when the grammar exceeds the limits of llguidance.
        """
        fill_next_token_bitmask(self._matcher, masks, row)
        self._check()

    def accept(self, token_id: int) -> None:
        """Move on by a sampled token. Raises RequestFailedError for a token that the mask did not allow."""
        self._matcher.consume_token(token_id)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RequestFailedError(f"The answer left its grammar: {_first_line(self._matcher.get_error())}.")


class GrammarCompiler:
    """Compiles grammars for one model. Safe to share between threads."""

    def __init__(self, tokenizer: Tokenizer | None, *, vocab_size: int) -> None:
        """``vocab_size`` is the number of logits, at least that of tokens: padding is never allowed.

        Without a tokenizer grammars can be checked, but not followed.
        """
        self._source = tokenizer
        self._vocab_size = vocab_size
        self._limits = LLParserLimits(verbose_errors=False)
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        # Matchers that never move: a large schema takes tenths of a second to compile, and a copy next to nothing.
        self._compiled = lru_cache(_CACHED_GRAMMARS)(self._compile)

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer."""
        return tuple(self._source.eos_token_ids) if self._source is not None else ()

    @property
    def mask_width(self) -> int:
        """Words of one row of masks."""
        return (self._vocab_size + 31) // 32

    def matcher(self, grammar: Grammar) -> GrammarMatcher:
        """Return a matcher at the start of an answer.

        Raises InvalidParameterError, naming the grammar's ``param`` and for a JSON Schema the path, for what cannot be
        followed.
        """
        return GrammarMatcher(self._compiled(grammar).deep_copy())

    def check(self, grammar: Grammar) -> None:
        """Raise InvalidParameterError as ``matcher`` does."""
        self._compiled(grammar)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        _require_parts(grammar)
        return _with_stack(lambda: self._compile_here(grammar))

    def _compile_here(self, grammar: Grammar) -> LLMatcher:
        try:
            matcher = self._new_matcher(grammar)
        except ValueError as error:
            raise InvalidParameterError(
                f"The {grammar.kind} cannot be read: {_first_line(str(error))}.", grammar.param
            ) from error
        if not matcher.is_error():
            # That no answer could even begin shows only when it is asked what may come first.
            matcher.compute_bitmask()
        if matcher.is_error():
            reason, place = _first_line(matcher.get_error()), ""
            if grammar.kind == "json_schema":
                place = f" at {self._locate(json.loads(grammar.text), reason) or 'its top level'}"
            raise InvalidParameterError(f"The {grammar.kind} cannot be followed{place}: {reason}.", grammar.param)
        return matcher

    def _new_matcher(self, grammar: Grammar) -> LLMatcher:
        """May be in an error state. Raises ValueError for text that is not of its kind at all."""
        source = _source(grammar)
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._make_tokenizer()
        return LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)

    def _make_tokenizer(self) -> LLTokenizer:
        if self._source is None:
            return LLTokenizer("byte")
        return LLTokenizer(self._source.to_json(), n_vocab=self._vocab_size, eos_token=list(self.end_token_ids))

    def _locate(self, schema: Any, reason: str, definitions: Mapping[str, Any] | None = None) -> str:
        """JSON pointer to the innermost schema that is refused for the same reason."""
        if not isinstance(schema, dict):
            return ""
        if definitions is None:
            definitions = {name: schema[name] for name in _DEFINITIONS if name in schema}
        for pointer, part in _parts(schema):
            alone = {**definitions, **part} if isinstance(part, dict) else part
            if _first_line(self._new_matcher(Grammar("json_schema", json.dumps(alone))).get_error()) == reason:
                return pointer + self._locate(part, reason, definitions)
        return ""


_checker = GrammarCompiler(None, vocab_size=0)


def check_grammar(grammar: Grammar) -> None:
    """Raise InvalidParameterError, naming ``param`` and a schema's path, for what no model could be held to.

    Needs no model, so that whoever takes a request can refuse it at once.
    """
    _checker.check(grammar)


def _require_parts(grammar: Grammar) -> None:
    """Each schema is an object, and each rule a line. Raises InvalidParameterError."""
    num_parts = grammar.text.count("{") + (grammar.text.count("\n") if grammar.kind == "grammar" else 0)
    if grammar.kind in ("json_schema", "grammar") and num_parts > MAX_PARTS:
        raise InvalidParameterError(
            f"The {grammar.kind} cannot be followed: it has {num_parts} parts, and {MAX_PARTS} is the most.",
            grammar.param,
        )


def _with_stack(make: Callable[[], T]) -> T:
    """Call ``make`` on a thread with ``STACK_BYTES`` of stack."""
    made: Future[T] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except BaseException as error:
            made.set_exception(error)

    with _stack_size_lock:
        # It holds for every thread that is started until it is set back; more room harms none of them.
        usual_bytes = threading.stack_size(STACK_BYTES)
        try:
            threading.Thread(target=run, name="grammar").start()
        finally:
            threading.stack_size(usual_bytes)
    return made.result()


def embedded_schema(schema: Any) -> str:
    """``schema`` as a grammar in Lark's notation takes it after ``%json``, with the options of every schema here."""
    whole = schema if isinstance(schema, dict) else {"anyOf": [schema]}
    return json.dumps({**whole, "x-guidance": _JSON_OPTIONS})


def _source(grammar: Grammar) -> str:
    if grammar.kind in ("json_object", "json_schema"):
        schema = grammar.text if grammar.kind == "json_schema" else '{"type": "object"}'
        if not schema.lstrip().startswith("{"):
            schema = f'{{"anyOf": [{schema}]}}'  # a schema may be true or false, which cannot carry the options
        return LLMatcher.grammar_from_json_schema(schema, overrides=_JSON_OPTIONS)
    if grammar.kind == "choice":
        choices = json.loads(grammar.text)
        if not (isinstance(choices, list) and choices and all(isinstance(c, str) and c for c in choices)):
            raise ValueError("a choice is a list of strings, none of them empty")
        return grammar_from("choice", grammar.text)
    return grammar_from("regex" if grammar.kind == "regex" else "grammar", grammar.text)


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for keyword in (*_SCHEMA_MAPS, *_SCHEMA_LISTS):
        inner = schema.get(keyword)
        named = inner.items() if isinstance(inner, dict) else enumerate(inner) if isinstance(inner, list) else ()
        for name, part in named:
            yield f"/{keyword}/{name}", part
    for keyword in _SCHEMAS:
        if keyword in schema:
            yield f"/{keyword}", schema[keyword]


def _first_line(message: str) -> str:
    """The reason without the drawing under it, in words that make sense to a client."""
    if message.startswith("oneOf constraints are not supported"):
        return "the branches of oneOf do not exclude each other; use anyOf"
    lines = [line.strip() for line in message.splitlines()]
    # A regular expression's error shows the expression first and says what is wrong with it last.
    reason = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), "")
    return (reason or (lines[0] if lines else "")).rstrip(".")
