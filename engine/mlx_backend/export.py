"""Writes a GGUF model as a folder in mlx-lm's layout: `python -m engine.mlx_backend.export MODEL FOLDER`.

Owns: the folder's files, made by the readers that the engine loads with, so that another program can run the very
weights that the engine runs. Must not know: why somebody wants that.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from engine.errors import ConfigError, StartupError
from engine.mlx_backend.device import choose_backend
from engine.mlx_backend.gguf import GgufCheckpoint, read_gguf
from engine.model_source import ModelSource, resolve_model
from engine.text.gguf_tokenizer import read_gguf_tokenizer
from engine.text.parts import TokenizerParts


def export_folder(source: ModelSource, folder: Path, *, backend: str = "auto") -> None:
    """Write ``source``, a GGUF file, into ``folder``, which is made.

    Weights are what the engine computes with on ``backend``: dense fp32 on the CPU, else packed as in the file. Raises
    ConfigError when the source is a folder already, UnsupportedModelError when it cannot be read.
    """
    if source.kind != "gguf":
        raise ConfigError(f"{source.path} is no GGUF file.", "use the folder as it is")
    checkpoint = read_gguf(source.path, mx.float32 if choose_backend(backend) == "cpu" else None)
    tokenizer = read_gguf_tokenizer(source.path)
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), checkpoint.weights, {"format": "mlx"})
    _write_json(folder / "config.json", _config(checkpoint, tokenizer))
    _write_json(folder / "generation_config.json", {"eos_token_id": list(tokenizer.eos_token_ids)})
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(checkpoint, tokenizer))


def _config(checkpoint: GgufCheckpoint, tokenizer: TokenizerParts) -> dict[str, Any]:
    config = {**checkpoint.config, "eos_token_id": list(tokenizer.eos_token_ids)}
    if checkpoint.quantization:
        # mlx-lm wants one default beside the modules that differ; every packed module is named, so any will do.
        first = next(iter(checkpoint.quantization.values()))
        config["quantization"] = config["quantization_config"] = {**first, **checkpoint.quantization}
    return config


def _tokenizer_config(checkpoint: GgufCheckpoint, tokenizer: TokenizerParts) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": checkpoint.config.get("max_position_embeddings"),
        **tokenizer.special_tokens,
    }
    if "default" in tokenizer.chat_templates:
        config["chat_template"] = tokenizer.chat_templates["default"]
    return config


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=1, ensure_ascii=False), encoding="utf-8")


def main() -> int:
    """Export from the command line."""
    parser = argparse.ArgumentParser(description="Write a GGUF model as a folder that mlx-lm can load.")
    parser.add_argument("model", help='"demo" or a .gguf file')
    parser.add_argument("folder", type=Path)
    parser.add_argument("--backend", default="auto")
    options = parser.parse_args()
    try:
        export_folder(resolve_model(options.model), options.folder, backend=options.backend)
    except StartupError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
