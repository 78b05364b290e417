"""One call to a replica, from its opening to its last message, the same for the ingress and for Python tools.

Owns: that a call is always cancelled when it is left, that a call whose replica vanished before the first message is
given to another one once, and that an answer which merely stops is an error. Must not know: HTTP, how replicas are
ranked.

Ray Serve never retries a call that a replica accepted, and a response generator that is dropped without ``cancel`` runs
on to its end in the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import Any

from engine.errors import RequestCancelledError
from serve_app.errors import ReplicaLostError, answer_for, cause_of
from serve_app.protocol import Deltas, GenerateCall

MAX_MOVES = 1


class ReplicaStream:
    """The messages of one call. Use it as a context manager and iterate it once, either way: sync or async."""

    def __init__(self, handle: Any, call: GenerateCall) -> None:
        """``handle``: the Serve handle of the model's replicas."""
        self._method = handle.options(method_name="generate", stream=True)
        self._call = call
        self._response: Any = None
        self._num_messages = 0
        self._num_moves = 0
        self._complete = False

    def open(self) -> None:
        """Send the call on its way. Does not wait."""
        self._response = self._method.remote(self._call)

    def close(self) -> None:
        """Cancel the call, if it still runs."""
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
                # Serve reports a replica that cancelled the call by itself in this form too.
                raise RequestCancelledError("The replica ended the call.") from None
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
        cause = cause_of(error)
        lost = answer_for(cause).code == "replica_lost"
        if not lost or self._num_messages or self._num_moves >= MAX_MOVES:
            raise cause from None
        self._num_moves += 1
        self.close()
        self.open()


def _cut_off() -> ReplicaLostError:
    return ReplicaLostError("The answer ended before it was complete.")


def _is_cancelled_from_outside() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
