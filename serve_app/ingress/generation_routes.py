"""The addresses that compute: OpenAI's four, Anthropic's two.

Owns: which request becomes which call, and in which shape it is answered. Must not know: Ray.
"""

from __future__ import annotations

import time
import uuid

from fastapi import FastAPI, Request
from starlette.responses import Response

from serve_app.ingress.answers import AnswerHead, AnswerShape, ChatShape, CompletionShape
from serve_app.ingress.anthropic import CountShape, MessageShape, count_call, messages_call
from serve_app.ingress.anthropic_types import CountTokensRequest, MessagesRequest
from serve_app.ingress.embeddings import EmbeddingResponse, EmbeddingsRequest, embeddings_call
from serve_app.ingress.fleet import Fleet, find_model
from serve_app.ingress.openai_types import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
)
from serve_app.ingress.primed import ResponseLimits, StreamedResponse, WholeResponse
from serve_app.ingress.responses import ResponseShape, responses_call
from serve_app.ingress.responses_types import ResponsesRequest
from serve_app.ingress.scope import key_in
from serve_app.ingress.translate import CallContext, chat_call, completion_call
from serve_app.protocol import GenerateCall

MAX_HEADER_CHARACTERS = 200


class Generation:
    """What all of them share."""

    def __init__(self, fleet: Fleet, limits: ResponseLimits) -> None:
        self._fleet = fleet
        self._limits = limits

    def respond(self, call: GenerateCall, shape: AnswerShape, *, stream: bool) -> Response:
        """Return the response that opens ``call`` when it is sent."""
        kind = StreamedResponse if stream else WholeResponse
        return kind(call, self._fleet.open, self._limits, shape)

    def embed(self, call: GenerateCall, *, as_base64: bool) -> Response:
        """Return the response that opens ``call``, which embeds, when it is sent."""
        return EmbeddingResponse(call, self._fleet.open, self._limits, as_base64=as_base64)

    def context(self, request: Request, prefix: str, model: str) -> CallContext:
        """What the call needs besides its body. Raises ModelUnknownError."""
        key = key_in(request.scope)
        return CallContext(
            request_id=f"{prefix}-{uuid.uuid4().hex}",
            model=find_model(self._fleet, model).name,
            timeout_s=self._limits.timeout_s,
            session_key=_header(request, "x-session-id"),
            client_request_id=_header(request, "x-request-id"),
            user=key.name if key else "",
            priority=key.priority if key else 0,
            key_name=key.name if key else "",
        )


def add_openai_routes(app: FastAPI, generation: Generation) -> None:
    """Add the chat, completions, responses and embeddings addresses."""

    @app.post("/v1/chat/completions", response_class=Response)
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        call = chat_call(body, generation.context(request, "chatcmpl", body.model))
        return generation.respond(call, ChatShape(_head(body, call), bool(body.logprobs)), stream=bool(body.stream))

    @app.post("/v1/completions", response_class=Response)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        call = completion_call(body, generation.context(request, "cmpl", body.model))
        shape = CompletionShape(_head(body, call), body.logprobs is not None)
        return generation.respond(call, shape, stream=bool(body.stream))

    @app.post("/v1/responses", response_class=Response)
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        call = responses_call(body, generation.context(request, "resp", body.model))
        return generation.respond(call, ResponseShape(_plain_head(call), body), stream=bool(body.stream))

    @app.post("/v1/embeddings", response_class=Response)
    async def embeddings(body: EmbeddingsRequest, request: Request) -> Response:
        call = embeddings_call(body, generation.context(request, "embd", body.model))
        return generation.embed(call, as_base64=body.encoding_format == "base64")


def add_anthropic_routes(app: FastAPI, generation: Generation) -> None:
    """Add the Messages API's addresses."""

    @app.post("/v1/messages", response_class=Response)
    async def messages(body: MessagesRequest, request: Request) -> Response:
        call = messages_call(body, generation.context(request, "msg", body.model))
        return generation.respond(call, MessageShape(_plain_head(call)), stream=bool(body.stream))

    @app.post("/v1/messages/count_tokens", response_class=Response)
    async def count_tokens(body: CountTokensRequest, request: Request) -> Response:
        call = count_call(body, generation.context(request, "count", body.model))
        return generation.respond(call, CountShape(), stream=False)


def _head(body: GenerationRequest, call: GenerateCall) -> AnswerHead:
    include_usage = bool(body.stream) and body.include_usage
    return AnswerHead(call.request_id, call.model, int(time.time()), include_usage, body.counts_as_it_goes)


def _plain_head(call: GenerateCall) -> AnswerHead:
    return AnswerHead(call.request_id, call.model, int(time.time()))


def _header(request: Request, name: str) -> str:
    return request.headers.get(name, "")[:MAX_HEADER_CHARACTERS]
