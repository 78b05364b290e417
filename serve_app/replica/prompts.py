"""Turns a call into the engine's requests: renders the chat, encodes the prompts.

Owns: what a client's words become as tokens. Must not know: Ray, or how requests run. Slow for long prompts, so it is
called in a thread.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.core.generation import GenerationRequest
from engine.errors import ContextLengthError, InvalidParameterError
from engine.text.structured import check_grammar
from engine.text.tokenizer import Tokenizer
from serve_app.protocol import GenerateCall
from serve_app.replica.chat import ChatPlan, plan_chat
from serve_app.replica.reading import Reading


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """A call as the engine gets it, and how the answers will be read."""

    requests: tuple[GenerationRequest, ...]
    reading: Reading


def prepare_call(
    call: GenerateCall, tokenizer: Tokenizer, max_model_len: int, received_s: float | None = None
) -> PreparedCall:
    """Return one engine request for each prompt of ``call``, received now or at ``received_s``.

    Raises as ``plan_chat`` does, InvalidParameterError for an empty prompt, ContextLengthError with both lengths.
    """
    received_s = time.monotonic() if received_s is None else received_s
    prompts: Sequence[Sequence[int]]
    if call.messages:
        plan = plan_chat(call, tokenizer)
        prompts = [tokenizer.encode_chat(plan.prompt)]
    else:
        if call.sampling.grammar is not None:
            check_grammar(call.sampling.grammar)
        plan = ChatPlan("", call.sampling, Reading())
        prompts = _encode(call, tokenizer)
    for token_ids in prompts:
        _require_room(token_ids, max_model_len, _field(call))
    requests = tuple(
        GenerationRequest(
            request_id=call.request_id if len(prompts) == 1 else f"{call.request_id}-{index}",
            prompt_token_ids=tuple(token_ids),
            sampling=replace(plan.sampling, max_tokens=call.max_tokens or max_model_len - len(token_ids)),
            received_s=received_s,
            stop=call.stop,
            n=call.n,
            priority=call.priority,
            user=call.user,
            cache_salt=call.cache_salt,
            deadline_s=None if call.timeout_s is None else received_s + call.timeout_s,
            continues_text=bool(call.template_variables.get("continue_final_message")),
            shown_token_ids=plan.shown_token_ids,
        )
        for index, token_ids in enumerate(prompts)
    )
    return PreparedCall(requests, plan.reading)


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


def _encode(call: GenerateCall, tokenizer: Tokenizer) -> list[Sequence[int]]:
    encoded = iter(tokenizer.encode_batch([p for p in call.prompts if isinstance(p, str)], add_special_tokens=True))
    return [next(encoded) if isinstance(prompt, str) else prompt for prompt in call.prompts]


def _require_room(token_ids: Sequence[int], max_model_len: int, param: str) -> None:
    if not token_ids:
        raise InvalidParameterError("The prompt has no tokens.", param)
    if len(token_ids) >= max_model_len:
        raise ContextLengthError(len(token_ids), max_model_len, param)


def _field(call: GenerateCall) -> str:
    return "messages" if call.messages else "prompt"
