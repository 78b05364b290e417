"""A Ray of our own on this machine: started, owned and ended by one process.

Owns: the settings of a single-machine Ray, its private folder, its secret, and the orderly end of every process that
it started. Must not know: what is deployed on it. Never attaches to a Ray that is already running.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import secrets
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from serve_app.cli.console import CommandFailedError
from serve_app.config import ray_environment

OBJECT_STORE_BYTES = 256 * 2**20
# Tokens and prompts go over gRPC, so the object store stays almost empty; unified memory is for the KV pool.
# Longer than the engine's own teardown (engine.core.async_engine.TEARDOWN_S), which a kill must not cut short on a Mac.
KILL_GRACE_S = 65.0 if sys.platform == "darwin" else 6.0
# Serve's and Ray's own way to the end, measured at 3 to 8 s on two busy cores.
SHUTDOWN_S = 30.0


class LocalRay:
    """One Ray instance, started by ``start`` and gone after ``stop``, whatever happened between."""

    def __init__(self) -> None:
        # Short: a Unix socket path below it may have 103 bytes on macOS.
        self.folder = Path(tempfile.mkdtemp(prefix="mslots-", dir=_short_temp_dir()))
        self.address = ""
        self.token = secrets.token_hex(32)

    def start(self) -> None:
        """Start Ray with one ``metal`` resource. Raises CommandFailedError with Ray's own words."""
        assert "ray" not in sys.modules, "Ray reads its environment at its first import"
        # RAY_ADDRESS would make this process join somebody else's cluster.
        for name in [key for key in os.environ if key.startswith(("RAY_ADDRESS", "RAY_AUTH_"))]:
            del os.environ[name]
        os.environ.update(ray_environment())
        # A secret of this instance, in the environment and not in a file or on a command line: Ray listens on all
        # interfaces, and without a token anyone on the network could run code here.
        os.environ.update({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token})
        import ray

        try:
            context: Any = self._init(ray)
        except Exception as error:
            raise CommandFailedError(
                f"Ray did not start: {error}", f"read the logs in {self.log_folder} and start again"
            ) from error
        self.address = str(context.address_info["address"])

    def _init(self, ray: Any) -> Any:
        # Serve sets its loggers' levels itself, so a level of ours would not last.
        logging.disable(logging.WARNING)
        return ray.init(
            address="local",
            # Logical: many small actors (controller, proxy, ingress) must be placeable on a small machine.
            num_cpus=max(8, os.cpu_count() or 1),
            resources={"metal": 1},
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=str(self.folder),
            _node_ip_address="127.0.0.1",
        )

    @property
    def log_folder(self) -> Path:
        """Where Ray and the replicas write their logs."""
        return self.folder / "session_latest" / "logs"

    def alive(self) -> bool:
        """Whether Ray's node process still runs; without it nothing on this machine can be served."""
        names = {process.name() for process in psutil.Process().children() if process.status() != psutil.STATUS_ZOMBIE}
        return "raylet" in names

    def stop(self, end_calls: Callable[[], None], grace_s: float) -> None:
        """End Serve, then Ray, then whatever of our children is still there, then the private folder.

        ``end_calls`` comes first and may take ``grace_s``. A Ray that does not end by itself is ended by force.
        """
        children = psutil.Process().children(recursive=True)
        thread = threading.Thread(target=_shut_down_ray, args=(end_calls,), name="ray-shutdown", daemon=True)
        # Ray prints that its controller, which it has just ended, does not answer.
        with contextlib.redirect_stderr(io.StringIO()):
            thread.start()
            thread.join(grace_s + SHUTDOWN_S)
        end_processes(children, KILL_GRACE_S)
        shutil.rmtree(self.folder, ignore_errors=True)


def _shut_down_ray(end_calls: Callable[[], None]) -> None:
    if "ray" not in sys.modules:
        return
    import ray
    from ray import serve

    end_serve: Any = serve.shutdown
    end_ray: Any = ray.shutdown
    if ray.is_initialized():
        # Whatever they raise, the processes are ended next.
        for end in (end_calls, end_serve, end_ray):
            with contextlib.suppress(Exception):
                end()


def end_processes(processes: list[psutil.Process], grace_s: float) -> None:
    """Ask the processes to end, and kill those that have not after ``grace_s`` seconds."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    _, alive = psutil.wait_procs(processes, timeout=grace_s)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(alive, timeout=grace_s)


def _short_temp_dir() -> str:
    folder = tempfile.gettempdir()
    return folder if len(folder) <= 24 else "/tmp"
