"""Loads a model and states the facts the engine needs of it.

Owns: mlx-lm folders and GGUF files to a ready ``LoadedModel``, dense fp32 weights on the CPU, what each layer keeps per
token, the refusal of models whose caches cannot be batched. Must not know: tokenizers, pools, steps.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten

from engine.config import require_context
from engine.errors import UnsupportedModelError
from engine.interfaces import ModelFacts
from engine.mlx_backend.adapters import apply_adapter
from engine.mlx_backend.bare_decoders import model_classes
from engine.mlx_backend.cache_layout import inspect_caches
from engine.mlx_backend.dense import make_dense
from engine.mlx_backend.device import Backend, choose_backend, device_facts, shortcomings, use_backend
from engine.mlx_backend.gguf import read_gguf
from engine.mlx_backend.loaded_model import LoadedModel
from engine.mlx_backend.mlx_lm_parts import Model
from engine.mlx_backend.mlx_lm_parts import load_model as load_folder
from engine.mlx_backend.probe import guess_form, prove_form
from engine.mlx_backend.step_model import forms_for
from engine.model_source import ModelSource

_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length", "seq_length", "max_seq_len")
_FALLBACK_CONTEXT_TOKENS = 4096
_FIX_FOLDER = "choose a model that mlx-lm supports"
_FIX = "choose a model whose layers all use plain or sliding-window attention"


def load_model(
    source: ModelSource,
    *,
    backend: str = "auto",
    max_model_len: int | None = None,
    parity: Literal["check", "off"] = "check",
) -> LoadedModel:
    """Load ``source`` on ``backend`` ("auto", "metal", "cuda" or "cpu"), on the thread that will run it.

    ``max_model_len`` None takes the model's own context. ``parity`` "check" compares packed steps with mlx-lm's own
    generation path. Raises UnsupportedModelError for a model that cannot be decoded right in slots, ConfigError for a
    backend or context that is not there.
    """
    chosen = choose_backend(backend)
    use_backend(chosen)
    model, config, notes = _load(source, chosen)
    if parity == "off":
        notes += ("Whether packed steps give mlx-lm's results was not checked (`parity: off`).",)
    loaded = describe_model(model, config, source, chosen, max_model_len, shortcomings(chosen) + notes)
    return prove_form(loaded) if parity == "check" else guess_form(loaded)


def describe_model(
    model: Model,
    config: Mapping[str, Any],
    source: ModelSource,
    backend: Backend,
    max_model_len: int | None = None,
    notes: tuple[str, ...] = (),
) -> LoadedModel:
    """State the facts of a model that is in memory. Raises UnsupportedModelError, ConfigError."""
    architecture = str(config.get("model_type"))
    seen = inspect_caches(model)
    layers = seen.layout.attention if seen.layout is not None else ()
    compute_dtype = seen.compute_dtype
    device = device_facts(backend)
    values_per_token = sum(layer.values_per_token for layer in layers)
    facts = ModelFacts(
        name=source.name,
        revision=source.revision,
        architecture=architecture,
        vocab_size=seen.vocab_size,
        max_model_len=_context_length(config, max_model_len),
        num_layers=len(seen.layout.entries) if seen.layout is not None else 0,
        kv_bytes_per_token=values_per_token * compute_dtype.size,
        weights_bytes=sum(array.nbytes for array in _arrays(model)),
        eos_token_ids=_eos_token_ids(config),
        device=device.description,
        compute_dtype=str(compute_dtype).removeprefix("mlx.core."),
        disclosures=notes,
        state_bytes_per_slot=seen.layout.state_bytes if seen.layout is not None else 0,
    )
    return LoadedModel(
        model,
        config,
        facts,
        device,
        layers,
        compute_dtype,
        layout=seen.layout,
        form=forms_for(seen.layout)[0],
        form_reason=seen.reason and f"In this {architecture} model {seen.reason}.",
    )


def _load(source: ModelSource, backend: Backend) -> tuple[Model, dict[str, Any], tuple[str, ...]]:
    dense_dtype = mx.float32 if backend == "cpu" else None
    if source.kind == "gguf":
        model, config, read_notes = _from_gguf(source.path, dense_dtype)
    else:
        model, config = _from_folder(source.path)
        read_notes = ()
    packed = make_dense(model, dense_dtype) if dense_dtype is not None else []
    if source.adapter is not None:
        read_notes += (apply_adapter(model, source.adapter),)
    mx.eval(model.parameters())
    notes = (f"{len(packed)} modules stay quantised, which is slow on the CPU.",) if packed else ()
    return model, config, read_notes + notes


def _from_folder(path: Path) -> tuple[Model, dict[str, Any]]:
    try:
        model, config = load_folder(path, lazy=True, get_model_classes=model_classes)
    except FileNotFoundError as error:
        raise UnsupportedModelError(f"{path} holds no safetensors.", "convert it with mlx_lm.convert") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UnsupportedModelError(f"mlx-lm cannot load {path}: {error}.", _FIX_FOLDER) from error
    return model, config


def _from_gguf(path: Path, dense_dtype: mx.Dtype | None) -> tuple[Model, dict[str, Any], tuple[str, ...]]:
    checkpoint = read_gguf(path, dense_dtype)
    module = importlib.import_module(f"mlx_lm.models.{checkpoint.config['model_type']}")
    model: Model = module.Model(module.ModelArgs.from_dict(checkpoint.config))
    weights = model.sanitize(checkpoint.weights) if hasattr(model, "sanitize") else checkpoint.weights
    if checkpoint.quantization:
        quantize(model, class_predicate=lambda name, _: checkpoint.quantization.get(name, False))
    model.eval()
    try:
        model.load_weights(list(weights.items()), strict=True)
    except ValueError as error:
        raise UnsupportedModelError(f"{path.name} does not fit its own description: {error}.", _FIX) from error
    return model, checkpoint.config, checkpoint.notes


def _arrays(model: Model) -> list[mx.array]:
    return list(dict(tree_flatten(model.parameters())).values())


def _context_length(config: Mapping[str, Any], asked: int | None) -> int:
    own = next((int(value) for value in _both_levels(config, _CONTEXT_KEYS)), None)
    if asked is None:
        return own or _FALLBACK_CONTEXT_TOKENS
    if own is not None:
        require_context(asked, own)
    return asked


def _eos_token_ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    value = next(iter(_both_levels(config, ("eos_token_id",))), None)
    if value is None:
        return ()
    return tuple(int(token) for token in value) if isinstance(value, list) else (int(value),)


def _both_levels(config: Mapping[str, Any], keys: tuple[str, ...]) -> list[Any]:
    """Values of ``keys`` that are set, a multimodal model's text part after the top level."""
    levels = (config, config.get("text_config") or {})
    return [level[key] for level in levels for key in keys if level.get(key) is not None]
