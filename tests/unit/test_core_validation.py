"""Requests are judged before anything is done for them, and the judgement names the field."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from engine.core.validation import validate_request
from engine.errors import ContextLengthError, InvalidParameterError
from engine.request import SamplingParams
from tests.core_fakes import FACTS, make_request


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("max_tokens", 0, "max_tokens"),
        ("temperature", -0.1, "temperature"),
        ("temperature", 2.1, "temperature"),
        ("temperature", math.nan, "temperature"),
        ("temperature", math.inf, "temperature"),
        ("top_p", 0.0, "top_p"),
        ("top_p", 1.1, "top_p"),
        ("top_p", math.nan, "top_p"),
        ("top_k", -1, "top_k"),
        ("top_k", FACTS.vocab_size, "top_k"),
        ("min_p", 1.5, "min_p"),
        ("repetition_penalty", 0.0, "repetition_penalty"),
        ("repetition_penalty", math.inf, "repetition_penalty"),
        ("presence_penalty", 2.5, "presence_penalty"),
        ("frequency_penalty", -2.5, "frequency_penalty"),
        ("logit_bias", ((FACTS.vocab_size, 1.0),), "logit_bias"),
        ("logit_bias", ((-1, 1.0),), "logit_bias"),
        ("logit_bias", ((1, 101.0),), "logit_bias"),
        ("seed", 2**63, "seed"),
        ("num_logprobs", 21, "top_logprobs"),
        ("stop_token_ids", (FACTS.vocab_size,), "stop_token_ids"),
    ],
)
def test_sampling_out_of_range_is_refused(field: str, value: object, param: str) -> None:
    request = make_request("a")
    sampling = replace(request.sampling, **{field: value})
    with pytest.raises(InvalidParameterError) as caught:
        validate_request(replace(request, sampling=sampling), FACTS)
    assert caught.value.param == param
    assert param in caught.value.message


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt_token_ids": ()}, "prompt"),
        ({"prompt_token_ids": (1, FACTS.vocab_size)}, "prompt"),
        ({"prompt_token_ids": (-1,)}, "prompt"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"stop": ("a", "")}, "stop"),
        ({"stop": ("a",) * 17}, "stop"),
    ],
)
def test_a_wrong_request_is_refused(changes: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        validate_request(replace(make_request("a"), **changes), FACTS)
    assert caught.value.param == param


def test_the_ends_of_the_ranges_are_allowed() -> None:
    sampling = SamplingParams(
        max_tokens=1,
        temperature=2.0,
        top_p=1.0,
        top_k=FACTS.vocab_size - 1,
        min_p=1.0,
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        logit_bias=((0, -100.0), (FACTS.vocab_size - 1, 100.0)),
        seed=-(2**63),
        num_logprobs=20,
        stop_token_ids=(0, FACTS.vocab_size - 1),
    )
    request = replace(make_request("a"), sampling=sampling)
    assert validate_request(request, FACTS) == request


def test_a_prompt_must_leave_room_for_one_token() -> None:
    fits = replace(make_request("a"), prompt_token_ids=(1,) * (FACTS.max_model_len - 1))
    assert validate_request(fits, FACTS).sampling.max_tokens == 1
    with pytest.raises(ContextLengthError) as caught:
        validate_request(replace(fits, prompt_token_ids=(1,) * FACTS.max_model_len), FACTS)
    assert str(FACTS.max_model_len) in caught.value.message


def test_max_tokens_is_clipped_to_the_context() -> None:
    request = make_request("a", "x" * 500, max_tokens=10_000)
    assert validate_request(request, FACTS).sampling.max_tokens == 12
