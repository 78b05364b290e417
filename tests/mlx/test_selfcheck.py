"""The self-check's lines and exit code, and the batching curve, with time and runner made up."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import engine.mlx_backend  # noqa: F401  (loads the BLAS before MLX)
from engine.batch import StepBatch, StepOutput
from engine.core.gains import read_gains
from engine.mlx_backend import selfcheck
from engine.mlx_backend.batching_curve import gains_of, measure_step_times, num_blocks_needed, save_profile
from engine.mlx_backend.gpu_cache import KernelBook
from engine.mlx_backend.kernel_check import Verdict
from engine.mlx_backend.kernels.tiling import Tuning
from engine.mlx_backend.loaded_model import LoadedModel
from engine.mlx_backend.selfcheck import Finding
from tests.kernel_emulator import Emulator
from tests.mlx.tiny_models import tiny_model


class ClockworkRunner:
    """Steps of ``fixed_s + rows * per_row_s`` on a clock of its own; checks what it is given."""

    facts: Any = None

    def __init__(self, max_steps_in_flight: int) -> None:
        self.max_steps_in_flight = max_steps_in_flight
        self.now_s = 0.0
        self.in_flight = 0
        self.most_in_flight = 0

    def clock(self) -> float:
        return self.now_s

    def launch(self, batch: StepBatch) -> Any:
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        blocks = [block for row in batch.rows for block in row.block_ids]
        assert len(set(blocks)) == len(blocks) <= num_blocks_needed(16, 16)
        assert all(len(row.block_ids) * 16 > row.start for row in batch.rows)

        def result() -> StepOutput:
            self.in_flight -= 1
            self.now_s += 0.010 + 0.002 * len(batch.rows)
            return StepOutput(batch.step_index, {}, 0.0)

        return SimpleNamespace(result=result)

    def release(self, request_ids: Any) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_the_curve_is_measured_with_the_pipeline_full(max_steps_in_flight: int) -> None:
    runner = ClockworkRunner(max_steps_in_flight)
    times_s = measure_step_times(runner, 16, 16, time_limit_s=1e9, clock=runner.clock)
    assert sorted(times_s) == list(range(1, 17))
    assert times_s[1] == pytest.approx(0.012)
    assert times_s[16] == pytest.approx(0.042)
    assert gains_of(times_s)[16] == pytest.approx(16 * 0.012 / 0.042)
    assert runner.most_in_flight == max_steps_in_flight
    assert runner.in_flight == 0


def test_the_curve_stops_when_its_time_is_over() -> None:
    runner = ClockworkRunner(1)
    assert max(measure_step_times(runner, 16, 16, time_limit_s=0.5, clock=runner.clock)) < 16


def test_the_engine_reads_the_saved_profile(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "profile.json"
    save_profile(path, model="demo", machine="m", times_s={1: 0.010, 2: 0.0125})
    assert read_gains(str(path), "demo") == {1: 1.0, 2: 1.6}


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, str]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_line_each_and_an_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["selfcheck", "--model", "m"])
    found = [Finding("a", "pass", "well"), Finding("b", "warn", "so so", "do this")]
    monkeypatch.setattr(selfcheck, "findings", lambda model, backend: iter(found))
    assert selfcheck.main() == 0
    assert lines(capsys)[1] == {"name": "b", "state": "warn", "detail": "so so", "fix": "do this"}
    found.append(Finding("c", "fail", "broken"))
    assert selfcheck.main() == 1


def test_a_missing_model_is_a_finding_with_its_fix() -> None:
    *_, last = selfcheck.findings("/nowhere/at/all", "cpu")
    assert (last.name, last.state) == ("model", "fail")
    assert last.fix


def test_all_checks_run_on_the_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(selfcheck, "load_model", lambda source, **options: tiny_model("llama"))
    monkeypatch.setattr(selfcheck, "resolve_model", lambda name: None)
    monkeypatch.setattr(selfcheck, "_MOST_ROWS", 2)
    found = {finding.name: finding for finding in selfcheck.findings("tiny", "cpu")}
    assert {name for name, finding in found.items() if finding.state == "skip"} == {
        *("gpu limits", "kernels", "kernel speed")
    }
    assert {finding.state for finding in found.values()} <= {"pass", "skip", "warn"}
    assert found["device"].detail.startswith("cpu")
    assert found["batching"].state == "pass"
    assert read_gains(str(tmp_path / "metalslots" / "profiles" / "tiny.json"), "tiny")[1] == 1.0


def test_a_check_that_breaks_off_fails_and_the_rest_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(loaded: object) -> Iterator[Finding]:
        raise ValueError("boom")
        yield

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(selfcheck, "load_model", lambda source, **options: tiny_model("llama"))
    monkeypatch.setattr(selfcheck, "resolve_model", lambda name: None)
    monkeypatch.setattr(selfcheck, "_MOST_ROWS", 1)
    monkeypatch.setattr(selfcheck, "_parity", broken)
    found = {finding.name: finding for finding in selfcheck.findings("tiny", "cpu")}
    assert found["broken"].state == "fail"
    assert "boom" in found["broken"].detail
    assert "batching" in found


@pytest.mark.parametrize(("head_dim", "pools"), [(32, (None, 8, 4)), (16, (None,))])
def test_kernels_are_judged_over_every_kind_of_pool(
    monkeypatch: pytest.MonkeyPatch, head_dim: int, pools: tuple[int | None, ...]
) -> None:
    loaded = tiny_model("llama", hidden_size=128, head_dim=head_dim)
    asked: list[int | None] = []

    def of_pool(loaded: LoadedModel, kv_dtype: str, book: KernelBook) -> list[Verdict]:
        asked.append(book.kv_bits)
        return [Verdict("block copy", "", 0.0)]

    monkeypatch.setattr(selfcheck, "check_pool_kernels", of_pool)
    monkeypatch.setattr(selfcheck, "check_other_kernels", lambda *_: [Verdict("sampling", "", 0.0)])
    monkeypatch.setattr(selfcheck, "steps_trial", lambda *_: Verdict("whole steps", "", 0.0))
    names = [verdict.name for verdict in selfcheck._verdicts(loaded, Emulator(Path("nowhere")), Tuning())]
    suffixes = ["" if kv_bits is None else f", {kv_bits} bits" for kv_bits in pools]
    assert names == ["sampling", *(f"{name}{suffix}" for suffix in suffixes for name in ("block copy", "whole steps"))]
    assert tuple(asked) == pools
