"""Checks a request against the model that is loaded, before anything is done for it.

Owns: ranges and their messages. Must not know: the scheduler's limits (it refuses by itself), HTTP.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from engine.core.generation import GenerationRequest
from engine.errors import ContextLengthError, InvalidParameterError
from engine.interfaces import ModelFacts
from engine.request import SamplingParams

MAX_LOGPROBS = 20
MAX_ANSWERS = 128
MAX_STOP_STRINGS = 16
MAX_TEMPERATURE = 2.0
MAX_LOGIT_BIAS = 100.0


def validate_request(request: GenerationRequest, facts: ModelFacts) -> GenerationRequest:
    """Return ``request`` with ``max_tokens`` clipped to the context.

    Raises InvalidParameterError naming the field, ContextLengthError with both lengths.
    """
    if request.embeds:
        _require(facts.embedding_size is not None, "model", "This model gives no embeddings.")
    else:
        _require(facts.writes_text, "model", "This model gives embeddings; it writes no text.")
    num_prompt_tokens, param = len(request.prompt_token_ids), "input" if request.embeds else "prompt"
    _require(num_prompt_tokens > 0, param, "The prompt has no tokens; at least one is needed.")
    _require_token_ids(request.prompt_token_ids, param, facts)
    if num_prompt_tokens >= facts.max_model_len:
        raise ContextLengthError(num_prompt_tokens, facts.max_model_len)
    _require_range("n", request.n, 1, MAX_ANSWERS)
    _require(
        len(request.stop) <= MAX_STOP_STRINGS,
        "stop",
        f"`stop` has {len(request.stop)} strings; at most {MAX_STOP_STRINGS} are allowed.",
    )
    _require(all(request.stop), "stop", "`stop` has an empty string, which would end every answer before it begins.")
    _validate_sampling(request.sampling, facts)
    max_tokens = min(request.sampling.max_tokens, facts.max_model_len - num_prompt_tokens)
    return replace(request, sampling=replace(request.sampling, max_tokens=max_tokens))


def _validate_sampling(sampling: SamplingParams, facts: ModelFacts) -> None:
    _require(sampling.max_tokens >= 1, "max_tokens", f"`max_tokens` is {sampling.max_tokens}; at least 1 is needed.")
    _require_range("temperature", sampling.temperature, 0.0, MAX_TEMPERATURE)
    _require(0.0 < sampling.top_p <= 1.0, "top_p", f"`top_p` is {sampling.top_p}; it must be above 0 and at most 1.")
    _require(
        0 <= sampling.top_k < facts.vocab_size,
        "top_k",
        f"`top_k` is {sampling.top_k}; it must be from 0 (off) to {facts.vocab_size - 1} (the vocabulary less one).",
    )
    _require_range("min_p", sampling.min_p, 0.0, 1.0)
    _require(
        0.0 < sampling.repetition_penalty < math.inf,
        "repetition_penalty",
        f"`repetition_penalty` is {sampling.repetition_penalty}; it must be above 0.",
    )
    _require_range("presence_penalty", sampling.presence_penalty, -2.0, 2.0)
    _require_range("frequency_penalty", sampling.frequency_penalty, -2.0, 2.0)
    _require_token_ids([token_id for token_id, _ in sampling.logit_bias], "logit_bias", facts)
    for _, bias in sampling.logit_bias:
        _require_range("logit_bias", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
    if sampling.seed is not None:
        _require_range("seed", sampling.seed, -(2**63), 2**63 - 1)
    if sampling.num_logprobs is not None:
        _require_range("top_logprobs", sampling.num_logprobs, 0, min(MAX_LOGPROBS, facts.vocab_size))
    _require_token_ids(sampling.stop_token_ids, "stop_token_ids", facts)
    _validate_guide(sampling, facts)


def _validate_guide(sampling: SamplingParams, facts: ModelFacts) -> None:
    if not sampling.guided:
        return
    _require(facts.guides, "response_format", "This server's engine cannot hold answers to a format.")
    _require(
        not (sampling.ignore_eos and sampling.grammar),
        "ignore_eos",
        "`ignore_eos` contradicts a format, which says where the answer ends.",
    )
    if sampling.thinking is not None:
        _require_token_ids((*sampling.thinking.start, *sampling.thinking.end), "thinking", facts)


def _require(condition: bool, param: str, message: str) -> None:
    if not condition:
        raise InvalidParameterError(message, param)


def _require_range(param: str, value: float, low: float, high: float) -> None:
    # A NaN compares false with everything, so it is refused here too.
    _require(low <= value <= high, param, f"`{param}` is {value}; it must be from {low} to {high}.")


def _require_token_ids(token_ids: Sequence[int], param: str, facts: ModelFacts) -> None:
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < facts.vocab_size):
        return
    wrong = next(token_id for token_id in token_ids if not 0 <= token_id < facts.vocab_size)
    raise InvalidParameterError(
        f"`{param}` names token {wrong}; this model's tokens are 0 to {facts.vocab_size - 1}.", param
    )
