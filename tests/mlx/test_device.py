"""Device choice, disclosures, and a machine without a C++ compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.mlx_backend.device import choose_backend, device_facts, shortcomings
from engine.mlx_backend.loader import load_model
from engine.model_source import resolve_model

ROOT = Path(__file__).parents[2]

RUN_TINY_MODEL = """
from tests.mlx.tiny_models import tiny_model
from engine.mlx_backend.device import shortcomings
from engine.mlx_backend.probe import check_parity
check_parity(tiny_model("llama"))
print(shortcomings("cpu"))
"""


def test_the_cpu_is_always_there() -> None:
    assert choose_backend("cpu") == "cpu"
    facts = device_facts("cpu")
    assert facts.working_set_bytes is None
    assert facts.memory_bytes > 2**30
    assert facts.description.startswith("cpu (")


@pytest.mark.skipif(sys.platform != "linux", reason="macOS builds no kernels with g++")
def test_steps_run_without_a_compiler_and_that_is_disclosed(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUN_TINY_MODEL],
        cwd=ROOT,
        env={**os.environ, "PATH": str(tmp_path), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "MLX builds them with g++" in done.stdout


def test_a_well_equipped_machine_has_nothing_to_disclose() -> None:
    if sys.platform == "linux" and not Path("/usr/bin/g++").exists():
        pytest.skip("this machine has no compiler")
    assert shortcomings("cpu") == ()


def test_an_unchecked_model_says_so() -> None:
    loaded = load_model(resolve_model("demo"), backend="cpu", parity="off")
    assert any("parity: off" in sentence for sentence in loaded.facts.disclosures)
