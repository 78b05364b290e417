"""``python -m tests.fleet_deploy ADDRESS MODULE:CLASS FILE``: deploy on a fleet, with replicas of a class of the tests.

``python -m tests.fleet_deploy ADDRESS --wait-for N`` waits until exactly N nodes are alive.
"""

from __future__ import annotations

import importlib
import logging
import sys
import threading
import time
from pathlib import Path
from typing import Any

import ray

from serve_app.app import run_app
from serve_app.config import read_app_config

LIMIT_S = 90.0


def wait_for_nodes(num: int) -> None:
    """Return when ``num`` nodes are alive. Raises TimeoutError with the number there is."""
    deadline_s = time.monotonic() + LIMIT_S
    list_nodes: Any = ray.nodes
    while (found := sum(node["Alive"] for node in list_nodes())) != num:
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{found} nodes instead of {num}")
        threading.Event().wait(0.2)


def main(address: str, what: str, argument: str) -> None:
    """Do it."""
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    if what == "--wait-for":
        wait_for_nodes(int(argument))
        return
    module, _, name = what.partition(":")
    run_app(read_app_config(Path(argument)), getattr(importlib.import_module(module), name))


if __name__ == "__main__":
    main(*sys.argv[1:])
