"""What a model will take, computed from its configuration before any weight is read.

Owns: the cache kind of each layer, bytes per token and per slot, and the plans by context length. Must not know: files,
devices, or how the bytes are held; a configuration comes in as a mapping with Hugging Face's keys.

What counts is what mlx-lm's model hands to its cache: keys and values of all KV heads in a sliding-window layer too
(one pool serves all layers, so a window saves reads, not memory), and for multi-head latent attention either the
latent or, in the families listed below, the expanded keys and values.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from engine.errors import MemoryPlanError, UnsupportedModelError
from engine.memory.ledger import MemoryPlan, balanced_slots, plan_memory
from engine.memory.plan_inputs import GIB, MIB, MachineMemory, ModelBytes, PlanInputs

CacheKind = Literal["full", "window", "latent", "expanded", "recurrent"]
Backend = Literal["metal", "cuda", "cpu"]

CONTEXTS = (4096, 8192, 16_384, 32_768, 65_536, 131_072, 262_144)
# Interpreter, MLX, mlx-lm and the tokenizer, as measured on Linux after a model is loaded.
RUNTIME_BYTES = 600 * MIB
_EXPANDED_FAMILIES = ("deepseek_v2", "minicpm3", "youtu_llm")
_DEFAULTS = {"gemma3_text": {"sliding_window_pattern": 6, "num_attention_heads": 8, "num_key_value_heads": 4}}
_UNREAD_KEYS = (
    "linear_attn_config",
    "hybrid_override_pattern",
    "layers_block_type",
    "mamba_d_state",
    "mamba_d_ssm",
    "attn_layer_period",
)
_FLOAT32_BYTES = 4
_CPU_CACHE_BYTES = 32 * MIB
_LEAST_GPU_CACHE_BYTES = 64 * MIB


@dataclass(frozen=True, slots=True)
class LayerCache:
    """What one layer keeps: keys and values of each token, or a state for each slot.

    ``window_tokens``: positions that a token sees, None = all. ``state_values`` are numbers of the compute dtype,
    ``state_float32_values`` of float32.
    """

    kind: CacheKind
    num_kv_heads: int = 0
    k_head_dim: int = 0
    v_head_dim: int = 0
    window_tokens: int | None = None
    state_values: int = 0
    state_float32_values: int = 0

    @property
    def values_per_token(self) -> int:
        """Numbers kept per position, keys and values together."""
        return self.num_kv_heads * (self.k_head_dim + self.v_head_dim)

    @property
    def buffer_values_per_token(self) -> int:
        """Numbers kept per position in the larger of the two buffers."""
        return self.num_kv_heads * max(self.k_head_dim, self.v_head_dim)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What memory planning needs of a configuration. ``feed_forward_width``: values between the two products."""

    architecture: str
    vocab_size: int
    max_model_len: int
    num_heads: int
    hidden_width: int
    feed_forward_width: int
    layers: tuple[LayerCache, ...]

    @property
    def num_layers_by_kind(self) -> dict[CacheKind, int]:
        """How many layers of each kind."""
        return dict(Counter(layer.kind for layer in self.layers))

    def kv_bytes_per_token(self, value_bytes: int) -> int:
        """K and V of all layers."""
        return value_bytes * sum(layer.values_per_token for layer in self.layers)

    def state_bytes_per_slot(self, value_bytes: int) -> int:
        """Recurrent state of all layers."""
        return sum(
            value_bytes * layer.state_values + _FLOAT32_BYTES * layer.state_float32_values for layer in self.layers
        )


@dataclass(frozen=True, slots=True)
class ContextPlan:
    """The plan at one context length, or why there is none. ``slots_that_fit`` is what memory alone allows."""

    max_model_len: int
    sequence_bytes: int
    slots_that_fit: int
    plan: MemoryPlan | None
    error: str = ""
    fix: str = ""


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """Read a ``config.json``. Raises UnsupportedModelError when a key is missing or layers cannot be told apart."""
    flat = {**config, **config.get("text_config", {})}
    flat = {**_DEFAULTS.get(str(flat.get("model_type")), {}), **flat}
    try:
        hidden, feed_forward = int(flat["hidden_size"]), int(flat.get("intermediate_size") or 0)
        experts = int(flat.get("num_experts_per_tok") or 0)
        expert_width = int(flat.get("moe_intermediate_size") or feed_forward)
        return ModelShape(
            architecture=str(flat["model_type"]),
            vocab_size=int(flat["vocab_size"]),
            max_model_len=int(flat["max_position_embeddings"]),
            num_heads=int(flat["num_attention_heads"]),
            hidden_width=hidden,
            feed_forward_width=max(feed_forward, experts * expert_width),
            layers=tuple(_layers(flat)),
        )
    except KeyError as error:
        raise UnsupportedModelError(
            f"The model's configuration has no key {error}.", "name a folder in mlx-lm's layout, or a .gguf file"
        ) from error


def _layers(config: Mapping[str, Any]) -> list[LayerCache]:
    if unread := [key for key in _UNREAD_KEYS if config.get(key) is not None]:
        raise UnsupportedModelError(
            f"The memory of {config['model_type']} layers is not known before loading (key {unread[0]!r}).",
            "start the engine: it measures what it loads",
        )
    attention, num_layers = _attention(config), int(config["num_hidden_layers"])
    return [_layer(config, attention, kind) for kind in _kinds(config, num_layers)]


def _kinds(config: Mapping[str, Any], num_layers: int) -> list[str]:
    """Per layer "full_attention", "sliding_attention" or "linear_attention", as newer configurations list them."""
    if config.get("layer_types"):
        return [str(kind) for kind in config["layer_types"]]
    if interval := config.get("full_attention_interval"):
        return ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(num_layers)]
    if (pattern := config.get("sliding_window_pattern")) and config.get("sliding_window"):
        return ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(num_layers)]
    return ["full_attention"] * num_layers


def _layer(config: Mapping[str, Any], attention: LayerCache, kind: str) -> LayerCache:
    if kind == "linear_attention":
        return _gated_delta(config)
    if kind in ("sliding_attention", "chunked_attention"):
        window = config.get("sliding_window") or config.get("attention_chunk_size")
        return dataclasses.replace(attention, kind="window", window_tokens=window)
    if kind == "full_attention":
        return attention
    raise UnsupportedModelError(
        f"A layer of kind {kind!r} is not known here.", "start the engine: it measures what it loads"
    )


def _attention(config: Mapping[str, Any]) -> LayerCache:
    heads = int(config["num_attention_heads"])
    if config.get("kv_lora_rank"):
        latent, rope = int(config["kv_lora_rank"]), int(config["qk_rope_head_dim"])
        if config["model_type"] not in _EXPANDED_FAMILIES:
            return LayerCache("latent", 1, latent, rope)
        return LayerCache("expanded", heads, int(config["qk_nope_head_dim"]) + rope, int(config["v_head_dim"]))
    head_dim = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
    return LayerCache("full", int(config.get("num_key_value_heads") or heads), head_dim, head_dim)


def _gated_delta(config: Mapping[str, Any]) -> LayerCache:
    """A gated delta-rule layer: the convolution's last inputs, and one key-by-value matrix per value head."""
    key_heads, value_heads = int(config["linear_num_key_heads"]), int(config["linear_num_value_heads"])
    key, value = int(config["linear_key_head_dim"]), int(config["linear_value_head_dim"])
    conv_width = 2 * key_heads * key + value_heads * value
    return LayerCache(
        "recurrent",
        state_values=(int(config["linear_conv_kernel_dim"]) - 1) * conv_width,
        state_float32_values=value_heads * key * value,
    )


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
    value_bytes: int | None = None

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
            state_bytes_per_slot=shape.state_bytes_per_slot(compute_bytes),
            buffer_bytes_per_token=kv_bytes * max(layer.buffer_values_per_token for layer in shape.layers),
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
