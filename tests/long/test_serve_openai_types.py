"""Requests: what is accepted, what is refused with the field's name, and what each field means for the engine."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from engine.errors import InvalidParameterError
from engine.request import SamplingParams
from serve_app.errors import UnsupportedParameterError
from serve_app.ingress.openai_types import ChatCompletionRequest, CompletionRequest
from serve_app.ingress.translate import CallContext, chat_call, completion_call
from serve_app.ingress.validation import explain
from serve_app.protocol import GenerateCall

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"model": "m", "prompt": "hi"}
CONTEXT = CallContext("id", "m", 60.0)


def chat(**fields: Any) -> GenerateCall:
    return chat_call(ChatCompletionRequest.model_validate({**CHAT, **fields}), CONTEXT)


def text(**fields: Any) -> GenerateCall:
    return completion_call(CompletionRequest.model_validate({**TEXT, **fields}), CONTEXT)


def refusal(kind: type[ChatCompletionRequest | CompletionRequest], body: Any) -> Exception:
    """What a client is told about a body that must not be accepted."""
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    return explain([{**finding, "loc": ("body", *finding["loc"])} for finding in caught.value.errors()])


@pytest.mark.parametrize("kind", [ChatCompletionRequest, CompletionRequest])
def test_null_means_not_given_for_every_optional_field(
    kind: type[ChatCompletionRequest | CompletionRequest],
) -> None:
    base = CHAT if kind is ChatCompletionRequest else TEXT
    nulls = dict.fromkeys(set(kind.model_fields) - set(base))
    assert kind.model_validate({**base, **nulls}) == kind.model_validate(base)
    assert len(nulls) > 15


@pytest.mark.parametrize(
    "fields",
    [
        {"metadata": {"team": "sales"}, "store": True, "user": "anna", "safety_identifier": "x"},
        {"service_tier": "auto"},
        {"response_format": {"type": "text"}},
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
        {"tool_choice": "none", "functions": [], "function_call": "none"},
        {"modalities": ["text"], "prediction": {"type": "content", "content": "x"}},
        {"stream_options": {}},
        {"stream_options": {"include_usage": None, "include_obfuscation": False}},
        {"logprobs": True, "top_logprobs": 0},
        {"logprobs": False, "top_logprobs": None},
    ],
)
def test_harmless_extras_are_accepted(fields: dict[str, Any]) -> None:
    assert chat(**fields).num_choices == 1


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({}, None),
        ({"max_tokens": 7}, 7),
        ({"max_completion_tokens": 5}, 5),
        ({"max_completion_tokens": 5, "max_tokens": 7}, 5),
        ({"max_completion_tokens": None, "max_tokens": 7}, 7),
    ],
)
def test_max_completion_tokens_goes_before_max_tokens(fields: dict[str, Any], limit: int | None) -> None:
    assert chat(**fields).max_tokens == limit


@pytest.mark.parametrize(("stop", "expected"), [(None, ()), ("END", ("END",)), (["a", "b"], ("a", "b")), ([], ())])
def test_stop_is_a_text_a_list_or_null(stop: Any, expected: tuple[str, ...]) -> None:
    assert chat(stop=stop).stop == expected
    assert text(stop=stop).stop == expected


def test_what_is_not_given_has_openais_defaults() -> None:
    assert chat().sampling == SamplingParams(temperature=1.0, top_p=1.0)
    assert text().max_tokens == 16


def test_every_sampling_field_reaches_the_engine() -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "logit_bias": {"5": -100, "7": 1.5},
        "seed": 42,
        "stop_token_ids": [9],
        "ignore_eos": True,
    }
    expected = SamplingParams(
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        repetition_penalty=1.1,
        presence_penalty=1,
        frequency_penalty=-1,
        logit_bias=((5, -100), (7, 1.5)),
        seed=42,
        stop_token_ids=(9,),
        ignore_eos=True,
    )
    assert chat(**fields).sampling == expected
    assert text(**fields).sampling == expected


def test_a_nucleus_of_nothing_is_the_likeliest_token() -> None:
    sampling = chat(top_p=0).sampling
    assert (sampling.top_k, sampling.top_p) == (1, 1.0)


@pytest.mark.parametrize(
    ("fields", "num_logprobs"), [({}, None), ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 5}, 5)]
)
def test_logprobs_of_chats(fields: dict[str, Any], num_logprobs: int | None) -> None:
    assert chat(**fields).sampling.num_logprobs == num_logprobs


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([{"role": "developer", "content": "be brief"}], [("system", "be brief")]),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
            [("user", "a\nb")],
        ),
        ([{"role": "assistant", "content": None, "refusal": "no"}], [("assistant", "no")]),
        ([{"role": "assistant", "content": "x", "tool_calls": None, "annotations": []}], [("assistant", "x")]),
        (
            [{"role": r, "content": "x"} for r in ("user", "system", "user")],
            [("user", "x"), ("system", "x"), ("user", "x")],
        ),
    ],
)
def test_messages_become_what_templates_take(messages: Any, expected: list[tuple[str, str]]) -> None:
    assert [(m["role"], m["content"]) for m in chat(messages=messages).messages] == expected


@pytest.mark.parametrize(
    ("fields", "header", "key"),
    [
        ({"user": "anna"}, "", "anna"),
        ({"user": "anna", "prompt_cache_key": "thread-1"}, "", "thread-1"),
        ({"user": "anna", "prompt_cache_key": "thread-1"}, "session-9", "session-9"),
        ({}, "", ""),
    ],
)
def test_the_conversation_is_named_by_header_cache_key_or_user(fields: dict[str, Any], header: str, key: str) -> None:
    request = ChatCompletionRequest.model_validate({**CHAT, **fields})
    assert chat_call(request, CallContext("id", "m", 60.0, session_key=header)).session_key == key


WRONG_NUMBERS = [True, "1", [], {}, float("nan"), float("inf"), -float("inf"), 10**400]


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [*WRONG_NUMBERS, -0.1, 2.1]),
        ("top_p", [*WRONG_NUMBERS, -0.1, 1.1]),
        ("min_p", [*WRONG_NUMBERS, -0.1, 1.1]),
        ("presence_penalty", [*WRONG_NUMBERS, -2.1, 2.1]),
        ("frequency_penalty", [*WRONG_NUMBERS, -2.1, 2.1]),
        ("repetition_penalty", [*WRONG_NUMBERS, 0, -1]),
        ("max_tokens", [*WRONG_NUMBERS, 0, -1, 1.5]),
        ("n", [*WRONG_NUMBERS, 0, -1, 129, 1.0]),
        ("top_k", [*WRONG_NUMBERS, -2, 1.5]),
        ("seed", [*WRONG_NUMBERS, 2**63]),
        ("stream", ["true", 1, []]),
        ("user", [5, [], {}]),
        ("stop", [5, {}, [1], [None], "", [""], ["a"] * 17, [["a"]]]),
        ("logit_bias", [5, [], {"x": 1}, {"-1": 1}, {"1": 101}, {"1": "1"}, {"1": float("nan")}, {"1": None}]),
        ("stop_token_ids", [5, "5", ["5"], [-1], [True]]),
        ("stream_options", [5, [], {"include_usage": 1}, {"unknown": 1}]),
        ("model", [None, 5, "", []]),
    ],
)
@pytest.mark.parametrize("kind", [ChatCompletionRequest, CompletionRequest])
def test_wrong_values_are_refused_by_field(kind: Any, field: str, values: list[Any]) -> None:
    base = CHAT if kind is ChatCompletionRequest else TEXT
    for value in values:
        error = refusal(kind, {**base, field: value})
        assert isinstance(error, InvalidParameterError), value
        assert error.param is not None
        assert error.param.startswith(field), value


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"messages": [{"role": "function", "content": "x", "name": "f"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content"),
    ],
)
def test_what_cannot_be_honoured_is_refused_and_not_ignored(fields: dict[str, Any], param: str) -> None:
    error = refusal(ChatCompletionRequest, {**CHAT, **fields})
    assert isinstance(error, UnsupportedParameterError)
    assert error.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"echo": True, "logprobs": 1}, "logprobs"),
    ],
)
def test_what_completions_cannot_honour(fields: dict[str, Any], param: str) -> None:
    error = refusal(CompletionRequest, {**TEXT, **fields})
    assert isinstance(error, UnsupportedParameterError)
    assert error.param == param


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ([5], "messages[0]"),
        ([{}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content"),
        ([{"role": "user", "content": ["text"]}], "messages[0].content"),
        ([{"role": "boss", "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": "x"}, {"role": "user", "content": "x", "colour": 1}], "messages[1].colour"),
        ([{"role": "user", "content": "\ud800"}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text", "text": "\udc00"}]}], "messages[0].content"),
    ],
)
def test_wrong_messages_are_refused_by_place(messages: Any, param: str) -> None:
    error = refusal(ChatCompletionRequest, {**CHAT, "messages": messages})
    assert isinstance(error, InvalidParameterError)
    assert error.param == param


@pytest.mark.parametrize(
    "prompt",
    [None, "", [], [""], [[]], [True], [1, "a"], {"a": 1}, 5, [-1], [2**31], "\ud800", [1.5], ["a", None]],
)
def test_wrong_prompts_are_refused(prompt: Any) -> None:
    error = refusal(CompletionRequest, {**TEXT, "prompt": prompt})
    assert isinstance(error, InvalidParameterError)
    assert error.param == "prompt"


@pytest.mark.parametrize(("name", "hint"), [("temprature", "`temperature`"), ("mirostat_eta", None)])
def test_unknown_fields_are_refused_with_the_closest_known_one(name: str, hint: str | None) -> None:
    error = refusal(ChatCompletionRequest, {**CHAT, name: 1})
    assert isinstance(error, InvalidParameterError)
    assert error.param == name
    assert (hint or "") in error.message
    assert ("Did you mean" in error.message) == (hint is not None)


def test_a_missing_field_is_named() -> None:
    error = refusal(ChatCompletionRequest, {"model": "m"})
    assert isinstance(error, InvalidParameterError)
    assert error.param == "messages"


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(sorted(ChatCompletionRequest.model_fields)), _JSON)
def test_any_value_in_any_field_is_accepted_or_refused_by_name(field: str, value: Any) -> None:
    try:
        ChatCompletionRequest.model_validate({**CHAT, field: value})
    except ValidationError as error:
        told = explain([{**finding, "loc": ("body", *finding["loc"])} for finding in error.errors()])
        assert isinstance(told, InvalidParameterError)
        assert str(told.param).startswith(field)
        str(told).encode("utf-8", "strict")
