"""Compares packed steps with mlx-lm's own generation path when a model is loaded.

Owns: a few random sequences run both ways, the refusal of a model that differs, naming the layer where it begins. Must
not know: how either path computes. The steps hold 1, 2 and 5 rows, chunks that start anywhere, decode rows beside
chunks and block tables without order; all in all some eighty tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from engine.batch import BatchRow, StepBatch
from engine.errors import UnsupportedModelError
from engine.mlx_backend.loaded_model import LoadedModel
from engine.mlx_backend.mlx_lm_parts import make_prompt_cache
from engine.mlx_backend.packed_model import PackedModel
from engine.request import SamplingParams

# Relative L2 distance of logits. fp32 paths differ by 1e-6; a wrong mask, offset or block gives 0.1 and more.
_TOLERANCE = {4: 1e-3, 2: 0.1}
_BLOCK_SIZE_TOKENS = 8
_NUM_BLOCKS = 24
_LENGTHS = (6, 2, 20, 12, 27, 10)
# Per step: sequence -> number of its tokens.
_STEPS: tuple[dict[int, int], ...] = (
    {5: 9},
    {5: 1},
    {0: 5, 2: 10},
    {0: 1, 1: 1, 2: 9, 3: 11, 4: 20},
    {1: 1, 2: 1, 3: 1, 4: 7},
)
_FIX = "choose another model, or set `parity: off` to run it unchecked"


def check_parity(loaded: LoadedModel) -> None:
    """Raises UnsupportedModelError when packed steps do not give mlx-lm's logits within the tolerance of the dtype."""
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, loaded.facts.vocab_size, length).tolist() for length in _LENGTHS]
    order = rng.permutation(_NUM_BLOCKS).tolist()
    per_sequence = [-(-length // _BLOCK_SIZE_TOKENS) for length in _LENGTHS]
    starts = np.cumsum([0, *per_sequence]).tolist()
    tables = [order[first : first + count] for first, count in zip(starts, per_sequence, strict=False)]
    packed = PackedModel(
        loaded.model,
        loaded.layers,
        num_blocks=_NUM_BLOCKS,
        block_size=_BLOCK_SIZE_TOKENS,
        dtype=loaded.compute_dtype,
        max_model_len=loaded.facts.max_model_len,
    )
    try:
        logits = _run_packed(packed, sequences, tables)
    except UnsupportedModelError:
        raise
    except Exception as error:
        raise UnsupportedModelError(
            f"A packed step of this {loaded.facts.architecture} model fails: {type(error).__name__}: {error}.", _FIX
        ) from error
    _check_attention_was_taken_over(packed, loaded)
    for sequence, table, ours in zip(sequences, tables, logits, strict=True):
        _compare(loaded, packed, sequence, table, ours)


def _run_packed(packed: PackedModel, sequences: Sequence[list[int]], tables: Sequence[list[int]]) -> list[mx.array]:
    computed = [0] * len(sequences)
    last: dict[str, mx.array] = {}
    for index, work in enumerate(_STEPS):
        rows = []
        for i, count in work.items():
            end = computed[i] + count
            rows.append(
                BatchRow(
                    request_id=str(i),
                    slot=i,
                    start=computed[i],
                    num_tokens=count,
                    token_ids=sequences[i],
                    block_ids=tables[i],
                    num_prompt_tokens=len(sequences[i]),
                    sampling=SamplingParams(),
                    seed=0,
                    samples=end == len(sequences[i]),
                    output_index=0,
                )
            )
            computed[i] = end
        step = packed.inputs.build(StepBatch(index, tuple(rows)))
        logits = packed.forward(step)
        mx.eval(logits, packed.state())
        last.update((row.request_id, logits[i]) for i, row in enumerate(step.sampling_rows))
    return [last[str(i)] for i in range(len(sequences))]


def _check_attention_was_taken_over(packed: PackedModel, loaded: LoadedModel) -> None:
    for index, cache in enumerate(packed.caches):
        if cache.num_attends != len(_STEPS):
            raise UnsupportedModelError(
                f"Layer {index} of this {loaded.facts.architecture} model computes attention in its own way "
                f"({cache.num_attends} of {len(_STEPS)} steps went through the shared function).",
                "choose another model",
            )


def _compare(loaded: LoadedModel, packed: PackedModel, sequence: list[int], table: list[int], ours: mx.array) -> None:
    caches = make_prompt_cache(loaded.model)
    theirs = loaded.model(mx.array([sequence]), cache=caches)[0, -1]
    distance = _distance(ours, theirs)
    if distance <= _TOLERANCE[loaded.compute_dtype.size]:
        return
    layer, key_distance = _first_differing_layer(packed, caches, table, len(sequence), loaded.compute_dtype)
    raise UnsupportedModelError(
        f"Packed steps of this {loaded.facts.architecture} model differ from mlx-lm's own result: logits by "
        f"{distance:.2g} (relative), keys first at layer {layer} (by {key_distance:.2g}).",
        _FIX,
    )


def _first_differing_layer(
    packed: PackedModel, caches: Sequence[Any], table: list[int], num_tokens: int, dtype: mx.Dtype
) -> tuple[int, float]:
    distance = 0.0
    for index, (pool, cache) in enumerate(zip(packed.pools, caches, strict=True)):
        keys = pool.read_blocks(table)[0][:, :num_tokens]
        distance = _distance(keys, cache.keys[0, :, :num_tokens])
        if distance > _TOLERANCE[dtype.size]:
            return index, distance
    return len(packed.pools), distance


def _distance(ours: mx.array, theirs: mx.array) -> float:
    ours, theirs = ours.astype(mx.float32), theirs.astype(mx.float32)
    distance = mx.linalg.norm(ours - theirs) / mx.maximum(mx.linalg.norm(theirs), 1e-6)
    value = float(np.array(distance))
    return value if np.isfinite(value) else float("inf")
