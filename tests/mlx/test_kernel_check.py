"""The checks at start: what they find in broken kernels, and what then runs. Kernels run on the emulator."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, cast

import mlx.core as mx
import pytest

from engine.mlx_backend import runners
from engine.mlx_backend.gpu_runner import GpuModelRunner
from engine.mlx_backend.kernels.dialect import KernelText
from engine.mlx_backend.kernels.launch import GpuTarget, KernelFactory, Launch
from engine.mlx_backend.kernels.tiling import Tuning
from engine.mlx_backend.loaded_model import LoadedModel
from engine.mlx_backend.loader import describe_model
from engine.mlx_backend.model_runner import MlxModelRunner
from engine.mlx_backend.step_check import steps_trial
from engine.model_source import ModelSource
from tests.kernel_emulator import COMPILER, Emulator
from tests.mlx.tiny_models import build

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

TUNING = Tuning(
    simds=1,
    chunk_groups=132,
    pages_chunks=True,
    joins_products=True,
    projects_rows=True,
    rotates_heads=True,
    fuses_norms=True,
)
# Breaks a kernel: its name, and a change of its text.
Damage = Mapping[str, tuple[str, str]]


class Make(Protocol):
    """Makes the runner that is chosen on a GPU whose kernels have the given damage."""

    def __call__(self, damage: Damage, kv_bits: int | None = None) -> GpuModelRunner | MlxModelRunner: ...


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    return Emulator(tmp_path_factory.mktemp("kernels"))


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    """A half-precision model that says it is on a GPU."""
    model, config = build("llama", vocab_size=224, layer_types=["full_attention"] * 3, hidden_size=128, head_dim=32)
    model.set_dtype(mx.float16)
    loaded = describe_model(model, config, ModelSource("half", "folder", Path("nowhere"), "r0"), "cpu")
    return dataclasses.replace(loaded, device=dataclasses.replace(loaded.device, backend="cuda"))


def damaged(emulator: Emulator, damage: Damage) -> KernelFactory:
    def factory(text: KernelText, dtype: mx.Dtype, pool_dtype: mx.Dtype, constants: Mapping[str, int]) -> Launch:
        kernel = emulator(text, dtype, pool_dtype, constants)
        if text.name in damage:
            old, new = damage[text.name]
            assert old in kernel._source
            kernel._source = kernel._source.replace(old, new)
        return kernel

    return factory


@pytest.fixture
def make(emulator: Emulator, model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> Make:
    """The runner that is chosen on a GPU whose kernels have the given damage."""

    def make(damage: Damage, kv_bits: int | None = None) -> GpuModelRunner | MlxModelRunner:
        def gpu_runner(*args: object, **options: object) -> GpuModelRunner:
            return GpuModelRunner(*args, **options, compiles=False)  # type: ignore[arg-type]

        def factory(target: GpuTarget) -> KernelFactory:
            return damaged(emulator, damage)

        monkeypatch.setattr(runners, "gpu_target", lambda: "cuda")
        monkeypatch.setattr(runners, "gpu_factory", factory)
        monkeypatch.setattr(runners, "TUNINGS", {"cuda": TUNING})
        monkeypatch.setattr(runners, "GpuModelRunner", gpu_runner)
        monkeypatch.setattr(GpuModelRunner, "warm_up", lambda self: None)
        runner = runners.make_runner(model, num_blocks=16, block_size=8, slots=2, max_chunk_tokens=16, kv_bits=kv_bits)
        return cast(GpuModelRunner | MlxModelRunner, runner)

    return make


def test_sound_kernels_are_used_and_nothing_is_disclosed(
    make: Make,
) -> None:
    runner = make({})
    assert isinstance(runner, GpuModelRunner)
    assert runner.max_steps_in_flight == 2
    assert runner.facts.disclosures == ()


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        pytest.param({"sample": ("x > best", "x < best")}, "sampling", id="sampling"),
        pytest.param({"paged_chunk_whole": ("t <= pos", "t <= pos + 1")}, "chunk attention", id="chunk attention"),
        pytest.param({"paged_chunk_reduce": ("value +=", "value =")}, "chunk attention", id="its reduce"),
        pytest.param({"project": ("u < TURNS", "u < 1")}, "projections", id="projections"),
        pytest.param({"project": ("total = 0.0f", "total = nonsense")}, "projections", id="one that does not compile"),
        pytest.param({"add_norm": ("epsilon[0]", "epsilon[0] + 1.0f")}, "residual norms", id="residual norms"),
        pytest.param({"rotate": ("positions[row]", "positions[0]")}, "rotation", id="rotation"),
    ],
)
def test_a_failing_kernel_is_turned_off_alone(damage: Damage, name: str, make: Make) -> None:
    runner = make(damage)
    assert isinstance(runner, GpuModelRunner)
    (disclosure,) = runner.facts.disclosures
    assert disclosure.startswith(f"Kernel off: {name} ")
    assert runner._model is not None
    assert (runner._model.sampling is None) == (name == "sampling")
    assert runner._model.products is not None
    assert (runner._model.products.kernel is None) == (name == "projections")
    assert (runner._model.norms is None) == (name == "residual norms")
    assert runner._inputs.pages_chunks == (name != "chunk attention")


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        pytest.param(
            {"paged_decode_whole": ("all_acc / all_sum", "all_acc / all_sum + 0.1f")}, "paged decode", id="decode"
        ),
        pytest.param(
            {"paged_chunk_write": ("store_piece(values_held, to,", "store_piece(values_held, from,")},
            "chunk write",
            id="write",
        ),
        pytest.param({"paged_block_copy": ("pairs[2 * pair]", "pairs[2 * pair + 1]")}, "block copy", id="copy"),
    ],
)
def test_without_the_pools_kernels_the_plain_runner_serves(damage: Damage, name: str, make: Make) -> None:
    runner = make(damage)
    assert isinstance(runner, MlxModelRunner)
    assert any(disclosure.startswith(f"Kernel off: {name}") for disclosure in runner.facts.disclosures)


def test_pools_of_few_bits_are_served_by_their_own_kernels(make: Make) -> None:
    runner = make({}, 4)
    assert isinstance(runner, GpuModelRunner)
    (disclosure,) = runner.facts.disclosures
    assert "Keys and values have 4 bits" in disclosure


def test_packed_kernels_are_judged_by_themselves(make: Make) -> None:
    damage = {"paged_decode_whole_packed": ("piece.bias = pool", "piece.scale = pool")}
    assert isinstance(make(damage), GpuModelRunner)
    runner = make(damage, 4)
    assert isinstance(runner, MlxModelRunner)
    assert any(text.startswith("Kernel off: paged decode attention differs") for text in runner.facts.disclosures)


def test_whole_steps_are_compared(model: LoadedModel, emulator: Emulator) -> None:
    for kv_bits in (None, 8, 4):
        assert steps_trial(model, 8, emulator, TUNING, kv_bits).problem == ""
    broken = damaged(emulator, {"paged_chunk_gather": ("span[0] + place", "span[0] + place / 2")})
    tuning = dataclasses.replace(TUNING, pages_chunks=False)
    assert "differs" in steps_trial(model, 8, broken, tuning).problem
    broken = damaged(
        emulator, {"paged_chunk_write_packed": ("store_piece(values_held, to,", "store_piece(values_held, from,")}
    )
    assert "differs" in steps_trial(model, 8, broken, TUNING, 4).problem


def test_a_cpu_gets_the_plain_runner_unchecked(model: LoadedModel) -> None:
    loaded = dataclasses.replace(model, device=dataclasses.replace(model.device, backend="cpu"))
    runner = runners.make_runner(loaded, num_blocks=16, block_size=8, slots=2, max_chunk_tokens=16)
    assert isinstance(runner, MlxModelRunner)
    assert runner.facts.disclosures == ()
