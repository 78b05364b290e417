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
from typing import IO, Any

import httpx
import psutil
import yaml

from serve_app.config import ray_environment
from tests.serve_endpoint import eventually

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
COMMAND_LIMIT_S = 180.0
# Several test runs on one machine: each fleet takes a bay of addresses, and of ports that the system does not give out.
NUM_BAYS = 5
BAY_PORTS = 1_800
FIRST_PORT = 23_000


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

    @property
    def has_ended(self) -> bool:
        """Whether its supervisor is gone."""
        return self._process.poll() is not None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to each of them."""
        for process in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def kill(self) -> None:
        """End it as a power cut does. Some of Ray's processes outlive those that made them, but for their group."""
        self.signal(signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class Fleet:
    """A head and its members. Leaving it ends them all."""

    def __init__(self, num_nodes: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="mfl-", dir="/tmp"))
        self._num_nodes = num_nodes
        self.http_port = free_port()
        self._gcs_port = free_port()
        self._bay, self._bay_lock = _take_bay()
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
        return f"127.0.{100 + self._bay}.1:{self._gcs_port}"

    @property
    def url(self) -> str:
        """The endpoint, once something is deployed."""
        return f"http://127.0.0.1:{self.http_port}"

    def __enter__(self) -> Fleet:
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
        self._bay_lock.close()

    def start_node(self, number: int | None = None) -> Node:
        """Start one more node, or one that has ended again, and wait until it says that it runs.

        Two that start at once get in each other's way.
        """
        number = len(self.nodes) if number is None else number
        address = f"127.0.{100 + self._bay}.{number + 1}"
        first = FIRST_PORT + BAY_PORTS * self._bay + 450 * (number % 4)
        role = ["--head", f"--port={self._gcs_port}", "--include-dashboard=false", f"--temp-dir={self.folder}"]
        if number:
            role = [f"--address={self.address}"]
        else:
            # It would say that a dead head still runs, since members of its are on this machine.
            (self.folder / "ray_current_cluster").unlink(missing_ok=True)
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
        self.nodes[number : number + 1] = [node]
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
        return [replica for replica in found if not replica["silent_s"]]

    def wait_for_nodes(self, num: int) -> None:
        """Wait until ``num`` nodes are alive, and no more."""
        self.run("-m", "tests.fleet_deploy", self.address, "--wait-for", str(num))


def _take_bay() -> tuple[int, IO[bytes]]:
    """A bay that no other fleet has, and the open file that keeps it."""
    for bay in range(NUM_BAYS):
        lock = Path(tempfile.gettempdir(), f"metalslots-fleet-{bay}.lock").open("wb")  # noqa: SIM115 - open as long as the fleet
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
        else:
            return bay, lock
    raise RuntimeError(f"{NUM_BAYS} fleets run on this machine already")


def free_port() -> int:
    """A port that nobody listens on now, outside the ranges that nodes use."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
