"""The seams between the engine's parts, as Protocols, and the facts that cross them.

Owns: what a model runner must offer (MLX, simulator and fake are three implementations) and the status records.
Must not know: any implementation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine.batch import StepBatch, StepOutput


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the rest of the engine needs to know of a loaded model.

    ``kv_bytes_per_token`` counts K and V of all layers. ``weights_bytes`` is measured after loading.
    ``state_bytes_per_slot``: recurrent state of one sequence; such a model shares a prefix only where a state was
    saved. ``is_alone``: it is served one sequence at a time, and shares no prefix at all. ``disclosures`` are sentences
    that stay in the status (kernel off, parity unchecked, slow BLAS). ``guides``: whether answers can be held to a
    grammar or a budget of thinking. ``embedding_size``: numbers of an embedding, None for a model that gives none;
    ``writes_text`` False for a model that was made for embeddings alone. ``verifies_drafts``: whether rows may carry
    guesses.
    """

    name: str
    revision: str
    architecture: str
    vocab_size: int
    max_model_len: int
    num_layers: int
    kv_bytes_per_token: int
    weights_bytes: int
    eos_token_ids: tuple[int, ...]
    device: str
    compute_dtype: str
    disclosures: tuple[str, ...] = ()
    guides: bool = False
    state_bytes_per_slot: int = 0
    is_alone: bool = False
    embedding_size: int | None = None
    writes_text: bool = True
    verifies_drafts: bool = False


class PendingStep(Protocol):
    """A launched step."""

    def result(self) -> StepOutput:
        """Wait for the step and return its tokens. Raises what the step raised."""
        ...


class ModelRunner(Protocol):
    """Computes steps. Used from one thread only: the one that built it."""

    @property
    def facts(self) -> ModelFacts:
        """Facts of the loaded model."""
        ...

    @property
    def max_steps_in_flight(self) -> int:
        """How many steps may be launched before the first result is read: 1 = none overlaps."""
        ...

    def launch(self, batch: StepBatch) -> PendingStep:
        """Start one step."""
        ...

    def release(self, request_ids: Sequence[str]) -> None:
        """Forget what is held for requests that finished or were preempted."""
        ...

    def close(self) -> None:
        """Free pools and weights. The runner is unusable afterwards."""
        ...


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """A moment of the scheduler. Blocks: total = free + cached + held; the window's are those of sliding-window layers
    with a pool of their own.

    ``num_admissions``: times that a request got a slot, ``num_admission_waves``: steps in which that happened.
    ``num_draft_tokens`` were guessed and tried, ``num_accepted_tokens`` of them came true.
    ``num_unread_tokens``: prompt tokens to compute, of requests that wait and that run. ``prefill_tokens_per_s`` and
    ``usual_answer_s`` (an answer of the usual length, decoded beside what runs now) are learnt from measured steps;
    ``usual_answer_row_s`` is what each further row adds to it, ``usual_answer_tokens`` the length.
    """

    slots: int
    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    peak_running: int
    num_blocks_total: int
    num_blocks_free: int
    num_blocks_cached: int
    num_steps: int
    num_preemptions: int
    num_prompt_tokens: int
    num_cached_prompt_tokens: int
    num_output_tokens: int
    num_finished: int
    num_refused: int
    num_cancelled: int
    num_failed: int
    num_admissions: int = 0
    num_admission_waves: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_unread_tokens: int = 0
    predicted_wait_s: float | None = None
    prefill_tokens_per_s: float | None = None
    usual_answer_s: float | None = None
    usual_answer_row_s: float | None = None
    usual_answer_tokens: float | None = None
    num_window_blocks_free: int = 0
    num_window_blocks_cached: int = 0
    waiting_on: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunningView:
    """One request that holds a slot. It reads its prompt until ``num_computed_tokens`` reaches it; then it decodes.

    ``waits_for``: what keeps it out of the steps that go out now, None when it is in them.
    """

    slot: int
    request_id: str
    user: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int
    num_output_tokens: int
    age_s: float
    waits_for: str | None = None


@dataclass(frozen=True, slots=True)
class WaitingView:
    """One request without a slot. ``num_tokens``: prompt, and what it had answered before it was preempted."""

    request_id: str
    user: str
    num_tokens: int
    age_s: float
    waits_for: str
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """What a replica discloses of its engine; unknown is None.

    ``running`` and ``waiting``: the requests themselves; of many that wait, the first. ``num_restarts`` counts restarts
    in place, ``last_failure`` is the sentence that the latest one was for.
    """

    state: str
    model: ModelFacts
    slots_asked: str
    scheduler: SchedulerStats
    memory: Mapping[str, float | int | str | None] = field(default_factory=dict)
    heartbeat_age_s: float | None = None
    num_restarts: int = 0
    last_failure: str | None = None
    running: tuple[RunningView, ...] = ()
    waiting: tuple[WaitingView, ...] = ()
