"""The daemon of one machine, around a stand-in for Ray: it ends in order, and notices when Ray has ended."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from serve_app.node.settings import Installation, load_settings
from serve_app.node.ticket import make_head
from tests.serve_endpoint import eventually

LIMIT_S = 30
# `ray start --block`, as far as the daemon sees it: words in a log, a raylet, and below it an engine with a session of
# its own that takes its time to end.
RAY = """#!/bin/sh
"$ENGINE" -c 'import signal, sys, threading
done = threading.Event()
signal.signal(signal.SIGUSR1, lambda *_: done.set())
open(sys.argv[1], "w").close()
done.wait()' "$RAN/engine" &
echo $! >"$RAN/engine.pid"
"$RAYLET" 600 &
raylet=$!
trap 'kill $raylet; exit 1' TERM
echo "Ray runtime started."
printf '%s\\n' "$@" >"$RAN/arguments"
wait $raylet
# As the real one: it goes on without its raylet.
exec sleep 600
"""


class Running:
    """A running daemon."""

    def __init__(self, folder: Path, installation: Installation, environment: dict[str, str]) -> None:
        self.folder = folder
        self.installation = installation
        code = "from pathlib import Path; from serve_app.node.daemon import NodeDaemon; "
        code += "from serve_app.node.settings import Installation; "
        code += (
            f"NodeDaemon(Installation(Path({str(installation.prefix)!r})), Path({str(folder / 'bin/python')!r})).run()"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE, text=True
        )

    def state(self) -> str:
        try:
            return str(json.loads(self.installation.state_file.read_text())["state"])
        except (OSError, ValueError):
            return ""

    def engine(self) -> psutil.Process:
        eventually((self.folder / "engine").exists)
        return psutil.Process(int((self.folder / "engine.pid").read_text()))


@pytest.fixture
def installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Installation:
    monkeypatch.setattr("serve_app.node.settings.MAX_PREFIX_BYTES", 1000)
    return Installation(tmp_path / "prefix")


@pytest.fixture
def daemon(tmp_path: Path, installation: Installation) -> Iterator[Running]:
    make_head(installation, load_settings({"role": "head", "address": "127.0.0.1", "head": "127.0.0.1:6379"}))
    with run(tmp_path, installation) as running:
        yield running


@contextmanager
def run(folder: Path, installation: Installation, script: str = RAY) -> Iterator[Running]:
    (folder / "bin").mkdir()
    ray = folder / "bin" / "ray"
    ray.write_text(script)
    ray.chmod(0o755)
    raylet = folder / "raylet"
    shutil.copy(shutil.which("sleep") or "/bin/sleep", raylet)
    environment = {**os.environ, "RAN": str(folder), "RAYLET": str(raylet), "ENGINE": sys.executable}
    running = Running(folder, installation, environment)
    try:
        yield running
    finally:
        children = []
        if running.process.poll() is None:
            children = psutil.Process(running.process.pid).children(recursive=True)
        running.process.kill()
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        running.process.communicate()


def test_it_ends_only_when_the_engine_has_given_its_memory_back(daemon: Running) -> None:
    eventually(lambda: daemon.state() == "running")
    engine = daemon.engine()
    daemon.process.send_signal(signal.SIGTERM)
    eventually(lambda: daemon.state() == "ending")
    raylets = [
        process for process in psutil.process_iter(["exe"]) if process.info["exe"] == str(daemon.folder / "raylet")
    ]
    psutil.wait_procs(raylets, timeout=LIMIT_S)
    assert daemon.process.poll() is None
    assert engine.is_running()
    engine.send_signal(signal.SIGUSR1)
    assert daemon.process.wait(LIMIT_S) == 0
    assert daemon.state() == "ended"


def test_it_fails_when_ray_goes_on_without_a_raylet(daemon: Running) -> None:
    eventually(lambda: daemon.state() == "running")
    engine = daemon.engine()
    for process in psutil.Process(daemon.process.pid).children(recursive=True):
        if process.name() == "raylet":
            process.kill()
    eventually(lambda: daemon.state() == "ending")
    engine.send_signal(signal.SIGUSR1)
    _, errors = daemon.process.communicate(timeout=LIMIT_S)
    assert daemon.process.returncode != 0
    assert "Ray has ended by itself" in errors
    assert not engine.is_running()


def test_a_member_says_that_it_waits_for_its_head_and_starts_when_that_is_there(
    tmp_path: Path, installation: Installation
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = {"role": "member", "address": "127.0.0.2", "head": f"127.0.0.1:{port}"}
    installation.write(load_settings(settings))
    with run(tmp_path, installation) as running:
        eventually(lambda: running.state() == "waiting for the head")
        assert not (tmp_path / "arguments").exists()
        with socket.create_server(("127.0.0.1", port)):
            eventually(lambda: running.state() == "running")
        assert f"--address=127.0.0.1:{port}" in (tmp_path / "arguments").read_text()
        running.engine().send_signal(signal.SIGUSR1)


def test_a_state_with_which_ray_does_not_start_is_forgotten(tmp_path: Path, installation: Installation) -> None:
    settings = {"role": "head", "address": "127.0.0.1", "head": "127.0.0.1:6379", "keep_state": True}
    make_head(installation, load_settings(settings))
    # It reports what it finds, and fails.
    with run(tmp_path, installation, '#!/bin/sh\nls -d "$RAY_gcs_storage_path" >"$RAN/found"\nexit 1\n') as running:
        _, errors = running.process.communicate(timeout=LIMIT_S)
    assert "Ray did not start" in errors
    assert (tmp_path / "found").read_text().strip() == str(installation.head_state_folder)
    assert not installation.head_state_folder.exists()
