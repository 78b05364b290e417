"""Whether steps carry guessed tokens along, and how many.

Owns: what steps with guesses cost, and the choice. Must not know: how a guess is made or verified. A row with k guesses
computes k + 1 positions in one step; what was sampled before the first wrong guess is what would have been sampled one
by one, so guesses change when tokens come and never which.

They pay where a step's time hardly depends on its tokens, which is so with few rows on devices that are bound by
reading weights, and not elsewhere. So nothing is assumed: the time of steps with guesses is measured against what a
step without them would have taken, by number of rows and of guesses; and a request's hit rate is measured on all of
its tokens, whether its guesses were tried or not.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from statistics import median

from engine.request import SamplingParams
from engine.scheduler.prompt_lookup import DraftRecord, Guess
from engine.scheduler.request_state import Request
from engine.scheduler.step_cost import StepCostModel, StepLoad

MAX_DRAFT_TOKENS = 8
# Sampling rows of a step at most: what the slots have room for, and a few for who has one slot.
_LEAST_SAMPLING_ROWS = 4
_NUM_DRAFTS = (2, 4, MAX_DRAFT_TOKENS)
# Guesses must promise this much, because waiting for a result before the next step is chosen costs some overlap.
_LEAST_GAIN = 1.1
_FIRST_COST_OF_TOKEN = 0.1
_NUM_TIMES_KEPT = 5
# A table entry that always says no is never measured again: now and then its oldest time is forgotten.
_FORGET_AFTER = 128


class DraftCosts:
    """Times of steps with guesses, as multiples of the same step's time without them."""

    def __init__(self) -> None:
        self._ratios: dict[tuple[int, int], deque[float]] = {}
        self._num_asked: dict[tuple[int, int], int] = {}

    def observe(self, num_rows: int, num_drafts: int, ratio: float) -> None:
        """A step was measured."""
        self._ratios.setdefault((num_rows, num_drafts), deque(maxlen=_NUM_TIMES_KEPT)).append(ratio)
        self._num_asked[num_rows, num_drafts] = 0

    def ratio(self, num_rows: int, num_drafts: int) -> float:
        """The median of the last times; where there is none, by the mean cost of a guess in the nearest step known."""
        measured = self._ratios.get((num_rows, num_drafts))
        if measured:
            return median(measured)
        known = [(abs(rows - num_rows) + abs(drafts - num_drafts), rows, drafts) for rows, drafts in self._ratios]
        if not known:
            return 1.0 + _FIRST_COST_OF_TOKEN * num_drafts
        _, rows, drafts = min(known)
        return 1.0 + max(0.0, median(self._ratios[rows, drafts]) - 1.0) / drafts * num_drafts

    def rejected(self, num_rows: int, num_drafts: int) -> None:
        """The entry was looked at and said no."""
        key = (num_rows, num_drafts)
        self._num_asked[key] = self._num_asked.get(key, 0) + 1
        if self._num_asked[key] >= _FORGET_AFTER and key in self._ratios:
            self._num_asked[key] = 0
            self._ratios[key].popleft()
            if not self._ratios[key]:
                del self._ratios[key]


class Speculator:
    """Chooses guesses for steps that only decode."""

    def __init__(self, max_draft_tokens: int, slots: int, cost: StepCostModel) -> None:
        self._max_draft_tokens = max_draft_tokens
        self._max_sampling_rows = max(slots, _LEAST_SAMPLING_ROWS)
        self._cost = cost
        self.costs = DraftCosts()

    def wants_results(self, running: Sequence[Request]) -> bool:
        """Whether the next step should wait for tokens in flight, because guesses on top of them look worth it."""
        if not self._has_room(len(running)) or any(request.num_uncomputed_tokens > 1 for request in running):
            return False
        # If the first guessed token is the one in flight, the rest are the guesses of the step that waited.
        guesses = [self._guess(request, ahead=request.num_pending_tokens) for request in running]
        return any(self._choose(running, guesses, _load_of(running)))

    def choose(self, decoding: Sequence[Request], load: StepLoad) -> list[Guess]:
        """Guessed tokens for each of ``decoding``, whose every token is known; mostly none."""
        if not self._has_room(len(decoding)):
            return [()] * len(decoding)
        return self._choose(decoding, [self._guess(request) for request in decoding], load)

    def observe(self, load: StepLoad, num_drafts: int, elapsed_s: float) -> None:
        """A step with guesses took ``elapsed_s``, from its choice to its result."""
        plain_s = self._cost.predict_s(load)
        if plain_s > 0.0 and math.isfinite(elapsed_s):
            self.costs.observe(load.num_decode_rows, num_drafts, elapsed_s / plain_s)

    def appended(self, request: Request, num_running: int) -> None:
        """A token of the answer is known: judge the guess, and guess again."""
        if not _may_be_guessed(request.asked.sampling):
            return
        if request.drafts is None:
            request.drafts = DraftRecord()
        request.drafts.saw(request.token_ids, guess_again=self._has_room(num_running))

    def _has_room(self, num_rows: int) -> bool:
        return 0 < 2 * num_rows <= self._max_sampling_rows

    def _guess(self, request: Request, ahead: int = 0) -> Guess:
        """``ahead``: so many of the guessed tokens are in flight already."""
        wanted = min(self._max_draft_tokens, request.max_tokens_total - request.num_tokens - 1)
        if wanted <= 0 or request.drafts is None or request.drafts.expected is None:
            return ()
        return request.drafts.lookup.guess(request.token_ids, ahead + wanted)[ahead:]

    def _choose(self, decoding: Sequence[Request], guesses: list[Guess], load: StepLoad) -> list[Guess]:
        num_rows = len(decoding)
        none: list[Guess] = [()] * num_rows
        if not any(guesses) or self._cost.predict_s(load) <= 0.0:
            return none
        best, best_gain = none, _LEAST_GAIN
        for limit in _NUM_DRAFTS:
            drafts = _within(guesses, min(limit, self._max_draft_tokens), self._max_sampling_rows - num_rows)
            num_drafts = sum(map(len, drafts))
            expected = sum(_expected_hits(r, len(d)) for r, d in zip(decoding, drafts, strict=True))
            gain = (1.0 + expected / num_rows) / self.costs.ratio(num_rows, num_drafts)
            if gain > best_gain:
                best, best_gain = drafts, gain
            else:
                self.costs.rejected(num_rows, num_drafts)
        return best


def _may_be_guessed(sampling: SamplingParams) -> bool:
    """Whether a token's choice depends on nothing but the tokens before it and its own random numbers."""
    penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    return not sampling.guided and not sampling.logit_bias and penalties == (1.0, 0.0, 0.0)


def _expected_hits(request: Request, num_drafts: int) -> float:
    """Right guesses before the first wrong one."""
    if request.drafts is None:
        return 0.0
    return sum(request.drafts.hit_rate**position for position in range(1, num_drafts + 1))


def _within(guesses: Iterable[Guess], limit: int, num_rows_left: int) -> list[Guess]:
    """Every guess cut to ``limit`` tokens, and all of them to ``num_rows_left``."""
    drafts: list[Guess] = []
    for guess in guesses:
        drafts.append(guess[: min(limit, num_rows_left)])
        num_rows_left -= len(drafts[-1])
    return drafts


def _load_of(running: Sequence[Request]) -> StepLoad:
    return StepLoad(len(running), sum(request.num_tokens for request in running))
