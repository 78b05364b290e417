"""Loads the fast BLAS before any test module of this tier imports MLX, and keeps one loaded demo model."""

from __future__ import annotations

import pytest

import engine.mlx_backend  # noqa: F401
from engine.mlx_backend.loaded_model import LoadedModel
from engine.mlx_backend.loader import load_model
from engine.model_source import resolve_model


@pytest.fixture(scope="session")
def demo() -> LoadedModel:
    return load_model(resolve_model("demo"), backend="cpu", parity="off")
