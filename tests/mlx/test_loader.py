"""Loading: mlx-lm folders, quantised ones made dense, facts, refusals."""

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


def test_recurrent_state_is_measured() -> None:
    model, config = build("qwen3_next")
    loaded = describe_model(model, config, ModelSource("m", "folder", Path("nowhere"), "r"), "cpu")
    convolution, matrix = 3 * (2 * 2 * 16 + 4 * 16), 4 * 16 * 16
    assert loaded.facts.state_bytes_per_slot == 2 * 4 * (convolution + matrix)
    assert len(loaded.layers) == 1
