"""What an answer's text may be held to: OpenAI's response_format and other servers' names for the rest.

Owns: their types, and the grammar that each comes to. Must not know: how a grammar is followed.
"""

from __future__ import annotations

import json
from typing import Annotated, Literal

from pydantic import Field, model_validator

from engine.request import Grammar
from serve_app.ingress.wire import JsonObject, Text, WireModel, no_effect, wrong

Schema = JsonObject | bool
Choices = Annotated[list[Annotated[Text, Field(min_length=1)]], Field(min_length=1, max_length=1024)]


class JsonSchema(WireModel):
    """A named schema. It is followed whether ``strict`` says so or not."""

    name: Text
    schema_: Annotated[Schema | None, Field(alias="schema")] = None
    description: Annotated[Text | None, no_effect] = None
    strict: Annotated[bool | None, no_effect] = None


class ResponseFormat(WireModel):
    """OpenAI's choice of formats."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_where_it_belongs(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise wrong("`json_schema` belongs to the type `json_schema` and to no other.")
        return self

    @property
    def grammar(self) -> Grammar | None:
        """What the text is held to."""
        if self.type == "text":
            return None
        schema = self.json_schema.schema_ if self.json_schema else None
        if schema is None:
            return Grammar("json_object")
        return Grammar("json_schema", json.dumps(schema))


class StructuredOutputs(WireModel):
    """vLLM's choice of formats: exactly one of them. ``grammar`` is in Lark's or GBNF's notation."""

    json_: Annotated[Schema | Text | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> StructuredOutputs:
        given = [self.json_, self.json_object or None, self.regex, self.choice, self.grammar]
        if sum(value is not None for value in given) != 1:
            raise wrong("Exactly one of json, json_object, regex, choice and grammar is needed.")
        return self

    @property
    def asked(self) -> Grammar:
        """What the text is held to."""
        param = "structured_outputs"
        if self.json_ is not None:
            text = self.json_ if isinstance(self.json_, str) else json.dumps(self.json_)
            return Grammar("json_schema", text, param)
        if self.regex is not None:
            return Grammar("regex", self.regex, param)
        if self.choice is not None:
            return Grammar("choice", json.dumps(self.choice), param)
        if self.grammar is not None:
            return Grammar("grammar", self.grammar, param)
        return Grammar("json_object", "", param)
