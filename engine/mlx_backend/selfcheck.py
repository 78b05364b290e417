"""``python -m engine.mlx_backend.selfcheck --model M``: proves the engine's parts on the machine it runs on.

Owns: the list of checks, one JSON object a line: ``{"name", "state", "detail", "fix"}`` with state pass, warn, fail or
skip. Exit code 1 if any failed. Must not know: how the lines are shown (``metalslots doctor`` does that).

It runs on Metal, CUDA and the CPU and says which. What only a GPU has is skipped without one.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Literal

import mlx.core as mx

from engine.errors import StartupError
from engine.mlx_backend.batching_curve import (
    gains_of,
    measure_step_times,
    num_blocks_needed,
    profile_path,
    save_profile,
)
from engine.mlx_backend.device import choose_backend, device_facts, measure_sgemm_gflops, use_backend
from engine.mlx_backend.gpu_cache import KernelBook
from engine.mlx_backend.kernel_check import Verdict
from engine.mlx_backend.kernel_speed import compare_speeds
from engine.mlx_backend.kernels.launch import KernelFactory, gpu_factory, gpu_target
from engine.mlx_backend.kernels.tiling import TUNINGS, Tuning
from engine.mlx_backend.loaded_model import LoadedModel
from engine.mlx_backend.loader import load_model
from engine.mlx_backend.quantised_pool import possible_kv_bits
from engine.mlx_backend.runners import check_other_kernels, check_pool_kernels, make_runner
from engine.mlx_backend.step_check import steps_trial
from engine.mlx_backend.step_model import StepForm
from engine.model_source import resolve_model

_GIB = 2**30
_BLOCK_SIZE_TOKENS = 16
_MOST_ROWS = 16
_CURVE_LIMIT_S = 60.0
_SLOW_SGEMM_GFLOPS = 15.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. ``fix``: one concrete thing to do, empty where nothing is to be done."""

    name: str
    state: Literal["pass", "warn", "fail", "skip"]
    detail: str
    fix: str = ""


def findings(model: str, backend: str = "auto") -> Iterator[Finding]:
    """All findings, each as soon as it is known. Later checks need earlier ones; the first failure may be the last."""
    try:
        chosen = choose_backend(backend)
        use_backend(chosen)
        yield _device(chosen)
        yield _limits(chosen)
        yield _blas(chosen)
        started_s = time.perf_counter()
        loaded = load_model(resolve_model(model), backend=chosen)
    except StartupError as error:
        yield Finding("model", "fail", error.message, error.fix)
        return
    facts = loaded.facts
    yield Finding(
        "model",
        "pass",
        f"{facts.name} ({facts.architecture}, {facts.compute_dtype}, {facts.weights_bytes / _GIB:.2f} GiB) loaded in "
        f"{time.perf_counter() - started_s:.1f} s",
    )
    for check in (_parity, _kernels, _speeds, lambda loaded: _curve(loaded, model)):
        yield from _guarded(check, loaded)


def _guarded(check: Callable[[LoadedModel], Iterator[Finding]], loaded: LoadedModel) -> Iterator[Finding]:
    """A check that breaks off is a finding: the ones after it still run."""
    try:
        yield from check(loaded)
    except Exception as error:
        name = getattr(check, "__name__", "check").strip("_<>")
        yield Finding(name, "fail", f"{type(error).__name__}: {error}", "report this line")


def _device(backend: Literal["metal", "cuda", "cpu"]) -> Finding:
    facts = device_facts(backend)
    system = (
        f"macOS {platform.mac_ver()[0]}" if sys.platform == "darwin" else f"{platform.system()} {platform.release()}"
    )
    return Finding("device", "pass", f"{facts.description}; {system}; {facts.memory_bytes / _GIB:.0f} GiB of memory")


def _limits(backend: Literal["metal", "cuda", "cpu"]) -> Finding:
    if backend != "metal":
        return Finding("gpu limits", "skip", f"working set and wired limits are Metal's; this is {backend}")
    info = mx.device_info()
    working_set = int(info.get("max_recommended_working_set_size", 0))
    longest = int(info.get("max_buffer_length", 0))
    detail = (
        f"working set {working_set / _GIB:.1f} GiB, longest buffer {longest / _GIB:.1f} GiB, wired limit {_wired()}"
    )
    return Finding("gpu limits", "pass" if working_set else "warn", detail)


def _wired() -> str:
    """The limit that `sudo sysctl iogpu.wired_limit_mb=N` sets; 0 is the system's own choice."""
    try:
        done = subprocess.run(["sysctl", "-n", "iogpu.wired_limit_mb"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return "the system's own" if done.stdout.strip() == "0" else f"{done.stdout.strip()} MiB"


def _blas(backend: Literal["metal", "cuda", "cpu"]) -> Finding:
    if backend != "cpu":
        return Finding("blas", "skip", f"matrix products run on {backend}")
    rate = measure_sgemm_gflops()
    detail = f"fp32 products at {rate:.0f} GFLOP/s"
    if rate >= _SLOW_SGEMM_GFLOPS:
        return Finding("blas", "pass", detail)
    return Finding("blas", "warn", f"{detail}: MLX's reference BLAS", "install a C compiler and run `make -B setup`")


def _parity(loaded: LoadedModel) -> Iterator[Finding]:
    if loaded.form is StepForm.SINGLE:
        detail = f"only one sequence at a time gives mlx-lm's own logits. {loaded.form_reason}"
        yield Finding("parity", "warn", detail, "write `slots: 1`, or choose another model")
        return
    why = f" (not packed: {loaded.form_reason})" if loaded.form_reason else ""
    yield Finding("parity", "pass", f"{loaded.form.value} steps give mlx-lm's own logits{why}")


def _kernels(loaded: LoadedModel) -> Iterator[Finding]:
    target = gpu_target() if loaded.backend != "cpu" else None
    if target is None:
        yield Finding("kernels", "skip", "MLX has no custom kernels on the CPU; the plain operations run")
        return
    if loaded.form is not StepForm.PACKED:
        yield Finding("kernels", "skip", f"they compute packed steps, and this model's are {loaded.form.value}")
        return
    for verdict in _verdicts(loaded, gpu_factory(target), TUNINGS[target]):
        if verdict.problem:
            yield Finding(
                f"kernel: {verdict.name}", "fail", verdict.problem, "none needed: plain MLX runs; report this line"
            )
        else:
            yield Finding(
                f"kernel: {verdict.name}", "pass", f"as its reference, largest difference {verdict.error:.2g}"
            )


def _verdicts(loaded: LoadedModel, factory: KernelFactory, tuning: Tuning) -> Iterator[Verdict]:
    """On plain pools, then on pools of 8 and 4 bits where this model can have them."""
    yield from check_other_kernels(loaded, factory, tuning)
    for kv_bits in possible_kv_bits(loaded.layers):
        pool = f", {kv_bits} bits" if kv_bits else ""
        verdicts = chain(
            check_pool_kernels(loaded, "auto", KernelBook(_BLOCK_SIZE_TOKENS, factory, tuning, kv_bits)),
            (steps_trial(loaded, _BLOCK_SIZE_TOKENS, factory, tuning, kv_bits) for _ in range(1)),
        )
        for verdict in verdicts:
            yield replace(verdict, name=f"{verdict.name}{pool}")


def _speeds(loaded: LoadedModel) -> Iterator[Finding]:
    target = gpu_target() if loaded.backend != "cpu" else None
    if target is None or loaded.form is not StepForm.PACKED:
        yield Finding("kernel speed", "skip", "no custom kernels are used")
        return
    for name, fast_s, plain_s in compare_speeds(loaded, gpu_factory(target), TUNINGS[target]):
        detail = f"{fast_s * 1e6:.0f} us against {plain_s * 1e6:.0f} us in plain MLX: {plain_s / fast_s:.1f}x"
        yield Finding(f"kernel speed: {name}", "pass" if fast_s <= plain_s else "warn", detail)


def _curve(loaded: LoadedModel, model: str) -> Iterator[Finding]:
    if loaded.form is StepForm.SINGLE:
        yield Finding("batching", "skip", f"this model is served one sequence at a time: {loaded.form_reason}")
        return
    runner = make_runner(
        loaded,
        num_blocks=num_blocks_needed(_MOST_ROWS, _BLOCK_SIZE_TOKENS),
        block_size=_BLOCK_SIZE_TOKENS,
        slots=_MOST_ROWS,
        max_chunk_tokens=64,
    )
    try:
        times_s = measure_step_times(runner, _MOST_ROWS, _BLOCK_SIZE_TOKENS, _CURVE_LIMIT_S)
    finally:
        runner.close()
    path = profile_path(model)
    save_profile(path, model=model, machine=loaded.facts.device, times_s=times_s)
    gains = gains_of(times_s)
    curve = " ".join(f"{rows}:{gains[rows]:.2f}" for rows in sorted(gains) if rows in (1, 2, 4, 8, 12, 16))
    complete = len(times_s) == _MOST_ROWS
    yield Finding(
        "batching",
        "pass" if complete else "warn",
        f"{1 / times_s[1]:.1f} tokens/s alone; gain by rows {curve}"
        + ("" if complete else f"; stopped at {max(times_s)} rows after {_CURVE_LIMIT_S:.0f} s")
        + f"; saved in {path}",
        f"write `profile: {path}` in the engine's configuration, and `slots: auto` will follow it",
    )


def main() -> int:
    """Print the findings; 1 if any failed."""
    parser = argparse.ArgumentParser(description="Check the engine on this machine; one JSON object a line.")
    parser.add_argument("--model", default="demo", help="model to load: demo, a folder, a GGUF file or a hub id")
    parser.add_argument("--backend", default="auto", choices=("auto", "metal", "cuda", "cpu"))
    options = parser.parse_args()
    failed = False
    for finding in findings(options.model, options.backend):
        print(json.dumps(asdict(finding)), flush=True)
        failed = failed or finding.state == "fail"
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
