"""OpenAI's Responses API: its requests as calls, and answers in its shape.

Owns: what each field means for the engine, the order of events. Must not know: HTTP, Ray.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from engine.errors import InvalidParameterError
from engine.request import Grammar, SamplingParams
from serve_app.ingress.answers import AnswerHead, Json
from serve_app.ingress.blocks import Block, BlockEvent, BlockTracker
from serve_app.ingress.responses_types import (
    CallItem,
    CallOutputItem,
    MessageItem,
    NamedFunctionTool,
    ReasoningItem,
    ResponsesRequest,
)
from serve_app.ingress.translate import CallContext, nucleus
from serve_app.protocol import Deltas, GenerateCall, ToolUse

_ID_PREFIXES = {"thinking": "rs", "text": "msg", "call": "fc"}


def responses_call(request: ResponsesRequest, context: CallContext) -> GenerateCall:
    """Return the call for a response."""
    top_k, top_p = nucleus(None, request.top_p)
    user = context.user or request.user or ""
    messages = tuple(_template_messages(request))
    if not messages:
        raise InvalidParameterError("The input holds nothing to answer.", "input")
    return GenerateCall(
        request_id=context.request_id,
        model=context.model,
        messages=messages,
        sampling=SamplingParams(
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=top_p,
            top_k=top_k,
            grammar=_grammar(request),
        ),
        max_tokens=request.max_output_tokens,
        user=user,
        priority=context.priority,
        key_name=context.key_name,
        session_key=context.session_key or request.prompt_cache_key or user,
        timeout_s=context.timeout_s,
        client_request_id=context.client_request_id,
        tool_use=_tool_use(request),
        thinking_effort=(request.reasoning.effort if request.reasoning else None) or "",
    )


def _template_messages(request: ResponsesRequest) -> Iterator[dict[str, Any]]:
    if request.instructions:
        yield {"role": "system", "content": request.instructions}
    if isinstance(request.input, str):
        yield {"role": "user", "content": request.input}
        return
    calls: list[dict[str, Any]] = []
    thought: dict[str, Any] = {}
    for item in request.input:
        if isinstance(item, CallItem):
            function = {"name": item.name, "arguments": item.arguments or "{}"}
            calls.append({"id": item.call_id, "type": "function", "function": function})
            continue
        if calls:
            # Calls of one turn come as items one after the other; templates want them in one message.
            yield {"role": "assistant", "content": "", "tool_calls": calls, **thought}
            calls, thought = [], {}
        match item:
            case MessageItem():
                role = "system" if item.role == "developer" else item.role
                yield {"role": role, "content": item.content, **(thought if role == "assistant" else {})}
                thought = {}
            case CallOutputItem():
                yield {"role": "tool", "tool_call_id": item.call_id, "content": item.output}
            case ReasoningItem():
                # It comes before what it led to.
                thought = {"reasoning_content": item.content} if item.content else {}
    if calls:
        yield {"role": "assistant", "content": "", "tool_calls": calls, **thought}


def _tool_use(request: ResponsesRequest) -> ToolUse | None:
    if not request.tools or request.tool_choice == "none":
        return None
    tools = tuple(
        {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)} for tool in request.tools
    )
    names = tuple(tool.name for tool in request.tools)
    if isinstance(request.tool_choice, NamedFunctionTool):
        return ToolUse(tools, (request.tool_choice.name,), parallel=False)
    return ToolUse(tools, names if request.tool_choice == "required" else (), request.parallel_tool_calls is not False)


def _grammar(request: ResponsesRequest) -> Grammar | None:
    asked = request.text.format if request.text else None
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object" or asked.schema_ is None:
        return Grammar("json_object", "", "text.format")
    return Grammar("json_schema", json.dumps(asked.schema_), "text.format")


class ResponseShape:
    """A response, whole and as events."""

    named_events = True

    def __init__(self, head: AnswerHead, request: ResponsesRequest) -> None:
        self._head = head
        self._request = request
        self._tracker = BlockTracker()
        self._num_events = 0

    def chunks(self, deltas: Deltas) -> Iterator[Json]:
        """Yield the events for one message, in order."""
        if not self._num_events:
            yield self._number({"type": "response.created", "response": self._response("in_progress")})
            yield self._number({"type": "response.in_progress", "response": self._response("in_progress")})
        for event in self._tracker.take(deltas):
            for written in self._events(event):
                yield self._number(written)
        if deltas.usage is not None:
            status = self._status
            yield self._number({"type": f"response.{status}", "response": self._response(status)})

    def whole(self, messages: Sequence[Deltas]) -> Json:
        """Return the response object for all messages of a call."""
        self._tracker.take_all(messages)
        return self._response(self._status)

    @property
    def _status(self) -> str:
        return "incomplete" if self._tracker.finish_reason == "length" else "completed"

    def _number(self, event: Json) -> Json:
        self._num_events += 1
        return event | {"sequence_number": self._num_events - 1}

    def _response(self, status: str) -> Json:
        request, done = self._request, status != "in_progress"
        effort = request.reasoning.effort if request.reasoning else None
        return {
            "id": self._head.id,
            "object": "response",
            "created_at": self._head.created_unix_s,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "model": self._head.model,
            "output": [self._item(block, self._item_status(block)) for block in self._tracker.blocks] if done else [],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": effort, "summary": None},
            "store": False,
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "text": {"format": {"type": "text"}} if request.text is None else _dump(request.text),
            "tool_choice": _dump(request.tool_choice) or "auto",
            "tools": [_dump(tool) for tool in request.tools or ()],
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "truncation": "disabled",
            "usage": self._usage() if done else None,
            "user": request.user,
            "metadata": request.metadata or {},
        }

    def _item_status(self, block: Block) -> str:
        cut = self._status == "incomplete" and block is self._tracker.blocks[-1]
        return "incomplete" if cut else "completed"

    def _item(self, block: Block, status: str) -> Json:
        begun = status == "in_progress"
        item: Json = {"id": self._item_id(block), "status": status}
        match block.kind:
            case "text":
                content = [] if begun else [_part(block, block.text)]
                return item | {"type": "message", "role": "assistant", "content": content}
            case "thinking":
                content = [] if begun else [_part(block, block.text)]
                return item | {"type": "reasoning", "summary": [], "content": content}
            case "call":
                arguments = "" if begun else block.text
                return item | {
                    "type": "function_call",
                    "call_id": block.call_id,
                    "name": block.name,
                    "arguments": arguments,
                }

    def _item_id(self, block: Block) -> str:
        return f"{_ID_PREFIXES[block.kind]}_{self._head.id.partition('-')[2]}{block.index}"

    def _events(self, event: BlockEvent) -> Iterator[Json]:
        block = event.block
        place = {"output_index": block.index}
        where: Json = {"item_id": self._item_id(block), **place}
        if block.kind != "call":
            where["content_index"] = 0
        what = {"text": "output_text", "thinking": "reasoning_text", "call": "function_call_arguments"}[block.kind]
        logprobs: Json = {"logprobs": []} if block.kind == "text" else {}
        match event.kind:
            case "start":
                yield {"type": "response.output_item.added", **place, "item": self._item(block, "in_progress")}
                if block.kind != "call":
                    yield {"type": "response.content_part.added", **where, "part": _part(block, "")}
            case "delta":
                yield {"type": f"response.{what}.delta", **where, "delta": event.text, **logprobs}
            case "stop":
                text = {"arguments": block.text, "name": block.name} if block.kind == "call" else {"text": block.text}
                yield {"type": f"response.{what}.done", **where, **text, **logprobs}
                if block.kind != "call":
                    yield {"type": "response.content_part.done", **where, "part": _part(block, block.text)}
                item = self._item(block, self._item_status(block))
                yield {"type": "response.output_item.done", **place, "item": item}

    def _usage(self) -> Json:
        usage = self._tracker.usage
        return {
            "input_tokens": usage.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.num_output_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.num_thinking_tokens},
            "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
        }


def _part(block: Block, text: str) -> Json:
    if block.kind == "thinking":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _dump(value: Any) -> Any:
    return value.model_dump(by_alias=True, exclude_none=True) if hasattr(value, "model_dump") else value
