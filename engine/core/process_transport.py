"""The loop in a process of its own: starting it, talking to it, ending it, and telling why it ended.

Owns: the child process, its socket and what it prints. Must not know: requests, restart policy, what the child builds.

The child is a fresh interpreter started by command, never a fork and never multiprocessing's spawn: a fork would carry
the caller's threads and locks, and spawn would import the caller's main module, which inside a Ray worker starts
another worker. It gets a session of its own, so that Ctrl-C in a terminal reaches only the parent, which ends it in
order.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from engine.core.messages import Launch, Shutdown, ToEngine
from engine.core.transport import OnEnded, OnMessage
from engine.core.wire import Decoder, encode
from engine.errors import EngineDeadError

# macOS gives a Unix socket 8 KiB by default: a few steps' worth.
SOCKET_BUFFER_BYTES = 1 << 20
# The end of the socket and the end of the process come within moments of each other; the second says why.
EXIT_STATUS_WAIT_S = 0.5
# After SIGTERM the child gives its loop `teardown_s` and then leaves by itself; so much more for that to be seen.
KILL_MARGIN_S = 1.0
# What is left after SIGKILL is the kernel's work.
REAP_S = 10.0
NUM_LAST_WORDS = 20
FATAL = "Fatal Python error"

logger = logging.getLogger("engine.process")


class ProcessTransport(asyncio.Protocol):
    """One engine process. ``command`` is completed with ``--fd N``; ``launch`` is its first message."""

    def __init__(self, command: Sequence[str], launch: Launch) -> None:
        self._command = list(command)
        self._launch = launch
        self._decoder = Decoder()
        self._last_words: deque[str] = deque(maxlen=NUM_LAST_WORDS)
        self._exited = asyncio.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: asyncio.WriteTransport | None = None
        self._pipe: asyncio.ReadTransport | None = None
        self._told_end: asyncio.Task[None] | None = None
        self._stop_grace_s: float | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the child."""
        return self._process.pid if self._process else None

    async def launch(self, on_message: OnMessage, on_ended: OnEnded) -> None:
        """Start the child and send it ``launch``."""
        self._on_message = on_message
        self._on_ended = on_ended
        self._event_loop = asyncio.get_running_loop()
        ours = self._spawn()
        process = self._process
        assert process is not None
        assert process.stdout is not None
        threading.Thread(target=self._wait_for_exit, args=(process,), name="engine-exit", daemon=True).start()
        self._pipe, _ = await self._event_loop.connect_read_pipe(lambda: _LineLog(self._last_words), process.stdout)
        await self._event_loop.create_unix_connection(lambda: self, sock=ours)
        self.send(self._launch)
        if self._stop_grace_s is not None:
            self.send(Shutdown(self._stop_grace_s))

    def send(self, message: ToEngine) -> None:
        """Write ``message`` without waiting."""
        if self._connection is not None and not self._connection.is_closing():
            self._connection.write(encode(message))

    async def stop(self, grace_s: float) -> bool:
        """Orderly: the child serves on for ``grace_s``, frees the model, exits. By force if it does not."""
        self._stop_grace_s = grace_s
        self.send(Shutdown(grace_s))
        if await self._gone_within(grace_s + self._launch.teardown_s):
            return True
        logger.error("engine process %s has not ended in order", self.pid)
        return await self.kill()

    async def kill(self) -> bool:
        """SIGTERM, on which the child still frees the model if it can; SIGKILL when that takes too long."""
        self._signal(signal.SIGTERM)
        if await self._gone_within(self._launch.teardown_s + KILL_MARGIN_S):
            return True
        logger.error("engine process %s does not react to SIGTERM; killing it", self.pid)
        self._signal(signal.SIGKILL)
        return await self._gone_within(REAP_S)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio."""
        # Not checked with isinstance: uvloop's transports do not derive from asyncio's classes.
        self._connection = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        """Called by asyncio: hand on the complete messages."""
        for message in self._decoder.feed(data):
            self._on_message(message)

    def connection_lost(self, _error: Exception | None) -> None:
        """Called by asyncio: the child has closed its end, or is gone."""
        self._tell_end_soon()

    def _spawn(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            for end in (ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
                end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
            ours.setblocking(False)
            self._process = subprocess.Popen(
                [*self._command, "--fd", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=_child_environment(),
            )
        return ours

    def _wait_for_exit(self, process: subprocess.Popen[bytes]) -> None:
        process.wait()
        # The event loop may be gone by now; then nobody is left to tell.
        with contextlib.suppress(RuntimeError):
            self._event_loop.call_soon_threadsafe(self._on_exit)

    def _on_exit(self) -> None:
        self._exited.set()
        # What it said last is still being read; a process that it started could hold both open for ever.
        self._event_loop.call_later(EXIT_STATUS_WAIT_S, self._close)

    def _close(self) -> None:
        for transport in (self._connection, self._pipe):
            if transport is not None:
                transport.close()
        # A connection that was never made, or is made but never lost, must not hide that the process is gone.
        self._tell_end_soon()

    def _tell_end_soon(self) -> None:
        if self._told_end is None:
            self._told_end = self._event_loop.create_task(self._tell_end())

    async def _gone_within(self, timeout_s: float) -> bool:
        if self._process is None:
            return True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._exited.wait(), timeout_s)
        return self._exited.is_set()

    async def _tell_end(self) -> None:
        await self._gone_within(EXIT_STATUS_WAIT_S)
        status = self._process.poll() if self._process else None
        self._on_ended(EngineDeadError(_describe_end(status, self._last_words)))

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)


class _LineLog(asyncio.Protocol):
    """Passes what the child prints to the log, at the level that a line begins with, and keeps the last lines."""

    def __init__(self, last_lines: deque[str]) -> None:
        self._last_lines = last_lines
        self._rest = b""

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            text = line.decode(errors="replace").rstrip()
            logger.log(_level_of(text), "%s", text)
            # What follows is faulthandler's stacks; what matters was said before.
            if not any(said.startswith(FATAL) for said in self._last_lines):
                self._last_lines.append(text)


def _level_of(line: str) -> int:
    return logging.getLevelNamesMapping().get(line.partition(" ")[0], logging.INFO)


def _child_environment() -> dict[str, str]:
    """The parent's environment, with this package importable from wherever the child starts."""
    root = str(Path(__file__).resolve().parents[2])
    inherited = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{inherited}" if inherited else root}


def _describe_end(status: int | None, last_words: Sequence[str]) -> str:
    if status is None:
        how = "closed its connection"
    elif status < 0:
        how = f"was killed by {signal.Signals(-status).name}"
    else:
        how = f"exited with status {status}"
    said = _last_words(last_words)
    return f"The engine process {how}." + (f" Its last words: {said}" if said else "")


def _last_words(lines: Sequence[str]) -> str | None:
    """What a dying process said of the reason: a crash's message comes before the line in which Python notes it."""
    said = [line for line in lines if line]
    if len(said) > 1 and said[-1].startswith(FATAL) and not _is_log(said[-2]):
        return said[-2]
    return said[-1] if said and not said[-1].startswith(("INFO ", "DEBUG ")) else None


def _is_log(line: str) -> bool:
    return line.partition(" ")[0] in logging.getLevelNamesMapping()
