"""OpenAI's embeddings: the request as a call, and the answer in its shape.

Owns: what each field means for the engine, and how vectors are written. Must not know: Ray, how a vector is made.
"""

from __future__ import annotations

import base64
import json
from array import array
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from engine.request import SamplingParams
from serve_app.ingress.fleet import CallStream
from serve_app.ingress.openai_types import read_prompts
from serve_app.ingress.primed import PrimedResponse, ResponseLimits, Sender
from serve_app.ingress.translate import CallContext
from serve_app.ingress.wire import Text, WireModel
from serve_app.protocol import ChoiceDelta, Deltas, GenerateCall, Usage

# The only token that is sampled means nothing; this is the quickest way to one.
_SAMPLING = SamplingParams(max_tokens=1, temperature=0.0)


class EmbeddingsRequest(WireModel):
    """POST /v1/embeddings."""

    model: Annotated[Text, Field(min_length=1)]
    input: Annotated[
        Any, Field(json_schema_extra={"x-shape": "text, list of texts, list of token ids, or lists of them"})
    ]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    user: Text | None = None

    @field_validator("input")
    @classmethod
    def _readable_input(cls, value: Any) -> tuple[str | tuple[int, ...], ...]:
        return read_prompts(value)


def embeddings_call(request: EmbeddingsRequest, context: CallContext) -> GenerateCall:
    """Return the call for the embeddings of all inputs."""
    return GenerateCall(
        request_id=context.request_id,
        model=context.model,
        prompts=request.input,
        sampling=_SAMPLING,
        max_tokens=1,
        user=context.user or request.user or "",
        priority=context.priority,
        key_name=context.key_name,
        session_key=context.session_key,
        timeout_s=context.timeout_s,
        client_request_id=context.client_request_id,
        embeds=True,
        dimensions=request.dimensions,
    )


class EmbeddingResponse(PrimedResponse):
    """All vectors as one JSON object. Each is written as it comes: a thousand at the end would hold everybody up."""

    def __init__(
        self,
        call: GenerateCall,
        open_call: Callable[[GenerateCall], CallStream],
        limits: ResponseLimits,
        *,
        as_base64: bool,
    ) -> None:
        super().__init__(call, open_call, limits)
        self._as_base64 = as_base64

    async def write(self, messages: AsyncIterator[Deltas], sender: Sender) -> None:
        """Wait for the last message, then send."""
        written: dict[int, bytes] = {}
        usage = Usage()
        async for message in messages:
            written |= {choice.index: self._write(choice) for choice in message.choices}
            usage = message.usage or usage
        num_tokens = usage.num_prompt_tokens
        rest = {"model": self._call.model, "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens}}
        data = b", ".join(written[index] for index in sorted(written))
        body = b'{"object": "list", "data": [' + data + b"], " + json.dumps(rest).encode()[1:]
        await sender.whole(200, body, {})

    def _write(self, choice: ChoiceDelta) -> bytes:
        vector: str | list[float]
        if self._as_base64:
            vector = base64.b64encode(choice.embedding).decode()
        else:
            vector = array("f", choice.embedding).tolist()
        return json.dumps({"object": "embedding", "index": choice.index, "embedding": vector}).encode()
