"""Grammars of answers that are calls, or may hold some.

Owns: how each obligation (must call, strict arguments, a format or calls) becomes a grammar. Must not know: how answers
are read, requests' fields.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from engine.request import Grammar
from engine.text.structured import embedded_schema
from engine.text.tool_formats import BARE, Tool, ToolFormat
from engine.text.tools import function_name


def parameters_of(tool: Tool) -> dict[str, Any]:
    """JSON Schema of a tool's arguments: always an object."""
    return {"type": "object", **(tool["function"].get("parameters") or {})}


def calls_grammar(tools: Sequence[Tool], *, parallel: bool) -> Grammar:
    """Grammar of one call or, with ``parallel``, several, as ``ArrayCallReader`` reads them."""
    schema: dict[str, Any] = {
        "$defs": {f"tool{i}": _relocated(parameters_of(tool), f"#/$defs/tool{i}") for i, tool in enumerate(tools)},
        "type": "array",
        "minItems": 1,
        "items": {"anyOf": [_call_schema(function_name(tool), i) for i, tool in enumerate(tools)]},
    }
    if not parallel:
        schema["maxItems"] = 1
    return Grammar("json_schema", json.dumps(schema))


def strict_calls_grammar(tools: Sequence[Tool], tool_format: ToolFormat, *, starts_with_token: bool) -> Grammar:
    """Grammar of free text in which every call has arguments after its function's schema.

    ``starts_with_token``: the format's start mark is one token of the model's. Only for formats that write JSON.
    """
    from llguidance import StructTag

    assert tool_format.writes_json
    tags = [
        StructTag(
            trigger=tool_format.start,
            begin=f'{tool_format.start}\n{{"name": {json.dumps(function_name(tool))}, "arguments": ',
            grammar=parameters_of(tool),
            end=f"}}\n{tool_format.end}",
        )
        for tool in tools
    ]
    return Grammar("grammar", StructTag.to_grammar(tags, assume_special=starts_with_token))


def answer_or_calls_grammar(
    schema: Any, tools: Sequence[Tool], tool_format: ToolFormat, start_token_id: int | None
) -> Grammar:
    """Grammar of an answer after ``schema``, or calls in their place.

    ``start_token_id``: the format's start mark, where that is one token. What follows the mark is left to the model,
    unless tools are strict: those are of a format that writes JSON.
    """
    start = json.dumps(tool_format.start) if start_token_id is None else f"<[{start_token_id}]>"
    rules = ["%llguidance {}", "start: answer | calls", f"answer: %json {embedded_schema(schema)}"]
    if tool_format.name == BARE:
        bare = {"anyOf": [_bare_call_schema(tool) for tool in tools]}
        rules.append(f"calls: %json {embedded_schema(bare)}")
    elif tool_format.writes_json:
        bodies = " | ".join(_call_body(tool, tool_format) for tool in tools)
        rules += ["calls: call+", f"call: {start} ({bodies}) /\\n?/"]
    else:
        rules += [f"calls: {start} rest", "rest: (<[*]>)*"]
    return Grammar("grammar", "\n".join(rules))


def _call_body(tool: Tool, tool_format: ToolFormat) -> str:
    name = json.dumps(f'\n{{"name": {json.dumps(function_name(tool))}, "arguments": ')
    end = json.dumps("}\n" + tool_format.end)
    return f"{name} %json {embedded_schema(parameters_of(tool))} {end}"


def _bare_call_schema(tool: Tool) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": function_name(tool)}, "parameters": {"type": "object"}},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _call_schema(name: str, index: int) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/tool{index}"}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _relocated(schema: Any, root: str) -> Any:
    """``schema`` with its references to itself turned to where it stands inside another one."""
    if isinstance(schema, list):
        return [_relocated(item, root) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {key: _relocated(value, root) for key, value in schema.items()}
    reference = moved.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = root + reference[1:]
    return moved
