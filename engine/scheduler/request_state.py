"""The scheduler's own record of a request: the mutable side of an ``EngineRequest``.

Owns: how far a request has come. Only this package writes to it; nothing outside ever sees it. Must not know: why
anything is done.

There is no prefill or decode phase. A request has ``num_tokens`` tokens (prompt and answer, the one being sampled
included) of which ``num_computed_tokens`` went through the model or are in a launched step; a step lets the second
number chase the first. A new prompt, a prefix hit, a prompt in the middle, a decoding request and one that resumes
after preemption differ in nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b

from engine.batch import BlockCopy
from engine.memory.kv_cache_manager import BlockTable
from engine.memory.window_blocks import WindowTable
from engine.request import EngineRequest, Pause, Timeline
from engine.scheduler.prompt_lookup import DraftRecord
from engine.scheduler.waiting_time import WaitAccount

NO_SLOT = -1


class Place(Enum):
    """Where a request is."""

    QUEUE = "queue"
    PARKED = "parked"
    SLOT = "slot"
    GONE = "gone"


@dataclass(slots=True)
class RequestStates:
    """One request's saved states. ``to_load``: a pinned entry that its first row starts from.

    ``points``: lengths after which the state is saved for others. ``rolling``: the newest saved block hash that only
    this request has kept so far.
    """

    num_matched_tokens: int = 0
    to_load: int | None = None
    points: frozenset[int] = frozenset()
    rolling: bytes | None = None


@dataclass(slots=True, eq=False)
class Request:
    """``arrival`` numbers requests in the order of arrival and never changes, so it is also a place in line.

    ``token_ids``             prompt and answer, as far as the host knows them
    ``num_pending_tokens``    tokens that launched steps are sampling
    ``num_computed_tokens``   went through the model, or are in a launched step
    ``num_confirmed_tokens``  those of them that are in finished steps
    ``num_rows_in_flight``    launched rows whose result is still to come
    ``max_tokens_total``      where prompt and answer end at the latest
    ``num_charged_tokens``    prompt tokens that the user's share has been charged for
    ``immune_until_output``   answer tokens before which it should not be preempted again
    ``num_times_passed``      how many requests went first although this one was ahead,
    ``num_tokens_passed``     and how many tokens they had in all; ``passing``: it goes before the holder of the turn
    ``copy_before_start``     block copy that has to precede the first row
    ``last_slot``             the slot that it holds, or held last
    ``pauses``                one for each preemption
    ``states``                saved recurrent states, for models that have any
    ``drafts``                guesses at its next tokens, once there are any
    ``has_drafts_in_flight``  a launched row carries guesses, so that nobody knows where the next one starts
    ``window_table``          blocks of sliding-window layers, where those have a pool of their own
    """

    asked: EngineRequest
    arrival: int
    table: BlockTable
    max_tokens_total: int
    seed: int
    token_ids: list[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    wait: WaitAccount = field(default_factory=WaitAccount)
    place: Place = Place.GONE
    slot: int = NO_SLOT
    num_computed_tokens: int = 0
    num_confirmed_tokens: int = 0
    num_pending_tokens: int = 0
    num_rows_in_flight: int = 0
    num_charged_tokens: int = 0
    num_cached_tokens: int = 0
    immune_until_output: int = 0
    num_times_passed: int = 0
    num_tokens_passed: int = 0
    passing: bool = False
    copy_before_start: BlockCopy | None = None
    states: RequestStates = field(default_factory=RequestStates)
    drafts: DraftRecord | None = None
    has_drafts_in_flight: bool = False
    window_table: WindowTable = field(default_factory=WindowTable)
    admitted_s: float | None = None
    prefill_started_s: float | None = None
    first_token_s: float | None = None
    last_slot: int | None = None
    pauses: list[Pause] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.token_ids = list(self.asked.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def request_id(self) -> str:
        """The caller's name for it."""
        return self.asked.request_id

    @property
    def user(self) -> str:
        """Whose fair share it uses."""
        return self.asked.user

    @property
    def priority(self) -> int:
        """Lower runs first."""
        return self.asked.priority

    @property
    def num_preemptions(self) -> int:
        """How often it was taken off its slot."""
        return len(self.pauses)

    def row_taken(self, now_s: float) -> None:
        """A step with a row of this request goes out: it waits for nothing any more."""
        if self.prefill_started_s is None:
            self.prefill_started_s = now_s
        if self.pauses and self.pauses[-1].resumed_s is None:
            self.pauses[-1] = Pause(self.pauses[-1].preempted_s, now_s)

    @property
    def num_tokens(self) -> int:
        """Prompt and answer, with the tokens that launched steps are sampling."""
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def num_output_tokens(self) -> int:
        """Known tokens of the answer."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens that no launched step has taken up: 1 while decoding."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def ends_with_pending(self) -> bool:
        """Whether the tokens in flight are the last ones whatever they are, so that no further step is needed."""
        return self.num_pending_tokens > 0 and self.num_tokens >= self.max_tokens_total

    def timeline(self, finished_s: float | None) -> Timeline:
        """The frozen account that goes out with the last token."""
        return Timeline(
            received_s=self.asked.received_s,
            admitted_s=self.admitted_s,
            prefill_started_s=self.prefill_started_s,
            first_token_s=self.first_token_s,
            finished_s=finished_s,
            num_preemptions=self.num_preemptions,
            waited_s=dict(self.wait.waited_s),
            slot=self.last_slot,
            pauses=tuple(self.pauses),
        )


def seed_of(asked: EngineRequest) -> int:
    """The request's own random stream: as asked, or drawn from its id, which callers make unique."""
    if asked.sampling.seed is not None:
        return asked.sampling.seed
    return int.from_bytes(blake2b(asked.request_id.encode(), digest_size=4).digest(), "little")
