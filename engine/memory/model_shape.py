"""What each layer of a model keeps, read from its configuration.

Owns: the cache kind of each layer, bytes per token and per slot. Must not know: files, devices, weights; a
configuration comes in as a mapping with Hugging Face's keys.

What counts is what mlx-lm's model hands to its cache: keys and values of all KV heads, and for multi-head latent
attention either the latent or, in the families listed below, the expanded keys and values.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from engine.errors import UnsupportedModelError

CacheKind = Literal["full", "window", "latent", "expanded", "recurrent"]

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

    def kv_bytes_per_token(self, value_bytes: float) -> int:
        """K and V of all layers."""
        return int(value_bytes * sum(layer.values_per_token for layer in self.layers))

    @property
    def window_tokens(self) -> int:
        """What the widest sliding-window layer sees, 0 where there is none."""
        return max((layer.window_tokens or 0 for layer in self.layers), default=0)

    def window_bytes_per_token(self, value_bytes: float) -> int:
        """The part of ``kv_bytes_per_token`` that belongs to sliding-window layers."""
        return int(value_bytes * sum(layer.values_per_token for layer in self.layers if layer.window_tokens))

    def state_bytes_per_slot(self, value_bytes: int) -> int:
        """Recurrent state of all layers."""
        return sum(
            value_bytes * layer.state_values + _FLOAT32_BYTES * layer.state_float32_values for layer in self.layers
        )


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
