"""The engine process from the inside: two threads, one socket, and an end that comes whatever happens.

Owns: reading the socket (main thread), the thread that runs the loop, signals, and noticing that the parent is gone.
Must not know: MLX; what to build comes in as a function, because only ``engine.build`` may join the two.

The process ends when it is told to, when its parent is gone (the socket closes, or the parent's id changes because a
forked copy holds the socket open), on SIGTERM or SIGINT, or when its loop fails. In every case the loop frees the model
first, for ``teardown_s`` at most: memory that Metal has wired can stay wired if its process is killed.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import selectors
import signal
import socket
import threading
from collections.abc import Callable
from typing import NoReturn

from engine.config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.core.engine_loop import EngineLoop
from engine.core.faults import FaultKind, FaultyRunner
from engine.core.messages import Abandon, FromEngine, Launch, OnProgress
from engine.core.wire import Decoder, encode
from engine.errors import StartupError

BuildCore = Callable[[EngineConfig, OnProgress], EngineCore]

EXIT_STOPPED = 0
EXIT_FAILED = 1
EXIT_HUNG = 70
PARENT_CHECK_S = 0.5
_READ_BYTES = 1 << 18

logger = logging.getLogger(__name__)


def run_engine_process(fd: int, build: BuildCore) -> NoReturn:
    """Serve the engine on the inherited socket ``fd`` until it ends, and with it the process."""
    faulthandler.enable()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    os.set_inheritable(fd, False)
    with socket.socket(fileno=fd) as connection:
        status = _EngineProcess(connection, build).run()
    logging.shutdown()
    # The model is freed, and the interpreter's own end would add nothing but a crash: MLX keeps compiled functions,
    # which are Python objects, per thread, and drops them when the loop's thread is gone; that asks for the lock of an
    # interpreter which is ending by then, and aborts (seen with mlx 0.32.4).
    os._exit(status)


class _EngineProcess:
    def __init__(self, connection: socket.socket, build: BuildCore) -> None:
        self._connection = connection
        self._build = build
        # Not select.select: the descriptor's number is the parent's, which may be beyond what that can take.
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ)
        self._decoder = Decoder()
        self._parent = os.getppid()
        self._launch: Launch | None = None
        self._engine = EngineLoop(self._build_core, self._emit)
        self._thread = threading.Thread(target=self._run_loop, name="engine-loop", daemon=True)
        self._ended_well = False
        self._signalled = False

    def run(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        while self._wait_for_input() and self._read():
            pass
        if self._launch is None:
            return EXIT_STOPPED
        self._engine.post(Abandon("Its parent process is gone."))
        self._thread.join(self._launch.teardown_s)
        if self._thread.is_alive():
            logger.error("the loop did not end in %.1f s; leaving by force from here:", self._launch.teardown_s)
            faulthandler.dump_traceback(all_threads=True)
            os._exit(EXIT_HUNG)
        return EXIT_STOPPED if self._ended_well else EXIT_FAILED

    def _wait_for_input(self) -> bool:
        """Block until there is something to read; False when there is a reason to end."""
        while not self._signalled:
            if self._selector.select(PARENT_CHECK_S):
                return True
            if os.getppid() != self._parent:
                logger.warning("the parent process is gone")
                return False
        return False

    def _read(self) -> bool:
        """Hand what arrived to the loop; False at the end of the stream."""
        try:
            data = self._connection.recv(_READ_BYTES)
        except ConnectionError:
            return False
        for message in self._decoder.feed(data):
            if isinstance(message, Launch):
                self._launch = message
                self._thread.start()
            else:
                self._engine.post(message)
        return bool(data)

    def _run_loop(self) -> None:
        self._ended_well = self._engine.run()
        # Wakes the main thread, which reads the end of the stream.
        self._connection.shutdown(socket.SHUT_RDWR)

    def _build_core(self, on_progress: OnProgress) -> EngineCore:
        assert self._launch is not None
        faults = self._launch.faults
        if any(fault.kind is FaultKind.REFUSE_START for fault in faults):
            raise StartupError("injected: the engine cannot be built.")
        core = self._build(self._launch.config, on_progress)
        if faults:
            core.runner = FaultyRunner(core.runner, faults)
        return core

    def _emit(self, message: FromEngine) -> None:
        # Blocks when the front has not read for some seconds: better to wait than to pile up tokens.
        try:
            self._connection.sendall(encode(message))
        except OSError:
            self._engine.post(Abandon("Its parent process is gone."))

    def _on_signal(self, number: int, _frame: object) -> None:
        # SimpleQueue.put may be called inside a signal handler.
        self._signalled = True
        self._engine.post(Abandon(f"It received {signal.Signals(number).name}."))
