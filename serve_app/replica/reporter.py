"""What this replica tells routers: how much it has to do, how fast it is, what it has cached, whether it drains.

Owns: the calls it counts, the memory of computed prompts, and the drain flag. Must not know: Ray, routers, the engine
beyond its status. Belongs to the replica's event loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from engine.interfaces import EngineStatus
from serve_app.errors import ReplicaDrainingError
from serve_app.protocol import Deltas, GenerateCall
from serve_app.routing.keys import salt_of
from serve_app.routing.prefix_memory import PrefixMemory
from serve_app.routing.report import ReplicaReport, tag_of

_SMOOTHING = 0.1


class CallRecord:
    """One call that is counted. ``num_answers``: the slots that it wants; ``num_unread_tokens``: as it arrived."""

    def __init__(self, reporter: Reporter, call: GenerateCall, num_unread_tokens: int) -> None:
        self._reporter = reporter
        self._call = call
        self._is_answered = False
        self.tag = tag_of(call.request_id)
        # Prompts that are only read show in the unread tokens.
        self.num_answers = 0 if call.count_only else 1 if call.embeds else call.num_choices
        self.num_unread_tokens = num_unread_tokens

    def note(self, message: Deltas) -> None:
        """A message of the answer is there. After the first one the prompt has been computed, and is cached."""
        if not self._is_answered:
            self._is_answered = True
            self._reporter.computed(self._call)
        if message.usage is not None:
            self._reporter.measured(self._call, message.usage.num_prompt_tokens)


class Reporter:
    """This replica's side of routing.

    Routers estimate a prompt's tokens from its bytes, and know no tokenizer. So what is said to them in tokens is in
    theirs: the engine's divided by how many of it one of theirs has turned out to be.

    The engine's figures are as old as its last step, and reading a long prompt is one step of a second or more. A
    router takes away from a report what it knows has ended since, and adds what the report does not count, so the
    figures have to count exactly the calls whose tags go with them: open calls are counted here, and those that the
    engine has not seen yet wait.
    """

    def __init__(self, *, block_size: int, prefix_cache: str) -> None:
        """``prefix_cache``: as configured for the engine, "shared", "per-user" or "off"."""
        self.draining = False
        self._block_size = block_size
        self._keeps_prefixes = prefix_cache != "off"
        self._per_user = prefix_cache == "per-user"
        self._memory = PrefixMemory(0)
        self._open: dict[CallRecord, None] = {}
        self._tokens_per_estimate = 1.0
        self._num_reports = 0
        self._num_restarts = 0

    @contextmanager
    def counted(self, call: GenerateCall) -> Iterator[CallRecord]:
        """Count ``call`` while it is open. Raises ReplicaDrainingError when nothing new is taken."""
        if self.draining:
            raise ReplicaDrainingError("This replica is draining.")
        salt = salt_of(call, per_user=self._per_user)
        num_cached = self._memory.num_cached_tokens(call.prefix, salt)
        record = CallRecord(self, call, max(0, call.prefix.num_prompt_tokens - num_cached))
        self._open[record] = None
        try:
            yield record
        finally:
            del self._open[record]

    def computed(self, call: GenerateCall) -> None:
        """The call's prompt is in the engine's cache now."""
        self._memory.remember(call.prefix, salt_of(call, per_user=self._per_user))

    def measured(self, call: GenerateCall, num_prompt_tokens: int) -> None:
        """The call's prompt had so many tokens."""
        if num_prompt_tokens and call.prefix.num_prompt_tokens:
            ratio = num_prompt_tokens / call.prefix.num_prompt_tokens
            self._tokens_per_estimate += _SMOOTHING * (ratio - self._tokens_per_estimate)

    def report(self, status: EngineStatus | None, *, ready: bool) -> ReplicaReport:
        """Return the next report. ``status`` None: the engine says nothing, so there is nothing to be had here."""
        self._num_reports += 1
        if status is None:
            return ReplicaReport(self._num_reports, slots=0, ready=False, draining=self.draining)
        self._follow_cache(status)
        scheduler, ratio = status.scheduler, self._tokens_per_estimate
        speed = scheduler.prefill_tokens_per_s
        num_open = sum(record.num_answers for record in self._open)
        num_running = min(scheduler.num_running, num_open)
        num_unseen = num_open - scheduler.num_running - scheduler.num_waiting
        return ReplicaReport(
            sequence=self._num_reports,
            slots=scheduler.slots,
            num_running=num_running,
            num_waiting=num_open - num_running,
            num_unread_tokens=round(scheduler.num_unread_tokens / ratio) + self._num_unread_of_newest(num_unseen),
            prefill_tokens_per_s=None if speed is None else speed / ratio,
            answer_s=scheduler.usual_answer_s,
            answer_row_s=scheduler.usual_answer_row_s,
            answer_tokens=scheduler.usual_answer_tokens,
            ready=ready,
            draining=self.draining,
            open_tags=frozenset(record.tag for record in self._open),
            prefixes=self._memory.newest(),
        )

    def _num_unread_of_newest(self, num_answers: int) -> int:
        """Prompt tokens of the newest calls that together want so many slots."""
        num_tokens = 0
        for record in reversed(self._open):
            if num_answers <= 0:
                break
            num_answers -= record.num_answers
            num_tokens += record.num_unread_tokens
        return num_tokens

    def _follow_cache(self, status: EngineStatus) -> None:
        if status.num_restarts != self._num_restarts:
            self._num_restarts = status.num_restarts
            self._memory.forget_all()
        num_tokens = status.scheduler.num_blocks_total * self._block_size if self._keeps_prefixes else 0
        self._memory.resize(int(num_tokens / self._tokens_per_estimate))
