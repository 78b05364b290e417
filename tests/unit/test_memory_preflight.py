"""What a model takes, from its configuration and headers alone: layer kinds, bytes, and plans by context length."""

from __future__ import annotations

import dataclasses
import json
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.config import load_engine_config
from engine.core.model_files import ModelFiles, describe_model_files, expect_model, read_model_files
from engine.errors import ConfigError, MemoryPlanError, ModelNotFoundError, UnsupportedModelError
from engine.memory.model_shape import read_shape
from engine.memory.plan_inputs import GIB, MIB, PlanInputs
from engine.memory.preflight import ModelEstimate, Weights, deviations, mac_memory, plan_contexts
from engine.model_source import ModelSource, resolve_model

KIB = 2**10
SHAPES = Path(__file__).parents[2] / "configs/models"


def shape_files(name: str) -> ModelFiles:
    return read_model_files(resolve_model(str(SHAPES / name)))


@pytest.mark.parametrize(
    ("name", "layers", "kv_bytes_per_token", "state_bytes_per_slot", "num_values"),
    [
        ("llama-3.1-8b", {"full": 32}, 128 * KIB, 0, 8_030_261_248),
        ("llama-3.3-70b", {"full": 80}, 320 * KIB, 0, 70_553_706_496),
        ("qwen3-30b-a3b", {"full": 48}, 96 * KIB, 0, 30_532_122_624),
        ("qwen3-next-80b-a3b", {"recurrent": 36, "full": 12}, 24 * KIB, 77_266_944, 79_674_391_296),
        ("gemma-3-27b", {"window": 52, "full": 10}, 496 * KIB, 0, 27_009_346_304),
        ("deepseek-v2-lite", {"expanded": 27}, 270 * KIB, 0, 15_706_484_224),
    ],
)
def test_real_shapes(
    name: str, layers: dict[str, int], kv_bytes_per_token: int, state_bytes_per_slot: int, num_values: int
) -> None:
    files = shape_files(name)
    shape = read_shape(files.config)
    assert shape.num_layers_by_kind == layers
    assert shape.kv_bytes_per_token(2) == kv_bytes_per_token
    assert shape.state_bytes_per_slot(2) == state_bytes_per_slot
    assert files.weights.num_values == num_values
    # Four bits and a half-precision scale and bias for each 64: 4.5 bits, norms a little more.
    assert 4.5 <= files.weights.packed_bytes * 8 / num_values < 4.51


def test_windows_and_latents_are_told_apart_per_layer() -> None:
    gemma = read_shape(shape_files("gemma-3-27b").config)
    assert [layer.window_tokens for layer in gemma.layers[:6]] == [1024] * 5 + [None]
    config = {**shape_files("deepseek-v2-lite").config, "model_type": "deepseek_v3"}
    latent = read_shape(config).layers[0]
    assert (latent.kind, latent.values_per_token, latent.buffer_values_per_token) == ("latent", 576, 512)


LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 512,
}


@pytest.mark.parametrize(
    ("extra", "kinds"),
    [
        ({}, ["full"] * 3),
        ({"sliding_window": 128}, ["full"] * 3),  # mlx-lm's llama reads layer_types only
        (
            {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 128},
            ["window", "full", "window"],
        ),
        ({"text_config": {"num_hidden_layers": 2}}, ["full"] * 2),
    ],
)
def test_layer_kinds(extra: dict[str, Any], kinds: list[str]) -> None:
    shape = read_shape({**LLAMA, **extra})
    assert [layer.kind for layer in shape.layers] == kinds
    assert shape.layers[0].values_per_token == 2 * 4 * 16


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({key: value for key, value in LLAMA.items() if key != "vocab_size"}, "vocab_size"),
        ({**LLAMA, "hybrid_override_pattern": "M*M"}, "hybrid_override_pattern"),
        ({**LLAMA, "layer_types": ["mamba"] * 3}, "'mamba'"),
    ],
)
def test_what_cannot_be_told_is_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedModelError, match=said):
        read_shape(config)


def test_the_demo_on_either_backend() -> None:
    files = read_model_files(resolve_model("demo"))
    shape = read_shape(files.config)
    assert files.weights.num_values == 134_515_008
    cpu, metal = (ModelEstimate(shape, files.weights, backend, 512).at(8192) for backend in ("cpu", "metal"))
    assert cpu.weights_bytes == 538_060_032
    assert cpu.kv_bytes_per_token == 45 * KIB
    assert metal.kv_bytes_per_token == 45 * KIB // 2
    assert metal.weights_bytes < 100 * 10**6
    assert cpu.buffer_bytes_per_token == 3 * 64 * 4
    # As measured on the served path at full context: 181 MiB for the largest chunk, 13 MiB for each decoding row.
    assert cpu.activation_bytes == pytest.approx(181 * MIB, rel=0.1)
    assert cpu.activation_bytes_per_slot == pytest.approx(13 * MIB, rel=0.1)


def write_safetensors(path: Path, tensors: dict[str, tuple[list[int], int]]) -> None:
    header, offset = {}, 0
    for name, (shape, num_bytes) in tensors.items():
        header[name] = {"dtype": "U32", "shape": shape, "data_offsets": [offset, offset + num_bytes]}
        offset += num_bytes
    text = json.dumps({**header, "__metadata__": {"format": "mlx"}}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)


def folder(path: Path, config: dict[str, Any]) -> ModelSource:
    (path / "config.json").write_text(json.dumps(config))
    return ModelSource("x", "folder", path, "r")


def test_headers_count_what_packed_weights_stand_for(tmp_path: Path) -> None:
    write_safetensors(
        tmp_path / "a.safetensors",
        {
            "model.q.weight": ([64, 8], 2048),
            "model.q.scales": ([64, 2], 256),
            "model.q.biases": ([64, 2], 256),
            "vision_tower.x.weight": ([1000], 4000),
        },
    )
    write_safetensors(tmp_path / "b.safetensors", {"model.norm.weight": ([64], 128)})
    weights = read_model_files(folder(tmp_path, {**LLAMA, "quantization": {"group_size": 32, "bits": 4}})).weights
    assert weights.packed_bytes == 2048 + 256 + 256 + 128
    assert weights.num_values == 64 * 2 * 32 + 64


def test_missing_or_broken_files_are_named(tmp_path: Path) -> None:
    source = folder(tmp_path, LLAMA)
    with pytest.raises(ModelNotFoundError, match=r"model\.safetensors\.index\.json"):
        read_model_files(source)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(UnsupportedModelError, match="how large"):
        read_model_files(source)
    (tmp_path / "model.safetensors").write_bytes(b"\1\2")
    with pytest.raises(UnsupportedModelError, match="no safetensors file"):
        read_model_files(source)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UnsupportedModelError, match="not valid JSON"):
        read_model_files(source)


def test_plans_by_context_length() -> None:
    files = shape_files("llama-3.1-8b")
    shape = read_shape(files.config)
    machine = mac_memory(16 * GIB)
    model = ModelEstimate(shape, files.weights, "metal", 512)
    inputs = PlanInputs(machine, model.at(131_072), shape.max_model_len)
    short, long = plan_contexts(inputs, model, [4096, 131_072])
    assert short.sequence_bytes == 257 * 16 * 128 * KIB
    assert short.slots_that_fit == 9
    assert short.plan is not None
    assert short.plan.slots == 9
    assert (long.plan, long.slots_that_fit) == (None, 0)
    assert long.fix == "set `max_model_len: 32768`"
    assert "weights 4.21 GiB (computed)" in long.error


@pytest.mark.parametrize(("gib", "working_set_gib"), [(16, 10 + 2 / 3), (32, 21 + 1 / 3), (36, 27), (192, 144)])
def test_metal_limits_of_a_mac_that_is_not_here(gib: int, working_set_gib: float) -> None:
    machine = mac_memory(gib * GIB)
    assert machine.working_set_bytes == pytest.approx(working_set_gib * GIB, abs=1)
    assert machine.foreign_bytes is None
    model = ModelEstimate(read_shape(LLAMA), shape_files("llama-3.1-8b").weights, "metal", 64)
    inputs = PlanInputs(machine, model.at(512), 512)
    assert inputs.limit_bytes <= working_set_gib * GIB + 1024 * MIB


def test_a_hopeless_model_is_refused_before_it_is_loaded() -> None:
    source = resolve_model("demo")
    with pytest.raises(MemoryPlanError, match=r"weights 513 MiB \(computed\)") as caught:
        expect_model(load_engine_config({"memory": {"budget": "600MiB"}}), source, "cpu")
    assert caught.value.fix.startswith("set `memory.budget: ")
    budget = caught.value.fix.split()[2].rstrip("`")
    assert expect_model(load_engine_config({"memory": {"budget": budget}}), source, "cpu") is not None
    # Estimates are no reason to refuse: 513 MiB of weights and 361 MiB for one sequence do fit.
    expected = expect_model(load_engine_config({"memory": {"budget": "900MiB"}}), source, "cpu")
    assert expected is not None
    assert expected.weights_bytes == 538_060_032


def test_what_files_do_not_tell_is_left_to_loading(tmp_path: Path) -> None:
    source = folder(tmp_path, {**LLAMA, "mamba_d_state": 16})
    write_safetensors(tmp_path / "model.safetensors", {"x.weight": ([64], 128)})
    assert expect_model(load_engine_config({}), source, "cpu") is None


def test_loading_is_compared_with_what_was_expected() -> None:
    files = read_model_files(resolve_model("demo"))
    expected = ModelEstimate(read_shape(files.config), files.weights, "cpu", 512).at(8192)
    assert deviations(expected, dataclasses.replace(expected, activation_bytes=1, runtime_bytes=2)) == []
    near = dataclasses.replace(expected, weights_bytes=expected.weights_bytes * 101 // 100)
    assert deviations(expected, near) == []
    (warning,) = deviations(expected, dataclasses.replace(expected, kv_bytes_per_token=23 * KIB))
    assert warning.startswith("KV cache of a token: 46,080 bytes expected")


def test_a_tied_head_is_counted_once(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "a.safetensors", {"model.e.weight": ([64], 128), "lm_head.weight": ([64], 128)})
    assert read_model_files(folder(tmp_path, {**LLAMA, "tie_word_embeddings": True})).weights.num_values == 64
    assert read_model_files(folder(tmp_path, LLAMA)).weights.num_values == 128


def test_of_a_hub_id_only_headers_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    tensor = SimpleNamespace(shape=[64, 10], data_offsets=(100, 1380))
    headers = SimpleNamespace(files_metadata={"a.safetensors": SimpleNamespace(tensors={"w": tensor})})
    fetched: list[str] = []

    def download(name: str, file: str) -> str:
        fetched.append(file)
        return str(tmp_path / file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.setattr("huggingface_hub.get_safetensors_metadata", lambda name: headers)
    assert describe_model_files("org/name").weights == Weights(1280, 640)
    assert fetched == ["config.json"]


def test_a_hub_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(name: str, file: str) -> str:
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    with pytest.raises(ModelNotFoundError, match="did not answer for 'org/name'"):
        describe_model_files("org/name")


def test_a_context_the_model_does_not_have_is_named_before_its_memory_is_planned() -> None:
    config = load_engine_config({"max_model_len": 10**9, "memory": {"budget": "600MiB"}})
    with pytest.raises(ConfigError, match="context is 131072") as caught:
        expect_model(config, resolve_model(str(SHAPES / "llama-3.1-8b")), "cpu")
    assert caught.value.fix == "write at most 131072"
