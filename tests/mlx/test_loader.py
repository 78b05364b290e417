"""Loading: mlx-lm folders, quantised ones made dense, GGUF files, facts, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from engine.errors import ConfigError, UnsupportedModelError
from engine.mlx_backend.dense import make_dense
from engine.mlx_backend.gguf import read_gguf
from engine.mlx_backend.loader import describe_model, load_model
from engine.mlx_backend.mlx_lm_parts import Model
from engine.model_source import ModelSource, resolve_model
from tests.mlx.tiny_models import build

TOKENS = [[5, 17, 3, 99, 0, 42]]


def logits_of(model: Model) -> mx.array:
    return model(mx.array(TOKENS))


def save_folder(model: Model, config: dict[str, Any], folder: Path) -> ModelSource:
    folder.mkdir(exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    return resolve_model(str(folder))


def test_a_folder_loads_with_its_facts(tmp_path: Path) -> None:
    model, config = build("llama", layer_types=None)
    loaded = load_model(save_folder(model, config, tmp_path), backend="cpu")
    assert mx.array_equal(logits_of(loaded.model), logits_of(model))
    assert loaded.facts.architecture == "llama"
    assert loaded.facts.eos_token_ids == (3, 4)
    assert loaded.facts.max_model_len == 512
    assert loaded.facts.kv_bytes_per_token == 3 * 2 * (16 + 16) * 4
    assert loaded.facts.weights_bytes == sum(a.nbytes for _, a in tree_flatten(model.parameters()))


@pytest.mark.parametrize("architecture", ["llama", "mixtral"])
def test_a_quantised_folder_becomes_dense_fp32_on_the_cpu(tmp_path: Path, architecture: str) -> None:
    model, config = build(architecture, layer_types=None, tie_word_embeddings=False, hidden_size=64)
    nn.quantize(model, group_size=32, bits=4)
    model.set_dtype(mx.bfloat16)
    settings = {"group_size": 32, "bits": 4}
    source = save_folder(model, {**config, "quantization": settings, "quantization_config": settings}, tmp_path)
    loaded = load_model(source, backend="cpu")
    names = {type(module).__name__ for _, module in loaded.model.named_modules()}
    assert not {name for name in names if name.startswith("Quantized")}
    assert {array.dtype for _, array in tree_flatten(loaded.model.parameters())} == {mx.float32}
    model.set_dtype(mx.float32)
    np.testing.assert_allclose(logits_of(loaded.model), logits_of(model), atol=2e-5)


def test_what_has_no_dense_form_is_named() -> None:
    model, _ = build("llama")
    odd = nn.QuantizedLinear(64, 64, group_size=32)
    odd.__class__ = type("OddLinear", (nn.QuantizedLinear,), {})
    model.model.layers[1].self_attn.q_proj = odd
    assert make_dense(model, mx.float32) == ["model.layers.1.self_attn.q_proj"]


def test_a_longer_context_than_the_models_is_refused(tmp_path: Path) -> None:
    model, config = build("llama")
    source = save_folder(model, config, tmp_path)
    assert load_model(source, backend="cpu", max_model_len=100, parity="off").facts.max_model_len == 100
    with pytest.raises(ConfigError, match="`max_model_len` is 513; this model's context is 512"):
        load_model(source, backend="cpu", max_model_len=513)


def test_unloadable_folders_are_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UnsupportedModelError, match="no safetensors"):
        load_model(resolve_model(str(tmp_path)), backend="cpu")
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {"a": mx.zeros((1,))})
    (tmp_path / "config.json").write_text('{"model_type": "no-such-thing"}')
    with pytest.raises(UnsupportedModelError, match="Model type no-such-thing not supported"):
        load_model(resolve_model(str(tmp_path)), backend="cpu")


def test_a_backend_that_is_not_there_is_refused(tmp_path: Path) -> None:
    if mx.metal.is_available():
        pytest.skip("this machine has Metal")
    with pytest.raises(ConfigError, match="'metal' is not available: MLX offers"):
        load_model(ModelSource("m", "folder", tmp_path, "r"), backend="metal")


def test_recurrent_models_are_refused_at_load() -> None:
    model, config = build("qwen3_next")
    with pytest.raises(UnsupportedModelError, match="ArraysCache"):
        describe_model(model, config, ModelSource("m", "folder", Path("nowhere"), "r"), "cpu")


# --- GGUF ---------------------------------------------------------------------------------------------------------

TO_GGUF = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def save_gguf(model: Model, architecture: str, path: Path, **changes: Any) -> Path:
    """Write ``model`` as llama.cpp's converter would: its names, q and k rows in RoPE pair order for llama."""
    weights = {}
    for name, array in tree_flatten(model.parameters()):
        module, _, leaf = name.rpartition(".")
        prefix = ""
        if module.startswith("model.layers."):
            _, _, index, module = module.split(".", 3)
            prefix = f"blk.{index}."
        if architecture == "llama" and module in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = 4 if "q_proj" in module else 2
            array = array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
        weights[f"{prefix}{TO_GGUF[module]}.{leaf}"] = mx.contiguous(array)
    numbers = {
        "context_length": 512,
        "embedding_length": 64,
        "block_count": 3,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 16,
        "rope.dimension_count": 16,
    }
    metadata: dict[str, Any] = {f"{architecture}.{key}": mx.array(value, mx.uint32) for key, value in numbers.items()}
    metadata |= {
        "general.architecture": architecture,
        f"{architecture}.attention.layer_norm_rms_epsilon": mx.array(1e-5),
        f"{architecture}.rope.freq_base": mx.array(10000.0),
        "tokenizer.ggml.eos_token_id": mx.array(3, mx.uint32),
    }
    metadata |= changes.pop("metadata", {})
    mx.save_gguf(str(path), weights | changes.pop("weights", {}), metadata)
    return path


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_file_gives_the_model_it_was_made_of(tmp_path: Path, architecture: str, tied: bool) -> None:
    model, _ = build(architecture, layer_types=None, tie_word_embeddings=tied)
    source = resolve_model(str(save_gguf(model, architecture, tmp_path / "m.gguf")))
    loaded = load_model(source, backend="cpu")
    np.testing.assert_allclose(logits_of(loaded.model), logits_of(model), atol=1e-5)
    assert loaded.facts.eos_token_ids == (3,)
    assert loaded.facts.max_model_len == 512


def test_the_demo_file_keeps_its_packed_weights_for_a_gpu() -> None:
    path = resolve_model("demo").path
    packed, dense = read_gguf(path, None), read_gguf(path, mx.float32)
    assert packed.quantization["model.layers.0.mlp.up_proj"] == {"group_size": 32, "bits": 4}
    assert packed.quantization["model.embed_tokens"] == {"group_size": 32, "bits": 8}
    assert not dense.quantization
    name = "model.layers.3.self_attn.q_proj"
    unpacked = mx.dequantize(
        packed.weights[f"{name}.weight"],
        packed.weights[f"{name}.scales"].astype(mx.float32),
        packed.weights[f"{name}.biases"].astype(mx.float32),
        32,
        4,
    )
    assert mx.array_equal(unpacked, dense.weights[f"{name}.weight"])
    assert {a.dtype for a in packed.weights.values()} == {mx.uint32, mx.float16}


def test_llama_3_frequency_factors_are_applied(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    model, _ = build("llama", layer_types=None, rope_scaling=scaling)
    plain = 10000.0 ** (np.arange(0, 16, 2) / 16)
    factors = mx.array(np.array(model.layers[0].self_attn.rope._freqs) / plain).astype(mx.float32)
    path = save_gguf(model, "llama", tmp_path / "m.gguf", weights={"rope_freqs.weight": factors})
    loaded = load_model(resolve_model(str(path)), backend="cpu")
    np.testing.assert_allclose(logits_of(loaded.model), logits_of(model), atol=1e-5)


def test_linear_rope_scaling_is_applied(tmp_path: Path) -> None:
    model, _ = build("llama", layer_types=None, rope_scaling={"type": "linear", "factor": 4.0})
    metadata = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": mx.array(4.0)}
    path = save_gguf(model, "llama", tmp_path / "m.gguf", metadata=metadata)
    loaded = load_model(resolve_model(str(path)), backend="cpu")
    np.testing.assert_allclose(logits_of(loaded.model), logits_of(model), atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"metadata": {"general.architecture": "rwkv7"}}, "architecture 'rwkv7' is not known"),
        ({"metadata": {"llama.rope.scaling.type": "yarn"}}, "RoPE scaling 'yarn'"),
        ({"metadata": {"llama.rope.dimension_count": mx.array(8, mx.uint32)}}, "only a part of each head"),
        ({"weights": {"blk.0.ffn_gate_inp.weight": mx.zeros((4, 64))}}, "ffn_gate_inp"),
        ({"metadata": {"llama.feed_forward_length": mx.array(97, mx.uint32)}}, "does not fit its own description"),
    ],
)
def test_gguf_files_that_cannot_be_computed_right_are_refused(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    model, _ = build("llama", layer_types=None)
    path = save_gguf(model, "llama", tmp_path / "m.gguf", **changes)
    with pytest.raises(UnsupportedModelError, match=reason):
        load_model(resolve_model(str(path)), backend="cpu")


def test_a_truncated_gguf_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(resolve_model("demo").path.read_bytes()[:60_000_000])
    with pytest.raises(UnsupportedModelError, match=r"m\.gguf cannot be read.*past the end of the file"):
        load_model(resolve_model(str(path)), backend="cpu")
