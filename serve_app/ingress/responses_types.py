"""The requests of OpenAI's Responses API, as pydantic models. Stateless: nothing is kept between requests.

Owns: fields, types, ranges, support marks. Must not know: how an answer is made.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, ValidationInfo, field_validator, model_validator

from serve_app.ingress.format_types import Schema
from serve_app.ingress.tool_types import (
    MAX_TOOLS,
    FunctionName,
    FunctionType,
    NamedFunction,
    require_callable,
    require_distinct,
)
from serve_app.ingress.wire import JsonObject, NeutralOnly, Text, TokenCount, WireModel, no_effect, refuse, wrong

_NO_EFFECT_ANY = Annotated[Any, no_effect]
_STATELESS = "Nothing is kept between requests here: send the whole conversation as `input`."
_TEXTS = dict.fromkeys(("input_text", "output_text", "text", "reasoning_text"), "text") | {"refusal": "refusal"}


def _joined_text(value: Any) -> Any:
    """Join the text parts of an item's content; refuse parts that are no text. Other values pass through."""
    if not isinstance(value, list):
        return value
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get(_TEXTS[kind]) if kind in _TEXTS else None
        if kind not in _TEXTS and isinstance(kind, str):
            raise refuse(f"This model reads text only: a content part of type `{kind[:40]}` cannot be used.")
        if not isinstance(text, str):
            raise wrong("A content part is an object with `type` and a text.")
        texts.append(text)
    return "\n".join(texts)


Content = Annotated[Text, BeforeValidator(_joined_text, json_schema_input_type=str | list[dict[str, Any]])]


Thought = Annotated[Text, BeforeValidator(_joined_text, json_schema_input_type=list[dict[str, Any]])]


class MessageItem(WireModel):
    """One message."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    id: Annotated[Text | None, no_effect] = None
    status: _NO_EFFECT_ANY = None
    phase: _NO_EFFECT_ANY = None


class CallItem(WireModel):
    """A call that the assistant made."""

    type: Literal["function_call"]
    call_id: Text
    name: FunctionName
    arguments: Text
    id: Annotated[Text | None, no_effect] = None
    status: _NO_EFFECT_ANY = None
    namespace: _NO_EFFECT_ANY = None
    caller: _NO_EFFECT_ANY = None


class CallOutputItem(WireModel):
    """What a call brought."""

    type: Literal["function_call_output"]
    call_id: Text
    output: Content
    id: Annotated[Text | None, no_effect] = None
    status: _NO_EFFECT_ANY = None
    caller: _NO_EFFECT_ANY = None


class ReasoningItem(WireModel):
    """What the assistant thought. It is given to chat templates, which mostly leave it out of later turns."""

    type: Literal["reasoning"]
    id: Annotated[Text | None, no_effect] = None
    summary: _NO_EFFECT_ANY = None
    content: Thought | None = None
    encrypted_content: _NO_EFFECT_ANY = None
    status: _NO_EFFECT_ANY = None


def _kind_of(item: Any) -> str:
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return kind if kind in ("function_call", "function_call_output", "reasoning") else "message"


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind_of),
]


class FunctionTool(WireModel):
    """A function that may be called. ``strict``: the arguments are held to ``parameters``."""

    type: FunctionType
    name: FunctionName
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class NamedFunctionTool(NamedFunction):
    """The one function that must be called."""

    type: FunctionType


FunctionChoice = Literal["none", "auto", "required"] | NamedFunctionTool


class TextFormat(WireModel):
    """The answer's format."""

    type: Literal["text", "json_object", "json_schema"]
    name: Text | None = None
    schema_: Annotated[Schema | None, Field(alias="schema")] = None
    description: Annotated[Text | None, no_effect] = None
    strict: Annotated[bool | None, no_effect] = None

    @model_validator(mode="after")
    def _schema_where_it_belongs(self) -> TextFormat:
        if self.schema_ is not None and self.type != "json_schema":
            raise wrong("`schema` belongs to the type `json_schema` and to no other.")
        return self


class TextConfig(WireModel):
    """What the answer's text is like."""

    format: TextFormat | None = None
    verbosity: Annotated[Any, NeutralOnly("This model has no verbosity to choose.", "medium")] = None


class ReasoningConfig(WireModel):
    """How much to think."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Annotated[Any, NeutralOnly("Thinking is given as it is, not summarised.", "auto")] = None


class ResponsesRequest(WireModel):
    """POST /v1/responses."""

    model: Annotated[Text, Field(min_length=1)]
    input: Text | Annotated[list[Item], Field(min_length=1)]
    instructions: Text | None = None
    max_output_tokens: TokenCount | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    stream: bool | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    user: Text | None = None
    prompt_cache_key: Text | None = None
    previous_response_id: Annotated[Any, NeutralOnly(_STATELESS)] = None
    conversation: Annotated[Any, NeutralOnly(_STATELESS)] = None
    prompt: Annotated[Any, NeutralOnly("No prompts are kept here.")] = None
    background: Annotated[Any, NeutralOnly("Answers are not made in the background.", False)] = None
    truncation: Annotated[Any, NeutralOnly("The input is never shortened.", "disabled")] = None
    include: Annotated[Any, NeutralOnly("Nothing more can be included.", [], ["reasoning.encrypted_content"])] = None
    top_logprobs: Annotated[Any, NeutralOnly("Log-probabilities are given by /v1/chat/completions.", 0)] = None
    max_tool_calls: Annotated[Any, NeutralOnly("The number of calls cannot be bounded.")] = None
    service_tier: Annotated[Any, NeutralOnly("This server has one service tier.", "auto", "default")] = None
    context_management: Annotated[Any, NeutralOnly("This server does not edit the context.", [])] = None
    moderation: Annotated[Any, NeutralOnly("This server does not moderate.")] = None
    image: Annotated[Any, NeutralOnly("This model reads and writes text only.")] = None
    background_options: _NO_EFFECT_ANY = None
    access_programs: _NO_EFFECT_ANY = None
    prompt_cache_options: _NO_EFFECT_ANY = None
    stream_options: _NO_EFFECT_ANY = None
    store: Annotated[bool | None, no_effect] = None
    metadata: _NO_EFFECT_ANY = None
    safety_identifier: Annotated[Text | None, no_effect] = None
    prompt_cache_retention: _NO_EFFECT_ANY = None

    @field_validator("tools")
    @classmethod
    def _distinct_names(cls, tools: list[FunctionTool] | None) -> list[FunctionTool] | None:
        require_distinct([tool.name for tool in tools or ()])
        return tools

    @field_validator("tool_choice")
    @classmethod
    def _something_to_call(cls, choice: FunctionChoice | None, info: ValidationInfo) -> FunctionChoice | None:
        names = [tool.name for tool in info.data.get("tools") or ()]
        chosen = choice.name if isinstance(choice, NamedFunctionTool) else None
        require_callable(names, must_call=choice == "required", chosen=chosen)
        return choice
