"""The README's path for an office, walked on one machine: each Mac is a prefix of its own and an address in 127/8.

A line of the README is run as it stands there but for what belongs to the place: `sudo` is left out, addresses, folders
and the app file's model are replaced, and a loop instead of launchd keeps the daemon alive.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import httpx
import openai
import psutil
import yaml

from serve_app.node.settings import Installation
from tests.fleet_nodes import free_port
from tests.tiny_model import make_tiny_model

ROOT = Path(__file__).parents[1]
BIN = "k8s-free-deploy/bin/"
ENVIRONMENT = Path(sys.executable).parents[1]
COMMAND_LIMIT_S = 240
# Below what systems give to whoever asks for any port.
PORT_BLOCKS = range(24_000, 32_000, 1_000)
README_ADDRESSES = {"192.168.1.10": "127.0.3.1", "192.168.1.11": "127.0.3.2", "192.168.1.12": "127.0.3.3"}


def readme_lines(section: str = "Several Macs") -> list[str]:
    """The commands of a section of the README, without ``sudo``."""
    text = (ROOT / "README.md").read_text().partition(f"## {section}\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    return [line.removeprefix("sudo ") for line in lines if line and not line.startswith("#")]


class Mac:
    """One machine of the office."""

    def __init__(self, prefix: Path, address: str, first_port: int) -> None:
        self.prefix = prefix
        self.address = address
        self.first_port = first_port

    @property
    def loop_pid(self) -> int | None:
        """The process that stands in for launchd."""
        try:
            return int((self.prefix / "run" / "loop.pid").read_text())
        except (OSError, ValueError):
            return None

    @property
    def processes(self) -> list[psutil.Process]:
        """The machine's processes, children before parents; also those whose parents are gone."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if str(self.prefix) in process.environ().get("METALSLOTS_PREFIX", "") or process.pid == self.loop_pid:
                    found.append(process)
        return sorted(found, key=lambda process: -process.pid)

    def cut_the_power(self) -> None:
        """End everything at once."""
        for process in reversed(self.processes):
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        psutil.wait_procs(self.processes, timeout=10)


class Office:
    """Three Macs. Entering it installs nothing; leaving it ends and removes everything."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="mof-", dir="/tmp"))
        first = iter(_free_blocks())
        self.macs = [
            Mac(self.folder / letter, address, next(first))
            for letter, address in zip("abc", README_ADDRESSES.values(), strict=True)
        ]
        self.head_port = free_port()
        self.http_port = free_port()
        self.key = ""
        self.models = [make_tiny_model(self.folder / f"model-{number}", number) for number in range(2)]

    @property
    def head(self) -> Mac:
        """The machine that the others join."""
        return self.macs[0]

    @property
    def url(self) -> str:
        """Where people ask."""
        return f"https://127.0.0.1:{self.http_port}"

    def __enter__(self) -> Office:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for mac in reversed(self.macs):
            mac.cut_the_power()
        shutil.rmtree(self.folder, ignore_errors=True)

    def walk(self, line: str, mac: Mac | None = None) -> str:
        """Run one line of the README on a machine (the head, or the one whose address stands in it)."""
        words = [self._replace(word) for word in shlex.split(line)]
        mac = mac or next((mac for mac in self.macs if mac.address in words and "ready" not in words), self.head)
        if words[0].startswith(BIN):
            words += ["--prefix", str(mac.prefix), "--supervisor", "none", *self._local_options(words[0], mac)]
        return self.run(words)

    def run(self, words: Sequence[str], *, expect: int = 0, environment: Mapping[str, str] | None = None) -> str:
        """Run a command that must end with ``expect``; returns what it prints."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "METALSLOTS_"))}
        done = subprocess.run(
            words,
            cwd=ROOT,
            env={**clean, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1", **(environment or {})},
            capture_output=True,
            text=True,
            timeout=COMMAND_LIMIT_S,
        )
        assert done.returncode == expect, f"{shlex.join(words)}\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def app_file(self, name: str) -> Path:
        """One of configs/apps with this place's model, port and folders instead of the office's."""
        text = (ROOT / "configs" / "apps" / name).read_text().replace("/opt/metalslots", str(self.head.prefix))
        values = yaml.safe_load(text)
        values |= {"port": self.http_port, "replica": {"shutdown_grace_s": 5}}
        for model, folder in zip(values["models"], self.models, strict=False):
            model["engine"] |= {"model": str(folder), "slots": 2, "max_model_len": 512}
        path = self.folder / name
        path.write_text(yaml.safe_dump(values))
        return path

    def trust(self) -> ssl.SSLContext:
        """What a client needs to believe the office's certificates."""
        return ssl.create_default_context(cafile=str(self.head.prefix / "etc" / "tls" / "ca.crt"))

    def tls_variables(self, mac: Mac) -> dict[str, str]:
        """The part of a machine's environment that makes Ray show the machine's certificate."""
        installation = Installation(mac.prefix)
        values = installation.environment(installation.read())
        return {name: value for name, value in values.items() if "TLS" in name}

    def shakes_hands(self, host: str, port: int, certificate: Mac | None) -> bool:
        """Whether a port lets in who shows the certificate of a machine, or none."""
        context = self.trust()
        context.set_alpn_protocols(["h2"])
        if certificate is not None:
            folder = certificate.prefix / "etc" / "tls"
            context.load_cert_chain(folder / "node.crt", folder / "node.key")
        try:
            with (
                socket.create_connection((host, port), timeout=10) as plain,
                context.wrap_socket(plain, server_hostname=host) as safe,
            ):
                # Since TLS 1.3 the server's refusal comes with the first thing that is read from it.
                return safe.read(1) != b""
        except (ssl.SSLError, ConnectionError):
            return False

    def client(self) -> openai.OpenAI:
        """The official client as it comes, but for its address, key and trust."""
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=self.key, http_client=httpx.Client(verify=self.trust(), timeout=60)
        )

    def get(self, path: str) -> httpx.Response:
        """Ask for a document with the key."""
        headers = {"Authorization": f"Bearer {self.key}"}
        return httpx.get(f"{self.url}{path}", headers=headers, verify=self.trust(), timeout=30)

    def _replace(self, word: str) -> str:
        if word in README_ADDRESSES:
            return README_ADDRESSES[word]
        if word == "join-ticket":
            return str(self.head.prefix / "etc" / "join-ticket")
        if word.startswith("configs/apps/"):
            return str(self.app_file(Path(word).name))
        return word.replace("/opt/metalslots", str(self.head.prefix))

    def _local_options(self, script: str, mac: Mac) -> list[str]:
        name = Path(script).name
        environment = ["--environment", str(ENVIRONMENT)] if name in ("install.sh", "join.sh", "upgrade.sh") else []
        ports = ["--first-port", str(mac.first_port)] if name in ("install.sh", "join.sh") else []
        return [*environment, *ports, *(["--port", str(self.head_port)] if name == "install.sh" else [])]

    def show_logs(self) -> None:
        """Print what the daemons and Ray have said last."""
        for mac in self.macs:
            for log in sorted((mac.prefix / "log").glob("*.log")):
                print(f"== {log}\n{log.read_text(errors='replace')[-3000:]}")


def _free_blocks() -> Iterable[int]:
    for first in PORT_BLOCKS:
        with contextlib.ExitStack() as stack:
            try:
                for port in (first, first + 1, first + 10):
                    probe = stack.enter_context(socket.socket())
                    probe.bind(("0.0.0.0", port))
            except OSError:
                continue
        yield first
