"""Writes docs/api.md: every field of every endpoint, from the models that check the requests.

Owns: the tables, and what was tried on the whole way. Must not know: what a field does; the models say it
(``x-support``, types, ranges).

    python -m serve_app.ingress.api_reference > docs/api.md
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from serve_app.ingress.anthropic_types import MessagesRequest
from serve_app.ingress.embeddings import EmbeddingsRequest
from serve_app.ingress.openai_types import ChatCompletionRequest, CompletionRequest
from serve_app.ingress.responses_types import ResponsesRequest

ENDPOINTS: tuple[tuple[str, type[BaseModel]], ...] = (
    ("POST /v1/chat/completions", ChatCompletionRequest),
    ("POST /v1/completions", CompletionRequest),
    ("POST /v1/responses", ResponsesRequest),
    ("POST /v1/messages", MessagesRequest),
    ("POST /v1/embeddings", EmbeddingsRequest),
)
_INTRODUCTION = """\
# The HTTP API, field by field

Written by `python -m serve_app.ingress.api_reference` from the models that check requests; a test fails when it is out
of date.

- **honoured**: the field does what its API says.
- **refused**: any value but the neutral ones listed is answered with 400 and the field's name.
- **no effect**: accepted, and without consequence for the answer (bookkeeping of the API's own service).

Any optional field may be null, which means the same as leaving it out. A field that is not listed is refused with 400
and the closest known name.

`/v1/messages/count_tokens` takes the fields of `/v1/messages` that shape the prompt. `/v1/embeddings` is answered by
models that give embeddings (`embeddings` in the engine's configuration) and refused with 400 by the others.
"""
_TRIED = """\
## What was tried

On Linux on the CPU, with the demo model; nothing of it on a Mac yet.

- `python -m tests.conversations` holds a scripted conversation with each of OpenAI's client, Anthropic's, and
  LangChain's ChatOpenAI through Ray: text whole and streamed, forced calls and their results, strict schemas, stop
  strings, log-probabilities, leaving in mid-answer. CI holds them, too.
- `python -m tests.fuzz_bodies --url URL --model demo --parallel 4 --count 2500`, with seeds 0, 100, 200 and 300,
  against `metalslots serve --slots 4`: 10,000 bodies of wrong types, huge numbers, deep nesting, broken UTF-8,
  truncated JSON and 20 MB. 403 were answered; 9,556 got 400, 25 got 404, 16 got 413; no 5xx, no hang, and the good
  request after every 50th and every large one was answered. A first round had found one 500, a grammar in which no
  answer can begin.
- `python -m tests.mlx.strict_demo`, in parts of 50: 200 seeded strict requests over 20 schemas, four at a time, 9,371
  tokens: all valid. The 555 plain answers of up to 44 tokens that were made beside them, greedy and sampled, are what
  they are alone.
- What a schema costs (the same command, alternating rounds of four answers at a time with and without one, on a machine
  that was not idle): 49.8 against 44.2 ms of the four for each token, 1.13 times as long at the median. Of this the
  mask itself is 13 us (`python -m tests.mlx.strict_schemas`). Beside plain answers a strict one gets a token in every
  second step, because its next mask needs the token before; the plain ones get theirs in each.
"""
_RANGES = {
    "minimum": "at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "below {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "minItems": "at least {} items",
    "maxItems": "at most {} items",
    "maxProperties": "at most {} entries",
}


def markdown() -> str:
    """The whole page."""
    return "\n".join([_INTRODUCTION, *(_endpoint(name, model) for name, model in ENDPOINTS), _TRIED])


def _endpoint(name: str, model: type[BaseModel]) -> str:
    schema = model.model_json_schema()
    parts = [f"## {name}\n", _table(schema)]
    for title, inner in sorted(schema.get("$defs", {}).items()):
        if "properties" in inner:
            parts += [f"### {title}\n", _table(inner)]
    return "\n".join(parts)


def _table(schema: Mapping[str, Any]) -> str:
    required = schema.get("required", ())
    lines = ["| field | support | value |", "|---|---|---|"]
    for name, field in schema["properties"].items():
        mark = " (required)" if name in required else ""
        lines.append(f"| `{name}`{mark} | {field.get('x-support', 'honoured')} | {_value(field)} |")
    return "\n".join([*lines, ""])


def _value(field: Mapping[str, Any]) -> str:
    said = [str(field[key]).rstrip(".") for key in ("description", "x-shape") if key in field]
    if field.get("x-support") == "refused":
        neutral = ", ".join(f"`{_json(value)}`" for value in field["enum"])
        return f"{said[0]}. Neutral: {neutral}"
    kinds = " or ".join(dict.fromkeys(_kinds(field)))
    ranges = dict.fromkeys(_ranges(field))
    return "; ".join(part for part in (kinds, ", ".join(ranges), *said) if part)


def _kinds(field: Mapping[str, Any]) -> Iterator[str]:
    if "$ref" in field:
        yield field["$ref"].rsplit("/", 1)[-1]
    for choice in field.get("anyOf", ()):
        if choice.get("type") != "null":
            yield from _kinds(choice)
    if "enum" in field or "const" in field:
        yield ", ".join(f"`{_json(value)}`" for value in field.get("enum", [field.get("const")]))
    elif field.get("type") == "array" and field.get("items"):
        yield f"list of {' or '.join(_kinds(field['items']))}"
    elif "type" in field:
        yield str(field["type"])


def _ranges(field: Mapping[str, Any]) -> Iterator[str]:
    for keyword, text in _RANGES.items():
        if keyword in field:
            yield text.format(field[keyword])
    for choice in field.get("anyOf", ()):
        yield from _ranges(choice)


def _json(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f'"{value}"' if isinstance(value, str) else str(value).replace("'", '"')


if __name__ == "__main__":
    print(markdown(), end="")
