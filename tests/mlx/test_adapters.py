"""LoRA, DoRA and full adapters from mlx-lm folders, and weights in several files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters

from engine.config import load_engine_config
from engine.errors import ModelNotFoundError, UnsupportedModelError
from engine.mlx_backend.adapters import apply_adapter
from engine.mlx_backend.loader import load_model
from engine.mlx_backend.mlx_lm_parts import Model
from engine.model_source import resolve_model
from tests.mlx.tiny_models import build

TOKENS = mx.array([[5, 17, 3, 99, 0, 42]])
KEYS = ["self_attn.q_proj", "mlp.down_proj"]


def save_folder(model: Model, config: dict[str, Any], folder: Path, *, num_files: int = 1) -> Path:
    folder.mkdir(exist_ok=True)
    weights = tree_flatten(model.parameters())
    for index in range(num_files):
        part = dict(weights[index::num_files])
        mx.save_safetensors(str(folder / f"model-{index + 1:05d}-of-{num_files:05d}.safetensors"), part)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def save_adapter(folder: Path, architecture: str, kind: str = "lora", **changes: Any) -> Path:
    """An adapter as training would leave it, with random changes on the last two layers."""
    model, _ = build(architecture, layer_types=None, **changes)
    settings = {"rank": 4, "scale": 5.0, "dropout": 0.0, "keys": KEYS}
    if kind != "full":
        linear_to_lora_layers(model, 2, settings, use_dora=kind == "dora")
    mx.random.seed(3)
    chosen = {
        name: array + 0.1 * mx.random.normal(array.shape)
        for name, array in tree_flatten(model.parameters())
        if name.rpartition(".")[2] in ("lora_a", "lora_b", "m") or (kind == "full" and "layers.1.mlp" in name)
    }
    folder.mkdir(exist_ok=True)
    mx.save_safetensors(str(folder / "adapters.safetensors"), chosen)
    description = {"fine_tune_type": kind, "num_layers": 2, "lora_parameters": settings}
    (folder / "adapter_config.json").write_text(json.dumps(description))
    return folder


def test_weights_in_several_files_are_read(tmp_path: Path) -> None:
    model, config = build("llama", layer_types=None)
    loaded = load_model(resolve_model(str(save_folder(model, config, tmp_path, num_files=3))), backend="cpu")
    assert mx.array_equal(loaded.model(TOKENS), model(TOKENS))


@pytest.mark.parametrize("kind", ["lora", "dora", "full"])
def test_an_adapter_computes_what_mlx_lm_computes(tmp_path: Path, kind: str) -> None:
    model, config = build("llama", layer_types=None)
    folder = save_folder(model, config, tmp_path / "model")
    adapter = save_adapter(tmp_path / "adapter", "llama", kind)
    without = np.array(model(TOKENS))
    loaded = load_model(resolve_model(str(folder), str(adapter)), backend="cpu")
    expected = load_adapters(model, str(adapter))(TOKENS)
    np.testing.assert_allclose(loaded.model(TOKENS), expected, atol=2e-5)
    assert np.abs(np.array(expected) - without).max() > 1e-2
    assert not [name for name, _ in tree_flatten(loaded.model.parameters()) if "lora" in name]
    assert any("The adapter in" in sentence for sentence in loaded.facts.disclosures)


def test_a_mixture_of_experts_takes_an_adapter(tmp_path: Path) -> None:
    model, config = build("mixtral", layer_types=None)
    folder = save_folder(model, config, tmp_path / "model")
    adapter = save_adapter(tmp_path / "adapter", "mixtral")
    loaded = load_model(resolve_model(str(folder), str(adapter)), backend="cpu")
    np.testing.assert_allclose(loaded.model(TOKENS), load_adapters(model, str(adapter))(TOKENS), atol=2e-5)


def test_the_change_to_a_quantised_weight_is_computed_beside_it(tmp_path: Path) -> None:
    model, _ = build("llama", layer_types=None)
    nn.quantize(model, group_size=32, bits=8, class_predicate=lambda name, _: name.endswith("q_proj"))
    sentence = apply_adapter(model, save_adapter(tmp_path, "llama"))
    assert "2 weights were changed, 2 are quantised" in sentence
    other, _ = build("llama", layer_types=None)
    np.testing.assert_allclose(model(TOKENS), load_adapters(other, str(tmp_path))(TOKENS), atol=0.05)


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    model, config = build("llama", layer_types=None)
    folder = save_folder(model, config, tmp_path / "model")
    adapter = save_adapter(tmp_path / "adapter", "llama", hidden_size=128)
    with pytest.raises(UnsupportedModelError, match="does not fit this model"):
        load_model(resolve_model(str(folder), str(adapter)), backend="cpu")


def test_a_folder_without_an_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no adapter_config\.json"):
        resolve_model("demo", str(tmp_path))
    assert load_engine_config({"adapter": "somewhere"}).adapter == "somewhere"


def test_another_adapter_is_another_revision(tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path, "llama")
    first = resolve_model("demo", str(adapter)).revision
    weights = mx.load(str(adapter / "adapters.safetensors"))
    mx.save_safetensors(str(adapter / "adapters.safetensors"), {name: array + 1 for name, array in weights.items()})
    assert len({resolve_model("demo").revision, first, resolve_model("demo", str(adapter)).revision}) == 3
