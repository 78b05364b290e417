"""The requests of OpenAI's chat and text completions, as pydantic models.

Owns: every field, its type and range, and whether it is honoured, refused or without effect (``x-support`` in the
schema). Must not know: how an answer is made. Any optional field may be null.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from engine.text.chat_template import RESERVED_VARIABLES
from serve_app.ingress.format_types import ResponseFormat, StructuredOutputs
from serve_app.ingress.tool_types import (
    MAX_TOOLS,
    CallMade,
    NamedTool,
    Tool,
    ToolChoice,
    require_callable,
    require_distinct,
)
from serve_app.ingress.wire import (
    JsonObject,
    LogitBias,
    NeutralOnly,
    Seed,
    StopTexts,
    Text,
    TokenCount,
    WireModel,
    no_effect,
    refuse,
    text_of_parts,
    whole_characters,
    wrong,
)

MAX_PROMPTS = 2048
MAX_CHOICES = 128
_OLD_TOOLS = "Functions of this older kind cannot be called; offer them as `tools`."

Content = Annotated[
    Text | None, BeforeValidator(text_of_parts, json_schema_input_type=str | list[dict[str, Any]] | None)
]


class StreamOptions(WireModel):
    """What else a stream carries."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Annotated[Any, NeutralOnly("Obfuscated chunks are not supported.", False)] = None


class ChatMessage(WireModel):
    """One message of a conversation."""

    role: str
    content: Content = Field(default=None, validate_default=True)
    name: Text | None = None
    refusal: Annotated[str | None, no_effect] = None
    annotations: Annotated[Any, no_effect] = None
    tool_calls: Annotated[list[CallMade], Field(max_length=MAX_TOOLS)] | None = None
    tool_call_id: Text | None = Field(default=None, validate_default=True)
    function_call: Annotated[Any, NeutralOnly(_OLD_TOOLS)] = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None
    audio: Annotated[Any, NeutralOnly("This model neither hears nor speaks.")] = None

    @field_validator("role")
    @classmethod
    def _known_role(cls, role: str) -> str:
        if role == "function":
            raise refuse(_OLD_TOOLS)
        if role not in ("system", "developer", "user", "assistant", "tool"):
            raise wrong("A role is one of system, developer, user, assistant, tool.")
        return role

    @field_validator("content")
    @classmethod
    def _content_given(cls, content: str | None, info: ValidationInfo) -> str | None:
        if content is None and info.data.get("role") != "assistant":
            raise wrong("Only an assistant's message may be without content.")
        return content

    @field_validator("tool_calls")
    @classmethod
    def _calls_by_the_assistant(cls, calls: list[CallMade] | None, info: ValidationInfo) -> list[CallMade] | None:
        if calls and info.data.get("role") != "assistant":
            raise wrong("Only an assistant's message has tool calls.")
        return calls

    @field_validator("tool_call_id")
    @classmethod
    def _result_of_a_call(cls, call_id: str | None, info: ValidationInfo) -> str | None:
        if (call_id is not None) != (info.data.get("role") == "tool"):
            raise wrong("A message of role tool, and no other, names the call that it answers.")
        return call_id


class GenerationRequest(WireModel):
    """The fields that chat and text completions share."""

    model: Annotated[Text, Field(min_length=1)]
    max_tokens: TokenCount | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: StopTexts = Field(default_factory=list)
    seed: Seed | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)] | None = None
    logit_bias: LogitBias | None = None
    user: Text | None = None
    # Not OpenAI's, but other servers' names for what the engine can do.
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10, allow_inf_nan=False)] | None = None
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=64)] | None = None
    ignore_eos: bool | None = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of token counts."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def counts_as_it_goes(self) -> bool:
        """Whether every chunk of a stream with usage says how many tokens there are so far (vLLM's name for it)."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)


class ChatCompletionRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    prompt_cache_key: Text | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[Any, NeutralOnly(_OLD_TOOLS, [])] = None
    function_call: Annotated[Any, NeutralOnly(_OLD_TOOLS, "none", "auto")] = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    thinking_token_budget: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    chat_template_kwargs: JsonObject | None = None
    cache_salt: Text | None = None
    modalities: Annotated[Any, NeutralOnly("This model answers with text only.", ["text"])] = None
    audio: Annotated[Any, NeutralOnly("This model neither hears nor speaks.")] = None
    web_search_options: Annotated[Any, NeutralOnly("This server does not search the web.")] = None
    verbosity: Annotated[Any, NeutralOnly("This model has no verbosity to choose.", "medium")] = None
    moderation: Annotated[Any, NeutralOnly("This server does not moderate.")] = None
    service_tier: Annotated[Any, NeutralOnly("This server has one service tier.", "auto", "default")] = None
    prediction: Annotated[Any, no_effect] = None
    metadata: Annotated[Any, no_effect] = None
    store: Annotated[bool | None, no_effect] = None
    safety_identifier: Annotated[str | None, no_effect] = None
    prompt_cache_retention: Annotated[Any, no_effect] = None
    prompt_cache_options: Annotated[Any, no_effect] = None

    @field_validator("top_logprobs")
    @classmethod
    def _logprobs_asked(cls, count: int | None, info: ValidationInfo) -> int | None:
        if count is not None and info.data.get("logprobs") is not True:
            raise wrong("`top_logprobs` needs `logprobs: true`.")
        return count

    @field_validator("tools")
    @classmethod
    def _distinct_names(cls, tools: list[Tool] | None) -> list[Tool] | None:
        require_distinct([tool.function.name for tool in tools or ()])
        return tools

    @field_validator("tool_choice")
    @classmethod
    def _something_to_call(cls, choice: ToolChoice | None, info: ValidationInfo) -> ToolChoice | None:
        names = [tool.function.name for tool in info.data.get("tools") or ()]
        chosen = choice.function.name if isinstance(choice, NamedTool) else None
        require_callable(names, must_call=choice == "required", chosen=chosen)
        return choice

    @field_validator("chat_template_kwargs")
    @classmethod
    def _no_reserved_names(cls, variables: dict[str, Any] | None) -> dict[str, Any] | None:
        if reserved := sorted(RESERVED_VARIABLES & set(variables or ())):
            raise wrong(f"`{reserved[0]}` cannot be set by a request.")
        return variables


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: Annotated[
        Any, Field(json_schema_extra={"x-shape": "text, list of texts, list of token ids, or lists of them"})
    ]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    suffix: Annotated[Any, NeutralOnly("Text cannot be inserted before a suffix by this server.", "")] = None

    @field_validator("prompt")
    @classmethod
    def _readable_prompt(cls, value: Any) -> tuple[str | tuple[int, ...], ...]:
        return read_prompts(value)

    @field_validator("logprobs")
    @classmethod
    def _no_logprobs_of_the_prompt(cls, count: int | None, info: ValidationInfo) -> int | None:
        if count is not None and info.data.get("echo"):
            raise refuse("`logprobs` together with `echo` would need log-probabilities of the prompt.")
        return count

    @field_validator("best_of")
    @classmethod
    def _best_of_is_n(cls, count: int | None, info: ValidationInfo) -> int | None:
        if count is not None and count != (info.data.get("n") or 1):
            raise refuse("`best_of` other than `n` is not supported.")
        return count


def read_prompts(value: Any) -> tuple[str | tuple[int, ...], ...]:
    """Return the prompts in any of the four shapes that OpenAI allows."""
    if isinstance(value, str) or _is_token_list(value):
        value = [value]
    if not isinstance(value, list) or not value:
        raise wrong("A prompt is a text, a list of texts, a list of token ids, or a list of such lists.")
    if len(value) > MAX_PROMPTS:
        raise wrong(f"There are {len(value)} prompts; at most {MAX_PROMPTS} are allowed.")
    return tuple(_read_prompt(prompt) for prompt in value)


def _is_token_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _read_prompt(value: Any) -> str | tuple[int, ...]:
    if value in ("", []):
        raise wrong("A prompt is empty.")
    if isinstance(value, str):
        return whole_characters(value)
    if _is_token_list(value) and all(0 <= token < 2**31 for token in value):
        return tuple(value)
    raise wrong("A prompt is a text, a list of texts, a list of token ids, or a list of such lists.")
