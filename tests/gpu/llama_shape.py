"""A model of Llama 3 8B's shape with random bf16 weights: what the GPU figures are measured on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models import llama

from engine.mlx_backend.device import choose_backend, use_backend
from engine.mlx_backend.loaded_model import LoadedModel
from engine.mlx_backend.loader import describe_model
from engine.model_source import ModelSource

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "vocab_size": 128256,
    "rope_theta": 500000.0,
    "head_dim": 128,
    "tie_word_embeddings": False,
    "max_position_embeddings": 131072,
}


def save(folder: Path, **changes: Any) -> None:
    """A folder as mlx-lm loads it, with random bf16 weights and no tokenizer."""
    config = {**CONFIG, **changes}
    model = _model(config)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    model.save_weights(str(folder / "model.safetensors"))


def load(max_model_len: int, **changes: Any) -> LoadedModel:
    """The model on the GPU. Its weights take 15 GiB unless ``changes`` make it smaller."""
    backend = choose_backend("auto")
    use_backend(backend)
    config = {**CONFIG, **changes}
    model = _model(config)
    source = ModelSource("llama-3-8b-shape", "folder", Path("nowhere"), "random")
    return describe_model(model, config, source, backend, max_model_len)


def _model(config: dict[str, Any]) -> Any:
    mx.random.seed(0)
    model = llama.Model(llama.ModelArgs.from_dict(config))
    model.set_dtype(mx.bfloat16)
    model.eval()
    mx.eval(model.parameters())
    return model
