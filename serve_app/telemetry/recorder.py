"""Keeps account of a replica's calls and makes a record of each that is over.

Owns: which calls are open, the gaps between their tokens, and when a call is over: its caller has left or has
everything, and the engine has accounted for each of its requests. Must not know: Ray, what is done with records.
Belongs to the engine's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.core.generation import GenerationDelta, RequestAccount
from serve_app.errors import answer_for
from serve_app.protocol import GenerateCall
from serve_app.telemetry.record import CANCELLED, OK, AnswerRecord, CallRecord, ReplicaName, TokenGaps

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tokens:
    """What a message of an answer brought: new tokens, and the gaps before them.

    ``first_of``: prompt and cached tokens of each answer that has begun with it.
    """

    num_output: int
    gaps_s: Sequence[float]
    first_of: Sequence[tuple[int, int]]


class Sink(Protocol):
    """Who is told. Called on the event loop; must be quick. What it raises is logged and harms nobody."""

    def tokens(self, tokens: Tokens) -> None:
        """Tokens left the engine."""
        ...

    def finished(self, record: CallRecord) -> None:
        """A call is over."""
        ...


class OpenCall:
    """One call from its arrival to its record."""

    def __init__(self, recorder: Recorder, call: GenerateCall, received_s: float, keeps_texts: bool) -> None:
        self.call = call
        self.received_s = received_s
        self._recorder = recorder
        self._places: dict[str, int] = {}
        self._accounts: dict[str, RequestAccount] = {}
        self._gaps: dict[int, TokenGaps] = {}
        self._newest_s: dict[int, float] = {}
        self._num_noted: dict[int, int] = {}
        self._texts: dict[int, list[str]] | None = {} if keeps_texts else None
        self._num_finished = 0
        self._outcome: str | None = None

    def prepared(self, request_ids: Sequence[str]) -> None:
        """The call became these requests, one for each prompt."""
        self._places = {request_id: place for place, request_id in enumerate(request_ids)}
        self._recorder.follow(self, request_ids)

    def note(self, arrived: Iterable[tuple[int, GenerationDelta]]) -> None:
        """Deltas, each with the number of its prompt, are on their way to the caller."""
        num_output = 0
        gaps_s: list[float] = []
        first_of: list[tuple[int, int]] = []
        for place, delta in arrived:
            choice = place * self.call.n + delta.index
            self._num_finished += delta.finish_reason is not None
            if self._texts is not None:
                self._texts.setdefault(choice, []).append(delta.text)
            if not delta.token_ids:
                continue
            newest_s = self._newest_s.get(choice)
            if newest_s is None:
                first_of.append((delta.num_prompt_tokens, delta.num_cached_tokens))
            else:
                gaps_s.append(delta.made_s - newest_s)
                self._gaps[choice] = self._gaps.get(choice, TokenGaps()).plus(gaps_s[-1])
            self._newest_s[choice] = delta.made_s
            self._num_noted[choice] = self._num_noted.get(choice, 0) + len(delta.token_ids)
            num_output += len(delta.token_ids)
        if num_output:
            self._recorder.tokens(Tokens(num_output, gaps_s, first_of))

    def close(self, error: BaseException | None) -> None:
        """The caller has left, or has everything."""
        left = error is None or isinstance(error, asyncio.CancelledError | GeneratorExit)
        if self._num_finished >= self.call.num_choices or (left and self.call.count_only):
            self._outcome = OK
        elif error is None or left:
            self._outcome = CANCELLED
        else:
            answer = answer_for(error)
            self._outcome = answer.code or answer.type
        self._recorder.settle(self)

    def account(self, account: RequestAccount) -> None:
        """The engine is done with one of the requests."""
        self._accounts[account.request_id] = account
        if self._outcome is not None:
            self._recorder.settle(self)

    @property
    def outstanding(self) -> list[str]:
        """Requests that the engine has not accounted for."""
        return [request_id for request_id in self._places if request_id not in self._accounts]

    @property
    def request_ids(self) -> list[str]:
        """All of its requests."""
        return list(self._places)

    def record(self, replica: ReplicaName) -> CallRecord:
        """Everything that is known of the call, which is over."""
        assert self._outcome is not None
        answers = [
            AnswerRecord(choice := self._places[request_id] * self.call.n + answer.index, answer, self._gap(choice))
            for request_id, account in self._accounts.items()
            for answer in account.answers
        ]
        ends_s = [answer.timeline.finished_s or 0.0 for answer in answers]
        texts = tuple("".join(self._texts.get(c, ())) for c in range(self.call.num_choices)) if self._texts else ()
        return CallRecord(
            call=self.call,
            replica=replica,
            received_s=self.received_s,
            finished_s=max(ends_s) if ends_s else time.monotonic(),
            epoch_s=time.time() - time.monotonic(),
            outcome=self._outcome,
            answers=tuple(sorted(answers, key=lambda answer: answer.choice)),
            texts=texts,
        )

    def unnoted(self, record: CallRecord) -> Tokens:
        """Tokens of the record that were not noted: they were made, and nobody was there to take them."""
        num_output, first_of = 0, []
        for answer in record.answers:
            num_output += answer.account.num_output_tokens - self._num_noted.get(answer.choice, 0)
            if answer.choice not in self._newest_s and answer.timeline.first_token_s is not None:
                first_of.append((answer.account.num_prompt_tokens, answer.account.num_cached_tokens))
        return Tokens(num_output, (), first_of)

    def _gap(self, choice: int) -> TokenGaps:
        return self._gaps.get(choice, TokenGaps())


class Recorder:
    """One replica's calls. ``holds``: whether the engine still has to account for a request."""

    def __init__(
        self,
        replica: ReplicaName,
        holds: Callable[[str], bool],
        sinks: Sequence[Sink] = (),
        *,
        keeps_texts: bool = False,
    ) -> None:
        self.sinks = tuple(sinks)
        self._replica = replica
        self._holds = holds
        self._keeps_texts = keeps_texts
        self._open: dict[str, OpenCall] = {}

    def open(self, call: GenerateCall) -> OpenCall:
        """A call has arrived."""
        return OpenCall(self, call, time.monotonic(), self._keeps_texts)

    def follow(self, call: OpenCall, request_ids: Iterable[str]) -> None:
        """``call`` is to hear of these requests."""
        self._open.update(dict.fromkeys(request_ids, call))

    def account(self, account: RequestAccount) -> None:
        """The engine is done with a request."""
        call = self._open.pop(account.request_id, None)
        if call is not None:
            call.account(account)

    def settle(self, call: OpenCall) -> None:
        """Make the record of a closed call, unless the engine has not accounted for all of it."""
        if any(self._holds(request_id) for request_id in call.outstanding):
            return
        for request_id in call.request_ids:
            self._open.pop(request_id, None)
        record = call.record(self._replica)
        rest = call.unnoted(record)
        if rest.num_output or rest.first_of:
            self.tokens(rest)
        for sink in self.sinks:
            self._tell(sink.finished, record)

    def tokens(self, tokens: Tokens) -> None:
        """Pass on."""
        for sink in self.sinks:
            self._tell(sink.tokens, tokens)

    def _tell(self, tell: Callable[[CallRecord], None] | Callable[[Tokens], None], what: object) -> None:
        try:
            tell(what)  # type: ignore[arg-type]
        except Exception:
            # Whoever watches must not be able to harm what is watched.
            logger.exception("what was observed could not be told")
