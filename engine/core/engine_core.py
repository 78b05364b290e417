"""The step: what to run next (scheduler), running it (runner), what came of it.

Owns: the order of those three, the steps in flight, and what a failing step means. Must not know: threads, processes,
text, MLX. Used from one thread only, the one that built it.

Failure classes: a row's failure ends that row; a step that raises ends the requests in it; ``MAX_FAILED_STEPS`` such
steps with no good one in between mean that the model or the device is broken, and raise EngineDeadError.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from engine.batch import StepBatch, StepOutput
from engine.core.messages import MemoryFacts, Snapshot, Started
from engine.errors import EngineDeadError, EngineError, StepFailedError
from engine.interfaces import ModelRunner, PendingStep
from engine.request import EngineRequest, TokenOutput
from engine.scheduler.scheduler import Scheduler

MAX_FAILED_STEPS = 3

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _InFlight:
    batch: StepBatch
    pending: PendingStep


@dataclass(frozen=True, slots=True)
class _NotLaunched:
    """Stands in the pipeline for a step that could not be launched: steps end in the order of their choice."""

    error: Exception

    def result(self) -> StepOutput:
        raise self.error


class EngineCore:
    """One model with its scheduler; ``step()`` does one turn.

    ``clock`` returns monotonic seconds. ``memory`` returns the ledger as it is disclosed in the status. ``upkeep`` is
    called with the time in every turn, before anything is scheduled: the memory guard's chance to act. ``after_close``
    puts back what was set for the whole process.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        clock: Callable[[], float],
        *,
        slots_asked: str = "",
        memory: Callable[[], MemoryFacts] = dict,
        upkeep: Callable[[float], None] = lambda _now_s: None,
        after_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.runner = runner
        self._scheduler = scheduler
        self._clock = clock
        self._slots_asked = slots_asked
        self._memory = memory
        self._upkeep = upkeep
        self._after_close = after_close
        self._in_flight: deque[_InFlight] = deque()
        self._last_launched = -1
        self._forgiven_until = -1
        self._num_failed_steps = 0
        self._progressed = False

    @property
    def progressed(self) -> bool:
        """Whether the last turn launched or read a step; False with work left means that requests are held."""
        return self._progressed

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished or any step unread."""
        return bool(self._in_flight) or self._scheduler.has_unfinished

    def add(self, request: EngineRequest) -> None:
        """Accept one sequence. Raises RequestError or AdmissionRefusedError."""
        self._scheduler.add(request, self._clock())

    def cancel(self, request_id: str) -> TokenOutput | None:
        """End a sequence without a result; returns its account, None when it is not known (any more)."""
        return self._scheduler.cancel(request_id, self._clock())

    def complete(self, request_id: str) -> TokenOutput | None:
        """End a sequence whose text is complete; returns as ``cancel`` does."""
        return self._scheduler.complete(request_id, self._clock())

    def step(self) -> list[TokenOutput]:
        """One turn: end what is overdue, fill the pipeline, read the oldest step.

        Returns what became known. Raises EngineDeadError when nothing sensible can be done any more.
        """
        now_s = self._clock()
        self._upkeep(now_s)
        outputs = self._scheduler.expire(now_s)
        self._progressed = False
        while self._may_launch() and self._launch_next():
            pass
        if self._in_flight:
            self._read_oldest(outputs)
        self._release()
        return outputs

    def fail_all(self, error: EngineError) -> list[TokenOutput]:
        """End every request with ``error``."""
        return self._scheduler.fail_all(error, self._clock())

    def started(self) -> Started:
        """The facts that the front needs once."""
        return Started(self.runner.facts, self._slots_asked, self.snapshot())

    def snapshot(self) -> Snapshot:
        """The engine at this moment."""
        now_s = self._clock()
        return Snapshot(self._scheduler.stats(now_s), self._memory(), *self._scheduler.views(now_s))

    def close(self) -> None:
        """Wait for what is in flight, then free pools and weights."""
        while self._in_flight:
            try:
                self._in_flight.popleft().pending.result()
            except Exception:
                # Its requests have been told already; what counts here is that nothing runs when memory is freed.
                logger.exception("a step failed while the engine was closing")
        self.runner.close()
        self._after_close()

    def _may_launch(self) -> bool:
        if len(self._in_flight) >= self.runner.max_steps_in_flight:
            return False
        # The next step would take tokens from one that never ran: its requests are to be failed first.
        return not (self._in_flight and isinstance(self._in_flight[-1].pending, _NotLaunched))

    def _launch_next(self) -> bool:
        batch = self._scheduler.schedule(self._clock())
        self._release()
        if batch is None:
            return False
        self._last_launched = batch.step_index
        self._progressed = True
        try:
            pending = self.runner.launch(batch)
        except Exception as error:
            pending = _NotLaunched(error)
        self._in_flight.append(_InFlight(batch, pending))
        return True

    def _read_oldest(self, outputs: list[TokenOutput]) -> None:
        step = self._in_flight.popleft()
        self._progressed = True
        try:
            result = step.pending.result()
        except Exception as error:
            outputs += self._fail(step.batch, error)
            return
        self._num_failed_steps = 0
        outputs += self._scheduler.update(step.batch, result, self._clock())

    def _fail(self, batch: StepBatch, error: Exception) -> list[TokenOutput]:
        logger.error("step %d with %d rows failed", batch.step_index, len(batch.rows), exc_info=error)
        # Steps launched before this failure was seen build on its tokens: their failing says nothing new.
        if batch.step_index > self._forgiven_until:
            self._num_failed_steps += 1
            self._forgiven_until = self._last_launched
        if self._num_failed_steps >= MAX_FAILED_STEPS:
            raise EngineDeadError(
                f"{MAX_FAILED_STEPS} steps in a row failed, the last with {_describe(error)}."
            ) from error
        reported = StepFailedError(f"The step that computed this request failed with {_describe(error)}.")
        return self._scheduler.fail_batch(batch, reported, self._clock())

    def _release(self) -> None:
        released = self._scheduler.take_released()
        if released:
            self.runner.release(released)


def _describe(error: Exception) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
