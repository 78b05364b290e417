"""The table of errors: every typed error has a row, errors survive Ray's wrapping, nothing internal is shown."""

from __future__ import annotations

import inspect
import pickle

import pytest

from engine import errors as engine_errors
from serve_app import errors
from serve_app.errors import TABLE, answer_for


class RayTaskError(Exception):
    """Has the name and the shape of Ray's wrapper."""


def as_ray_hands_it_over(cause: Exception) -> Exception:
    """An instance of both classes that holds the cause and not the cause's arguments, as Ray makes it."""

    class BothError(RayTaskError, type(cause)):  # type: ignore[misc]
        def __init__(self) -> None:
            self.cause = cause

        @property
        def args(self) -> tuple[object, ...]:
            return (cause,)

    return BothError()


@pytest.mark.parametrize("module", [engine_errors, errors])
def test_every_error_has_a_row_of_its_own_or_of_its_kind(module: object) -> None:
    roots = (engine_errors.EngineError, errors.ServeAppError)
    kinds = [c for _, c in inspect.getmembers(module, inspect.isclass) if issubclass(c, roots) and c not in roots]
    without = [
        kind.__qualname__
        for kind in kinds
        if not any(f"{base.__module__}.{base.__qualname__}" in TABLE for base in kind.__mro__)
    ]
    assert not without
    assert len(kinds) > 5


@pytest.mark.parametrize(
    ("error", "status", "code", "param", "retry_after_s"),
    [
        (engine_errors.InvalidParameterError("bad", "top_k"), 400, "invalid_value", "top_k", None),
        (errors.UnsupportedParameterError("no", "tools"), 400, "unsupported_parameter", "tools", None),
        (engine_errors.ContextLengthError(9, 8, "prompt"), 400, "context_length_exceeded", "prompt", None),
        (engine_errors.NeverFitsError(9, 8), 400, "request_too_large_for_pool", None, None),
        (errors.UnauthorizedError("no key"), 401, "invalid_api_key", None, None),
        (errors.ModelUnknownError("x", ["a"]), 404, "model_not_found", None, None),
        (errors.RequestTooLargeError(10), 413, "request_too_large", None, None),
        (engine_errors.AdmissionRefusedError("requests", 4, 5, 2.5), 429, "queue_full", None, 2.5),
        (errors.NoReplicaError("none"), 503, "no_replica", None, 5.0),
        (errors.RequestTimeoutError(600.0), 408, "request_timeout", None, None),
        (engine_errors.DeadlineExceededError("late"), 408, "request_timeout", None, None),
        (engine_errors.ConfigError("bad", "fix"), 503, "engine_not_started", None, 5.0),
        (KeyError("inside"), 500, "internal_error", None, None),
    ],
)
def test_rows(error: Exception, status: int, code: str, param: str | None, retry_after_s: float | None) -> None:
    for raised in (error, pickle.loads(pickle.dumps(error)), as_ray_hands_it_over(error)):
        answer = answer_for(raised)
        assert (answer.status, answer.code, answer.param) == (status, code, param)
        assert answer.retry_after_s == retry_after_s


def test_messages_carry_the_limit_and_the_given_value() -> None:
    assert "4096" in answer_for(engine_errors.ContextLengthError(5000, 4096)).message
    assert "5000" in answer_for(engine_errors.ContextLengthError(5000, 4096)).message
    assert "'gpt-9'" in answer_for(errors.ModelUnknownError("gpt-9", ["demo"])).message
    assert "inside" not in answer_for(KeyError("inside")).message


@pytest.mark.parametrize(("wait_s", "header"), [(0.0, "1"), (0.2, "1"), (6.4, "7"), (30.0, "30")])
def test_retry_after_is_in_whole_seconds_and_never_zero(wait_s: float, header: str) -> None:
    answer = answer_for(engine_errors.AdmissionRefusedError("requests", 1, 2, wait_s))
    assert answer.headers == {"Retry-After": header}
