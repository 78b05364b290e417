"""The one table that says how each error is shown to a client.

Owns: exception class -> HTTP status, OpenAI error type and code, Retry-After; the errors that only the fleet side can
have; the error body. Must not know: which framework sends the answer. Ray's classes are rows by name, so that the
command line can use this module without loading Ray.

Looked up along the exception's class hierarchy: the nearest row wins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from engine.errors import EngineError, InvalidParameterError

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"


class ServeAppError(Exception):
    """Base of the errors that arise outside the engine. All arguments go to ``super().__init__`` for pickling."""

    @property
    def message(self) -> str:
        """One sentence for a person."""
        return str(self.args[0]) if self.args else type(self).__name__

    def __str__(self) -> str:
        return self.message


class UnsupportedParameterError(InvalidParameterError):
    """A known field asks for something that this server cannot do; it is refused rather than ignored."""


class MalformedRequestError(ServeAppError):
    """The body is not what the endpoint reads at all: bad JSON, or another content type."""


class ModelUnknownError(ServeAppError):
    """No model of that name is served."""

    def __init__(self, given: str, known: Sequence[str]) -> None:
        super().__init__(given, tuple(known))

    @property
    def message(self) -> str:
        given, known = self.args
        return f"The model {given!r} does not exist here. Served: {', '.join(map(repr, known))}."


class RouteUnknownError(ServeAppError):
    """There is nothing at that address."""


class MethodNotAllowedError(ServeAppError):
    """The address exists, but not for that HTTP method."""


class UnauthorizedError(ServeAppError):
    """The key is missing or wrong."""


class RateLimitError(ServeAppError):
    """A key has used up one of its limits; ``retry_after_s`` is when it may ask again."""

    def __init__(self, what: str, limit: int, retry_after_s: float) -> None:
        super().__init__(what, limit, retry_after_s)
        self.retry_after_s = retry_after_s

    @property
    def message(self) -> str:
        return f"This key is limited to {self.args[1]} {self.args[0]}. Try again in {self.retry_after_s:.0f} s."


class RequestTooLargeError(ServeAppError):
    """The body is larger than allowed."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(limit_bytes)

    @property
    def message(self) -> str:
        return f"The request's body is larger than {self.args[0]} bytes."


class RequestTimeoutError(ServeAppError):
    """The answer was not complete within the time that the server gives to one request."""

    def __init__(self, limit_s: float) -> None:
        super().__init__(limit_s)

    @property
    def message(self) -> str:
        return f"The answer was not complete within {self.args[0]:g} seconds."


class NoReplicaError(ServeAppError):
    """No replica of the model can answer now."""


class ReplicaDrainingError(ServeAppError):
    """The replica takes no new calls: its machine is about to leave."""


class ReplicaLostError(ServeAppError):
    """The replica that was answering is gone, or stopped before the answer was complete."""


@dataclass(frozen=True, slots=True)
class _Row:
    status: int
    type: str
    code: str | None
    retry_after_s: float | None = None


# Full dotted class name: how it is shown.
TABLE: dict[str, _Row] = {
    # The request is wrong.
    "engine.errors.RequestError": _Row(400, INVALID_REQUEST, None),
    "engine.errors.InvalidParameterError": _Row(400, INVALID_REQUEST, "invalid_value"),
    "serve_app.errors.UnsupportedParameterError": _Row(400, INVALID_REQUEST, "unsupported_parameter"),
    "engine.errors.ContextLengthError": _Row(400, INVALID_REQUEST, "context_length_exceeded"),
    "engine.errors.NeverFitsError": _Row(400, INVALID_REQUEST, "request_too_large_for_pool"),
    "serve_app.errors.MalformedRequestError": _Row(400, INVALID_REQUEST, "malformed_request"),
    "serve_app.errors.UnauthorizedError": _Row(401, "authentication_error", "invalid_api_key"),
    "serve_app.errors.ModelUnknownError": _Row(404, INVALID_REQUEST, "model_not_found"),
    "serve_app.errors.RouteUnknownError": _Row(404, INVALID_REQUEST, "unknown_url"),
    "serve_app.errors.MethodNotAllowedError": _Row(405, INVALID_REQUEST, "method_not_allowed"),
    "serve_app.errors.RequestTooLargeError": _Row(413, INVALID_REQUEST, "request_too_large"),
    # Right request, wrong moment.
    "serve_app.errors.RateLimitError": _Row(429, "rate_limit_error", "rate_limit_exceeded"),
    "engine.errors.AdmissionRefusedError": _Row(429, "rate_limit_error", "queue_full"),
    "ray.serve.exceptions.BackPressureError": _Row(429, "rate_limit_error", "queue_full", 5.0),
    "serve_app.errors.NoReplicaError": _Row(503, SERVER_ERROR, "no_replica", 5.0),
    "ray.serve.exceptions.DeploymentUnavailableError": _Row(503, SERVER_ERROR, "no_replica", 5.0),
    "ray.serve.exceptions.ReplicaUnavailableError": _Row(503, SERVER_ERROR, "replica_lost", 1.0),
    "serve_app.errors.ReplicaDrainingError": _Row(503, SERVER_ERROR, "replica_draining", 1.0),
    "serve_app.errors.ReplicaLostError": _Row(503, SERVER_ERROR, "replica_lost", 1.0),
    # Between two replicas Serve speaks gRPC and passes on most of its errors as they are.
    "grpc.RpcError": _Row(503, SERVER_ERROR, "replica_lost", 1.0),
    "ray.exceptions.RayActorError": _Row(503, SERVER_ERROR, "replica_lost", 1.0),
    "ray.exceptions.NodeDiedError": _Row(503, SERVER_ERROR, "replica_lost", 1.0),
    "engine.errors.EngineDeadError": _Row(503, SERVER_ERROR, "engine_dead", 5.0),
    "engine.errors.StartupError": _Row(503, SERVER_ERROR, "engine_not_started", 5.0),
    # The request was taken, and then ended without an answer.
    "serve_app.errors.RequestTimeoutError": _Row(408, SERVER_ERROR, "request_timeout"),
    "engine.errors.DeadlineExceededError": _Row(408, SERVER_ERROR, "request_timeout"),
    "engine.errors.RequestCancelledError": _Row(503, SERVER_ERROR, "request_cancelled", 1.0),
    "ray.serve.exceptions.RequestCancelledError": _Row(503, SERVER_ERROR, "request_cancelled", 1.0),
    "ray.exceptions.TaskCancelledError": _Row(503, SERVER_ERROR, "request_cancelled", 1.0),
    "engine.errors.RequestFailedError": _Row(500, SERVER_ERROR, "request_failed"),
    "engine.errors.StepFailedError": _Row(500, SERVER_ERROR, "step_failed"),
}
_UNKNOWN = _Row(500, SERVER_ERROR, "internal_error")
_GENERIC_MESSAGES = {
    "queue_full": "Too many requests are waiting. Try again later.",
    "no_replica": "No replica of this model can answer now. Try again later.",
    "replica_lost": "The machine that was answering is gone. Try again.",
    "request_cancelled": "The request was cancelled before its answer was complete.",
}


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """An error as a client sees it."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None

    @property
    def body(self) -> dict[str, dict[str, str | None]]:
        """OpenAI's error object."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """Retry-After in whole seconds, at least one, where waiting helps."""
        if self.retry_after_s is None:
            return {}
        return {"Retry-After": str(max(1, math.ceil(self.retry_after_s)))}


def cause_of(error: BaseException) -> BaseException:
    """Return what the replica raised.

    Ray hands it over as an instance of a class made on the spot that inherits from both RayTaskError and the cause's
    class, but not the cause's arguments; only its ``cause`` is whole.
    """
    while any(cls.__name__ == "RayTaskError" for cls in type(error).__mro__):
        cause = getattr(error, "cause", None)
        if not isinstance(cause, BaseException):
            break
        error = cause
    return error


def answer_for(error: BaseException) -> ErrorAnswer:
    """Return how ``error`` is shown. What is not in the table is a 500 that tells the client nothing of our insides."""
    error = cause_of(error)
    row = _row_of(error)
    param = getattr(error, "param", None)
    return ErrorAnswer(
        status=row.status,
        message=_message_of(error, row),
        type=row.type,
        param=str(param) if param is not None else None,
        code=row.code,
        retry_after_s=_retry_after_of(error, row),
    )


def _row_of(error: BaseException) -> _Row:
    for cls in type(error).__mro__:
        row = TABLE.get(f"{cls.__module__}.{cls.__qualname__}")
        if row is not None:
            return row
    return _UNKNOWN


def _message_of(error: BaseException, row: _Row) -> str:
    if row is _UNKNOWN:
        return "The server failed to answer this request; its log has the reason."
    if isinstance(error, EngineError | ServeAppError):
        return error.message
    return _GENERIC_MESSAGES[row.code or ""]


def _retry_after_of(error: BaseException, row: _Row) -> float | None:
    predicted_s = getattr(error, "retry_after_s", None)
    return float(predicted_s) if isinstance(predicted_s, int | float) else row.retry_after_s
