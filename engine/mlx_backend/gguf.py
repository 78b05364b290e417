"""Reads a GGUF file into the configuration and weight names of the mlx-lm model that computes it.

Owns: one table row per GGUF architecture, tensor names, row order of q and k, quantised groups. Must not know: the
tokenizer in the same file (engine/text reads it), or how the model is built.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx

from engine.errors import UnsupportedModelError

_GROUP = 32  # every block format that MLX keeps packed (Q4_0, Q4_1, Q8_0) has one scale per 32 weights
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FIX = "use a model in mlx-lm's layout (a folder or a hub id) instead"


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one GGUF architecture maps to an mlx-lm model.

    ``interleaved_rope``: q and k rows are stored in the pair order of the original RoPE and must be put back into the
    half-split order that mlx-lm computes.
    """

    model_type: str
    interleaved_rope: bool = False
    extra_layer_names: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, object] = field(default_factory=dict)


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", interleaved_rope=True, config={"attention_bias": False, "mlp_bias": False}),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture(
        "qwen3", extra_layer_names={"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
    ),
}


@dataclass(frozen=True, slots=True)
class GgufCheckpoint:
    """``config`` and ``weights`` as mlx-lm names them. ``quantization``: group size and bits per packed module."""

    config: dict[str, object]
    weights: dict[str, mx.array]
    quantization: dict[str, dict[str, int]]


class _Metadata:
    """The file's key-value part, with numbers as Python numbers."""

    def __init__(self, values: Mapping[str, object], prefix: str) -> None:
        self._values, self._prefix = values, prefix

    def get(self, key: str, default: object = None) -> object:
        value = self._values.get(key, default)
        return value.item() if isinstance(value, mx.array) and value.size == 1 else value

    def own(self, key: str, default: object = None) -> object:
        """A key of the file's own architecture, named without its prefix."""
        return self.get(f"{self._prefix}.{key}", default)

    def number(self, key: str, default: float | None = None) -> float:
        """As ``own``. Raises UnsupportedModelError when it is missing or no single number."""
        value = self.own(key, default)
        if not isinstance(value, int | float):
            raise UnsupportedModelError(f"The GGUF file has no single number under {self._prefix}.{key}.", _FIX)
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        return int(self.number(key, default))


def read_gguf(path: Path, dense_dtype: mx.Dtype | None) -> GgufCheckpoint:
    """Read ``path``.

    ``dense_dtype``: dequantise everything to this type; None keeps packed weights packed, with fp16 scales, which
    then decide the type of the activations. Raises UnsupportedModelError for what cannot be computed right.
    """
    try:
        loaded: Any = mx.load(str(path), return_metadata=True)
    except (RuntimeError, ValueError) as error:
        raise UnsupportedModelError(f"{path.name} cannot be read: {error}.", _FIX) from error
    arrays: dict[str, mx.array] = loaded[0]
    values: dict[str, object] = loaded[1]
    name = str(values.get("general.architecture"))
    architecture = ARCHITECTURES.get(name)
    if architecture is None:
        known = ", ".join(ARCHITECTURES)
        raise UnsupportedModelError(f"GGUF architecture {name!r} is not known here (known: {known}).", _FIX)
    metadata = _Metadata(values, name)
    rope_factors = arrays.pop("rope_freqs.weight", None)
    tensors = _rename(arrays, architecture, metadata)
    config = _config(architecture, metadata, tensors, rope_factors)
    return _pack(config, tensors, dense_dtype)


def _rename(
    arrays: Mapping[str, mx.array], architecture: Architecture, metadata: _Metadata
) -> dict[str, dict[str, mx.array]]:
    """Module name -> leaf ("weight", "scales", "biases", "bias") -> array, q and k rows in mlx-lm's order."""
    num_heads = metadata.integer("attention.head_count")
    heads = {"attn_q": num_heads, "attn_k": metadata.integer("attention.head_count_kv", num_heads)}
    tensors: dict[str, dict[str, mx.array]] = {}
    for key, array in arrays.items():
        stem, _, leaf = key.rpartition(".")
        part = stem.rpartition(".")[2]
        if architecture.interleaved_rope and part in heads:
            array = _to_half_split(array, heads[part])
        tensors.setdefault(_module_name(stem, architecture), {})[leaf] = array
    return tensors


def _module_name(stem: str, architecture: Architecture) -> str:
    if stem in _TOP:
        return _TOP[stem]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    part = match and {**_LAYER, **architecture.extra_layer_names}.get(match.group(2))
    if not match or part is None:
        raise UnsupportedModelError(f"The GGUF file holds a tensor {stem!r} that this reader does not know.", _FIX)
    return f"model.layers.{match.group(1)}.{part}"


def _to_half_split(array: mx.array, num_heads: int) -> mx.array:
    """Rows (pair, 2) of each head -> (2, pair). Quantised groups run along the other axis and stay whole."""
    rows, rest = array.shape[0], array.shape[1:]
    return array.reshape(num_heads, rows // num_heads // 2, 2, *rest).swapaxes(1, 2).reshape(rows, *rest)


def _config(
    architecture: Architecture,
    metadata: _Metadata,
    tensors: Mapping[str, Mapping[str, mx.array]],
    rope_factors: mx.array | None,
) -> dict[str, object]:
    num_heads, hidden = metadata.integer("attention.head_count"), metadata.integer("embedding_length")
    head_dim = metadata.integer("attention.key_length", hidden // num_heads)
    if metadata.integer("rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedModelError("The GGUF model rotates only a part of each head.", _FIX)
    context_length = metadata.integer("context_length")
    return {
        "model_type": architecture.model_type,
        "hidden_size": hidden,
        "intermediate_size": metadata.integer("feed_forward_length"),
        "num_hidden_layers": metadata.integer("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.integer("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(metadata, rope_factors, context_length),
        "max_position_embeddings": context_length,
        "vocab_size": tensors["model.embed_tokens"]["weight"].shape[0],
        "tie_word_embeddings": "lm_head" not in tensors,
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        **architecture.config,
    }


def _rope_scaling(metadata: _Metadata, rope_factors: mx.array | None, context_length: int) -> dict[str, object] | None:
    if rope_factors is not None:
        # Llama 3 files carry the finished divisor of every frequency. "longrope" is mlx-lm's form that takes such a
        # list; with equal context lengths it leaves the magnitude alone.
        factors: object = rope_factors.astype(mx.float32).tolist()
        return {
            "type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "original_max_position_embeddings": context_length,
        }
    kind = metadata.own("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind == "linear":
        return {"type": "linear", "factor": metadata.number("rope.scaling.factor")}
    raise UnsupportedModelError(f"GGUF RoPE scaling {kind!r} is not known here.", _FIX)


def _pack(
    config: dict[str, object], tensors: Mapping[str, Mapping[str, mx.array]], dense_dtype: mx.Dtype | None
) -> GgufCheckpoint:
    weights: dict[str, mx.array] = {}
    quantization: dict[str, dict[str, int]] = {}
    for module, leaves in tensors.items():
        if "scales" in leaves and dense_dtype is not None:
            weights[f"{module}.weight"] = _dequantise(leaves).astype(dense_dtype)
            continue
        if "scales" in leaves:
            quantization[module] = {"group_size": _GROUP, "bits": _bits(leaves)}
        for leaf, array in leaves.items():
            packed = array.dtype == mx.uint32
            weights[f"{module}.{leaf}"] = array if packed else array.astype(dense_dtype or mx.float16)
    return GgufCheckpoint(config, weights, quantization)


def _bits(leaves: Mapping[str, mx.array]) -> int:
    return leaves["weight"].shape[-1] * 32 // (leaves["scales"].shape[-1] * _GROUP)


def _dequantise(leaves: Mapping[str, mx.array]) -> mx.array:
    # In fp32: scales are stored in fp16, in which the product would be rounded once more.
    scales, biases = leaves["scales"].astype(mx.float32), leaves["biases"].astype(mx.float32)
    return mx.dequantize(leaves["weight"], scales, biases, _GROUP, _bits(leaves))
