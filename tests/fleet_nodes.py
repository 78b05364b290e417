"""Several Ray nodes on this machine, each as a Mac of its own: started, frozen, killed and ended by process id.

Each node has an address of its own in 127.0.0.0/8, one `metal`, and its own ports. Nothing here imports Ray: the fleet
lives in other processes, and so does whoever deploys on it (``tests.fleet_deploy``).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import psutil
import yaml

from serve_app.config import ray_environment
from tests.serve_endpoint import eventually

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
COMMAND_LIMIT_S = 180.0
LOCK = Path(tempfile.gettempdir()) / "metalslots-test-fleet.lock"


class Node:
    """One Ray node: its supervisor process and everything below it."""

    def __init__(self, name: str, address: str, process: subprocess.Popen[bytes]) -> None:
        self.name = name
        self.address = address
        self._process = process

    @property
    def processes(self) -> list[psutil.Process]:
        """The node's processes, children before parents."""
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self._process.pid)
            return [*reversed(root.children(recursive=True)), root]
        return []

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to each of them."""
        for process in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def kill(self) -> None:
        """End it as a power cut does."""
        self.signal(signal.SIGKILL)
        self._process.wait()


class Fleet:
    """A head and its members. Leaving it ends them all."""

    def __init__(self, num_nodes: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="mfl-", dir="/tmp"))
        self._num_nodes = num_nodes
        self.http_port = free_port()
        self._gcs_port = free_port()
        self.nodes: list[Node] = []
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
            **ray_environment(),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(16),
            "PYTHONPATH": str(ROOT),
            "OPENBLAS_NUM_THREADS": "1",
            "METALSLOTS_API_KEY": "",
        }

    @property
    def address(self) -> str:
        """Ray's address."""
        return f"127.0.1.1:{self._gcs_port}"

    @property
    def url(self) -> str:
        """The endpoint, once something is deployed."""
        return f"http://127.0.0.1:{self.http_port}"

    def __enter__(self) -> Fleet:
        # Its addresses and ports are fixed: one fleet at a time on a machine. A dead owner's lock is free.
        self._lock = LOCK.open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            for _ in range(self._num_nodes):
                self.start_node()
            self.wait_for_nodes(self._num_nodes)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for node in reversed(self.nodes):
            node.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()

    def start_node(self) -> Node:
        """Start one more node and wait until it says that it runs: two that start at once get in each other's way."""
        number = len(self.nodes)
        address = f"127.0.1.{number + 1}"
        first = 20_000 + 500 * number
        role = ["--head", f"--port={self._gcs_port}", "--include-dashboard=false", f"--temp-dir={self.folder}"]
        if number:
            role = [f"--address={self.address}"]
        command = [
            str(BIN / "ray"),
            "start",
            *role,
            f"--node-ip-address={address}",
            '--resources={"metal": 1}',
            "--num-cpus=4",
            "--object-store-memory=134217728",
            f"--min-worker-port={first}",
            f"--max-worker-port={first + 400}",
            f"--dashboard-agent-listen-port={first + 401}",
            f"--dashboard-agent-grpc-port={first + 402}",
            f"--runtime-env-agent-port={first + 403}",
            f"--metrics-export-port={first + 404}",
            "--disable-usage-stats",
            "--block",
        ]
        log = self.folder / f"node-{number}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, env=self.environment, stdout=output, stderr=output, start_new_session=True
            )
        node = Node(f"mac{number}", address, process)
        self.nodes.append(node)
        eventually(lambda: "Ray runtime started" in log.read_text())
        return node

    def deploy(self, replica_class: str, **values: Any) -> None:
        """Deploy an app whose replicas are of ``replica_class`` (module:name), and wait until it answers."""
        config = self.folder / "app.yaml"
        config.write_text(yaml.safe_dump({"host": "127.0.0.1", "port": self.http_port, **values}))
        self.run("-m", "tests.fleet_deploy", self.address, replica_class, str(config))

    def run(self, *arguments: str) -> str:
        """Run a Python program as somebody on the fleet; returns what it prints."""
        done = subprocess.run(
            [sys.executable, "-W", "ignore", *arguments],
            env=self.environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=COMMAND_LIMIT_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def command(self, *arguments: str, limit_s: float = COMMAND_LIMIT_S) -> subprocess.CompletedProcess[str]:
        """Run `metalslots` on the fleet."""
        return subprocess.run(
            [str(BIN / "metalslots"), *arguments],
            env=self.environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=limit_s,
        )

    def replicas(self) -> list[Mapping[str, Any]]:
        """What every replica that answers says of itself."""
        try:
            found: list[Mapping[str, Any]] = httpx.get(f"{self.url}/status", timeout=10).json()["replicas"]
        except (httpx.HTTPError, ValueError, KeyError):
            return []
        return found

    def wait_for_nodes(self, num: int) -> None:
        """Wait until ``num`` nodes are alive, and no more."""
        self.run("-m", "tests.fleet_deploy", self.address, "--wait-for", str(num))


def free_port() -> int:
    """A port that nobody listens on now, outside the ranges that nodes use."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
