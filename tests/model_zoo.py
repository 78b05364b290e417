"""Tiny random-weight instances of mlx-lm's model modules: every one that a small configuration can describe.

Owns: building them. Windows are shorter than the sequences that tests run through them, and weights that a model starts
as zeros or ones are drawn at random, so that sinks, norms, biases and routers all count.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.models
from mlx.utils import tree_map

from engine.mlx_backend.device import use_backend
from engine.mlx_backend.mlx_lm_parts import Model
from tests.model_zoo_configs import CHANGES, CONFIG, NOT_BUILT, TEXT_MODULE, WRAPPED

_HELPERS = {
    "activations",
    "base",
    "bitlinear_layers",
    "cache",
    "gated_delta",
    "mla",
    "pipeline",
    "rope_utils",
    "ssm",
    "switch_layers",
}


def module_names() -> list[str]:
    """All model modules of the installed mlx-lm."""
    folder = Path(next(iter(mlx_lm.models.__path__)))
    return sorted(
        (path.stem for path in folder.glob("*.py") if path.stem not in _HELPERS | {"__init__"}), key=str.lower
    )


def built_names() -> Iterator[str]:
    """Modules of which an instance can be made here."""
    return (name for name in module_names() if name not in NOT_BUILT)


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    """The tiny configuration of a module."""
    text = TEXT_MODULE.get(name, name)
    config = {**CONFIG, **CHANGES.get(text, {}), **CHANGES.get(name, {}), "model_type": name, **changes}
    return {**config, "text_config": {**config, "model_type": text}} if name != text or name in WRAPPED else config


def build(name: str, **changes: Any) -> tuple[Model, dict[str, Any]]:
    """An evaluated random model and its configuration."""
    use_backend("cpu")
    module = importlib.import_module(f"mlx_lm.models.{name}")
    config = config_of(name, **changes)
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict(config))
    model.eval()
    model.update(tree_map(_stirred, model.parameters()))
    mx.eval(model.parameters())
    return model, config


def _stirred(array: mx.array) -> mx.array:
    """The weight, with noise where it was constant."""
    if array.size > 1 and mx.issubdtype(array.dtype, mx.floating) and (array == array.reshape(-1)[0]).all():
        return array + mx.random.normal(array.shape, scale=0.1).astype(array.dtype)
    return array
