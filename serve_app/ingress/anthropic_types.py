"""The requests of Anthropic's Messages API, as pydantic models.

Owns: fields, types, ranges, support marks. Must not know: how an answer is made.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from serve_app.ingress.format_types import Schema
from serve_app.ingress.tool_types import MAX_TOOLS, FunctionName, require_callable, require_distinct
from serve_app.ingress.wire import (
    JsonObject,
    NeutralOnly,
    StopText,
    Text,
    TokenCount,
    WireModel,
    no_effect,
    refuse,
    wrong,
)

_NO_EFFECT_ANY = Annotated[Any, no_effect]


class TextBlock(WireModel):
    """Text."""

    type: Literal["text"]
    text: Text
    cache_control: _NO_EFFECT_ANY = None
    citations: _NO_EFFECT_ANY = None


class ToolUseBlock(WireModel):
    """A call that the assistant made."""

    type: Literal["tool_use"]
    id: Text
    name: FunctionName
    input: JsonObject
    cache_control: _NO_EFFECT_ANY = None
    caller: _NO_EFFECT_ANY = None


class ThinkingBlock(WireModel):
    """What the assistant thought. It is given to chat templates, which mostly leave it out of later turns."""

    type: Literal["thinking", "redacted_thinking"]
    thinking: Text | None = None
    signature: _NO_EFFECT_ANY = None
    data: _NO_EFFECT_ANY = None


def _text_only(value: Any) -> Any:
    blocks = value if isinstance(value, list) else ()
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind in ("image", "document", "search_result", "container_upload"):
            raise refuse(f"This model reads text only: a block of type `{kind}` cannot be used.")
    return value


class ToolResultBlock(WireModel):
    """What a call brought."""

    type: Literal["tool_result"]
    tool_use_id: Text
    content: Annotated[Text | list[TextBlock] | None, BeforeValidator(_text_only)] = None
    is_error: bool | None = None
    cache_control: _NO_EFFECT_ANY = None


Block = Annotated[TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock, Field(discriminator="type")]


class InputMessage(WireModel):
    """One turn."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[Text | list[Block], BeforeValidator(_text_only)]


class InputTool(WireModel):
    """A tool on offer. ``strict``: its input is held to ``input_schema``."""

    type: Literal["custom"] | None = None
    name: FunctionName
    description: Text | None = None
    input_schema: JsonObject
    strict: bool | None = None
    cache_control: _NO_EFFECT_ANY = None
    eager_input_streaming: Annotated[bool | None, no_effect] = None
    input_examples: _NO_EFFECT_ANY = None


class InputToolChoice(WireModel):
    """Which tools must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _name_where_it_belongs(self) -> InputToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise wrong("`name` belongs to the type `tool` and to no other.")
        return self


class ThinkingConfig(WireModel):
    """How much to think before answering."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    display: Annotated[Any, no_effect] = None

    @model_validator(mode="after")
    def _budget_where_it_belongs(self) -> ThinkingConfig:
        if self.budget_tokens is not None and self.type != "enabled":
            raise wrong("`budget_tokens` belongs to the type `enabled` and to no other.")
        return self


class JsonFormat(WireModel):
    """Answers as JSON after a schema."""

    type: Literal["json_schema"]
    schema_: Annotated[Schema, Field(alias="schema")]


class OutputConfig(WireModel):
    """The answer's format and effort."""

    format: JsonFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class MessageMetadata(WireModel):
    """Whose request it is."""

    user_id: Text | None = None


class CountTokensRequest(WireModel):
    """POST /v1/messages/count_tokens, and what /v1/messages shares with it."""

    model: Annotated[Text, Field(min_length=1)]
    messages: Annotated[list[InputMessage], Field(min_length=1)]
    system: Annotated[Text | list[TextBlock] | None, BeforeValidator(_text_only)] = None
    tools: Annotated[list[InputTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: InputToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    cache_control: _NO_EFFECT_ANY = None
    mcp_servers: Annotated[Any, NeutralOnly("This server calls no other servers.", [])] = None
    context_management: Annotated[Any, NeutralOnly("This server does not edit the context.")] = None

    @field_validator("tools")
    @classmethod
    def _distinct_names(cls, tools: list[InputTool] | None) -> list[InputTool] | None:
        require_distinct([tool.name for tool in tools or ()])
        return tools

    @field_validator("tool_choice")
    @classmethod
    def _something_to_call(cls, choice: InputToolChoice | None, info: ValidationInfo) -> InputToolChoice | None:
        names = [tool.name for tool in info.data.get("tools") or ()]
        if choice is not None:
            require_callable(names, must_call=choice.type == "any", chosen=choice.name)
        return choice


class MessagesRequest(CountTokensRequest):
    """POST /v1/messages."""

    max_tokens: TokenCount
    stop_sequences: Annotated[list[StopText], Field(max_length=16)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    metadata: MessageMetadata | None = None
    container: Annotated[Any, NeutralOnly("This server runs no code.")] = None
    service_tier: Annotated[Any, NeutralOnly("This server has one service tier.", "auto", "standard_only")] = None
    speed: Annotated[Any, NeutralOnly("This server has one speed.", "standard")] = None
    diagnostics: Annotated[Any, NeutralOnly("This server keeps no earlier messages to compare with.")] = None
    user_profile_id: _NO_EFFECT_ANY = None
    inference_geo: _NO_EFFECT_ANY = None
