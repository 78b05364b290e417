"""What is expected from a configuration is what mlx-lm's models keep, and what loading measures."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, make_prompt_cache

from engine.config import load_engine_config
from engine.core.memory_readers import system_reader
from engine.core.model_files import expect_model
from engine.memory.ledger import plan_memory
from engine.memory.model_shape import read_shape
from engine.memory.plan_inputs import GIB, MachineMemory, PlanInputs
from engine.memory.preflight import deviations
from engine.mlx_backend import memory
from engine.mlx_backend.loaded_model import LoadedModel
from engine.mlx_backend.loader import load_model
from engine.mlx_backend.memory import DeviceMemory, measure_model_bytes, with_device_limits
from engine.model_source import resolve_model

SHAPES = Path(__file__).parents[2] / "configs/models"
FLOAT32_BYTES = 4

SMALLER: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": 128,
    "num_hidden_layers": 8,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}


def shrunk(name: str) -> dict[str, Any]:
    """A public configuration with its heads, windows and ranks, but narrow and shallow."""
    config: dict[str, Any] = json.loads((SHAPES / name / "config.json").read_text())
    del config["quantization"]
    inner = config.get("text_config", config)
    inner.setdefault("head_dim", inner["hidden_size"] // inner["num_attention_heads"])
    inner |= {key: value for key, value in SMALLER.items() if key in inner}
    config["vocab_size"] = SMALLER["vocab_size"]
    return config


@pytest.mark.parametrize("name", sorted(path.name for path in SHAPES.iterdir()))
def test_layers_keep_what_the_configuration_says(name: str) -> None:
    config = shrunk(name)
    shape = read_shape(config)
    module = import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(json.loads(json.dumps(config))))
    model.set_dtype(mx.float32)
    caches = make_prompt_cache(model)
    mx.eval(model(mx.zeros((1, 3), mx.int32), cache=caches))
    assert len(caches) == len(shape.layers)
    for layer, cache in zip(shape.layers, caches, strict=True):
        if isinstance(cache, ArraysCache):
            assert layer.kind == "recurrent"
            kept = [array for array in cache.cache if array is not None]
            assert sum(array.size for array in kept) == layer.state_values + layer.state_float32_values
            continue
        assert layer.window_tokens == getattr(cache, "max_size", None)
        assert cache.keys.shape[1::2] == (layer.num_kv_heads, layer.k_head_dim)
        assert cache.values.shape[1::2] == (layer.num_kv_heads, layer.v_head_dim)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-30b-a3b", "deepseek-v2-lite", "gemma-3-27b"])
def test_weights_are_counted_from_headers(name: str, tmp_path: Path) -> None:
    config = shrunk(name)
    module = import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(json.loads(json.dumps(config))))
    model.set_dtype(mx.float16)
    weights = dict(tree_flatten(model.parameters()))
    (tmp_path / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)
    expected = expect_model(load_engine_config({"max_model_len": 256}), resolve_model(str(tmp_path)), "cpu")
    assert expected is not None
    assert expected.weights_bytes == FLOAT32_BYTES * sum(array.size for array in weights.values())


def test_loading_the_demo_finds_what_its_file_promised() -> None:
    config = load_engine_config({"max_model_len": 1024})
    source = resolve_model("demo")
    expected = expect_model(config, source, "cpu")
    loaded = load_model(source, backend="cpu", max_model_len=1024, parity="off")
    footprint_bytes = system_reader().read().footprint_bytes
    measured = measure_model_bytes(loaded, loaded.compute_dtype, 512, footprint_bytes)
    assert expected is not None
    assert deviations(expected, measured) == []
    assert measured.weights_bytes == expected.weights_bytes
    assert measured.buffer_bytes_per_token == expected.buffer_bytes_per_token
    assert measured.activation_bytes == pytest.approx(expected.activation_bytes, rel=0.5)
    # A fourth of the difference of two peaks, which hang on what earlier work left in the allocator.
    assert 0 <= measured.activation_bytes_per_slot <= 2 * expected.activation_bytes_per_slot
    # How much else this process holds hangs on the tests before; a process of its own is test_memory_footprint.py's.
    assert 0 < measured.runtime_bytes < footprint_bytes


def test_limits_are_put_back() -> None:
    inputs = PlanInputs.of(
        load_engine_config({"model": "demo", "slots": 1}),
        MachineMemory(8 * GIB, 7 * GIB, 0),
        # Only the limit matters here.
        expect_model(load_engine_config({}), resolve_model("demo"), "cpu"),  # type: ignore[arg-type]
        512,
    )
    before = mx.set_cache_limit(123 << 20)
    try:
        device = DeviceMemory("cpu", plan_memory(inputs))
        device.set_tight(True)
        assert mx.set_cache_limit(0) == 0
        device.set_tight(False)
        assert mx.set_cache_limit(inputs.model.cache_limit_bytes) == inputs.model.cache_limit_bytes
        device.restore()
        assert mx.set_cache_limit(before) == 123 << 20
    finally:
        mx.set_cache_limit(before)


@pytest.mark.parametrize(
    ("backend", "info", "expected"),
    [
        ("cpu", {}, MachineMemory(64 * GIB, 50 * GIB, GIB)),
        ("metal", {"max_buffer_length": 7}, MachineMemory(64 * GIB, 50 * GIB, GIB, 48 * GIB, 7)),
        ("cuda", {"total_memory": 140 * GIB, "free_memory": 9}, MachineMemory(140 * GIB, 9, 5)),
        ("cuda", {"total_memory": 140 * GIB}, MachineMemory(140 * GIB, None, 5)),
    ],
)
def test_limits_of_a_device(
    backend: str, info: dict[str, int], expected: MachineMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = SimpleNamespace(working_set_bytes=48 * GIB if backend == "metal" else None)
    loaded = cast(LoadedModel, SimpleNamespace(backend=backend, device=device))
    monkeypatch.setattr(memory.mx, "device_info", lambda: info)
    monkeypatch.setattr(memory.mx, "get_active_memory", lambda: 3)
    monkeypatch.setattr(memory.mx, "get_cache_memory", lambda: 2)
    assert with_device_limits(MachineMemory(64 * GIB, 50 * GIB, GIB), loaded) == expected
