"""Tiny random models of many architectures, in fp32 on the CPU."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from engine.mlx_backend.loaded_model import LoadedModel
from engine.mlx_backend.loader import describe_model
from engine.model_source import ModelSource
from tests.model_zoo import build
from tests.model_zoo_configs import CONFIG

__all__ = ["CONFIG", "build", "tiny_model"]


@cache
def tiny_model(architecture: str = "llama", **changes: Any) -> LoadedModel:
    """A loaded random model, one per architecture and set of changes in the whole test run."""
    model, config = build(architecture, **changes)
    source = ModelSource(f"tiny-{architecture}", "folder", Path("nowhere"), "r0")
    return describe_model(model, config, source, "cpu")
