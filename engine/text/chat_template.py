"""Turns chat messages into a prompt by the model's own template.

Owns: the form in which templates get messages, and what to do when a template refuses them.
Must not know: tokens, HTTP.

Templates are Jinja programs that come with a model; ``transformers`` runs them sandboxed. Many know only one system
message at the beginning, or strictly alternating turns, and clients send more than that. So a conversation is offered
as it is first, then in simpler arrangements that keep every word in its place.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from engine.errors import InvalidParameterError, RequestError, UnsupportedModelError

Message = dict[str, Any]

# Type of a content part -> the field that holds its text.
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
# Names that a request must not give to a template variable: arguments of the renderer.
# The last is the name that Jinja gives to a template itself.
RESERVED_VARIABLES = frozenset(
    {"chat_template", "conversations", "messages", "return_assistant_tokens_mask", "tools", "self"}
)
_PROBE = "metalslots"


class ChatTemplate:
    """A model's chat templates. Safe to share between threads."""

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, Any]) -> None:
        """Raises UnsupportedModelError when the template cannot render one message of a user."""
        self._templates = templates
        self._special_tokens = special_tokens
        self._wants_parts = bool(templates) and self._probe()

    @property
    def exists(self) -> bool:
        """Whether the model has a template at all."""
        return bool(self._templates)

    @property
    def source(self) -> str:
        """The text of all templates: what they show of tools and thinking."""
        return "\n".join(self._templates.values())

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        /,
        **template_kwargs: Any,
    ) -> str:
        """Return the prompt's text. ``template_kwargs`` are variables for the template, such as ``enable_thinking``;
        unless they say otherwise the prompt ends where the assistant's answer begins.

        Raises RequestError without a template, InvalidParameterError for messages that the template refuses in every
        arrangement, for content that is not text, and for reserved variables.
        """
        if not self.exists:
            raise RequestError(
                "This model has no chat template. Send plain text to /v1/completions instead.", "messages"
            )
        if reserved := sorted(RESERVED_VARIABLES & set(template_kwargs)):
            raise InvalidParameterError(f"`{reserved[0]}` cannot be set by a request.", "chat_template_kwargs")
        prepared = prepare_messages(messages)
        rendered, refusal = None, None
        for arrangement in _arrangements(prepared):
            try:
                text = self._render(arrangement, tools, template_kwargs)
            except Exception as error:  # a template is a program of its own and may raise anything
                refusal = refusal or error
                continue
            if all(content in text for content in _late_instructions(prepared)):
                return text
            rendered = rendered or text
        if rendered is None:
            raise InvalidParameterError(
                f"The model's chat template refuses these messages: {str(refusal).rstrip('.')}.", "messages"
            ) from refusal
        return rendered  # the template rewrites what it is given, so that nothing can be looked for in its text

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, variables: Mapping[str, Any]
    ) -> str:
        if self._wants_parts:
            messages = [{**message, "content": [_part(message["content"])]} for message in messages]
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        texts = _render_jinja(
            conversations=[messages],
            tools=list(tools) if tools else None,
            chat_template=self._templates.get(name) or next(iter(self._templates.values())),
            **{
                "add_generation_prompt": not variables.get("continue_final_message"),
                **self._special_tokens,
                **variables,
            },
        )
        return texts[0]

    def _probe(self) -> bool:
        """Whether the template reads content only as a list of parts. Compiles it too."""
        message = {"role": "user", "content": _PROBE}
        failure: Exception | None = None
        for content in (_PROBE, [_part(_PROBE)]):
            self._wants_parts = False
            try:
                if _PROBE in self._render([{**message, "content": content}], None, {}):
                    return content is not _PROBE
            except Exception as error:  # as in render
                failure = failure or error
        reason = f"fails: {failure}" if failure else "leaves a user's message out"
        raise UnsupportedModelError(
            f"The model's chat template {reason}.",
            "correct chat_template.jinja, or take it away to serve /v1/completions alone",
        )


def prepare_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return messages in the form that templates read.

    Content is one string ("" where there is none), the ``developer`` role is called system, arguments of tool calls are
    objects, fields that are null are left out. Raises InvalidParameterError for an empty list and for other content.
    """
    if not messages:
        raise InvalidParameterError("`messages` is empty: at least one message is needed.", "messages")
    return [_prepare(message) for message in messages]


def _prepare(message: Mapping[str, Any]) -> Message:
    prepared = {name: value for name, value in message.items() if value is not None}
    prepared["content"] = _content_text(message.get("content"))
    if prepared.get("role") == "developer":
        prepared["role"] = "system"
    if "tool_calls" in prepared:
        prepared["tool_calls"] = [_prepare_call(call) for call in prepared["tool_calls"]]
    return prepared


def _content_text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list | tuple):
        raise InvalidParameterError("`content` must be a string or a list of parts.", "messages")
    return "".join(_part_text(part) for part in content)


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    text = part.get(_TEXT_PARTS[kind]) if kind in _TEXT_PARTS else None
    if not isinstance(text, str):
        raise InvalidParameterError(f"Content of type {kind!r} cannot be read: this model takes text only.", "messages")
    return text


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _prepare_call(call: Mapping[str, Any]) -> Message:
    function = dict(call.get("function") or {})
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except ValueError:
            parsed = None
        # Templates write arguments as JSON: a string would come out quoted a second time.
        function["arguments"] = parsed if isinstance(parsed, dict) else arguments
    return {**call, "function": function}


def _arrangements(messages: list[Message]) -> Iterator[list[Message]]:
    """The conversation as it is, then with late system messages said by the user, then without the system role."""
    yield messages
    num_leading = next((i for i, m in enumerate(messages) if m.get("role") != "system"), len(messages))
    yield _merge([*messages[:num_leading], *(_as_user(message) for message in messages[num_leading:])])
    yield _merge([_as_user(message) for message in messages])


def _late_instructions(messages: list[Message]) -> list[str]:
    """What some templates leave out without a word: every system message but one at the very beginning."""
    return [message["content"].strip() for message in messages[1:] if message.get("role") == "system"]


def _as_user(message: Message) -> Message:
    return {**message, "role": "user"} if message.get("role") == "system" else message


def _merge(messages: list[Message]) -> list[Message]:
    """Join neighbours of the system or user role, which templates with strict turns want as one message."""
    merged: list[Message] = []
    for message in messages:
        role = message.get("role")
        if merged and role in ("system", "user") and merged[-1].get("role") == role:
            merged[-1] = {**merged[-1], "content": f"{merged[-1]['content']}\n\n{message['content']}"}
        else:
            merged.append(message)
    return merged


def _render_jinja(**arguments: Any) -> list[str]:
    # Imported on first use: transformers takes most of a second, and processes that only route never need it. Without
    # PyTorch it prints advice that does not concern anybody here.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered: Any = render_jinja_template(**arguments)  # annotated as str; the second item are training marks
    texts: list[str] = rendered[0]
    return texts
