"""The process that launchd or systemd keeps alive on every machine: it holds this machine's Ray.

Owns: the order start to end, what is known about it (``run/node.json``), and that nothing is left over. Must not know:
which supervisor started it. It imports no Ray: Ray runs below it, in a session of its own.

It stands between the supervisor and ``ray start --block`` for four reasons. That command goes on when its raylet has
ended with code 0, and a machine without a raylet serves nothing. It ends before the engines below it have given their
memory back, and a supervisor that then starts the next life, or kills what is left, strands wired memory on a Mac. A
supervisor's environment is bare, and Ray's must be complete before Ray starts. And the head has to deploy its app
again after each start, because its Ray begins empty.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pwd
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import psutil

from engine.core.async_engine import TEARDOWN_S
from engine.errors import StartupError
from serve_app.files import write_file
from serve_app.node.head_state import HeadState
from serve_app.node.machine_checks import reach
from serve_app.node.settings import RAY_DRAIN_S, Installation

POLL_S = 1.0
# Between two attempts to reach the head, or to deploy.
RETRY_S = 5.0
MAX_RETRY_S = 60.0
START_LIMIT_S = 120.0
# Ray drains its node, ends its processes, and the engines' teardown, which nobody may cut short, comes after that.
END_LIMIT_S = RAY_DRAIN_S + 20.0 + TEARDOWN_S
KILL_WAIT_S = 5.0
STARTED_WORDS = "Ray runtime started"


class NodeDaemon:
    """Runs one machine's Ray until it is told to end or Ray ends."""

    def __init__(self, installation: Installation, python: Path) -> None:
        """``python``: the interpreter of the environment that holds Ray and metalslots."""
        self._installation = installation
        self._settings = installation.read()
        self._bin = python.parent
        self._environment = {**daemon_environment(), **installation.environment(self._settings)}
        self._asked_to_end = threading.Event()
        self._processes: set[psutil.Process] = set()
        self._app: subprocess.Popen[bytes] | None = None
        self._state = HeadState(installation.head_state_folder, self._settings) if self._settings.keep_state else None

    def run(self) -> None:
        """Return when told to end. Raises StartupError when Ray does not start, or ends by itself."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._end)
        awake = _keep_awake()
        try:
            self._run()
        finally:
            if awake is not None:
                awake.terminate()

    def _run(self) -> None:
        if self._settings.role == "member":
            self._wait_for_head()
        if self._asked_to_end.is_set():
            return
        ray = self._start_ray()
        try:
            self._wait_until_started(ray)
            if not self._asked_to_end.is_set():
                self._note("running", f"Ray is up, {self._settings.role} of {self._settings.head}")
            self._watch()
        finally:
            self._note("ending", "waiting for the engines to give their memory back")
            self._end_all(ray)
            self._note("ended", "")

    def _end(self, number: int, frame: FrameType | None) -> None:
        self._asked_to_end.set()

    def _wait_for_head(self) -> None:
        while (reason := reach(self._settings.head_host, self._settings.head_port)) is not None:
            self._note("waiting for the head", reason)
            if self._asked_to_end.wait(RETRY_S):
                return

    def _start_ray(self) -> subprocess.Popen[bytes]:
        self._note("starting", "")
        if self._state is not None:
            self._state.prepare()
        # What a life that was cut short has left: a head refuses to start while any process of this machine names it.
        (self._installation.ray_folder / "ray_current_cluster").unlink(missing_ok=True)
        with (self._installation.log_folder / "ray.log").open("wb") as log:
            # A session of its own: Ray's reaper signals its whole process group.
            return subprocess.Popen(
                [str(self._bin / "ray"), "start", *self._installation.ray_arguments(self._settings)],
                env=self._environment,
                cwd=self._installation.prefix,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _wait_until_started(self, ray: subprocess.Popen[bytes]) -> None:
        log = self._installation.log_folder / "ray.log"
        deadline_s = time.monotonic() + START_LIMIT_S
        while STARTED_WORDS not in log.read_text(errors="replace"):
            if ray.poll() is not None or time.monotonic() > deadline_s:
                if self._state is not None:
                    # Should that have been the reason, it must not be again.
                    self._state.forget()
                raise StartupError(f"Ray did not start; its last words: {_last_line(log)}", f"read {log}")
            if self._asked_to_end.wait(POLL_S / 4):
                return

    def _watch(self) -> None:
        deploy_at_s = time.monotonic() if self._deploys else math.inf
        retry_s = RETRY_S
        while not self._asked_to_end.wait(POLL_S):
            found = psutil.Process().children(recursive=True)
            self._processes = {process for process in self._processes if process.is_running()} | set(found)
            if not any(_name(process) == "raylet" for process in found):
                raise StartupError("Ray has ended by itself.", f"read {self._installation.ray_folder}")
            if self._app is None and time.monotonic() >= deploy_at_s:
                self._app = self._start_app()
            elif self._app is not None and (code := self._app.poll()) is not None:
                self._app = None
                deploy_at_s = math.inf if code == 0 else time.monotonic() + retry_s
                retry_s = min(2 * retry_s, MAX_RETRY_S)

    @property
    def _deploys(self) -> bool:
        return self._settings.role == "head" and self._installation.app_file.exists()

    def _start_app(self) -> subprocess.Popen[bytes]:
        with (self._installation.log_folder / "app.log").open("ab") as log:
            return subprocess.Popen(
                [str(self._bin / "metalslots"), "deploy", "--if-needed", str(self._installation.app_file)],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _end_all(self, ray: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(psutil.Error):
            self._processes |= set(psutil.Process().children(recursive=True))
        self._processes = {process for process in self._processes if _name(process) != "caffeinate"}
        if self._app is not None:
            self._app.terminate()
        ray.terminate()
        # Ray ends its own; an engine sees that its replica is gone and frees its model. That is waited for.
        _, alive = psutil.wait_procs(self._processes, timeout=END_LIMIT_S)
        for process in alive:
            with contextlib.suppress(psutil.Error):
                print(f"killing what has not ended: {shlex.join(process.cmdline())[:200]}", flush=True)
                process.kill()
        psutil.wait_procs(alive, timeout=KILL_WAIT_S)

    def _note(self, state: str, detail: str) -> None:
        note = {"state": state, "detail": detail, "since_unix_s": round(time.time()), "pid": os.getpid()}
        write_file(self._installation.state_file, json.dumps(note) + "\n", mode=0o644)
        print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {state}{f': {detail}' if detail else ''}", flush=True)


def daemon_environment() -> dict[str, str]:
    """This process's environment without what belongs to another Ray, and with what a supervisor leaves out."""
    values = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    # launchd gives its daemons neither a home nor a useful path.
    values.setdefault("HOME", pwd.getpwuid(os.getuid()).pw_dir)
    values["PATH"] = os.pathsep.join(dict.fromkeys([*_path(values), "/usr/bin", "/bin", "/usr/sbin", "/sbin"]))
    return values


def read_state(installation: Installation) -> dict[str, object] | None:
    """What the daemon said last; None when there is none, or it is gone without a word."""
    try:
        note: dict[str, object] = json.loads(installation.state_file.read_text())
    except (OSError, ValueError):
        return None
    pid = note.get("pid")
    if note.get("state") != "ended" and not (isinstance(pid, int) and psutil.pid_exists(pid)):
        return None
    return note


def keep_awake_command(pid: int, platform: str) -> Sequence[str] | None:
    """The command that keeps this machine awake while process ``pid`` lives, where one is needed.

    A Mac may sleep although its settings forbid it (a lid, a schedule); a sleeping member is a frozen one. A Linux
    server does not sleep by itself, and `metalslots doctor` says so when its settings differ.
    """
    return ["/usr/bin/caffeinate", "-ims", "-w", str(pid)] if platform == "darwin" else None


def _keep_awake() -> subprocess.Popen[bytes] | None:
    command = keep_awake_command(os.getpid(), sys.platform)
    if command is None:
        return None
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _path(values: dict[str, str]) -> list[str]:
    return [folder for folder in values.get("PATH", "").split(os.pathsep) if folder]


def _name(process: psutil.Process) -> str:
    try:
        return process.name() if process.status() != psutil.STATUS_ZOMBIE else ""
    except psutil.Error:
        return ""


def _last_line(path: Path) -> str:
    lines = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "none"
