"""The loop that owns the model: it builds the core on the thread that runs it, steps it, and frees it there.

Owns: the inbox, when to sleep, orderly teardown. Must not know: who carries its messages (a queue or a socket),
asyncio, MLX. MLX's streams belong to the thread that made them, so ``run`` does everything that touches the model and
the other methods only leave messages.
"""

from __future__ import annotations

import gc
import logging
import queue
import time
from collections.abc import Callable, Sequence

from engine.core.engine_core import EngineCore
from engine.core.messages import (
    Abandon,
    Cancel,
    Complete,
    Failed,
    FromEngine,
    OnProgress,
    Outputs,
    Shutdown,
    Stopped,
    Submit,
    ToEngine,
)
from engine.errors import EngineDeadError, EngineError, RequestCancelledError, RequestFailedError, StartupError
from engine.request import FinishReason, TokenOutput

SNAPSHOT_PERIOD_S = 0.2
# An idle loop wakes so often for the memory guard, and to show that it lives.
IDLE_PERIOD_S = 1.0
# Only while requests wait and nothing may run (the memory guard holds them): deadlines still have to be seen.
HELD_POLL_S = 0.02

logger = logging.getLogger(__name__)


class EngineLoop:
    """Runs one engine from build to teardown. ``emit`` is called on the loop's thread and must not block."""

    def __init__(
        self,
        build: Callable[[OnProgress], EngineCore],
        emit: Callable[[FromEngine], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._build = build
        self._emit = emit
        self._clock = clock
        self._inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
        self._stop_at_s: float | None = None
        self._snapshot_at_s = 0.0
        self._held = False
        self._ended: list[TokenOutput] = []

    def post(self, message: ToEngine) -> None:
        """Leave a message from any thread; a sleeping loop wakes at once."""
        self._inbox.put(message)

    def run(self) -> bool:
        """Build, serve until told to stop, free. Returns whether it ended as it was told to.

        Never raises: an exception becomes a ``Failed`` message.
        """
        try:
            core = self._build(self._emit)
        except Exception as error:
            logger.debug("the engine could not be built", exc_info=error)
            self._emit(Failed(_startup_error(error)))
            return False
        self._emit(core.started())
        ended_well = self._serve_until_told(core)
        try:
            core.close()
        except Exception:
            logger.exception("the engine could not be closed")
            return False
        finally:
            # A model's modules refer to each other, and who waits for the loop's end relies on their memory being free.
            del core
            gc.collect()
        if ended_well:
            self._emit(Stopped())
        return ended_well

    def _serve_until_told(self, core: EngineCore) -> bool:
        try:
            self._serve(core)
        except Exception as error:
            # The cause of an EngineDeadError has been logged where it happened.
            logger.error("the engine loop ends: %s", error, exc_info=not isinstance(error, EngineDeadError))
            # Told before the model is freed, which can take seconds: the front fails or moves its requests at once.
            self._emit(Failed(_dead_error(error)))
            return False
        return True

    def _serve(self, core: EngineCore) -> None:
        while True:
            for message in self._take_messages(self._sleep_s(core)):
                self._handle(core, message)
            if self._ended:
                # Callers wait for these accounts: not until a step is over.
                self._publish(core, ())
            if self._stop_at_s is not None and (not core.has_work or self._clock() >= self._stop_at_s):
                break
            outputs = core.step()
            self._held = not outputs and not core.progressed
            self._publish(core, outputs)
        self._publish(core, core.fail_all(RequestCancelledError("The engine is stopping.")))

    def _sleep_s(self, core: EngineCore) -> float:
        """How long the next look into the inbox may wait for a message."""
        if not core.has_work:
            return IDLE_PERIOD_S if self._stop_at_s is None else 0.0
        return HELD_POLL_S if self._held else 0.0

    def _take_messages(self, timeout_s: float) -> list[ToEngine]:
        messages: list[ToEngine] = []
        try:
            if timeout_s > 0:
                messages.append(self._inbox.get(timeout=timeout_s))
            while True:
                messages.append(self._inbox.get_nowait())
        except queue.Empty:
            return messages

    def _handle(self, core: EngineCore, message: ToEngine) -> None:
        match message:
            case Submit():
                self._submit(core, message)
            case Cancel():
                self._ended += filter(None, map(core.cancel, message.request_ids))
            case Complete():
                self._ended += filter(None, map(core.complete, message.request_ids))
            case Shutdown():
                stop_at_s = self._clock() + message.grace_s
                # A second, more hurried shutdown wins; a second, more patient one does not.
                self._stop_at_s = stop_at_s if self._stop_at_s is None else min(self._stop_at_s, stop_at_s)
            case Abandon():
                raise EngineDeadError(message.why)
            case _:
                raise AssertionError(f"unexpected message {type(message).__name__}")

    def _submit(self, core: EngineCore, message: Submit) -> None:
        accepted: list[str] = []
        try:
            if self._stop_at_s is not None:
                raise RequestCancelledError("The engine is stopping.")
            for request in message.requests:
                core.add(request)
                accepted.append(request.request_id)
        except Exception as error:
            for request_id in accepted:
                core.cancel(request_id)
            refusal = _refusal_error(error)
            self._emit(Outputs(tuple(_refusal(request.request_id, refusal) for request in message.requests)))

    def _publish(self, core: EngineCore, outputs: Sequence[TokenOutput]) -> None:
        now_s = self._clock()
        due = now_s >= self._snapshot_at_s or not core.has_work
        if due:
            self._snapshot_at_s = now_s + SNAPSHOT_PERIOD_S
        outputs, self._ended = (*self._ended, *outputs), []
        if outputs or due:
            self._emit(Outputs(outputs, core.snapshot() if due else None))


def _refusal(request_id: str, error: EngineError) -> TokenOutput:
    return TokenOutput(request_id, finish_reason=FinishReason.ERROR, error=error)


def _refusal_error(error: Exception) -> EngineError:
    if isinstance(error, EngineError):
        return error
    logger.error("a request could not be added", exc_info=error)
    return RequestFailedError(f"The request could not be added: {type(error).__name__}: {error}.")


def _startup_error(error: Exception) -> StartupError:
    if isinstance(error, StartupError):
        return error
    return StartupError(f"The engine could not be built: {type(error).__name__}: {error}.")


def _dead_error(error: Exception) -> EngineDeadError:
    if isinstance(error, EngineDeadError):
        return error
    return EngineDeadError(f"The engine loop failed with {type(error).__name__}: {error}.")
