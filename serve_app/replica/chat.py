"""What a chat asks of the model beyond its words: tools, thinking, a format. Pure.

Owns: how tools reach models whose template knows none, what the answer is held to, and how it will be read. Must not
know: engine requests, HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.errors import InvalidParameterError
from engine.request import Grammar, SamplingParams, Thinking
from engine.text.chat_template import RESERVED_VARIABLES
from engine.text.structured import check_grammar
from engine.text.thinking import ThinkingMarks, find_thinking_marks, is_open_at_end
from engine.text.tokenizer import Tokenizer
from engine.text.tool_formats import HARMONY, ToolFormat, find_tool_format
from engine.text.tool_grammars import answer_or_calls_grammar, calls_grammar, parameters_of, strict_calls_grammar
from engine.text.tools import function_name
from serve_app.protocol import ChatMessage, GenerateCall, ToolUse
from serve_app.replica.reading import Reading

Message = Mapping[str, Any]
_INSTRUCTIONS = """\
You can call these functions, given as JSON:
{tools}
To call one, write {start}{{"name": its name, "arguments": an object}}{end} and nothing else."""


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """``prompt`` is the rendered text; ``shown_token_ids``: special tokens that the reading needs to see."""

    prompt: str
    sampling: SamplingParams
    reading: Reading
    shown_token_ids: tuple[int, ...] = ()


def plan_chat(call: GenerateCall, tokenizer: Tokenizer) -> ChatPlan:
    """Return everything that follows from ``call``'s messages and options.

    Raises RequestError for messages that the template refuses, InvalidParameterError for a format, tool or option that
    this model cannot follow.
    """
    template = tokenizer.chat_template_source
    marks, tool_format = find_thinking_marks(template), find_tool_format(template)
    messages, tools = _shown_tools(call, tool_format)
    prompt = tokenizer.render_chat_template(messages, tools, **_variables(call, template, marks))
    is_open = marks is not None and is_open_at_end(prompt, marks)
    grammar = _grammar(call, tool_format, tokenizer)
    thinking = _thinking(call, marks, is_open, tokenizer) if grammar or call.thinking_budget is not None else None
    use = call.tool_use
    reading = Reading(marks, is_open, tool_format)
    if use is not None:
        reading = replace(reading, tools=use.tools, forced=use.forced, parallel=use.parallel)
    texts = ((marks.start, marks.end) if marks else ()) + (tool_format.marks if use else ())
    return ChatPlan(
        prompt,
        replace(call.sampling, grammar=grammar, thinking=thinking),
        reading,
        tuple(token for text in texts for token in tokenizer.encode(text) if tokenizer.is_special(token)),
    )


def _variables(call: GenerateCall, template: str, marks: ThinkingMarks | None) -> dict[str, Any]:
    """Variables for the template. Raises InvalidParameterError for an effort that the model has no place for."""
    variables = dict(call.template_variables)
    if reserved := sorted(RESERVED_VARIABLES & set(variables)):
        raise InvalidParameterError(f"`{reserved[0]}` cannot be set by a request.", "chat_template_kwargs")
    effort = call.thinking_effort
    if not effort:
        return variables
    if "reasoning_effort" in template:
        return {"reasoning_effort": effort, **variables}
    if "enable_thinking" in template:
        return {"enable_thinking": effort != "none", **variables}
    if effort == "none" and marks is None:
        return variables
    raise InvalidParameterError("This model has no reasoning effort to choose.", "reasoning_effort")


def _thinking(call: GenerateCall, marks: ThinkingMarks | None, is_open: bool, tokenizer: Tokenizer) -> Thinking | None:
    if marks is not None:
        start, end = tuple(tokenizer.encode(marks.start)), tuple(tokenizer.encode(marks.end))
        return Thinking(start, end, is_open, call.thinking_budget)
    if call.thinking_budget is not None:
        raise InvalidParameterError("This model does not think before it answers.", "thinking_token_budget")
    return None


def _shown_tools(
    call: GenerateCall, tool_format: ToolFormat
) -> tuple[Sequence[ChatMessage], Sequence[Mapping[str, Any]] | None]:
    """Messages and tools for the template; for one that knows no tools everything is written into messages."""
    tools = call.tool_use.tools if call.tool_use else ()
    if tool_format.native:
        messages = call.messages
        if tool_format.name == HARMONY:
            messages = tuple(_with_thought(message) for message in messages)
        return messages, tools or None
    written = [_written_out(message, tool_format) for message in call.messages]
    if tools:
        lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        text = _INSTRUCTIONS.format(tools=lines, start=tool_format.start, end=tool_format.end)
        if written[0]["role"] == "system":
            written[0] = {**written[0], "content": f"{written[0]['content']}\n\n{text}"}
        else:
            written.insert(0, {"role": "system", "content": text})
    return written, None


def _with_thought(message: Message) -> Message:
    """What gpt-oss's template reads as the thinking before a call, which may have no content besides."""
    thought = message.get("reasoning_content")
    return {**message, "thinking": thought} if thought and not message.get("content") else message


def _written_out(message: Message, tool_format: ToolFormat) -> dict[str, Any]:
    """``message`` with its calls, or the result of one, as text."""
    plain = {name: value for name, value in message.items() if name not in ("tool_calls", "tool_call_id")}
    content = str(plain.get("content") or "")
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    for call in message.get("tool_calls") or ():
        function = call["function"]
        written = f'{{"name": {json.dumps(function["name"])}, "arguments": {function["arguments"]}}}'
        content += f"{tool_format.start}{written}{tool_format.end}"
    return {**plain, "content": content}


def _grammar(call: GenerateCall, tool_format: ToolFormat, tokenizer: Tokenizer) -> Grammar | None:
    asked, use = call.sampling.grammar, call.tool_use
    if asked is not None:
        check_grammar(asked)
    if use is None:
        return asked
    for index, tool in enumerate(use.tools):
        if _is_strict(tool):
            check_grammar(_schema(tool, f"tools[{index}].function.parameters"))
    loose = tuple(tool if _is_strict(tool) else _loosened(tool) for tool in use.tools)
    if use.forced:
        return calls_grammar([tool for tool in loose if function_name(tool) in use.forced], parallel=use.parallel)
    if asked is not None:
        return _format_or_calls(asked, use, tool_format, tokenizer)
    return _strict_grammar(use, tool_format, tokenizer)


def _format_or_calls(asked: Grammar, use: ToolUse, tool_format: ToolFormat, tokenizer: Tokenizer) -> Grammar:
    """An answer in the format that was asked for, or calls in its place."""
    if asked.kind not in ("json_object", "json_schema") or tool_format.name == HARMONY:
        raise InvalidParameterError(
            "This format for the answer cannot be combined with tools for this model; take `tool_choice: none` with "
            "it, or `required`.",
            asked.param,
        )
    _require_strictness(use, tool_format)
    schema = json.loads(asked.text) if asked.kind == "json_schema" else {"type": "object"}
    start = tokenizer.encode(tool_format.start)
    tools = [tool if _is_strict(tool) else _without_schema(tool) for tool in use.tools]
    return answer_or_calls_grammar(schema, tools, tool_format, start[0] if len(start) == 1 else None)


def _strict_grammar(use: ToolUse, tool_format: ToolFormat, tokenizer: Tokenizer) -> Grammar | None:
    if not any(_is_strict(tool) for tool in use.tools):
        return None
    _require_strictness(use, tool_format)
    tools = [tool if _is_strict(tool) else _without_schema(tool) for tool in use.tools]
    return strict_calls_grammar(tools, tool_format, starts_with_token=len(tokenizer.encode(tool_format.start)) == 1)


def _require_strictness(use: ToolUse, tool_format: ToolFormat) -> None:
    """Raise InvalidParameterError for a strict tool that the model's notation cannot be held to."""
    if any(_is_strict(tool) for tool in use.tools) and not tool_format.writes_json:
        raise InvalidParameterError(
            "This model's own way to write calls cannot be held to a schema: take `strict: false`, or "
            "`tool_choice: required`.",
            "tools",
        )


def _is_strict(tool: Mapping[str, Any]) -> bool:
    return bool(tool["function"].get("strict"))


def _schema(tool: Mapping[str, Any], param: str = "tools") -> Grammar:
    return Grammar("json_schema", json.dumps(parameters_of(tool)), param)


def _loosened(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """``tool`` as it is if its schema can be followed; nobody asked for it to be, so any object will do else."""
    try:
        check_grammar(_schema(tool))
    except InvalidParameterError:
        return _without_schema(tool)
    return tool


def _without_schema(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**tool, "function": {**tool["function"], "parameters": {}}}
