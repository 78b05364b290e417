"""A model's GPU steps: from an upload and the chain of versions to logits or tokens, compiled where sizes recur.

Owns: the pools' caches and versions, compiled steps by layout. Must not know: requests, scheduling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import cast

import mlx.core as mx
import numpy as np

from engine.batch import BlockCopy
from engine.mlx_backend.fused_heads import FusedHeads
from engine.mlx_backend.fused_norms import FusedNorms
from engine.mlx_backend.gpu_cache import GpuLayerCache, GpuStep, KernelBook
from engine.mlx_backend.gpu_inputs import HostStep, StepShape
from engine.mlx_backend.input_batch import StepInputs
from engine.mlx_backend.kernels.norming import AddNormKernel
from engine.mlx_backend.kernels.projecting import ProjectionKernel
from engine.mlx_backend.kernels.rotating import RotationKernel
from engine.mlx_backend.kernels.sampling import SampleKernel
from engine.mlx_backend.loaded_model import LoadedModel
from engine.mlx_backend.packed_model import PackedModel
from engine.mlx_backend.row_products import RowProducts, Use
from engine.mlx_backend.uploads import Layout

StepFunction = Callable[..., list[mx.array]]


class GpuModel(PackedModel):
    """One model over its own pools, computed with the paged kernels. Use from one thread.

    ``sampling`` None means that the sampling kernel is off: then ``logits`` is all there is. ``compiles``: whether
    steps whose shapes recur are compiled. ``num_fused_heads``: layers whose heads the rotation
    kernel splits and rotates.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        num_blocks: int,
        block_size: int,
        dtype: mx.Dtype,
        book: KernelBook,
        sampling: SampleKernel | None,
        num_window_blocks: int | None = None,
        compiles: bool = True,
    ) -> None:
        max_model_len = loaded.facts.max_model_len
        super().__init__(
            loaded.model,
            loaded.layers,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=dtype,
            max_model_len=max_model_len,
            kv_bits=book.kv_bits,
            num_window_blocks=num_window_blocks,
        )
        self.products = _products_of(loaded, book)
        fused = _fused_heads_of(loaded, book, self.products)
        self.num_fused_heads = 0 if fused is None else fused.num_layers
        self.norms = _fused_norms_of(loaded, book)
        has_window_pools = num_window_blocks is not None
        self.layers = [
            GpuLayerCache(
                *(pool, self._holder, max_model_len, book, fused),
                is_apart=has_window_pools and pool.shape.window is not None,
            )
            for pool in self.pools
        ]
        self.caches = list(self.layers)
        self.sampling = sampling
        self._compiles = compiles
        self._embeds = loaded.facts.embedding_size is not None
        self._steps: dict[tuple[Layout, bool, Use], StepFunction] = {}

    @property
    def versions(self) -> list[mx.array]:
        """The newest link of every layer's chain."""
        return [layer.version for layer in self.layers]

    @versions.setter
    def versions(self, versions: Sequence[mx.array]) -> None:
        for layer, version in zip(self.layers, versions, strict=True):
            layer.version = version

    def logits(self, host: HostStep, last_tokens: mx.array) -> tuple[mx.array, mx.array | None]:
        """Logits [R, vocab] of the step's head rows, lazily, and of a model that embeds their hidden states [R, width].
        ``last_tokens`` int32 by slot."""
        logits, *hidden = self._run(host, last_tokens, samples=False)
        return logits, hidden[0] if hidden else None

    def tokens(self, host: HostStep, last_tokens: mx.array) -> list[mx.array]:
        """Tokens int32 [R] of the head rows, marks of broken rows [R], and ``last_tokens`` with the new ones."""
        return self._run(host, last_tokens, samples=True)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole blocks of every layer, after all steps built so far."""
        pairs = mx.array(np.array([(copy.source, copy.target) for copy in copies], np.int32))
        for layer in self.layers:
            layer.copy_blocks(pairs)

    def close(self) -> None:
        """Drop pools, caches and compiled steps."""
        super().close()
        self._steps.clear()
        self.layers.clear()

    def _run(self, host: HostStep, last_tokens: mx.array, *, samples: bool) -> list[mx.array]:
        shape, versions = host.shape, self.versions
        use = Use.APART
        if self.products is not None:
            use = self.products.use_for(shape.num_decode_rows, shape.num_chunk_rows)
        key = (shape.layout, samples, use)
        step = self._steps.get(key)
        if step is None:
            step = self._step_of(shape, samples, use)
            if self._compiles and not shape.gathered:
                step = self._steps[key] = cast(StepFunction, mx.compile(step))
        try:
            results = step(host.upload, last_tokens, *versions)
        except BaseException:
            self.versions = versions  # a trace that broke off leaves its placeholders there
            raise
        self.versions = results[-len(versions) :]
        return results[: -len(versions)]

    def _step_of(self, shape: StepShape, samples: bool, use: Use) -> StepFunction:
        def run(upload: mx.array, last_tokens: mx.array, *versions: mx.array) -> list[mx.array]:
            self.versions = versions
            arrays = shape.layout.unpack(upload)
            logits, hidden = self._forward(shape, arrays, last_tokens, use)
            if samples:
                results = self._choose(logits, arrays, last_tokens)
            else:
                results = [logits, hidden] if self._embeds and hidden is not None else [logits]
            return [*results, *self.versions]

        return run

    def _forward(
        self, shape: StepShape, arrays: dict[str, mx.array], last_tokens: mx.array, use: Use
    ) -> tuple[mx.array, mx.array | None]:
        tokens, positions = [], []
        if shape.num_decode_rows:
            known = arrays["tokens"]
            tokens.append(mx.where(known < 0, last_tokens[arrays["slots"]], known))
            positions.append(mx.maximum(arrays["lengths"] - 1, 0))
        if shape.num_chunk_rows:
            tokens.append(arrays["chunk_tokens"])
            positions.append(arrays["chunk_positions"])
        step = GpuStep(
            tokens=_joined(tokens)[:, None],
            positions=_joined(positions),
            head_rows=arrays["head_index"] if shape.num_chunk_rows else mx.arange(shape.num_decode_rows),
            num_decode_rows=shape.num_decode_rows,
            num_chunk_rows=shape.num_chunk_rows,
            gathered=shape.gathered,
            arrays=arrays,
        )
        with (
            self.products.step(use) if self.products is not None else nullcontext(),
            self.norms.step() if self.norms is not None else nullcontext(),
        ):
            return self.forward_both(cast(StepInputs, step))

    def _choose(self, logits: mx.array, arrays: dict[str, mx.array], last_tokens: mx.array) -> list[mx.array]:
        assert self.sampling is not None, "the sampling kernel is off"
        settings = arrays["settings"].view(mx.float32)
        tokens, broken = self.sampling(logits, settings, arrays["limits"], arrays["keys"])
        return [tokens, broken, remember(last_tokens, arrays["head_slots"], tokens)]


def _products_of(loaded: LoadedModel, book: KernelBook) -> RowProducts | None:
    if not book.tuning.joins_products:
        return None
    products = RowProducts(ProjectionKernel(book.factory) if book.tuning.projects_rows else None)
    products.take_over(loaded.model)
    return products


def _fused_heads_of(loaded: LoadedModel, book: KernelBook, products: RowProducts | None) -> FusedHeads | None:
    if products is None or not book.tuning.rotates_heads:
        return None
    fused = FusedHeads(products, RotationKernel(book.factory))
    fused.take_over(loaded.model)
    return fused


def _fused_norms_of(loaded: LoadedModel, book: KernelBook) -> FusedNorms | None:
    if not book.tuning.fuses_norms:
        return None
    norms = FusedNorms(AddNormKernel(book.factory))
    norms.take_over(loaded.model)
    return norms


def remember(last_tokens: mx.array, slots: mx.array, tokens: mx.array) -> mx.array:
    """``last_tokens`` with ``tokens`` at ``slots``; the old array stays as it is, a step in flight may read it."""
    changed = mx.array(last_tokens)
    changed[slots] = tokens
    return changed


def _joined(parts: list[mx.array]) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)
