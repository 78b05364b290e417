"""Applies an adapter, as `mlx_lm.lora` writes it, to a loaded model.

Owns: melting low-rank changes into dense weights, where they cost nothing afterwards. Must not know: how the model was
read.
"""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_unflatten

from engine.errors import UnsupportedModelError
from engine.mlx_backend.mlx_lm_parts import Model, load_adapters


def apply_adapter(model: Model, folder: Path) -> str:
    """Change ``model`` in place; returns a sentence for the status.

    A quantised weight stays as it is, with the change computed beside it: quantising the sum would lose a part of the
    change. Raises UnsupportedModelError for an adapter that does not fit the model.
    """
    try:
        load_adapters(model, str(folder))
    except (KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise UnsupportedModelError(
            f"The adapter in {folder} does not fit this model: {error}", "train it on this model, or leave it out"
        ) from error
    melted, beside = [], 0
    for name, module in model.named_modules():
        if "lora_a" not in module:
            continue
        if "scales" in (module.get("linear") or module["embedding"]):
            beside += 1
            continue
        dense = module.fuse()
        mx.eval(dense.parameters())
        melted.append((name, dense))
    model.update_modules(tree_unflatten(melted))
    model.eval()
    parts = f"{len(melted)} weights were changed, {beside} are quantised and have the change computed beside them"
    return f"The adapter in {folder} is applied: {parts}."
