"""What holds for every test: the tier from the folder, the environment, the BLAS, hypothesis' profile."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

# Read when MLX, Ray or a hub client is first imported, so set before any test module is.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # two spinning BLAS threads on two busy cores are slower
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

# Loads the BLAS that stands in front of MLX's own, and not MLX: any test module may import MLX first after this.
importlib.import_module("engine.mlx_backend")

TESTS = Path(__file__).parent
TIERS = ("unit", "long", "api", "faults", "mlx", "serve", "gpu", "metal")
# The first test of a file starts its Ray nodes: a minute on two busy cores, before it begins.
FLEET_LIMIT_S = 300

# No deadline: a test must not depend on the speed of the machine. On CI every run draws the same examples.
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


def _tier(path: Path) -> str:
    folder = path.relative_to(TESTS).parts[0]
    return folder if folder in TIERS else "unit"


def _has_cuda() -> bool:
    """Answered without importing MLX, which must not be loaded before the BLAS that stands in for its own."""
    installed = {dist.name for dist in importlib.metadata.distributions()}
    return bool(installed & {"mlx-cuda-12", "mlx-cuda-13"}) and Path("/dev/nvidiactl").exists()


def _missing_device(tier: str) -> str | None:
    if tier == "gpu" and not _has_cuda():
        return "needs an NVIDIA GPU and MLX's CUDA build"
    if tier == "metal" and (sys.platform, platform.machine()) != ("darwin", "arm64"):
        return "needs a Mac with Apple silicon"
    return None


@pytest.fixture(autouse=True)
def _logging_enabled() -> Iterator[None]:
    """Commands and import-linter silence loggers for their process; here other tests share it."""
    yield
    logging.disable(logging.NOTSET)
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.disabled = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with its tier, skip tiers whose device is missing, run the quick tiers first."""
    for item in items:
        tier = _tier(item.path)
        item.add_marker(tier)
        if tier == "serve" and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(FLEET_LIMIT_S))
        if reason := _missing_device(tier):
            item.add_marker(pytest.mark.skip(reason=reason))
    items.sort(key=lambda item: TIERS.index(_tier(item.path)))
