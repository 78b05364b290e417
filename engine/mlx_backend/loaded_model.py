"""A model ready to run on its device.

Owns: the record that loader, probe and runner pass on. Must not know: how it was loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from engine.interfaces import ModelFacts
from engine.mlx_backend.cache_layout import CacheLayout
from engine.mlx_backend.device import Backend, DeviceFacts
from engine.mlx_backend.mlx_lm_parts import Model
from engine.mlx_backend.paged_cache import LayerShape
from engine.mlx_backend.step_model import StepForm, StepModel, make_step_model
from engine.text.structured import GrammarCompiler


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """``layers``: what each attention layer keeps per token. ``facts`` assume the KV pool in ``compute_dtype``.

    ``layout``: what all layers keep, in the model's structure; None where it cannot be pooled. ``form``: how its steps
    are computed, and ``form_reason`` why not in a faster form. ``grammars`` compiles grammars for its tokens; None
    where no answer will be held to one.
    """

    model: Model
    config: Mapping[str, Any]
    facts: ModelFacts
    device: DeviceFacts
    layers: tuple[LayerShape, ...]
    compute_dtype: mx.Dtype
    grammars: GrammarCompiler | None = None
    layout: CacheLayout | None = None
    form: StepForm = StepForm.PACKED
    form_reason: str = ""

    @property
    def backend(self) -> Backend:
        """Where the model runs."""
        return self.device.backend

    def kv_bytes_per_token(self, dtype: mx.Dtype, kv_bits: int | None = None) -> int:
        """Pool bytes per token with K and V of all layers in ``dtype``, or with ``kv_bits`` bits."""
        return sum(layer.bytes_per_token(dtype, kv_bits) for layer in self.layers)

    @property
    def window_tokens(self) -> int:
        """What sliding-window layers see, where they get a pool of their own; else 0."""
        if self.form is StepForm.SINGLE:
            return 0
        widest = max((layer.window or 0 for layer in self.layers), default=0)
        return min(widest, self.facts.max_model_len)

    def window_bytes_per_token(self, dtype: mx.Dtype, kv_bits: int | None = None) -> int:
        """The part of ``kv_bytes_per_token`` that belongs to sliding-window layers with a pool of their own."""
        if not self.window_tokens:
            return 0
        return sum(layer.bytes_per_token(dtype, kv_bits) for layer in self.layers if layer.window is not None)

    @property
    def state_bytes_per_slot(self) -> int:
        """Recurrent state of one sequence."""
        return self.layout.state_bytes if self.layout is not None else 0

    def step_model(
        self,
        *,
        num_blocks: int,
        block_size: int,
        dtype: mx.Dtype,
        num_state_entries: int = 0,
        kv_bits: int | None = None,
        num_window_blocks: int | None = None,
    ) -> StepModel:
        """The model with new pools, in its form."""
        return make_step_model(
            self.model,
            self.layout or CacheLayout(self.layers),
            self.form,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=dtype,
            max_model_len=self.facts.max_model_len,
            num_state_entries=num_state_entries,
            kv_bits=kv_bits,
            num_window_blocks=num_window_blocks,
        )
