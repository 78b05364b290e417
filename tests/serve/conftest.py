"""One private Ray for all tests of this tier, and the apps that are deployed on it."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from serve_app.config import APP_NAME, load_app_config, ray_environment
from tests.serve_endpoint import Endpoint

ROOT = Path(__file__).parents[2]

# Ray reads these when it is first imported, which the test modules do.
for name in [name for name in os.environ if name.startswith(("RAY_ADDRESS", "RAY_AUTH_"))]:
    del os.environ[name]
os.environ.update(ray_environment())
os.environ.update({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16), "PYTHONPATH": str(ROOT)})


@pytest.fixture(scope="session")
def ray_port() -> Iterator[int]:
    """A Ray of our own, with its own folder and secret, that joins no other; yields the port that its apps get."""
    import ray
    from ray import serve

    folder = tempfile.mkdtemp(prefix="mst-", dir="/tmp")
    ray.init(
        address="local",
        num_cpus=8,
        resources={"metal": 1},
        include_dashboard=False,
        object_store_memory=128 * 2**20,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _temp_dir=folder,
        _node_ip_address="127.0.0.1",
    )
    try:
        yield _free_port()
    finally:
        serve.shutdown()
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def chain(ray_port: int) -> Iterator[Endpoint]:
    """The whole way through Ray with the chain model at its end: fast, and every answer is known beforehand."""
    from tests.serve_replicas import ChainReplica

    model = {"name": "chain", "engine": {"slots": 8, "max_waiting_requests": 64}}
    with deployed({"port": ray_port, "models": [model], "replica": {"shutdown_grace_s": 1.0}}, ChainReplica) as app:
        yield app


@pytest.fixture(scope="module")
def demo(ray_port: int) -> Iterator[Endpoint]:
    """The demo model with four slots, as `make serve` runs it."""
    engine = {"model": "demo", "slots": 4, "max_model_len": 4096, "embeddings": "last-token"}
    with deployed({"port": ray_port, "models": [{"engine": engine}], "replica": {"shutdown_grace_s": 1.0}}) as app:
        yield app


@contextmanager
def deployed(values: dict[str, Any], *replica: Any) -> Iterator[Endpoint]:
    from ray import serve

    from serve_app.app import run_app

    run_app(load_app_config(values), *replica)
    try:
        yield Endpoint(f"http://127.0.0.1:{values['port']}")
    finally:
        serve.delete(APP_NAME)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
