"""Starts a server as a child process, waits until it answers, and ends it by its process id.

Owns: the life of one child and of what it started. Must not know: which server it is or what is measured.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from serve_app.bench.errors import BenchError

POLL_S = 0.25
ANSWER_TIMEOUT_S = 2.0
KILL_GRACE_S = 10.0
LOG_TAIL_LINES = 5


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """How to start a server on ``port``: it is ready when ``ready_path`` answers 200.

    ``stop_signal`` asks it to end; ``grace_s`` is how long it may take before it is killed.
    """

    label: str
    arguments: tuple[str, ...]
    port: int
    ready_path: str
    environment: Mapping[str, str] = field(default_factory=dict)
    start_timeout_s: float = 180.0
    stop_signal: signal.Signals = signal.SIGTERM
    grace_s: float = 30.0

    @property
    def base_url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.port}"


def free_port() -> int:
    """A port that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running(command: ServerCommand, log_folder: Path) -> Iterator[int]:
    """Run the server while the context is open and yield its process id.

    Its output goes to a file in ``log_folder``. Raises BenchError with the end of that file when it does not start.
    """
    log_folder.mkdir(parents=True, exist_ok=True)
    log_path = log_folder / f"{command.label.replace(' ', '-').replace(',', '')}.log"
    with log_path.open("wb") as log:
        # A session of its own: Ctrl-C in the terminal reaches the bench alone, which then ends its servers in order.
        process = subprocess.Popen(
            command.arguments,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **command.environment},
            start_new_session=True,
        )
        try:
            _wait_ready(command, process, log_path)
            yield process.pid
        finally:
            stop(process, command.stop_signal, command.grace_s)


def _wait_ready(command: ServerCommand, process: subprocess.Popen[bytes], log_path: Path) -> None:
    deadline_s = time.monotonic() + command.start_timeout_s
    while not _answers(command.base_url + command.ready_path):
        if process.poll() is not None:
            raise BenchError(
                f"{command.label} ended with code {process.returncode} before it answered:\n{_tail(log_path)}",
                f"see {log_path}",
            )
        if time.monotonic() > deadline_s:
            raise BenchError(
                f"{command.label} did not answer within {command.start_timeout_s:.0f} s:\n{_tail(log_path)}",
                f"see {log_path}",
            )
        time.sleep(POLL_S)


def _answers(url: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=ANSWER_TIMEOUT_S) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _tail(path: Path) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])


def stop(process: subprocess.Popen[bytes], stop_signal: signal.Signals, grace_s: float) -> None:
    """Ask the process to end, wait, and kill what is left of it and of its children."""
    children = _children(process.pid)
    if process.poll() is None:
        process.send_signal(stop_signal)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
    if process.poll() is None:
        process.kill()
        process.wait(KILL_GRACE_S)
    left = [child for child in children if child.is_running()]
    for child in left:
        with contextlib.suppress(psutil.Error):
            child.kill()
    psutil.wait_procs(left, timeout=KILL_GRACE_S)


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []
