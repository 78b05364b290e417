"""Compares a model's steps with mlx-lm's own generation path when it is loaded, and chooses the form of its steps.

Owns: a few random sequences run both ways, naming the layer where a difference begins. Must not know: how either path
computes. The steps hold 1, 2 and 5 rows, chunks that start anywhere, decode rows beside chunks, block tables without
order, a row that shares another's blocks and saved state, a slot that is used again; all in all some 120 tokens. Where
a sliding window is longer than that, one more sequence is as long as the window and a little more.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from engine.batch import BatchRow, StateLoad, StateSave, StepBatch
from engine.errors import UnsupportedModelError
from engine.mlx_backend.loaded_model import LoadedModel
from engine.mlx_backend.mlx_lm_parts import ArraysCache, CacheList, make_prompt_cache
from engine.mlx_backend.packed_model import PackedModel
from engine.mlx_backend.row_model import RowModel
from engine.mlx_backend.step_model import StepForm, StepModel, forms_for
from engine.request import SamplingParams

# Relative L2 distance of logits. fp32 paths differ by 1e-6; a wrong mask, offset or block gives 0.1 and more.
_TOLERANCE = {4: 1e-3, 2: 0.1}
_BLOCK_SIZE_TOKENS = 8
_NUM_SLOTS = 6
_SHARED_TOKENS = 16
_LENGTHS = (6, 2, 20, 12, 27, 10, 21, 13)
# Sequences that begin like another one.
_LIKE = {6: (4, _SHARED_TOKENS), 7: (2, 13)}
# Sequences whose slot another one had before.
_SLOTS = {6: 0, 7: 5}
# Per step: sequence -> number of its tokens.
_STEPS: tuple[dict[int, int], ...] = (
    {5: 9},
    {5: 1},
    {0: 5, 2: 10},
    {0: 1, 1: 1, 2: 9, 3: 11, 4: 20},
    {1: 1, 2: 1, 3: 1, 4: 7},
    {6: 3, 7: 12},
    {6: 2, 7: 1},
)
_SAVED_BY, _LOADED_BY = 4, 6
_LONG_CHUNK_TOKENS = 512
_LONG_LIMIT_S = 3.0
_FIX = "choose another model, or set `parity: off` to run it unchecked"


@dataclass(frozen=True, slots=True)
class _Sequences:
    """Tokens of each sequence, and mlx-lm's logits after its last one with the caches that led there."""

    tokens: tuple[list[int], ...]
    logits: tuple[mx.array, ...]
    caches: tuple[list[Any], ...]
    seconds_per_token: float


def prove_form(loaded: LoadedModel) -> LoadedModel:
    """``loaded`` in the fastest form whose steps give mlx-lm's logits within the tolerance of the dtype.

    The last form is mlx-lm's own path, for one sequence at a time; ``form_reason`` then says what the others did.
    """
    sequences = _by_mlx_lm(loaded)
    reason = loaded.form_reason
    for form in forms_for(loaded.layout):
        tried = dataclasses.replace(loaded, form=form, form_reason=reason)
        try:
            notes = _check(tried, sequences)
        except UnsupportedModelError as error:
            reason = reason or error.message
        else:
            return _disclosing(tried, notes)
    raise AssertionError("the last form is mlx-lm's own")


def guess_form(loaded: LoadedModel) -> LoadedModel:
    """``loaded`` in the first form whose steps can be built, unchecked."""
    sequences = _random_tokens(loaded)
    reason = loaded.form_reason
    for form in forms_for(loaded.layout):
        tried = dataclasses.replace(loaded, form=form, form_reason=reason)
        try:
            if form is not StepForm.SINGLE:
                _Run(tried, sequences).build_all()
        except UnsupportedModelError as error:
            reason = reason or error.message
        else:
            return _disclosing(tried)
    raise AssertionError("the last form is mlx-lm's own")


def check_parity(loaded: LoadedModel) -> None:
    """Raises UnsupportedModelError when steps in ``loaded.form`` do not give mlx-lm's logits within the tolerance."""
    _check(loaded, _by_mlx_lm(loaded))


def _disclosing(loaded: LoadedModel, notes: tuple[str, ...] = ()) -> LoadedModel:
    """``loaded`` saying what its form costs the people who use it."""
    if loaded.form is StepForm.SINGLE:
        notes += (f"This model is served to one person at a time. {loaded.form_reason}",)
    elif loaded.form is StepForm.SERIAL:
        notes += (f"This model's slots are computed one after another and gain no speed. {loaded.form_reason}",)
    facts = dataclasses.replace(loaded.facts, disclosures=(*loaded.facts.disclosures, *notes))
    return dataclasses.replace(loaded, facts=facts)


def _check(loaded: LoadedModel, sequences: _Sequences) -> tuple[str, ...]:
    """Raises UnsupportedModelError. Returns what could not be checked, as sentences."""
    if loaded.form is StepForm.SINGLE:
        return ()
    run = _Run(loaded, sequences.tokens)
    try:
        logits = run.all_logits()
        for index, ours in logits.items():
            _compare(loaded, run, sequences, index, ours)
    finally:
        run.model.close()
    return _check_windows(loaded, sequences.seconds_per_token)


def _random_tokens(loaded: LoadedModel) -> tuple[list[int], ...]:
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, loaded.facts.vocab_size, length).tolist() for length in _LENGTHS]
    for index, (other, num_tokens) in _LIKE.items():
        tokens[index][:num_tokens] = tokens[other][:num_tokens]
    return tuple(tokens)


def _by_mlx_lm(loaded: LoadedModel) -> _Sequences:
    tokens = _random_tokens(loaded)
    logits, caches = [], []
    started_s = time.perf_counter()
    for sequence in tokens:
        cache = make_prompt_cache(loaded.model)
        last = loaded.model(mx.array([sequence]), cache=cache)[0, -1]
        mx.eval(last)
        logits.append(last)
        caches.append(cache)
    seconds = (time.perf_counter() - started_s) / sum(_LENGTHS)
    return _Sequences(tokens, tuple(logits), tuple(caches), seconds)


class _Run:
    """The steps on pools of their own."""

    def __init__(self, loaded: LoadedModel, tokens: Sequence[list[int]]) -> None:
        self._loaded, self._tokens = loaded, tokens
        num_blocks = [-(-len(sequence) // _BLOCK_SIZE_TOKENS) for sequence in tokens]
        order = np.random.default_rng(1).permutation(sum(num_blocks)).tolist()
        starts = np.cumsum([0, *num_blocks]).tolist()
        self.tables = [order[first : first + count] for first, count in zip(starts, num_blocks, strict=False)]
        num_shared = _SHARED_TOKENS // _BLOCK_SIZE_TOKENS
        self.tables[_LOADED_BY][:num_shared] = self.tables[_SAVED_BY][:num_shared]
        self.model: StepModel = loaded.step_model(
            num_blocks=sum(num_blocks),
            block_size=_BLOCK_SIZE_TOKENS,
            dtype=loaded.compute_dtype,
            num_state_entries=_NUM_SLOTS + 1,
        )

    def build_all(self) -> None:
        """Build the graphs of all steps without computing them."""
        self._steps(_STEPS, evaluates=False)
        self.model.close()

    def all_logits(self) -> dict[int, mx.array]:
        """Logits after each sequence's last token."""
        return self._steps(_STEPS, evaluates=True)

    def _steps(self, steps: Sequence[dict[int, int]], evaluates: bool) -> dict[int, mx.array]:
        computed = [0] * len(self._tokens)
        computed[_LOADED_BY] = _SHARED_TOKENS
        logits: dict[int, mx.array] = {}
        for index, work in enumerate(steps):
            batch = self._batch(index, work, computed)
            try:
                step = self.model.build(batch)
                rows = self.model.forward(step)
                self._check_attention_was_taken_over(index + 1)
                if evaluates:
                    mx.eval(rows, self.model.state())
            except UnsupportedModelError:
                raise
            except Exception as error:
                raise UnsupportedModelError(
                    f"A {self._loaded.form.value} step of this {self._loaded.facts.architecture} model fails: "
                    f"{_describe(error)}.",
                    _FIX,
                ) from error
            logits.update((int(row.request_id), rows[i]) for i, row in enumerate(step.sampling_rows))
        return logits

    def _batch(self, index: int, work: dict[int, int], computed: list[int]) -> StepBatch:
        rows = []
        for i, count in work.items():
            end = computed[i] + count
            rows.append(probe_row(i, self._tokens[i], computed[i], count, _SLOTS.get(i, i), self.tables[i]))
            computed[i] = end
        loads = [StateLoad(_NUM_SLOTS, _SLOTS[i]) for i in work if i == _LOADED_BY and computed[i] - work[i] == 16]
        saves = [StateSave(i, _NUM_SLOTS, 16) for i in work if i == _SAVED_BY and work[i] >= _SHARED_TOKENS]
        return StepBatch(index, tuple(rows), (), tuple(loads), tuple(saves))

    def _check_attention_was_taken_over(self, num_steps: int) -> None:
        if not isinstance(self.model, PackedModel | RowModel):
            return
        for index, num_attends in enumerate(self.model.num_attends()):
            if num_attends < num_steps:
                raise UnsupportedModelError(
                    f"Attention layer {index} of this {self._loaded.facts.architecture} model computes attention in "
                    f"its own way ({num_attends} calls of the shared function in {num_steps} steps).",
                    "choose another model",
                )


def _describe(error: Exception) -> str:
    if isinstance(error, AttributeError) and "Cache" in type(error.obj).__name__:
        return f"it asks its cache for `{error.name}`"
    return f"{type(error).__name__}: {str(error).rstrip('.')}"


def probe_row(index: int, tokens: list[int], start: int, count: int, slot: int, table: list[int]) -> BatchRow:
    """A row of one sequence; the last one samples."""
    return BatchRow(
        request_id=str(index),
        slot=slot,
        start=start,
        num_tokens=count,
        token_ids=tokens,
        block_ids=table,
        num_prompt_tokens=len(tokens),
        sampling=SamplingParams(),
        seed=0,
        samples=start + count == len(tokens),
        output_index=0,
    )


def _compare(loaded: LoadedModel, run: _Run, sequences: _Sequences, index: int, ours: mx.array) -> None:
    distance = _distance(ours, sequences.logits[index])
    tolerance = _TOLERANCE[loaded.compute_dtype.size]
    if distance <= tolerance:
        return
    assert isinstance(run.model, PackedModel | RowModel)
    place, key_distance = "after the last attention layer", 0.0
    keepers = [part for part in _flat(sequences.caches[index]) if not isinstance(part, ArraysCache)]
    for layer, (pool, cache) in enumerate(zip(run.model.pools, keepers, strict=True)):
        num_tokens = len(sequences.tokens[index])
        keys = pool.read_blocks(run.tables[index])[0][:, :num_tokens]
        key_distance = _distance(keys, cache.keys[0, :, :num_tokens])
        if key_distance > tolerance:
            place = f"at attention layer {layer}"
            break
    raise UnsupportedModelError(
        f"Steps of this {loaded.facts.architecture} model ({loaded.form.value}) differ from mlx-lm's own result: "
        f"logits by {distance:.2g} (relative), keys first {place} (by {key_distance:.2g}).",
        _FIX,
    )


def _check_windows(loaded: LoadedModel, seconds_per_token: float) -> tuple[str, ...]:
    """One sequence that outgrows the longest window, where the short ones did not and the time allows."""
    window = max((layer.window or 0 for layer in loaded.layers), default=0)
    num_tokens = window + _BLOCK_SIZE_TOKENS + 1
    if max(_LENGTHS) >= num_tokens or num_tokens > loaded.facts.max_model_len:
        return ()
    if 2 * num_tokens * seconds_per_token > _LONG_LIMIT_S:
        return (f"Whether slots are right beyond the window of {window} tokens was not checked: too slow here.",)
    tokens = np.random.default_rng(2).integers(0, loaded.facts.vocab_size, num_tokens).tolist()
    num_blocks = -(-num_tokens // _BLOCK_SIZE_TOKENS)
    model = loaded.step_model(
        num_blocks=num_blocks, block_size=_BLOCK_SIZE_TOKENS, dtype=loaded.compute_dtype, num_state_entries=1
    )
    cache = make_prompt_cache(loaded.model)
    table = np.random.default_rng(3).permutation(num_blocks).tolist()
    ours = theirs = mx.array(0.0)
    for index, start in enumerate(range(0, num_tokens, _LONG_CHUNK_TOKENS)):
        count = min(_LONG_CHUNK_TOKENS, num_tokens - start)
        batch = StepBatch(index, (probe_row(0, tokens, start, count, 0, table),))
        ours = model.forward(model.build(batch))
        theirs = loaded.model(mx.array([tokens[start : start + count]]), cache=cache)[0, -1]
        mx.eval(ours, theirs, model.state())
    model.close()
    distance = _distance(ours[0], theirs)
    if distance > _TOLERANCE[loaded.compute_dtype.size]:
        raise UnsupportedModelError(
            f"Steps of this {loaded.facts.architecture} model ({loaded.form.value}) differ from mlx-lm's own result "
            f"beyond the window of {window} tokens: logits by {distance:.2g} (relative).",
            _FIX,
        )
    return ()


def _flat(caches: Sequence[Any]) -> list[Any]:
    return [part for cache in caches for part in (cache.caches if isinstance(cache, CacheList) else (cache,))]


def _distance(ours: mx.array, theirs: mx.array) -> float:
    ours, theirs = ours.astype(mx.float32), theirs.astype(mx.float32)
    distance = mx.linalg.norm(ours - theirs) / mx.maximum(mx.linalg.norm(theirs), 1e-6)
    value = float(np.array(distance))
    return value if np.isfinite(value) else float("inf")
