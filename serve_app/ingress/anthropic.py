"""Anthropic's Messages API: its requests as calls, and answers in its shape.

Owns: what each field means for the engine, the order of events. Must not know: HTTP, Ray.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from engine.errors import InvalidParameterError
from engine.request import Grammar, SamplingParams
from serve_app.ingress.answers import AnswerHead, Json
from serve_app.ingress.anthropic_types import (
    CountTokensRequest,
    InputMessage,
    MessagesRequest,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from serve_app.ingress.blocks import Block, BlockEvent, BlockTracker
from serve_app.ingress.translate import CallContext, nucleus
from serve_app.protocol import Deltas, GenerateCall, ToolUse, Usage

_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}


def count_call(request: CountTokensRequest, context: CallContext) -> GenerateCall:
    """Return the call that only counts the prompt's tokens."""
    return _call(request, context, SamplingParams(), count_only=True)


def messages_call(request: MessagesRequest, context: CallContext) -> GenerateCall:
    """Return the call for a message."""
    config = request.output_config
    grammar = None
    if config is not None and config.format is not None:
        grammar = Grammar("json_schema", json.dumps(config.format.schema_), "output_config.format")
    top_k, top_p = nucleus(request.top_k, request.top_p)
    sampling = SamplingParams(
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=top_p,
        top_k=top_k,
        grammar=grammar,
    )
    user = request.metadata.user_id if request.metadata else None
    return _call(
        request,
        context,
        sampling,
        max_tokens=request.max_tokens,
        stop=tuple(request.stop_sequences or ()),
        user=context.user or user or "",
    )


def _call(request: CountTokensRequest, context: CallContext, sampling: SamplingParams, **more: Any) -> GenerateCall:
    thinking = request.thinking
    effort = (request.output_config.effort if request.output_config else None) or ""
    messages = tuple(_template_messages(request))
    if not messages:
        raise InvalidParameterError("No message has any content.", "messages")
    variables = {"continue_final_message": True} if request.messages[-1].role == "assistant" else {}
    return GenerateCall(
        **{
            "request_id": context.request_id,
            "model": context.model,
            "messages": messages,
            "sampling": sampling,
            "priority": context.priority,
            "key_name": context.key_name,
            "session_key": context.session_key,
            "timeout_s": context.timeout_s,
            "client_request_id": context.client_request_id,
            "tool_use": _tool_use(request),
            "template_variables": variables,
            "thinking_effort": "none" if thinking is not None and thinking.type == "disabled" else effort,
            "thinking_budget": thinking.budget_tokens if thinking is not None and thinking.type == "enabled" else None,
            **more,
        }
    )


def _template_messages(request: CountTokensRequest) -> Iterator[dict[str, Any]]:
    if request.system:
        yield {"role": "system", "content": _text(request.system)}
    for message in request.messages:
        yield from _turn(message)


def _turn(message: InputMessage) -> Iterator[dict[str, Any]]:
    """One turn, its calls' results as messages of their own before the rest of it."""
    if isinstance(message.content, str):
        yield {"role": message.role, "content": message.content}
        return
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in message.content:
        match block:
            case TextBlock():
                texts.append(block.text)
            case ToolUseBlock():
                arguments = json.dumps(block.input, ensure_ascii=False)
                calls.append(
                    {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}
                )
            case ToolResultBlock():
                # No template has a place for failures.
                text = ("Error: " if block.is_error else "") + _text(block.content or "")
                yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}
            case ThinkingBlock():
                thoughts.append(block.thinking or "")
    if texts or calls:
        more = {"tool_calls": calls, "reasoning_content": "\n".join(thoughts)}
        given = {name: value for name, value in more.items() if value}
        yield {"role": message.role, "content": "\n".join(texts), **given}


def _text(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _tool_use(request: CountTokensRequest) -> ToolUse | None:
    choice = request.tool_choice
    if not request.tools or (choice is not None and choice.type == "none"):
        return None
    tools = tuple(
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description or "",
                "parameters": tool.input_schema,
                "strict": bool(tool.strict),
            },
        }
        for tool in request.tools
    )
    names = tuple(tool.name for tool in request.tools)
    forced: tuple[str, ...] = ()
    if choice is not None and choice.type == "any":
        forced = names
    if choice is not None and choice.type == "tool":
        assert choice.name is not None
        forced = (choice.name,)
    return ToolUse(tools, forced, parallel=not (choice and (choice.disable_parallel_tool_use or choice.type == "tool")))


class CountShape:
    """The answer of count_tokens."""

    named_events = True

    def chunks(self, deltas: Deltas) -> Iterator[Json]:
        """Nothing: counts are not streamed."""
        yield from ()

    def whole(self, messages: Sequence[Deltas]) -> Json:
        """Return the count."""
        usage = messages[-1].usage or Usage()
        return {"input_tokens": usage.num_prompt_tokens}


class MessageShape:
    """A message, whole and as events."""

    named_events = True

    def __init__(self, head: AnswerHead) -> None:
        self._head = head
        self._tracker = BlockTracker()
        self._started = False

    def chunks(self, deltas: Deltas) -> Iterator[Json]:
        """Yield the events for one message, in order."""
        if not self._started:
            self._started = True
            self._tracker.usage = deltas.prompt_usage or Usage()
            yield {"type": "message_start", "message": self._message([])}
        for event in self._tracker.take(deltas):
            yield _event(event)
        if deltas.usage is not None:
            yield {"type": "message_delta", "delta": self._ending(), "usage": _usage(deltas.usage)}
            yield {"type": "message_stop"}

    def whole(self, messages: Sequence[Deltas]) -> Json:
        """Return the message object for all messages of a call."""
        self._tracker.take_all(messages)
        return self._message([_content(block) for block in self._tracker.blocks])

    def _message(self, content: list[Json]) -> Json:
        return {
            "id": self._head.id,
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": content,
            **self._ending(),
            "usage": _usage(self._tracker.usage),
        }

    def _ending(self) -> Json:
        stop = self._tracker.stop_reason
        if isinstance(stop, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        reason = self._tracker.finish_reason
        return {"stop_reason": _STOP_REASONS.get(reason) if reason else None, "stop_sequence": None}


def _event(event: BlockEvent) -> Json:
    index = event.block.index
    match event.kind:
        case "start":
            return {"type": "content_block_start", "index": index, "content_block": _content(event.block, empty=True)}
        case "delta":
            return {"type": "content_block_delta", "index": index, "delta": _delta(event)}
        case "stop":
            return {"type": "content_block_stop", "index": index}


def _delta(event: BlockEvent) -> Json:
    match event.block.kind:
        case "thinking":
            return {"type": "thinking_delta", "thinking": event.text}
        case "text":
            return {"type": "text_delta", "text": event.text}
        case "call":
            return {"type": "input_json_delta", "partial_json": event.text}


def _content(block: Block, *, empty: bool = False) -> Json:
    text = "" if empty else block.text
    match block.kind:
        case "thinking":
            return {"type": "thinking", "thinking": text, "signature": ""}
        case "text":
            return {"type": "text", "text": text}
        case "call":
            return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": json.loads(text or "{}")}


def _usage(usage: Usage) -> Json:
    # Anthropic counts cached tokens apart from the others.
    return {
        "input_tokens": usage.num_prompt_tokens - usage.num_cached_tokens,
        "cache_read_input_tokens": usage.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.num_output_tokens,
        "output_tokens_details": {"thinking_tokens": usage.num_thinking_tokens},
    }
