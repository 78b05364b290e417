"""Writes an mlx-lm model as the GGUF file that llama.cpp's converter would make of it.

The conventions are spelled out here, apart from the reader's: tensor names, q and k rows in RoPE pair order for llama,
norms that hold 1 + w for Gemma, settings under the architecture's prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import quantize
from mlx.utils import tree_flatten
from numpy.typing import NDArray

from engine.mlx_backend.mlx_lm_parts import Model
from tests.mlx.k_quants import QUANTISERS, quantise

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.final_layernorm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.dense": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
}
FOUR_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
Choice = Callable[[str, NDArray[np.float32]], Kind]


def all_floats(name: str, values: NDArray[np.float32]) -> Kind:
    """Every tensor in float32."""
    return Kind.F32


def save_gguf(
    model: Model,
    config: Mapping[str, Any],
    architecture: str,
    path: Path,
    *,
    kinds: Choice = all_floats,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, NDArray[np.float32]] | None = None,
    split_max_tensors: int = 0,
) -> Path:
    """Write ``model``; ``metadata`` and ``tensors`` come on top or instead. ``split_max_tensors``: of a part."""
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split_max_tensors)
    for key, value in ({**_metadata(config, architecture), **(metadata or {})}).items():
        _add_value(writer, key, value)
    arrays = {name: np.array(array.astype(mx.float32)) for name, array in tree_flatten(model.parameters())}
    converted = dict(_tensor(name, array, config, architecture) for name, array in arrays.items())
    for name, values in (converted | dict(tensors or {})).items():
        kind = kinds(name, values) if values.ndim == 2 else Kind.F32
        data = quantise(values, kind) if kind in QUANTISERS else quantize(values, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensor(
    name: str, values: NDArray[np.float32], config: Mapping[str, Any], architecture: str
) -> tuple[str, NDArray[np.float32]]:
    module, _, leaf = name.rpartition(".")
    prefix = ""
    if module.startswith("model.layers."):
        _, _, index, module = module.split(".", 3)
        prefix = f"blk.{index}."
    if architecture.startswith("gemma") and module.endswith("norm"):
        values = values + 1
    if architecture == "llama" and module in ("self_attn.q_proj", "self_attn.k_proj"):
        heads = config["num_attention_heads" if "q_proj" in module else "num_key_value_heads"]
        values = values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
    names = NAMES | (FOUR_NORMS if architecture in ("gemma2", "gemma3") else {})
    return f"{prefix}{names[module]}.{leaf}", np.ascontiguousarray(values)


def _metadata(config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    rotated = config["head_dim"]
    if architecture in ("phi2", "phi3"):
        rotated = int(rotated * config["partial_rotary_factor"])
    own = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "attention.layer_norm_epsilon": config["layer_norm_eps"],
        "rope.dimension_count": rotated,
        "rope.freq_base": config["rope_theta"],
    }
    if architecture in ("gemma2", "gemma3"):
        own["attention.sliding_window"] = config["sliding_window"]
    if architecture == "gemma2":
        own["attn_logit_softcapping"] = config["attn_logit_softcapping"]
        own["final_logit_softcapping"] = config["final_logit_softcapping"]
    return {f"{architecture}.{key}": value for key, value in own.items()} | {"tokenizer.ggml.eos_token_id": 3}


def _add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_array(key, list(value))
