"""Says, for each GGUF architecture, which mlx-lm model computes it and how names, numbers and rows translate.

Owns: one table row per architecture, and the configuration made from the file's metadata. Must not know: block formats,
files. What the files hold follows llama.cpp's converter; an architecture, tensor or setting that is not known here is
refused, because leaving it out would give quietly wrong answers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import mlx.core as mx

from engine.errors import UnsupportedModelError

FIX = "use a model in mlx-lm's layout (a folder or a hub id) instead"

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
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# Frequency divisors are no weights: they go into the configuration.
ROPE_TENSORS = ("rope_freqs", "rope_factors_long", "rope_factors_short")


class Metadata:
    """The file's key-value part."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self.architecture = str(values.get("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        return self._values.get(key, default)

    def own(self, key: str, default: Any = None) -> Any:
        """A key of the file's own architecture, named without its prefix."""
        return self.get(f"{self.architecture}.{key}", default)

    def number(self, key: str, default: float | None = None) -> float:
        """As ``own``. Raises UnsupportedModelError when it is missing or no single number."""
        value = self.own(key, default)
        if not isinstance(value, int | float):
            raise UnsupportedModelError(f"The GGUF file has no single number under {self.architecture}.{key}.", FIX)
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """As ``number``."""
        return int(self.number(key, default))

    @property
    def num_heads(self) -> int:
        return self.integer("attention.head_count")

    @property
    def num_kv_heads(self) -> int:
        return self.integer("attention.head_count_kv", self.num_heads)

    @property
    def head_dim(self) -> int:
        return self.integer("attention.key_length", self.integer("embedding_length") // self.num_heads)


@dataclass(frozen=True, slots=True)
class Found:
    """What the tensors say: rows of the embedding, an output matrix of its own, divisors of RoPE's frequencies."""

    vocab_size: int
    has_output: bool
    rope_factors: Mapping[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one GGUF architecture maps to an mlx-lm model.

    ``interleaved_rope``: q and k rows are stored in the pair order of the original RoPE and must be put back into the
    half-split order that mlx-lm computes. ``norms_hold_one_more``: the file stores 1 + w where mlx-lm adds the 1.
    ``half_dtype``: of activations on a GPU; Gemma's exceed the range of float16.
    """

    model_type: str
    extra_config: Callable[[Metadata, Found], dict[str, object]] = lambda metadata, found: {}
    extra_names: Mapping[str, str] = field(default_factory=dict)
    top_names: Mapping[str, str] = field(default_factory=dict)
    interleaved_rope: bool = False
    rotates_part: bool = False
    norms_hold_one_more: bool = False
    layer_norm: bool = False
    half_dtype: mx.Dtype = mx.float16

    def module_name(self, stem: str) -> str:
        """mlx-lm's name of a GGUF tensor, without its leaf. Raises UnsupportedModelError for an unknown one."""
        top = {**_TOP, **self.top_names}
        if stem in top:
            return top[stem]
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
        part = match and {**_LAYER, **self.extra_names}.get(match.group(2))
        if not match or part is None:
            raise UnsupportedModelError(f"The GGUF file holds a tensor {stem!r} that this reader does not know.", FIX)
        return f"model.layers.{match.group(1)}.{part}"

    def arrange(self, stem: str, array: mx.array, metadata: Metadata) -> mx.array:
        """Rows, and the numbers of norms, as mlx-lm's model holds them. Rows of packed leaves move like dense ones."""
        part = stem.rpartition(".")[2]
        if self.norms_hold_one_more and part.endswith("norm"):
            return array.astype(mx.float32) - 1
        heads = {"attn_q": metadata.num_heads, "attn_k": metadata.num_kv_heads}
        if self.interleaved_rope and part in heads:
            return _to_half_split(array, heads[part])
        return array

    def config(self, metadata: Metadata, found: Found) -> dict[str, object]:
        """What mlx-lm's model is built from. Raises UnsupportedModelError for a setting that it cannot compute."""
        head_dim, rotated = metadata.head_dim, metadata.integer("rope.dimension_count", metadata.head_dim)
        if rotated != head_dim and not self.rotates_part:
            raise UnsupportedModelError("The GGUF model rotates only a part of each head.", FIX)
        norm_key, norm_name = ("layer_norm_epsilon", "layer_norm_eps") if self.layer_norm else _RMS_NORM
        context_length = metadata.integer("context_length")
        return {
            "model_type": self.model_type,
            "hidden_size": metadata.integer("embedding_length"),
            "intermediate_size": metadata.integer("feed_forward_length"),
            "num_hidden_layers": metadata.integer("block_count"),
            "num_attention_heads": metadata.num_heads,
            "num_key_value_heads": metadata.num_kv_heads,
            "head_dim": head_dim,
            norm_name: metadata.number(f"attention.{norm_key}"),
            "rope_theta": metadata.number("rope.freq_base", 10000.0),
            "rope_scaling": _rope_scaling(metadata, found, context_length),
            "partial_rotary_factor": _part(rotated, head_dim),
            "max_position_embeddings": context_length,
            "vocab_size": found.vocab_size,
            "tie_word_embeddings": not found.has_output,
            "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
            **self.extra_config(metadata, found),
        }


_RMS_NORM = ("layer_norm_rms_epsilon", "rms_norm_eps")


def _part(rotated: int, head_dim: int) -> float:
    """The share of each head that is rotated, such that ``int(head_dim * share)`` gives the count back."""
    share = rotated / head_dim
    return share if int(head_dim * share) == rotated else math.nextafter(share, 1.0)


def _to_half_split(array: mx.array, num_heads: int) -> mx.array:
    """Rows (pair, 2) of each head -> (2, pair). Quantised groups run along the other axis and stay whole."""
    rows, rest = array.shape[0], array.shape[1:]
    return array.reshape(num_heads, rows // num_heads // 2, 2, *rest).swapaxes(1, 2).reshape(rows, *rest)


def _rope_scaling(metadata: Metadata, found: Found, context_length: int) -> dict[str, object] | None:
    if "rope_freqs" in found.rope_factors:
        # Llama 3 files carry the finished divisor of every frequency. "longrope" is mlx-lm's form that takes such a
        # list; with equal context lengths it leaves the magnitude alone.
        factors = found.rope_factors["rope_freqs"]
        return {
            "type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "original_max_position_embeddings": context_length,
        }
    kind = metadata.own("rope.scaling.type", "none")
    if kind == "none" or "rope_factors_long" in found.rope_factors:
        return None
    if kind == "linear":
        return {"type": "linear", "factor": metadata.number("rope.scaling.factor")}
    raise UnsupportedModelError(f"GGUF RoPE scaling {kind!r} is not known here.", FIX)


def _llama(metadata: Metadata, found: Found) -> dict[str, object]:
    return {"attention_bias": False, "mlp_bias": False} | _within_window(metadata)


def _within_window(metadata: Metadata, default: int = 0) -> dict[str, object]:
    """A context no longer than the window, for models whose window mlx-lm leaves out: within it both are the same."""
    window = metadata.integer("attention.sliding_window", default)
    context_length = metadata.integer("context_length")
    return {"max_position_embeddings": window} if 0 < window < context_length else {}


def _gemma2(metadata: Metadata, found: Found) -> dict[str, object]:
    return {
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _query_scalar(metadata, layers_of_27b=46),
        **_within_window(metadata, default=4096),
    }


def _gemma3(metadata: Metadata, found: Found) -> dict[str, object]:
    if metadata.own("final_logit_softcapping"):
        raise UnsupportedModelError("The GGUF model caps its logits, which mlx-lm's gemma3 does not.", FIX)
    return {
        "sliding_window": metadata.integer("attention.sliding_window"),
        "sliding_window_pattern": metadata.integer("attention.sliding_window_pattern", 6),
        "rope_theta": metadata.number("rope.freq_base", 1_000_000.0),
        "rope_local_base_freq": metadata.number("rope.freq_base_swa", 10000.0),
        "query_pre_attn_scalar": _query_scalar(metadata, layers_of_27b=62),
    }


def _query_scalar(metadata: Metadata, layers_of_27b: int) -> float:
    """The file does not carry it: the width of a head, but of the hidden state's share in the 27B models."""
    is_27b = metadata.integer("block_count") == layers_of_27b
    return metadata.integer("embedding_length") / metadata.num_heads if is_27b else metadata.head_dim


def _phi3(metadata: Metadata, found: Found) -> dict[str, object]:
    config = _within_window(metadata)
    if "rope_factors_long" in found.rope_factors:
        original = metadata.integer("rope.scaling.original_context_length")
        config |= {
            "original_max_position_embeddings": original,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": found.rope_factors["rope_factors_short"],
                "long_factor": found.rope_factors["rope_factors_long"],
            },
        }
    return config


ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        # Mistral's files of all versions before 3.1 and most descendants of Llama say "llama" too.
        "llama": Architecture("llama", _llama, interleaved_rope=True),
        "qwen2": Architecture("qwen2"),
        "qwen3": Architecture("qwen3", extra_names=_HEAD_NORMS),
        "gemma": Architecture("gemma", norms_hold_one_more=True, half_dtype=mx.bfloat16),
        "gemma2": Architecture(
            "gemma2", _gemma2, extra_names=_FOUR_NORMS, norms_hold_one_more=True, half_dtype=mx.bfloat16
        ),
        "gemma3": Architecture(
            "gemma3_text",
            _gemma3,
            extra_names=_FOUR_NORMS | _HEAD_NORMS,
            norms_hold_one_more=True,
            half_dtype=mx.bfloat16,
        ),
        "phi2": Architecture(
            "phi",
            extra_names={
                "attn_output": "self_attn.dense",
                "ffn_up": "mlp.fc1",
                "ffn_down": "mlp.fc2",
            },
            top_names={"output_norm": "model.final_layernorm"},
            rotates_part=True,
            layer_norm=True,
        ),
        "phi3": Architecture(
            "phi3",
            _phi3,
            extra_names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
            rotates_part=True,
        ),
    }
)
