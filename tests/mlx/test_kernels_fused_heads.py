"""Joined products and fused heads on the CPU: which layers are taken, and that what is taken is the layer's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from engine.mlx_backend import attention
from engine.mlx_backend.fused_heads import FusedHeads
from engine.mlx_backend.kernels.rotating import RotationKernel
from engine.mlx_backend.mlx_lm_parts import Model
from engine.mlx_backend.row_products import RowProducts, Use
from tests.kernel_emulator import COMPILER, Emulator
from tests.mlx.tiny_models import build

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 128}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


def half(architecture: str, **changes: Any) -> Model:
    model, _ = build(architecture, **changes)
    model.set_dtype(mx.float16)
    mx.eval(model.parameters())
    return model


def taken_over(model: Model, emulator: Emulator) -> tuple[RowProducts, FusedHeads]:
    attention.take_over(model)
    products = RowProducts(None)
    products.take_over(model)
    fused = FusedHeads(products, RotationKernel(emulator))
    fused.take_over(model)
    return products, fused


@pytest.mark.parametrize(
    ("architecture", "changes", "num_layers"),
    [
        pytest.param("llama", {}, 3, id="llama"),
        pytest.param("llama", {"rope_scaling": LLAMA3}, 3, id="scaled as llama 3"),
        pytest.param("qwen2", {}, 3, id="biases"),
        pytest.param("gemma", {}, 3, id="gemma"),
        pytest.param("smollm3", {}, 2, id="one layer without rotation"),
        pytest.param("llama", {"rope_traditional": True}, 0, id="neighbours turn as a pair"),
        pytest.param("llama", {"rope_scaling": YARN}, 0, id="a rotation that also scales"),
        pytest.param("qwen3", {}, 0, id="normalised heads"),
        pytest.param("phi3", {}, 0, id="joined in the model itself"),
    ],
)
def test_layers_are_taken_that_only_split_and_rotate(
    architecture: str, changes: dict[str, Any], num_layers: int, tmp_path: Path
) -> None:
    _, fused = taken_over(half(architecture, **changes), Emulator(tmp_path))
    assert fused.num_layers == num_layers


def test_joined_weights_are_not_kept_twice() -> None:
    model = half("llama", hidden_size=512, intermediate_size=1024)
    before_bytes = mx.get_active_memory()
    weights = {name: mx.array(layer.weight) for name, layer in _projections(model)}
    mx.eval(weights)
    copies_bytes = mx.get_active_memory() - before_bytes
    RowProducts(None).take_over(model)
    RowProducts(None).take_over(model)  # as the check at start and the runner do
    assert mx.get_active_memory() - before_bytes - copies_bytes < 0.01 * copies_bytes
    assert all(mx.array_equal(layer.weight, weights[name]) for name, layer in _projections(model))


def _projections(model: Model) -> list[tuple[str, Any]]:
    return [(name, layer) for name, layer in model.named_modules() if name.endswith("_proj")]


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_what_is_taken_is_what_the_layer_hands_over(architecture: str, tmp_path: Path) -> None:
    model = half(architecture)
    products, fused = taken_over(model, Emulator(tmp_path))
    layer = model.layers[1].self_attn
    x, positions = mx.random.normal((5, 1, 64), dtype=mx.float16), mx.array([0, 3, 8, 2, 400], mx.int32)
    wanted = [projection(x) for projection in (layer.q_proj, layer.k_proj, layer.v_proj)]
    wanted = [array.reshape(5, -1, 1, 16) for array in wanted]
    wanted = [layer.rope(wanted[0], offset=positions), layer.rope(wanted[1], offset=positions), wanted[2]]
    with products.step(Use.JOINED):
        projected = layer.q_proj(x)
        layer.k_proj(x)
        layer.v_proj(x)
        assert layer.rope(projected, offset=positions) is projected
        taken = fused.take(positions)
        assert taken is not None
        assert fused.take(positions) is None
        layer.o_proj(x)
        assert fused.take(positions) is None
    for ours, theirs in zip(taken, wanted, strict=True):
        assert mx.allclose(ours, theirs, atol=4e-3, rtol=4e-3)
    assert layer.rope(projected.reshape(5, -1, 1, 16), offset=positions) is not projected
