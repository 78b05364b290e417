"""One call to a replica, from its opening to its last message, the same for the ingress and for Python tools.

Owns: that a call is always cancelled when it is left, that it ends at its deadline whoever hangs, that a call which its
replica lost or would not take is given to another one once, if nothing of its answer has come, and that an answer which
merely stops is an error. Must not know: HTTP, how replicas are ranked.

Ray Serve never retries a call that a replica accepted, and a response generator that is dropped without ``cancel`` runs
on to its end in the engine.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from types import TracebackType
from typing import Any

from engine.errors import DeadlineExceededError, RequestCancelledError
from serve_app.errors import ReplicaLostError, answer_for, cause_of
from serve_app.protocol import Deltas, GenerateCall
from serve_app.routing.decision import Decision
from serve_app.routing.journal import JOURNAL
from serve_app.routing.keys import prefix_of

MAX_MOVES = 1
# The engine ends overdue calls itself; this is for calls that wait for a replica, or whose replica hangs.
OVERDUE_SLACK_S = 1.0
# Ends of a call that say nothing of the call itself: another replica may well answer it.
MOVABLE_CODES = frozenset({"replica_lost", "engine_dead", "replica_draining"})
FULL_CODE = "queue_full"


class ReplicaStream:
    """The messages of one call. Use it as a context manager and iterate it once, either way: sync or async."""

    def __init__(self, handle: Any, call: GenerateCall) -> None:
        """``handle``: the Serve handle of the model's replicas."""
        self._method = handle.options(method_name="generate", stream=True)
        self._call = call if call.prefix.hashes else replace(call, prefix=prefix_of(call))
        self._response: Any = None
        self._deadline_s = None if call.timeout_s is None else time.monotonic() + call.timeout_s
        self._alarm: asyncio.TimerHandle | threading.Timer | None = None
        self._is_overdue = False
        self._num_messages = 0
        self._num_moves = 0
        self._complete = False

    @property
    def decision(self) -> Decision | None:
        """Why the call is where it is; None before it was sent, and where another router than ours chooses."""
        return JOURNAL.decision_on(self._call.request_id)

    @property
    def num_moves(self) -> int:
        """How often the call was given to another replica."""
        return self._num_moves

    def open(self) -> None:
        """Send the call on its way, with the time that is left of it. Does not wait."""
        call = self._call
        if self._deadline_s is not None:
            left_s = self._deadline_s - time.monotonic()
            call = replace(call, timeout_s=max(0.0, left_s))
            self._alarm = _call_later(left_s + OVERDUE_SLACK_S, self._end_overdue)
        self._response = self._method.remote(call)
        JOURNAL.watch(call.request_id, self._response.cancel)

    def close(self) -> None:
        """Cancel the call, if it still runs."""
        JOURNAL.unwatch(self._call.request_id)
        if self._alarm is not None:
            self._alarm.cancel()
        if self._response is not None and not self._complete:
            self._response.cancel()
        self._response = None

    async def __aenter__(self) -> ReplicaStream:
        self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __enter__(self) -> ReplicaStream:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __aiter__(self) -> AsyncIterator[Deltas]:
        return self

    async def __anext__(self) -> Deltas:
        while not self._complete:
            self._require_open()
            try:
                return self._note(await self._response.__anext__())
            except StopAsyncIteration:
                raise _cut_off() from None
            except asyncio.CancelledError:
                if _is_cancelled_from_outside():
                    raise
                # Serve reports a call that the router gave up, or that the replica ended by itself, in this form too.
                self._move_or_raise(RequestCancelledError("The replica ended the call."))
            except Exception as error:
                self._move_or_raise(error)
        raise StopAsyncIteration

    def __iter__(self) -> Iterator[Deltas]:
        return self

    def __next__(self) -> Deltas:
        while not self._complete:
            self._require_open()
            try:
                return self._note(self._response.__next__())
            except StopIteration:
                raise _cut_off() from None
            except Exception as error:
                self._move_or_raise(error)
        raise StopIteration

    def _require_open(self) -> None:
        if self._response is None:
            raise RuntimeError("A stream is iterated inside its `with` or `async with` block.")

    def _note(self, message: Deltas) -> Deltas:
        self._num_messages += 1
        self._complete = message.usage is not None
        return message

    def _move_or_raise(self, error: Exception) -> None:
        if self._is_overdue:
            raise DeadlineExceededError("The request was not done at its deadline.") from None
        is_lost = JOURNAL.take_lost(self._call.request_id)
        cause = ReplicaLostError("The machine that was answering is silent.") if is_lost else cause_of(error)
        if self._num_messages or self._num_moves >= MAX_MOVES or not self._may_move(answer_for(cause).code):
            raise cause from None
        self._num_moves += 1
        self.close()
        self.open()

    def _end_overdue(self) -> None:
        self._is_overdue = True
        if (response := self._response) is not None:
            response.cancel()

    def _may_move(self, code: str | None) -> bool:
        if code == FULL_CODE:
            # A router's figures are a second old: somebody else may have room.
            return self.decision is not None and self.decision.num_usable > 1
        return code in MOVABLE_CODES


def _call_later(delay_s: float, act: Callable[[], None]) -> asyncio.TimerHandle | threading.Timer:
    """Call ``act`` in the running event loop, or in a thread where there is none."""
    try:
        return asyncio.get_running_loop().call_later(delay_s, act)
    except RuntimeError:
        timer = threading.Timer(delay_s, act)
        timer.daemon = True
        timer.start()
        return timer


def _cut_off() -> ReplicaLostError:
    return ReplicaLostError("The answer ended before it was complete.")


def _is_cancelled_from_outside() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
