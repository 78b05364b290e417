"""Between OpenAI's shapes and the replica's protocol. Pure: values in, values out.

Owns: what each request field means for the engine, and the defaults of both endpoints. Must not know: HTTP, Ray, or how
an answer's shape is written (answers.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.errors import InvalidParameterError
from engine.request import Grammar, SamplingParams
from serve_app.ingress.openai_types import ChatCompletionRequest, ChatMessage, CompletionRequest, GenerationRequest
from serve_app.ingress.tool_types import NamedTool
from serve_app.protocol import ChatMessage as TemplateMessage
from serve_app.protocol import GenerateCall, ToolUse

DEFAULT_COMPLETION_TOKENS = 16
_SEED_RANGE = 2**63


@dataclass(frozen=True, slots=True)
class CallContext:
    """What a call needs besides the body: its id, the served model's name, and what the headers said.

    ``user``, ``priority`` and ``key_name`` are the key's; without keys the body may name the user.
    """

    request_id: str
    model: str
    timeout_s: float
    session_key: str = ""
    client_request_id: str = ""
    user: str = ""
    priority: int = 0
    key_name: str = ""


def chat_call(request: ChatCompletionRequest, context: CallContext) -> GenerateCall:
    """Return the call for a chat. Without a limit the answer may be as long as the context allows."""
    num_logprobs = (request.top_logprobs or 0) if request.logprobs else None
    return GenerateCall(
        request_id=context.request_id,
        model=context.model,
        messages=tuple(_template_message(message) for message in request.messages),
        sampling=_sampling(request, num_logprobs, _grammar(request)),
        max_tokens=request.max_completion_tokens or request.max_tokens,
        n=request.n or 1,
        stop=tuple(request.stop),
        user=context.user or request.user or "",
        priority=context.priority,
        key_name=context.key_name,
        session_key=context.session_key or request.prompt_cache_key or request.user or "",
        timeout_s=context.timeout_s,
        client_request_id=context.client_request_id,
        tool_use=_tool_use(request),
        template_variables=request.chat_template_kwargs or {},
        thinking_effort=request.reasoning_effort or "",
        thinking_budget=request.thinking_token_budget,
        cache_salt=request.cache_salt or "",
    )


def completion_call(request: CompletionRequest, context: CallContext) -> GenerateCall:
    """Return the call for text completions."""
    return GenerateCall(
        request_id=context.request_id,
        model=context.model,
        prompts=request.prompt,
        sampling=_sampling(request, request.logprobs, _structured(request)),
        max_tokens=request.max_tokens or DEFAULT_COMPLETION_TOKENS,
        n=request.n or 1,
        stop=tuple(request.stop),
        echo=bool(request.echo),
        user=context.user or request.user or "",
        priority=context.priority,
        key_name=context.key_name,
        session_key=context.session_key or request.user or "",
        timeout_s=context.timeout_s,
        client_request_id=context.client_request_id,
    )


def _template_message(message: ChatMessage) -> TemplateMessage:
    # A developer message is what newer clients send for a system message; templates know only the latter.
    role = "system" if message.role == "developer" else message.role
    values: dict[str, Any] = {"role": role, "content": message.content or message.refusal or ""}
    if message.tool_calls:
        values["tool_calls"] = [call.model_dump(exclude={"index"}) for call in message.tool_calls]
    # What the assistant thought is given to templates, which mostly leave it out of later turns.
    thought = (message.reasoning_content or message.reasoning) if role == "assistant" else None
    more = {"name": message.name, "tool_call_id": message.tool_call_id, "reasoning_content": thought}
    return values | {name: value for name, value in more.items() if value}


def _tool_use(request: ChatCompletionRequest) -> ToolUse | None:
    if not request.tools or request.tool_choice == "none":
        return None
    tools = tuple(tool.model_dump(exclude_none=True) for tool in request.tools)
    parallel = request.parallel_tool_calls is not False
    if isinstance(request.tool_choice, NamedTool):
        return ToolUse(tools, (request.tool_choice.function.name,), parallel=False)
    forced = tuple(tool.function.name for tool in request.tools) if request.tool_choice == "required" else ()
    return ToolUse(tools, forced, parallel)


def _grammar(request: ChatCompletionRequest) -> Grammar | None:
    asked = request.response_format.grammar if request.response_format else None
    structured = _structured(request)
    if asked and structured:
        raise InvalidParameterError("`response_format` and `structured_outputs` exclude each other.", structured.param)
    return asked or structured


def _structured(request: GenerationRequest) -> Grammar | None:
    return request.structured_outputs.asked if request.structured_outputs else None


def _sampling(request: GenerationRequest, num_logprobs: int | None, grammar: Grammar | None) -> SamplingParams:
    top_k, top_p = nucleus(request.top_k, request.top_p)
    return SamplingParams(
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=request.min_p or 0.0,
        repetition_penalty=request.repetition_penalty or 1.0,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        logit_bias=tuple((int(token), bias) for token, bias in (request.logit_bias or {}).items()),
        seed=None if request.seed is None else request.seed % _SEED_RANGE,
        num_logprobs=num_logprobs,
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        grammar=grammar,
    )


def nucleus(top_k: int | None, top_p: float | None) -> tuple[int, float]:
    """Both as the engine takes them. A ``top_p`` of 0 means the likeliest token alone."""
    if top_p == 0.0:
        return 1, 1.0
    return max(0, top_k or 0), 1.0 if top_p is None else top_p
