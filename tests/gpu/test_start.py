"""What a start finds on this machine's GPU: every kernel right, the runner with all of them, a clean self-check."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.mlx_backend.gpu_runner import GpuModelRunner
from engine.mlx_backend.kernels.launch import gpu_target
from engine.mlx_backend.kernels.tiling import TUNINGS
from engine.mlx_backend.runners import make_runner
from engine.mlx_backend.selfcheck import findings
from tests.gpu.llama_shape import load, save

SMALL = {"num_hidden_layers": 4, "hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8}


def test_the_runner_has_every_kernel() -> None:
    loaded = load(2048, **SMALL)
    runner = make_runner(loaded, num_blocks=200, block_size=16, slots=4, max_chunk_tokens=128)
    assert isinstance(runner, GpuModelRunner)
    try:
        assert [text for text in runner.facts.disclosures if text.startswith("Kernel off")] == []
        assert set(runner.rung_times_s) == {1, 2, 4}
        model, target = runner._model, gpu_target()
        assert model is not None
        assert target is not None
        assert (model.products is not None) == TUNINGS[target].joins_products
        if model.products is not None:
            assert set(model.products.uses) == {1, 2, 4}
        if TUNINGS[target].rotates_heads:
            assert model.num_fused_heads == 4
        if TUNINGS[target].fuses_norms:
            assert model.norms is not None
            assert model.norms.num_blocks == 4
    finally:
        runner.close()


def test_the_self_check_finds_nothing_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    save(tmp_path / "model", **SMALL)
    found = list(findings(str(tmp_path / "model")))
    assert [finding for finding in found if finding.state == "fail"] == []
    assert sum(finding.name.startswith("kernel: ") for finding in found) >= 8
    assert any(finding.name == "batching" and finding.state == "pass" for finding in found)
