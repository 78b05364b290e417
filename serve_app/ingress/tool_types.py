"""Tools in OpenAI's chat requests: what is offered, what must be called, what was called before.

Owns: their types, and their refusals. Must not know: how a model sees tools.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from serve_app.ingress.wire import JsonObject, NeutralOnly, Text, WireModel, no_effect, refuse, wrong

MAX_TOOLS = 128
FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


def _functions_only(value: Any) -> Any:
    if isinstance(value, str) and value != "function":
        raise refuse(f"Only tools of type `function` can be offered, not `{value[:40]}`.")
    return value


FunctionType = Annotated[Literal["function"], BeforeValidator(_functions_only)]


class FunctionSpec(WireModel):
    """A function that may be called. ``strict``: the arguments are held to ``parameters``."""

    name: FunctionName
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(WireModel):
    """One tool."""

    type: FunctionType
    function: FunctionSpec
    custom: Annotated[Any, NeutralOnly("Only functions can be offered as tools.")] = None


class NamedFunction(WireModel):
    """A function by name."""

    name: FunctionName


class NamedTool(WireModel):
    """The one tool that must be called."""

    type: FunctionType
    function: NamedFunction


class CalledFunction(WireModel):
    """A call that was made."""

    name: FunctionName
    arguments: Text

    @field_validator("arguments")
    @classmethod
    def _a_json_object(cls, text: str) -> str:
        try:
            value = json.loads(text or "{}")
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise wrong("The arguments of a call are the text of a JSON object.")
        return text or "{}"


class CallMade(WireModel):
    """A tool call in an assistant's message."""

    id: Text
    type: FunctionType = "function"
    function: CalledFunction
    index: Annotated[int | None, no_effect] = None


def require_distinct(names: Sequence[str]) -> None:
    """Refuse tools of one name: nobody could say which of them was called."""
    if len(set(names)) < len(names):
        raise wrong("Two tools have the same name.")


def require_callable(names: Sequence[str], *, must_call: bool, chosen: str | None) -> None:
    """Refuse a choice of a tool that is not among ``names``. ``must_call``: one of them, whichever it is."""
    if must_call and not names:
        raise wrong("There are no `tools` of which one could be called.")
    if chosen is not None and chosen not in names:
        raise wrong(f"`{chosen}` is not among the `tools`.")


ToolChoice = Literal["none", "auto", "required"] | NamedTool
