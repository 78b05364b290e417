"""What the front of the engine and the loop that owns the model say to each other.

Owns: the frozen messages of both directions, the same whether a queue or a socket carries them. Must not know: who
carries them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from engine.config import EngineConfig
from engine.core.faults import FaultPlan
from engine.errors import EngineError
from engine.interfaces import ModelFacts, RunningView, SchedulerStats, WaitingView
from engine.request import EngineRequest, TokenOutput

MemoryFacts = Mapping[str, float | int | str | None]


@dataclass(frozen=True, slots=True)
class Launch:
    """First message to an engine process: what to build. ``faults`` is filled by tests alone."""

    config: EngineConfig
    teardown_s: float
    faults: tuple[FaultPlan, ...] = ()


@dataclass(frozen=True, slots=True)
class Submit:
    """The sequences of one client request: all of them are taken, or none is."""

    requests: tuple[EngineRequest, ...]


@dataclass(frozen=True, slots=True)
class Cancel:
    """End these sequences; what they hold is free before the next step is chosen. Each one's account comes back."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Complete:
    """As ``Cancel``, for answers that a stop string has ended: they are finished."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Take nothing new, go on for ``grace_s`` at most, fail what is left, free the model, end."""

    grace_s: float


@dataclass(frozen=True, slots=True)
class Abandon:
    """Free the model and end, with no word to the requests: their front is gone, or will give them to the next life."""

    why: str


@dataclass(frozen=True, slots=True)
class Progress:
    """How far start-up is: ``fraction`` of ``stage`` is done; None where it cannot be known."""

    stage: str
    fraction: float | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The engine at one moment, sent a few times a second while it works, once when it falls idle, and
    every second then."""

    scheduler: SchedulerStats
    memory: MemoryFacts = field(default_factory=dict)
    running: tuple[RunningView, ...] = ()
    waiting: tuple[WaitingView, ...] = ()


@dataclass(frozen=True, slots=True)
class Started:
    """The model is loaded. ``facts.max_model_len`` is the context that is served."""

    facts: ModelFacts
    slots_asked: str
    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class Outputs:
    """Everything one step brought, for all sequences, in one message."""

    outputs: tuple[TokenOutput, ...]
    snapshot: Snapshot | None = None

    def __reduce__(self) -> tuple[Callable[..., Outputs], tuple[object, ...]]:
        # The one message per step. Pickling 32 TokenOutputs as objects takes 70-110 us each way, as tuples a small
        # part of that; the time is taken from the thread that steps and from the front's event loop.
        return (_read_outputs, (tuple(_row(output) for output in self.outputs), self.snapshot))


@dataclass(frozen=True, slots=True)
class Failed:
    """The loop has ended because of ``error``: a StartupError before ``Started``, an EngineDeadError after it."""

    error: EngineError


@dataclass(frozen=True, slots=True)
class Stopped:
    """The loop has ended as it was told to, and has freed the model."""


ToEngine = Launch | Submit | Cancel | Complete | Shutdown | Abandon
FromEngine = Progress | Started | Outputs | Failed | Stopped
OnProgress = Callable[[Progress], None]


def _row(output: TokenOutput) -> tuple[object, ...]:
    return (
        output.request_id,
        output.token_ids,
        output.logprobs,
        output.finish_reason,
        output.error,
        output.num_prompt_tokens,
        output.num_cached_tokens,
        output.timeline,
        output.embedding,
    )


def _read_outputs(rows: Sequence[tuple[object, ...]], snapshot: Snapshot | None) -> Outputs:
    return Outputs(tuple(TokenOutput(*row) for row in rows), snapshot)  # type: ignore[arg-type]
