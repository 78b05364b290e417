"""The load-time parity check: it finds the form of a model's steps, and catches what is computed wrongly."""

from __future__ import annotations

import dataclasses
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import gemma2

from engine.errors import UnsupportedModelError
from engine.mlx_backend import packed_model, paged_cache, probe, row_model, sequence_caches, state_pool
from engine.mlx_backend.gathered_attention import attend
from engine.mlx_backend.loaded_model import LoadedModel
from engine.mlx_backend.probe import check_parity, guess_form, prove_form
from engine.mlx_backend.step_model import StepForm
from tests.mlx.tiny_models import tiny_model


@pytest.mark.parametrize(
    ("architecture", "form", "reason"),
    [
        ("qwen3", "packed", ""),
        ("qwen3_next", "batched", ""),
        ("deepseek_v3", "gathered", "position scores through the attention mask"),
        ("smollm3", "gathered", "masks a window of 12 tokens over a cache that keeps all"),
        ("gemma2", "grouped", "computes attention in its own way"),
        ("llama4", "serial", "asks its cache for `maybe_trim_front`"),
        ("longcat_flash_ngram", "single", "recurrent state changes its shape with the length"),
    ],
)
def test_the_first_right_form_is_taken(architecture: str, form: str, reason: str) -> None:
    loaded = prove_form(tiny_model(architecture))
    assert loaded.form.value == form
    assert reason in loaded.form_reason
    assert bool(reason) == bool(loaded.form_reason)
    assert bool(loaded.facts.disclosures) == (form in ("serial", "single"))


def test_unchecked_the_first_form_that_can_be_built_is_taken() -> None:
    assert guess_form(tiny_model("gemma2")).form is StepForm.GROUPED


def test_attention_inherited_from_another_file_is_found() -> None:
    assert prove_form(tiny_model("smollm3", layer_types=None)).form is StepForm.PACKED


def test_windows_are_those_of_the_models_own_cache() -> None:
    assert [layer.window for layer in tiny_model("gemma3_text").layers] == [12, 12, None]


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_difference_is_refused_and_placed(monkeypatch: pytest.MonkeyPatch, layer: int) -> None:
    loaded = tiny_model("qwen3")
    calls = 0

    def attend_wrongly(*args: Any) -> mx.array:
        nonlocal calls
        calls += 1
        out = attend(*args)
        return out * 1.5 if (calls - 1) % len(loaded.layers) == layer else out

    monkeypatch.setattr(paged_cache, "attend", attend_wrongly)
    place = f"at attention layer {layer + 1}" if layer < 2 else "after the last attention layer"
    with pytest.raises(UnsupportedModelError, match=rf"keys first {place} "):
        check_parity(loaded)


def test_a_model_that_fails_in_a_step_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> mx.array:
        raise ValueError("offset must be an int")

    monkeypatch.setattr(paged_cache, "attend", fail)
    with pytest.raises(UnsupportedModelError, match="ValueError: offset must be an int"):
        check_parity(tiny_model("qwen3"))


def test_a_window_that_would_take_too_long_to_outgrow_is_disclosed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_LONG_LIMIT_S", 0.0)
    loaded = prove_form(tiny_model("gemma3_text", sliding_window=64))
    assert any("beyond the window of 64 tokens was not checked" in note for note in loaded.facts.disclosures)


def without_windows(loaded: LoadedModel) -> LoadedModel:
    """A copy that forgot its sliding windows."""
    layers = tuple(dataclasses.replace(layer, window=None) for layer in loaded.layers)
    assert loaded.layout is not None
    layout = dataclasses.replace(loaded.layout, entries=layers)
    return dataclasses.replace(loaded, layers=layers, layout=layout)


@pytest.mark.parametrize("architecture", ["gemma3_text", "gpt_oss", "cohere2"])
def test_an_ignored_window_is_caught(monkeypatch: pytest.MonkeyPatch, architecture: str) -> None:
    monkeypatch.setattr(paged_cache.PagedLayerCache, "make_mask", lambda *_, **__: None)
    loaded = prove_form(tiny_model(architecture))
    with pytest.raises(UnsupportedModelError, match="differ from mlx-lm's own result"):
        check_parity(without_windows(loaded))


def test_an_ignored_window_that_is_longer_than_the_short_sequences_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_cache.PagedLayerCache, "make_mask", lambda *_, **__: None)
    loaded = tiny_model("gemma3_text", sliding_window=64)
    check_parity(loaded)
    monkeypatch.setattr(
        paged_cache.LayerShape, "kind", property(lambda shape: paged_cache.LayerKind(shape.num_kv_heads))
    )
    with pytest.raises(UnsupportedModelError, match="beyond the window of 64 tokens"):
        check_parity(loaded)


def test_a_dropped_soft_cap_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = dataclasses.replace(tiny_model("gemma2", attn_logit_softcapping=2.0), form=StepForm.GROUPED)
    check_parity(loaded)
    tanh = mx.tanh

    def uncapped(scores: mx.array) -> mx.array:
        return scores if row_is_computed else tanh(scores)

    row_is_computed = False
    run = row_model.RowModel._run

    def marked_run(self: row_model.RowModel, each: row_model.Pass) -> mx.array:
        nonlocal row_is_computed
        row_is_computed = True
        try:
            return run(self, each)
        finally:
            row_is_computed = False

    monkeypatch.setattr(row_model.RowModel, "_run", marked_run)
    monkeypatch.setattr(gemma2.mx, "tanh", uncapped)
    with pytest.raises(UnsupportedModelError, match="differ from mlx-lm's own result"):
        check_parity(loaded)


@pytest.mark.parametrize("architecture", ["llama", "qwen3_next", "deepseek_v3"])
def test_rope_offset_by_one_is_caught(monkeypatch: pytest.MonkeyPatch, architecture: str) -> None:
    """From the fifth position on: where all positions are off by one, relative ones are right and so is the result."""
    loaded = prove_form(tiny_model(architecture))
    for owner in (paged_cache.PagedLayerCache, sequence_caches.SequenceLayerCache, sequence_caches.GatheredLayerCache):
        right = owner.offset.fget

        def shifted(cache: Any, right: Any = right) -> Any:
            offset = right(cache)
            return offset + (offset > 4)

        monkeypatch.setattr(owner, "offset", property(shifted))
    with pytest.raises(UnsupportedModelError, match="differ from mlx-lm's own result"):
        check_parity(loaded)


@pytest.mark.parametrize("architecture", ["llama", "mamba2", "deepseek_v3"])
def test_a_wrong_order_of_rows_is_caught(monkeypatch: pytest.MonkeyPatch, architecture: str) -> None:
    loaded = prove_form(tiny_model(architecture))
    chosen = packed_model.RowSelector.chosen

    def reversed_rows(self: packed_model.RowSelector, logits: mx.array, rows: mx.array) -> mx.array:
        return chosen(self, logits, rows)[::-1]

    monkeypatch.setattr(packed_model.RowSelector, "chosen", reversed_rows)
    with pytest.raises(UnsupportedModelError, match="differ from mlx-lm's own result"):
        check_parity(loaded)


@pytest.mark.parametrize("fault", ["never loaded", "never saved", "not reset", "of another slot"])
def test_a_wrong_recurrent_state_is_caught(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    loaded = prove_form(tiny_model("qwen3_next"))
    copy, getitem = state_pool.StatePool.copy, state_pool.StateCache.__getitem__
    if fault in ("never loaded", "never saved"):
        to_slot = fault == "never loaded"

        def lossy_copy(self: state_pool.StatePool, pairs: Any) -> None:
            copy(self, [pair for pair in pairs if (pair[1] < probe._NUM_SLOTS) != to_slot])

        monkeypatch.setattr(state_pool.StatePool, "copy", lossy_copy)
    elif fault == "not reset":

        def stale(self: state_pool.StateCache, index: int) -> Any:
            self._holder.rows = dataclasses.replace(self._holder.rows, fresh=False)  # type: ignore[type-var]
            return getitem(self, index)

        monkeypatch.setattr(state_pool.StateCache, "__getitem__", stale)
    else:

        def mixed(self: state_pool.StateCache, index: int) -> Any:
            value = getitem(self, index)
            return None if value is None else value[::-1]

        monkeypatch.setattr(state_pool.StateCache, "__getitem__", mixed)
    with pytest.raises(UnsupportedModelError, match="differ from mlx-lm's own result"):
        check_parity(loaded)
