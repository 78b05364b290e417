"""Turns calls into the engine's requests: renders chats, encodes prompts.

Owns: what a client's words become as tokens. Must not know: Ray, or how requests run. Slow for long prompts, so it is
called in a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar

from engine.core.generation import GenerationRequest
from engine.errors import ContextLengthError, InvalidParameterError
from engine.text.structured import check_grammar
from engine.text.tokenizer import Tokenizer
from serve_app.protocol import GenerateCall, Prompt
from serve_app.replica.chat import ChatPlan, plan_chat
from serve_app.replica.reading import Reading

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """A call as the engine gets it, and how the answers will be read."""

    requests: tuple[GenerationRequest, ...]
    reading: Reading


@dataclass(frozen=True, slots=True)
class ReceivedCall:
    """A call, and when it came."""

    call: GenerateCall
    received_s: float

    @property
    def num_text_bytes(self) -> int:
        """About how much text it brings to the tokenizer."""
        contents = (str(message.get("content", "")) for message in self.call.messages)
        prompts = (prompt for prompt in self.call.prompts if isinstance(prompt, str))
        return sum(map(len, contents)) + sum(map(len, prompts))


@dataclass(frozen=True, slots=True)
class _Draft:
    """A call before its words are tokens. ``prompts``: texts, or token ids where the client sent those."""

    call: GenerateCall
    plan: ChatPlan
    prompts: tuple[Prompt, ...]
    received_s: float

    @property
    def texts(self) -> list[str]:
        return [prompt for prompt in self.prompts if isinstance(prompt, str)]


def prepare_calls(
    calls: Sequence[ReceivedCall], tokenizer: Tokenizer, max_model_len: int
) -> list[PreparedCall | Exception]:
    """Return for each of ``calls`` its engine requests, one for each prompt, or the error that it ends with.

    All texts are encoded in one call of the tokenizer, equal ones once. Errors are what ``plan_chat`` raises,
    InvalidParameterError for none, an empty prompt or text that is no Unicode, ContextLengthError with both lengths.
    """
    drafts = [_attempt(_draft, call, tokenizer) for call in calls]
    token_ids = _Encoded(tokenizer, [draft for draft in drafts if isinstance(draft, _Draft)])
    return [
        draft if isinstance(draft, Exception) else _attempt(_finish, draft, token_ids, max_model_len)
        for draft in drafts
    ]


def require_room_in_queue(call: GenerateCall, num_places: int) -> None:
    """Refuse a call with more answers than the engine's slots and waiting queue together will ever take at once.

    Raises InvalidParameterError with both numbers: waiting would not help.
    """
    if call.num_choices > num_places:
        raise InvalidParameterError(
            f"The request asks for {call.num_choices} answers at once; {num_places} can run and wait here.",
            "n" if call.num_prompts == 1 else "prompt",
        )


def echo_texts(call: GenerateCall, tokenizer: Tokenizer) -> tuple[str, ...]:
    """Return the text of each prompt, as a client that asked for an echo gets it back."""
    return tuple(prompt if isinstance(prompt, str) else tokenizer.decode(prompt) for prompt in call.prompts)


def _attempt(make: Callable[..., T], *arguments: object) -> T | Exception:
    try:
        return make(*arguments)
    except Exception as error:
        return error


def _draft(received: ReceivedCall, tokenizer: Tokenizer) -> _Draft:
    call, received_s = received.call, received.received_s
    if call.messages:
        plan = plan_chat(call, tokenizer)
        return _Draft(call, plan, (plan.prompt,), received_s)
    if not call.prompts:
        # Nothing would ever come of it: neither a token nor an end.
        raise InvalidParameterError("There is nothing to answer.", "messages")
    if call.sampling.grammar is not None:
        check_grammar(call.sampling.grammar)
    return _Draft(call, ChatPlan("", call.sampling, Reading()), call.prompts, received_s)


class _Encoded:
    """Token ids of every text of a wave. A template writes special tokens itself, a plain text gets the model's."""

    def __init__(self, tokenizer: Tokenizer, drafts: Sequence[_Draft]) -> None:
        self._tokenizer = tokenizer
        self._ids: dict[tuple[str, bool], Sequence[int]] = {}
        for is_chat in (True, False):
            texts = list(
                {text: None for draft in drafts if bool(draft.call.messages) is is_chat for text in draft.texts}
            )
            if not texts:
                continue
            # One text that is no Unicode spoils the batch; each is then encoded when its own call asks for it.
            with suppress(InvalidParameterError):
                encoded = tokenizer.encode_batch(texts, add_special_tokens=not is_chat)
                self._ids.update(((text, is_chat), ids) for text, ids in zip(texts, encoded, strict=True))

    def of(self, prompt: Prompt, *, is_chat: bool) -> Sequence[int]:
        """Raises InvalidParameterError for a text that is no Unicode."""
        if not isinstance(prompt, str):
            return prompt
        found = self._ids.get((prompt, is_chat))
        if found is not None:
            return found
        return self._tokenizer.encode_chat(prompt) if is_chat else self._tokenizer.encode(prompt, True)


def _finish(draft: _Draft, encoded: _Encoded, max_model_len: int) -> PreparedCall:
    call, plan = draft.call, draft.plan
    prompts = [encoded.of(prompt, is_chat=bool(call.messages)) for prompt in draft.prompts]
    for token_ids in prompts:
        _require_room(token_ids, max_model_len, _field(call))
    requests = tuple(
        GenerationRequest(
            request_id=call.request_id if len(prompts) == 1 else f"{call.request_id}-{index}",
            prompt_token_ids=tuple(token_ids),
            sampling=replace(plan.sampling, max_tokens=call.max_tokens or max_model_len - len(token_ids)),
            received_s=draft.received_s,
            stop=call.stop,
            n=call.n,
            priority=call.priority,
            user=call.user,
            cache_salt=call.cache_salt,
            deadline_s=None if call.timeout_s is None else draft.received_s + call.timeout_s,
            continues_text=bool(call.template_variables.get("continue_final_message")),
            shown_token_ids=plan.shown_token_ids,
            embeds=call.embeds,
        )
        for index, token_ids in enumerate(prompts)
    )
    return PreparedCall(requests, plan.reading)


def _require_room(token_ids: Sequence[int], max_model_len: int, param: str) -> None:
    if not token_ids:
        raise InvalidParameterError("The prompt has no tokens.", param)
    if len(token_ids) >= max_model_len:
        raise ContextLengthError(len(token_ids), max_model_len, param)


def _field(call: GenerateCall) -> str:
    if call.messages:
        return "messages"
    return "input" if call.embeds else "prompt"
