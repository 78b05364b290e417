"""What a model will take, computed before any weight is read, and what a machine could do with it.

Owns: the estimate of all terms, plans by context length, limits of a Mac that is not here, and the comparison with what
loading found. Must not know: files, devices, or how the bytes are held.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from engine.errors import MemoryPlanError
from engine.memory.ledger import MemoryPlan, balanced_slots, plan_memory
from engine.memory.model_shape import ModelShape
from engine.memory.plan_inputs import GIB, MIB, MachineMemory, ModelBytes, PlanInputs

Backend = Literal["metal", "cuda", "cpu"]

CONTEXTS = (4096, 8192, 16_384, 32_768, 65_536, 131_072, 262_144)
# Interpreter, MLX, mlx-lm and the tokenizer, as measured on Linux after a model is loaded.
RUNTIME_BYTES = 600 * MIB
# Expected and measured bytes may differ by this part before the term is named.
TOLERANCE = 0.02
_FLOAT32_BYTES = 4
_CPU_CACHE_BYTES = 32 * MIB
_LEAST_GPU_CACHE_BYTES = 64 * MIB


@dataclass(frozen=True, slots=True)
class ContextPlan:
    """The plan at one context length, or why there is none. ``slots_that_fit`` is what memory alone allows."""

    max_model_len: int
    sequence_bytes: int
    slots_that_fit: int
    plan: MemoryPlan | None
    error: str = ""
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Weights:
    """A model's weights as MLX holds them in their stored form, and how many numbers they stand for."""

    packed_bytes: int
    num_values: int


@dataclass(frozen=True, slots=True)
class ModelEstimate:
    """A model before it is loaded, on one backend. ``value_bytes``: of one cached number, None for the usual.

    The CPU backend holds and computes everything in float32 (its half-precision products are many times slower).
    """

    shape: ModelShape
    weights: Weights
    backend: Backend
    max_chunk_tokens: int
    value_bytes: float | None = None

    def at(self, max_model_len: int) -> ModelBytes:
        """What the model takes when it serves contexts of up to ``max_model_len`` tokens."""
        shape, on_cpu = self.shape, self.backend == "cpu"
        compute_bytes = _FLOAT32_BYTES if on_cpu else 2
        kv_bytes = self.value_bytes or compute_bytes
        activation_bytes = compute_bytes * self._chunk_values(max_model_len)
        return ModelBytes(
            weights_bytes=self.weights.num_values * _FLOAT32_BYTES if on_cpu else self.weights.packed_bytes,
            kv_bytes_per_token=shape.kv_bytes_per_token(kv_bytes),
            vocab_size=shape.vocab_size,
            window_bytes_per_token=shape.window_bytes_per_token(kv_bytes),
            window_tokens=min(shape.window_tokens, max_model_len),
            state_bytes_per_slot=shape.state_bytes_per_slot(compute_bytes),
            buffer_bytes_per_token=int(kv_bytes * max(layer.buffer_values_per_token for layer in shape.layers)),
            activation_bytes=activation_bytes,
            # The CPU path gathers a layer's keys and values for each row; the GPU kernels read them in place.
            activation_bytes_per_slot=compute_bytes * max_model_len * self._layer_values if on_cpu else 0,
            runtime_bytes=RUNTIME_BYTES,
            cache_limit_bytes=cache_limit_bytes(self.backend, activation_bytes),
            sources={"weights": "computed", "runtime": "computed", "activations": "computed"},
        )

    @property
    def _layer_values(self) -> int:
        return max(layer.values_per_token for layer in self.shape.layers)

    def _chunk_values(self, max_model_len: int) -> int:
        """Numbers alive at once during a chunk's step: one layer's values, several times over because a step's graph
        frees late; the context's keys and values; on the CPU all attention scores."""
        shape, num_tokens = self.shape, min(self.max_chunk_tokens, max_model_len)
        width = 8 * shape.hidden_width + 4 * shape.feed_forward_width
        scores = num_tokens * shape.num_heads * max_model_len if self.backend == "cpu" else 0
        return num_tokens * width + max_model_len * self._layer_values + scores + 4 * shape.vocab_size


def cache_limit_bytes(backend: Backend, activation_bytes: int) -> int:
    """What MLX may keep of freed buffers: on a GPU all that a step frees, on the CPU its own small default (there
    malloc keeps the rest)."""
    return _CPU_CACHE_BYTES if backend == "cpu" else max(_LEAST_GPU_CACHE_BYTES, activation_bytes)


def mac_memory(total_bytes: int) -> MachineMemory:
    """A Mac that cannot be asked: Metal's usual limits, nothing known of its other programs.

    The recommended working set is two thirds of memory on Macs of up to 32 GiB and three quarters above; the longest
    buffer is three quarters of that (values that Macs of 16 to 192 GiB have reported publicly).
    """
    working_set = total_bytes * 2 // 3 if total_bytes <= 32 * GIB else total_bytes * 3 // 4
    return MachineMemory(total_bytes, working_set_bytes=working_set, max_buffer_bytes=working_set * 3 // 4)


def refuse_hopeless(inputs: PlanInputs) -> None:
    """Raise MemoryPlanError when the model cannot fit whatever is measured later: weights and one sequence alone.

    Estimated terms are left out of this judgement, so that an estimate never refuses what a measurement would allow;
    the refusal itself counts them, so that its remedy is enough.
    """
    certain = dataclasses.replace(
        inputs.model, activation_bytes=0, activation_bytes_per_slot=0, runtime_bytes=0, cache_limit_bytes=0
    )
    try:
        plan_memory(dataclasses.replace(inputs, model=certain, overcommit="warn"))
    except MemoryPlanError:
        plan_memory(inputs)


def deviations(expected: ModelBytes, measured: ModelBytes) -> list[str]:
    """One sentence for each term that loading found to differ from the files by more than ``TOLERANCE``."""
    terms = (
        ("weights", expected.weights_bytes, measured.weights_bytes),
        ("KV cache of a token", expected.kv_bytes_per_token, measured.kv_bytes_per_token),
        ("state of a slot", expected.state_bytes_per_slot, measured.state_bytes_per_slot),
    )
    return [
        f"{name}: {planned:,} bytes expected from the model's files, {found:,} measured after loading"
        for name, planned, found in terms
        if abs(planned - found) > TOLERANCE * found
    ]


def plan_contexts(inputs: PlanInputs, model: ModelEstimate, contexts: Iterable[int]) -> list[ContextPlan]:
    """Plan the same machine and model at each context length."""
    return [
        _plan_context(dataclasses.replace(inputs, model=model.at(context), max_model_len=context))
        for context in contexts
    ]


def _plan_context(inputs: PlanInputs) -> ContextPlan:
    sequence_bytes = inputs.num_blocks_per_sequence * inputs.block_bytes
    try:
        plan = plan_memory(inputs)
    except MemoryPlanError as error:
        return ContextPlan(inputs.max_model_len, sequence_bytes, 0, None, error.message, error.fix)
    return ContextPlan(inputs.max_model_len, sequence_bytes, balanced_slots(inputs), plan)
