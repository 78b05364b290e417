"""Between OpenAI's shapes and the replica's protocol. Pure: values in, values out.

Owns: what each request field means for the engine, and the defaults of both endpoints. Must not know: HTTP, Ray, or how
an answer's shape is written (answers.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.request import SamplingParams
from serve_app.ingress.openai_types import ChatCompletionRequest, ChatMessage, CompletionRequest, GenerationRequest
from serve_app.protocol import ChatMessage as TemplateMessage
from serve_app.protocol import GenerateCall

DEFAULT_COMPLETION_TOKENS = 16
_SEED_RANGE = 2**63


@dataclass(frozen=True, slots=True)
class CallContext:
    """What a call needs besides the body: its id, the served model's name, and what the headers said."""

    request_id: str
    model: str
    timeout_s: float
    session_key: str = ""
    client_request_id: str = ""


def chat_call(request: ChatCompletionRequest, context: CallContext) -> GenerateCall:
    """Return the call for a chat. Without a limit the answer may be as long as the context allows."""
    num_logprobs = (request.top_logprobs or 0) if request.logprobs else None
    return GenerateCall(
        request_id=context.request_id,
        model=context.model,
        messages=tuple(_template_message(message) for message in request.messages),
        sampling=_sampling(request, num_logprobs),
        max_tokens=request.max_completion_tokens or request.max_tokens,
        n=request.n or 1,
        stop=tuple(request.stop),
        user=request.user or "",
        session_key=context.session_key or request.prompt_cache_key or request.user or "",
        timeout_s=context.timeout_s,
        client_request_id=context.client_request_id,
    )


def completion_call(request: CompletionRequest, context: CallContext) -> GenerateCall:
    """Return the call for text completions."""
    return GenerateCall(
        request_id=context.request_id,
        model=context.model,
        prompts=request.prompt,
        sampling=_sampling(request, request.logprobs),
        max_tokens=request.max_tokens or DEFAULT_COMPLETION_TOKENS,
        n=request.n or 1,
        stop=tuple(request.stop),
        echo=bool(request.echo),
        user=request.user or "",
        session_key=context.session_key or request.user or "",
        timeout_s=context.timeout_s,
        client_request_id=context.client_request_id,
    )


def _template_message(message: ChatMessage) -> TemplateMessage:
    # A developer message is what newer clients send for a system message; templates know only the latter.
    role = "system" if message.role == "developer" else message.role
    values = {"role": role, "content": message.content or message.refusal or ""}
    return values | ({"name": message.name} if message.name else {})


def _sampling(request: GenerationRequest, num_logprobs: int | None) -> SamplingParams:
    top_k = max(0, request.top_k or 0)
    top_p = 1.0 if request.top_p is None else request.top_p
    if top_p == 0.0:
        # The smallest set of tokens that holds a probability of nothing is the likeliest token alone.
        top_k, top_p = 1, 1.0
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
    )
