"""What MLX knows of memory and does about it: measured bytes of a loaded model, limits, buffers kept for reuse.

Owns: the calls into MLX's allocator, and restoring its limits. Must not know: how memory is planned or guarded. The
wired limit follows MLX's documentation; it has never run on Metal.
"""

from __future__ import annotations

import dataclasses

import mlx.core as mx

from engine.memory.ledger import MemoryPlan
from engine.memory.plan_inputs import MachineMemory, ModelBytes
from engine.memory.preflight import cache_limit_bytes
from engine.mlx_backend.activations import measure_activation_bytes
from engine.mlx_backend.device import Backend
from engine.mlx_backend.loaded_model import LoadedModel

# Two step widths show what a step costs by itself and what each further decoding row adds.
_FEW_ROWS, _MORE_ROWS = 1, 5


def measure_model_bytes(
    loaded: LoadedModel,
    kv_dtype: mx.Dtype,
    max_chunk_tokens: int,
    footprint_bytes: int | None,
    kv_bits: int | None = None,
) -> ModelBytes:
    """Measure a model that is in memory.

    ``footprint_bytes``: what the system charges this process with now. What of it is neither weights nor kept by MLX
    for reuse is the runtime: interpreter, libraries, and memory that loading freed and malloc keeps.
    """
    known_bytes = mx.get_active_memory() + mx.get_cache_memory()
    few, more = (measure_activation_bytes(loaded, max_chunk_tokens, rows, kv_bits) for rows in (_FEW_ROWS, _MORE_ROWS))
    per_row_bytes = max(0, more - few) // (_MORE_ROWS - _FEW_ROWS)
    return ModelBytes(
        weights_bytes=loaded.facts.weights_bytes,
        kv_bytes_per_token=loaded.kv_bytes_per_token(kv_dtype, kv_bits),
        vocab_size=loaded.facts.vocab_size,
        window_bytes_per_token=loaded.window_bytes_per_token(kv_dtype, kv_bits),
        window_tokens=loaded.window_tokens,
        state_bytes_per_slot=loaded.state_bytes_per_slot,
        buffer_bytes_per_token=(kv_bits or 8 * kv_dtype.size)
        * max((layer.num_kv_heads * max(layer.k_head_dim, layer.v_head_dim) for layer in loaded.layers), default=0)
        // 8,
        activation_bytes=max(0, few - _FEW_ROWS * per_row_bytes),
        activation_bytes_per_slot=per_row_bytes,
        runtime_bytes=0 if footprint_bytes is None else max(0, footprint_bytes - known_bytes),
        cache_limit_bytes=cache_limit_bytes(loaded.backend, more),
        sources={"runtime": "unknown"} if footprint_bytes is None else {},
    )


def with_device_limits(machine: MachineMemory, loaded: LoadedModel) -> MachineMemory:
    """Add what only the device knows: how much it may hold at once, and its longest buffer.

    A CUDA device has memory of its own: that is then the machine that is planned.
    """
    info = mx.device_info()
    if loaded.backend == "cuda" and "total_memory" in info:
        free = info.get("free_memory")
        own_bytes = mx.get_active_memory() + mx.get_cache_memory()
        return MachineMemory(int(info["total_memory"]), None if free is None else int(free), own_bytes)
    longest = info.get("max_buffer_length") if loaded.backend == "metal" else None
    return dataclasses.replace(
        machine,
        working_set_bytes=loaded.device.working_set_bytes,
        max_buffer_bytes=None if longest is None else int(longest),
    )


class DeviceMemory:
    """MLX's limits while one engine runs; ``restore`` puts back what was there before."""

    def __init__(self, backend: Backend, plan: MemoryPlan) -> None:
        self._cache_limit_bytes = plan.cache_limit_bytes
        self._old_cache_limit_bytes = mx.set_cache_limit(plan.cache_limit_bytes)
        wired_bytes = plan.wired_limit_bytes if backend == "metal" else None
        self._wired_limit_bytes = wired_bytes
        self._old_wired_limit_bytes = None if wired_bytes is None else mx.set_wired_limit(wired_bytes)

    def reusable_bytes(self) -> int:
        """What MLX holds only for reuse."""
        return mx.get_cache_memory()

    def set_tight(self, tight: bool) -> None:
        """True: keep nothing for reuse and let macOS move unused pages of the pool out; False: as planned again."""
        mx.set_cache_limit(0 if tight else self._cache_limit_bytes)
        if self._wired_limit_bytes is not None:
            mx.set_wired_limit(0 if tight else self._wired_limit_bytes)
        if tight:
            mx.clear_cache()

    def restore(self) -> None:
        """Put back the limits from before."""
        if self._old_wired_limit_bytes is not None:
            mx.set_wired_limit(self._old_wired_limit_bytes)
        mx.set_cache_limit(self._old_cache_limit_bytes)
