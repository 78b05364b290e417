"""Checkpoints of embedding models, which hold a decoder and nothing around it.

Owns: giving their weights the names that mlx-lm's whole models use. Must not know: how embeddings are taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from engine.mlx_backend.mlx_lm_parts import Model, find_model_classes

Weights = dict[str, mx.array]

_EMBEDDING = "embed_tokens.weight"
_DECODER, _HEAD = "model.", "lm_head."


def model_classes(config: dict[str, Any]) -> tuple[Any, Any]:
    """As mlx-lm's own, for ``load_model``, with a model that also takes the weights of a decoder alone."""
    model_class, arguments_class = find_model_classes(config)

    def make(arguments: Any) -> Model:
        model = model_class(arguments)
        sanitize = getattr(model, "sanitize", lambda weights: weights)
        tied = bool(config.get("tie_word_embeddings", getattr(arguments, "tie_word_embeddings", True)))
        model.sanitize = lambda weights: sanitize(with_whole_names(weights, needs_head=not tied))
        return model

    return make, arguments_class


def with_whole_names(weights: Mapping[str, mx.array], *, needs_head: bool) -> Weights:
    """``weights`` as they are, or a bare decoder's under the names they have in a whole model.

    A head that is missing is the token embedding once more: it is never asked.
    """
    if _EMBEDDING not in weights:
        return dict(weights)
    whole = {_DECODER + name: array for name, array in weights.items()}
    if needs_head:
        stem = f"{_DECODER}{_EMBEDDING.removesuffix('weight')}"
        whole |= {_HEAD + name.removeprefix(stem): array for name, array in whole.items() if name.startswith(stem)}
    return whole
