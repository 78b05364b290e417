"""Functions put into mlx-lm's models: right values, and no trace outside of packed steps."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from engine.mlx_backend import attention, cpu_activations
from engine.mlx_backend.mlx_lm_parts import make_prompt_cache, swiglu
from engine.mlx_backend.probe import check_parity
from tests.mlx.tiny_models import build, tiny_model


def test_swiglu_equals_mlx_lms() -> None:
    gate = mx.concatenate(
        [mx.random.normal((50, 33)) * 10, mx.array([[0.0, -0.0, 80.0, -80.0, 1e4, -1e4] * 5 + [1, 2, 3]])]
    )
    x = mx.random.normal(gate.shape)
    np.testing.assert_allclose(cpu_activations.swiglu(gate, x), swiglu(gate, x), rtol=1e-5, atol=1e-6)


def test_it_is_used_in_packed_steps_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = tiny_model("qwen3")
    check_parity(loaded)
    used = 0

    def count(gate: mx.array, x: mx.array) -> mx.array:
        nonlocal used
        used += 1
        return swiglu(gate, x)

    monkeypatch.setattr(cpu_activations, "swiglu", count)
    loaded.model(mx.array([[1, 2, 3]]), cache=make_prompt_cache(loaded.model))
    assert used == 0
    check_parity(loaded)
    assert used > 0


@pytest.mark.parametrize(("architecture", "file"), [("llama", "llama"), ("smollm3", "llama"), ("qwen3", "qwen3")])
def test_attention_is_replaced_in_the_file_that_defines_it(architecture: str, file: str) -> None:
    model, _ = build(architecture)
    assert attention.take_over(model) == 1
    attend_globals = type(model.layers[0].self_attn).__call__.__globals__
    assert attend_globals["__name__"] == f"mlx_lm.models.{file}"
    assert attend_globals["scaled_dot_product_attention"] is attention.dispatch
    assert attention.take_over(model) == 1
