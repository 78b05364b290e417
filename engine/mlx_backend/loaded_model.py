"""A model ready to run on its device.

Owns: the record that loader, probe and runner pass on. Must not know: how it was loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from engine.interfaces import ModelFacts
from engine.mlx_backend.device import Backend, DeviceFacts
from engine.mlx_backend.mlx_lm_parts import Model
from engine.mlx_backend.paged_cache import LayerShape
from engine.text.structured import GrammarCompiler


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """``layers``: what each cached layer keeps per token. ``facts`` assume the KV pool in ``compute_dtype``.

    ``grammars`` compiles grammars for its tokens; None where no answer will be held to one.
    """

    model: Model
    config: Mapping[str, Any]
    facts: ModelFacts
    device: DeviceFacts
    layers: tuple[LayerShape, ...]
    compute_dtype: mx.Dtype
    grammars: GrammarCompiler | None = None

    @property
    def backend(self) -> Backend:
        """Where the model runs."""
        return self.device.backend

    def kv_bytes_per_token(self, dtype: mx.Dtype) -> int:
        """Pool bytes per token with K and V of all layers in ``dtype``."""
        return sum(layer.values_per_token for layer in self.layers) * dtype.size
