"""Keeps one loaded demo model for the tests of this tier."""

from __future__ import annotations

import pytest

from engine.mlx_backend.loaded_model import LoadedModel
from engine.mlx_backend.loader import load_model
from engine.model_source import resolve_model


@pytest.fixture(scope="session")
def demo() -> LoadedModel:
    return load_model(resolve_model("demo"), backend="cpu", parity="off")
