"""Reads what a model's files say of it, here or on the hub, without reading weights.

Owns: config.json, the safetensors index and headers, the head of a GGUF file, and what they make one expect before
loading. Must not know: how memory is planned, or MLX.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config import EngineConfig, require_context
from engine.core.memory_readers import read_machine
from engine.errors import EngineError, ModelNotFoundError, UnsupportedModelError
from engine.memory.model_shape import read_shape
from engine.memory.plan_inputs import ModelBytes, PlanInputs
from engine.memory.preflight import Backend, ModelEstimate, Weights, refuse_hopeless
from engine.model_source import DEMO_MODEL, ModelSource, resolve_model
from engine.text.gguf_metadata import read_gguf_metadata, read_gguf_tensors

INDEX_FILE = "model.safetensors.index.json"
# Parts of a checkpoint that mlx-lm's language models leave out.
_LEFT_OUT = ("vision_tower", "visual", "multi_modal_projector", "model.visual", "model.vision_tower", "mtp.")
_LENGTH = struct.Struct("<Q")
# Bits per value once MLX holds the tensor, by ggml's type number. The quantised ones carry a half-precision scale and
# bias for each 32 values. All else is half precision.
_GGUF_BITS = {
    **dict.fromkeys((2, 3, 12), 5),  # Q4_0, Q4_1, Q4_K
    **dict.fromkeys((6, 7, 13), 6),  # Q5_0, Q5_1, Q5_K
    **dict.fromkeys((8, 14), 9),  # Q8_0, Q6_K
    **dict.fromkeys((10, 16, 17, 19, 22, 29, 34, 35), 5),  # Q2_K, IQ1 and IQ2, TQ1_0, TQ2_0
    **dict.fromkeys((11, 18, 21), 6),  # Q3_K, IQ3
    **dict.fromkeys((20, 23, 39), 7),  # IQ4, MXFP4
}
_GGUF_OTHER_BITS = 16
# A scale and a bias in half precision for each group of 32 numbers in a KV pool of few bits.
_SCALE_BITS = 1
_GGUF_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "vocab_size": "vocab_size",
}


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model's configuration with Hugging Face's keys, and its weights."""

    config: Mapping[str, Any]
    weights: Weights


def expect_model(config: EngineConfig, source: ModelSource, backend: Backend) -> ModelBytes | None:
    """What the files promise, or None when they do not tell: then loading has to show it.

    Raises ConfigError for a context that the model does not have, MemoryPlanError for a model that cannot fit on this
    machine, before any of it is loaded.
    """
    try:
        files = read_model_files(source)
        shape = read_shape(files.config)
    except UnsupportedModelError:
        return None
    # Before the memory of it is planned: a wrong length would be refused for its size, with the wrong remedy.
    require_context(config.max_model_len, shape.max_model_len)
    value_bytes: float | None = {"auto": None, "float32": 4, "float16": 2, "bfloat16": 2}[config.kv_dtype]
    if config.kv_bits is not None:
        value_bytes = (config.kv_bits + _SCALE_BITS) / 8
    estimate = ModelEstimate(shape, files.weights, backend, config.prefill.max_chunk_tokens, value_bytes)
    max_model_len = config.max_model_len or shape.max_model_len
    model = estimate.at(max_model_len)
    refuse_hopeless(PlanInputs.of(config, read_machine(), model, max_model_len))
    return model


def describe_model_files(name: str) -> ModelFiles:
    """Read the model that ``name`` stands for in a configuration; of a hub id only headers are fetched.

    Raises ModelNotFoundError or UnsupportedModelError.
    """
    local = name == DEMO_MODEL or Path(name).expanduser().exists() or Path(name).suffix == ".gguf"
    if local or name.count("/") != 1 or name.startswith((".", "/", "~")):
        return read_model_files(resolve_model(name))
    return _hub_files(name)


def read_model_files(source: ModelSource) -> ModelFiles:
    """Read configuration and headers. Raises ModelNotFoundError or UnsupportedModelError with the file at fault."""
    if source.kind == "gguf":
        return ModelFiles(_gguf_config(source.path), _gguf_weights(source.path))
    config = _read_json(source.path / "config.json")
    files = sorted(source.path.glob("*.safetensors"))
    if files:
        return ModelFiles(config, _weights((entry for path in files for entry in _entries(path)), config))
    return ModelFiles(config, _indexed_weights(source.path / INDEX_FILE))


def _hub_files(name: str) -> ModelFiles:
    from huggingface_hub import get_safetensors_metadata, hf_hub_download

    try:
        config = _read_json(Path(hf_hub_download(name, "config.json")))
        headers = get_safetensors_metadata(name).files_metadata.values()
    except EngineError:
        raise
    except Exception as error:
        raise ModelNotFoundError(
            f"The hub did not answer for {name!r}: {type(error).__name__}.", "check the name and the connection"
        ) from error
    tensors = (pair for header in headers for pair in header.tensors.items())
    entries = (_Entry(key, math.prod(info.shape), info.data_offsets[1] - info.data_offsets[0]) for key, info in tensors)
    return ModelFiles(config, _weights(entries, config))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelNotFoundError(f"{path} cannot be read: {error.strerror}.", "fetch the model again") from error
    except ValueError as error:
        raise UnsupportedModelError(f"{path} is not valid JSON: {error}.", "fetch the model again") from error
    if not isinstance(values, dict):
        raise UnsupportedModelError(f"{path} holds no JSON object.", "fetch the model again")
    return values


def _indexed_weights(path: Path) -> Weights:
    if not path.exists():
        raise ModelNotFoundError(f"{path.parent} has neither weights nor {INDEX_FILE}.", "fetch the model's index")
    metadata = _read_json(path).get("metadata", {})
    packed_bytes = int(metadata.get("total_size", 0))
    if packed_bytes <= 0:
        raise UnsupportedModelError(f"{path} does not say how large the weights are.", "fetch the weights")
    return Weights(packed_bytes, int(metadata.get("total_parameters") or packed_bytes // 2))


@dataclass(frozen=True, slots=True)
class _Entry:
    """One tensor of a safetensors header."""

    name: str
    num_values: int
    num_bytes: int


def _weights(entries: Iterable[_Entry], config: Mapping[str, Any]) -> Weights:
    group_size = int((config.get("quantization") or {}).get("group_size", 64))
    left_out = (*_LEFT_OUT, "lm_head.") if config.get("tie_word_embeddings") else _LEFT_OUT
    kept = {entry.name: entry for entry in entries if not entry.name.startswith(left_out)}
    num_values = 0
    for entry in kept.values():
        stem, _, part = entry.name.rpartition(".")
        scales = kept.get(f"{stem}.scales")
        if scales is None:
            num_values += entry.num_values
        elif part == "weight":
            num_values += scales.num_values * group_size
    return Weights(sum(entry.num_bytes for entry in kept.values()), num_values)


def _entries(path: Path) -> list[_Entry]:
    try:
        with path.open("rb") as stream:
            (length,) = _LENGTH.unpack(stream.read(_LENGTH.size))
            header = json.loads(stream.read(length))
    except (OSError, ValueError, struct.error) as error:
        raise UnsupportedModelError(f"{path} is no safetensors file: {error}.", "fetch the file again") from error
    header.pop("__metadata__", None)
    return [
        _Entry(name, math.prod(entry["shape"]), entry["data_offsets"][1] - entry["data_offsets"][0])
        for name, entry in header.items()
    ]


def _gguf_config(path: Path) -> dict[str, Any]:
    metadata = read_gguf_metadata(path)
    architecture = metadata.get("general.architecture", "")
    config = {key: metadata.get(f"{architecture}.{name}") for key, name in _GGUF_KEYS.items()}
    if config["vocab_size"] is None:
        config["vocab_size"] = len(metadata.get("tokenizer.ggml.tokens", ()))
    return {"model_type": architecture} | {key: value for key, value in config.items() if value is not None}


def _gguf_weights(path: Path) -> Weights:
    tensors = read_gguf_tensors(path)
    packed_bits = sum(tensor.num_values * _GGUF_BITS.get(tensor.type_number, _GGUF_OTHER_BITS) for tensor in tensors)
    return Weights(packed_bits // 8, sum(tensor.num_values for tensor in tensors))
