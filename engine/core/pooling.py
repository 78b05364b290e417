"""Whether a model's files say that it was made for embeddings, and how they are pooled.

Owns: reading what sentence-transformers leaves beside the weights. Must not know: MLX, how an embedding is taken.
"""

from __future__ import annotations

import json
from typing import Any

from engine.errors import UnsupportedModelError
from engine.model_source import ModelSource

_MODULES = "modules.json"
_LAST_TOKEN = "pooling_mode_lasttoken"
_FIX = "set `embeddings: off` to use the model for text alone, or choose one that pools the last token"


def is_made_for_embeddings(source: ModelSource) -> bool:
    """Whether the files describe an embedding model whose last token's state is the embedding.

    Raises UnsupportedModelError for one that pools otherwise: a decoder's other tokens have not seen the whole text,
    and models that look both ways cannot be computed in slots.
    """
    modules = _read(source, _MODULES)
    if not isinstance(modules, list):
        return False
    paths = [str(module.get("path")) for module in modules if str(module.get("type", "")).endswith(".Pooling")]
    if not paths:
        return False
    pooling = _read(source, f"{paths[0]}/config.json")
    modes = [name for name, on in pooling.items() if name.startswith("pooling_mode_") and on is True]
    if modes != [_LAST_TOKEN]:
        given = ", ".join(name.removeprefix("pooling_mode_") for name in modes) or "nothing that is known"
        raise UnsupportedModelError(f"{source.name} pools {given}; only the last token's state is taken here.", _FIX)
    return True


def _read(source: ModelSource, name: str) -> Any:
    if source.kind != "folder" or not (source.path / name).is_file():
        return {}
    try:
        return json.loads((source.path / name).read_text(encoding="utf-8"))
    except ValueError as error:
        raise UnsupportedModelError(f"{source.path / name} is not valid JSON: {error}.", "fetch it again") from error
