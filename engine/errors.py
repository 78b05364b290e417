"""Every failure the engine can report, as types.

Owns: the tree below. Each error carries the limit and the given value it speaks of, so that whoever shows it can say
both. Must not know: HTTP, Ray, or how an error is shown (serve_app/errors.py has that table).

    EngineError
    |-- StartupError                the engine cannot be built as configured
    |   |-- ConfigError             a key or value of the configuration
    |   |-- ModelNotFoundError      no such model on this machine or hub
    |   |-- UnsupportedModelError   the model loads, but cannot be decoded in slots correctly
    |   `-- MemoryPlanError         the ledger does not add up
    |-- RequestError                this request is wrong; sending it again will fail again
    |   |-- InvalidParameterError
    |   |-- ContextLengthError      prompt (or prompt + answer) is longer than the context
    |   `-- NeverFitsError          needs more blocks than the pool will ever have
    |-- AdmissionRefusedError       right request, wrong moment: retry later
    |-- RequestFailedError          this request ended in the engine; others go on
    |   |-- DeadlineExceededError
    |   |-- StepFailedError         the step that held the request raised
    |   `-- RequestCancelledError   the client went away, or the engine is stopping
    `-- EngineDeadError             the engine process or thread is gone; nothing in it can answer
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of all engine errors. Arguments all go to ``super().__init__`` so that errors survive pickling."""

    def __str__(self) -> str:
        return self.message

    @property
    def message(self) -> str:
        """One sentence for a person."""
        return str(self.args[0]) if self.args else type(self).__name__


class StartupError(EngineError):
    """The engine cannot be built as configured; ``fix`` is one concrete thing to do."""

    def __init__(self, message: str, fix: str = "") -> None:
        super().__init__(message, fix)

    @property
    def fix(self) -> str:
        """One concrete remedy, or an empty string."""
        return str(self.args[1])

    def __str__(self) -> str:
        return f"{self.message} Fix: {self.fix}" if self.fix else self.message


class ConfigError(StartupError):
    """A configuration key or value is wrong."""


class ModelNotFoundError(StartupError):
    """The named model is neither on this machine nor reachable on a hub."""


class UnsupportedModelError(StartupError):
    """The model loads, but cannot be decoded in slots with right results."""


class MemoryPlanError(StartupError):
    """The memory ledger does not add up: the message names every term."""


class RequestError(EngineError):
    """The request itself is wrong; ``param`` names its field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message, param)

    @property
    def param(self) -> str | None:
        """The request field at fault, if one can be named."""
        value = self.args[1]
        return None if value is None else str(value)


class InvalidParameterError(RequestError):
    """A field has a value outside its range."""


class ContextLengthError(RequestError):
    """The prompt does not leave room for one token in the context."""

    def __init__(self, num_prompt_tokens: int, max_model_len: int, param: str | None = "messages") -> None:
        super().__init__(
            f"This model's context is {max_model_len} tokens; the prompt has {num_prompt_tokens} "
            f"and at least one token must be left for the answer.",
            param,
        )
        self.num_prompt_tokens = num_prompt_tokens
        self.max_model_len = max_model_len

    def __reduce__(self) -> tuple[type[ContextLengthError], tuple[int, int, str | None]]:
        return (type(self), (self.num_prompt_tokens, self.max_model_len, self.param))


class NeverFitsError(RequestError):
    """The request needs more blocks than the whole pool has."""

    def __init__(self, num_blocks_needed: int, num_blocks_total: int) -> None:
        super().__init__(
            f"The request needs {num_blocks_needed} KV blocks and this machine's pool has {num_blocks_total}.", None
        )
        self.num_blocks_needed = num_blocks_needed
        self.num_blocks_total = num_blocks_total

    def __reduce__(self) -> tuple[type[NeverFitsError], tuple[int, int]]:
        return (type(self), (self.num_blocks_needed, self.num_blocks_total))


class AdmissionRefusedError(EngineError):
    """The waiting queue is full; ``retry_after_s`` is the predicted wait."""

    def __init__(self, what: str, limit: int, given: int, retry_after_s: float) -> None:
        super().__init__(what, limit, given, retry_after_s)
        self.what = what
        self.limit = limit
        self.given = given
        self.retry_after_s = retry_after_s

    @property
    def message(self) -> str:
        return (
            f"The waiting queue is full: {self.given} {self.what} where {self.limit} are allowed. "
            f"Try again in about {self.retry_after_s:.0f} s."
        )


class RequestFailedError(EngineError):
    """One request ended with an error inside the engine."""


class DeadlineExceededError(RequestFailedError):
    """The request was not done at its deadline."""


class StepFailedError(RequestFailedError):
    """The step that held this request raised."""


class RequestCancelledError(RequestFailedError):
    """The client went away, or the engine is stopping."""


class EngineDeadError(EngineError):
    """The engine is gone; open and new requests cannot be answered by it."""
