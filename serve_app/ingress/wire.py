"""Building blocks of the request models: strict base, refused and harmless fields, text out of content parts.

Owns: how a field says that it is honoured, refused or without effect. Must not know: which endpoint has which field.

A field that is listed nowhere is refused with the closest known name; nothing a client sends is ignored in silence.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

MAX_DEPTH = 64
UNKNOWN_PARAMETER = "unknown_parameter"
UNSUPPORTED_PARAMETER = "unsupported_parameter"

# Understood, and of no consequence for the answer: hints and bookkeeping of OpenAI's own service.
no_effect = Field(json_schema_extra={"x-support": "no effect"})


class NeutralOnly:
    """Marks a field that is refused unless it is null or one of ``neutral``; those leave the answer as it is."""

    def __init__(self, reason: str, *neutral: Any) -> None:
        self.reason = reason
        self.neutral = neutral

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"enum": [None, *self.neutral], "description": self.reason, "x-support": "refused"}

    def _check(self, value: Any) -> None:
        if value is None or any(type(value) is type(allowed) and value == allowed for allowed in self.neutral):
            return
        raise refuse(self.reason)


def refuse(reason: str) -> PydanticCustomError:
    """An error for a value that is understood but cannot be honoured."""
    return PydanticCustomError(UNSUPPORTED_PARAMETER, "{reason}", {"reason": reason})


def wrong(reason: str) -> PydanticCustomError:
    """An error for a value that makes no sense."""
    return PydanticCustomError("invalid_value", "{reason}", {"reason": reason})


class WireModel(BaseModel):
    """A JSON object of a request. Strict: no text for a number, no number for a truth value."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_fields(cls, values: Any) -> Any:
        if isinstance(values, Mapping):
            known = [field.alias or name for name, field in cls.model_fields.items()]
            for name in values:
                if name not in known:
                    raise _unknown_field(str(name), known)
        return values


def _unknown_field(name: str, known: list[str]) -> PydanticCustomError:
    closest = difflib.get_close_matches(name[:64], known, n=1, cutoff=0.6)
    hint = f" Did you mean `{closest[0]}`?" if closest else ""
    return PydanticCustomError(
        UNKNOWN_PARAMETER, "This server does not know the field.{hint}", {"hint": hint, "param": name}
    )


def _shallow(value: Any) -> Any:
    """Refuse nesting that no template or schema needs, and that recursive readers could not follow."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise wrong(f"It is nested more than {MAX_DEPTH} levels deep.")
        inner = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)]
        level = [item for items in inner for item in items]
    return value


def _one_or_more(value: Any) -> Any:
    if value is None:
        return []
    return [value] if isinstance(value, str) else value


def whole_characters(text: str) -> str:
    """Refuse lone surrogates: legal in JSON, but no text, and no tokenizer can encode them."""
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise wrong("The text holds half a character (a lone surrogate).")
    return text


JsonObject = Annotated[dict[str, Any], AfterValidator(_shallow)]
Text = Annotated[str, AfterValidator(whole_characters)]
StopText = Annotated[Text, Field(min_length=1, max_length=1024)]
StopTexts = Annotated[
    list[StopText], BeforeValidator(_one_or_more, json_schema_input_type=str | list[str] | None), Field(max_length=16)
]
TokenKey = Annotated[str, Field(pattern=r"^\d{1,9}$")]
LogitBias = Annotated[
    dict[TokenKey, Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]], Field(max_length=1024)
]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
TokenCount = Annotated[int, Field(ge=1, lt=2**31)]


def text_of_parts(value: Any) -> Any:
    """Join the text parts of a message's content; refuse parts that are no text. Other values pass through."""
    if not isinstance(value, list):
        return value
    if not value:
        raise wrong("The list of content parts is empty.")
    return "\n".join(_text_of_part(part) for part in value)


def _text_of_part(part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in ("text", "refusal"):
        text = part.get(kind)
        if not isinstance(text, str):
            raise wrong(f"A content part of type `{kind}` needs `{kind}` with a text.")
        return text
    if kind in ("image_url", "input_audio", "file", "video_url"):
        raise refuse(f"This model reads text only: a content part of type `{kind}` cannot be used.")
    raise wrong("A content part is an object with `type` and, for type `text`, `text`.")
