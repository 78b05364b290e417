"""Residual and norm in one kernel, on the CPU: which blocks are taken, and that their results stay what they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from engine.mlx_backend import attention
from engine.mlx_backend.fused_norms import FusedNorms
from engine.mlx_backend.kernels.norming import AddNormKernel
from tests.kernel_emulator import COMPILER, Emulator
from tests.mlx.tiny_models import build

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")


@pytest.mark.parametrize(
    ("architecture", "num_blocks"),
    [
        pytest.param("llama", 3, id="llama"),
        pytest.param("qwen3", 3, id="normalised heads"),
        pytest.param("qwen3_moe", 3, id="experts"),
        pytest.param("gemma", 0, id="norms that add one to their weights"),
        pytest.param("olmo2", 0, id="norms behind attention"),
        pytest.param("cohere", 0, id="attention and feed-forward side by side"),
    ],
)
def test_blocks_of_the_usual_form_are_taken(architecture: str, num_blocks: int, tmp_path: Path) -> None:
    model, _ = build(architecture)
    attention.take_over(model)
    norms = FusedNorms(AddNormKernel(Emulator(tmp_path)))
    norms.take_over(model)
    assert norms.num_blocks == num_blocks


def test_each_norm_is_computed_with_the_sum_before_it(tmp_path: Path) -> None:
    """All but the first: that one has no sum before it. Outside a step the model is itself."""
    model, _ = build("llama")
    attention.take_over(model)
    emulator = Emulator(tmp_path)
    norms = FusedNorms(AddNormKernel(emulator))
    norms.take_over(model)
    tokens = mx.array([[5], [7]], mx.int32)
    before = emulator.num_launches
    wanted = model(tokens)
    assert emulator.num_launches == before
    plain: list[mx.array] = []
    with pytest.MonkeyPatch.context() as patch:
        rms_norm = mx.fast.rms_norm

        def counted(x: mx.array, *arguments: Any) -> mx.array:
            plain.append(x)
            return rms_norm(x, *arguments)

        patch.setattr(mx.fast, "rms_norm", counted)
        with norms.step():
            result = model(tokens)
    assert len(plain) == 1
    assert emulator.num_launches == before + 6
    assert mx.allclose(result, wanted, atol=1e-4)
