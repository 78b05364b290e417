"""Adds a layer's residual and computes the norm that follows in one kernel, during a GPU step.

Owns: which of a model's blocks are of the usual form (norm, attention, add, norm, feed-forward, add; each is tried),
and that this happens inside a step of ours only. Must not know: steps, pools, attention.

The sum's norm is kept until the layer that is to compute it is called with that very sum, also in the next block.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import mlx.core as mx
from mlx.nn.layers.normalization import RMSNorm

from engine.mlx_backend.kernels.norming import AddNormKernel
from engine.mlx_backend.layer_trial import Recorder, near, random_rows
from engine.mlx_backend.mlx_lm_parts import Model

_PARTS = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
_LAST_NORM_NAMES = ("norm", "final_layernorm", "ln_f")


class FusedNorms:
    """All blocks of one model that ``kernel`` can serve. ``active`` within a step."""

    def __init__(self, kernel: AddNormKernel) -> None:
        self._kernel = kernel
        self._epsilons: dict[float, mx.array] = {}
        self._next_norms: dict[int, Model] = {}  # by id of the block; a module must not hold another as an attribute
        self._newest: tuple[mx.array, Model, mx.array] | None = None
        self.active = False

    @property
    def num_blocks(self) -> int:
        """Blocks that were found."""
        return len(self._next_norms)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Use the kernel inside."""
        self.active = True
        try:
            yield
        finally:
            self.active, self._newest = False, None  # nothing of a step is held longer than the step

    def add(self, x: mx.array, y: mx.array, norm: Model) -> mx.array:
        """``x + y`` [T, 1, K]; what ``norm`` makes of it is kept for ``take``."""
        total, normed = self._kernel(x, y, norm.weight, self._epsilon(norm.eps))
        self._newest = total, norm, normed
        return total

    def compute(self, block: Model, x: mx.array, mask: mx.array | None, cache: object) -> mx.array:
        """What ``block`` computes of ``x`` [T, 1, K]."""
        return self._added(block, self._next_norms[id(block)], x, mask, cache)

    def take(self, x: mx.array, norm: Model) -> mx.array | None:
        """``norm`` of ``x`` if ``add`` has just computed it."""
        if self._newest is None or self._newest[0] is not x or self._newest[1] is not norm:
            return None
        normed, self._newest = self._newest[2], None
        return normed

    def take_over(self, model: Model) -> None:
        """Find the blocks. ``model``'s attention must be taken over already."""
        for module in model.modules():
            blocks = module.children().get("layers")
            last_norm = next((module[name] for name in _LAST_NORM_NAMES if name in module.children()), None)
            if not isinstance(blocks, list) or not blocks or type(last_norm) not in (RMSNorm, _KeptNorm):
                continue
            for block, following in pairwise([*blocks, None]):
                next_norm = last_norm if following is None else following.children().get("input_layernorm")
                if _is_usual(block) and type(next_norm) in (RMSNorm, _KeptNorm):
                    self._take_over_block(block, next_norm)

    def _take_over_block(self, block: Model, next_norm: Model) -> None:
        try:
            rows = random_rows(block.input_layernorm.weight.shape[0], block.input_layernorm.weight.dtype)
            wanted = block(rows, None, Recorder())
            with self.step():
                works = near(self._added(block, next_norm, rows, None, Recorder()), wanted)
        except Exception:  # another signature, another cache, a kernel that does not run: not for this block
            return
        if not works:
            return
        if not isinstance(block, _FusedBlock):
            base = type(block)
            block.__class__ = type(base.__name__, (_FusedBlock, base), {})
        block.fused_norms = self
        self._next_norms[id(block)] = next_norm
        for norm in (block.post_attention_layernorm, next_norm):
            norm.__class__ = _KeptNorm
            norm.fused_norms = self

    def _added(self, block: Model, next_norm: Model, x: mx.array, mask: mx.array | None, cache: object) -> mx.array:
        attended = block.self_attn(block.input_layernorm(x), mask, cache)
        hidden = self.add(x, attended, block.post_attention_layernorm)
        return self.add(hidden, block.mlp(block.post_attention_layernorm(hidden)), next_norm)

    def _epsilon(self, eps: float) -> mx.array:
        if eps not in self._epsilons:
            self._epsilons[eps] = mx.array([eps], mx.float32)
            mx.eval(self._epsilons[eps])
        return self._epsilons[eps]


class _FusedBlock:
    """Mixed in front of a block's class."""

    fused_norms: FusedNorms

    def __call__(self, x: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
        if self.fused_norms.active and x.dtype == self.input_layernorm.weight.dtype:  # type: ignore[attr-defined]
            return self.fused_norms.compute(self, x, mask, cache)
        result: mx.array = super().__call__(x, mask, cache)  # type: ignore[misc]
        return result


class _KeptNorm(RMSNorm):
    """A norm that asks first whether it is computed already."""

    fused_norms: FusedNorms

    def __call__(self, x: mx.array) -> mx.array:
        normed = self.fused_norms.take(x, self)
        if normed is None:
            normed = super().__call__(x)  # type: ignore[no-untyped-call]
        return normed


def _is_usual(block: Model) -> bool:
    """Whether the block has the usual parts, with plain norms of its own number type."""
    children = block.children()
    norms = [children.get("input_layernorm"), children.get("post_attention_layernorm")]
    return all(name in children for name in _PARTS) and all(type(norm) in (RMSNorm, _KeptNorm) for norm in norms)
