"""``python -m tests.gpu.benchmark``: the engine, scheduler included, beside mlx-lm on the same GPU in one process.

A model of Llama 3 8B's shape with random bf16 weights. Pairs alternate, because step times of MLX's CUDA backend jump
between plateaus; medians and ranges are printed. ``--only`` picks sections.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from engine.mlx_backend.gpu_runner import GpuModelRunner
from engine.mlx_backend.kernels.launch import gpu_factory, gpu_target
from engine.mlx_backend.kernels.tiling import TUNINGS
from engine.mlx_backend.loaded_model import LoadedModel
from engine.request import SamplingParams
from tests.gpu.llama_shape import load
from tests.gpu.serving import HostTimes, Run, Work, at, batch_generator, decode_batches, serve, steps_ms

BLOCK_SIZE = 16
MAX_MODEL_LEN = 36_864
NUM_BLOCKS = 3000
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, ignore_eos=True)
STALL_SHARE = 1.9  # of the gap without a newcomer
FLOOR_BYTES_PER_S = 4.3e12  # a large device-to-device copy on an H200
_started_s = time.perf_counter()


def say(*parts: object) -> None:
    print(f"[{time.perf_counter() - _started_s:6.1f}]", *parts, flush=True)


def spread(values: Sequence[float], digits: int = 0) -> str:
    """Median and range."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f}..{high:.{digits}f})"


def _mlx_environment() -> dict[str, str]:
    """What of MLX is set from outside: sizes of its CUDA graphs, say."""
    return {name: value for name, value in os.environ.items() if name.startswith("MLX_")}


def prompt(draw: random.Random, length: int) -> tuple[int, ...]:
    return tuple(draw.randrange(1000) for _ in range(length))


class Bench:
    """One loaded model and one runner for all sections but the one of long contexts."""

    def __init__(self, pairs: int) -> None:
        self.pairs = pairs
        self.loaded = load(MAX_MODEL_LEN)
        self.floor_ms = self.loaded.facts.weights_bytes / FLOOR_BYTES_PER_S * 1e3
        say(f"mlx {version('mlx')}, mlx-lm {version('mlx-lm')}, {self.loaded.facts.device}")
        say(f"weights {self.loaded.facts.weights_bytes / 2**30:.1f} GiB: read in {self.floor_ms:.2f} ms at best")
        self.runner = self.new_runner(slots=32, num_blocks=NUM_BLOCKS)
        started_s = time.perf_counter()
        self.runner.warm_up()
        say(f"warm-up {time.perf_counter() - started_s:.1f} s; decode steps, ms by rows:", self._rungs())
        say("steps with chunks:", self._chunk_use(), "| environment:", _mlx_environment())

    def new_runner(self, slots: int, num_blocks: int) -> GpuModelRunner:
        target = gpu_target()
        assert target is not None, "needs a GPU"
        return GpuModelRunner(
            self.loaded,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            slots=slots,
            max_chunk_tokens=512,
            factory=gpu_factory(target),
            tuning=TUNINGS[target],
        )

    def _rungs(self) -> dict[int, str]:
        products = self.runner._model.products if self.runner._model else None
        return {
            rung: f"{time_s * 1e3:.2f} {products.uses[rung].name if products and rung in products.uses else ''}"
            for rung, time_s in self.runner.rung_times_s.items()
        }

    def _chunk_use(self) -> str:
        products = self.runner._model.products if self.runner._model else None
        return products.chunk_use.name if products else ""

    def serve(self, works: Sequence[Work], slots: int, **options: Any) -> Run:
        return serve(
            _Shared(self.runner),
            works,
            slots=slots,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            max_model_len=MAX_MODEL_LEN,
            **options,
        )


class _Shared:
    """The runner for one ``serve`` of many: not closed at its end."""

    def __init__(self, runner: GpuModelRunner) -> None:
        self.facts, self.max_steps_in_flight = runner.facts, runner.max_steps_in_flight
        self.launch, self.release = runner.launch, runner.release

    def close(self) -> None:
        pass


def decode(bench: Bench) -> None:
    """Whole-engine decode against BatchGenerator at 1 to 32 rows, 512-token prompts."""
    draw = random.Random(0)
    ratios = []
    for rows in (1, 4, 8, 16, 32):
        ours, theirs, pairs = [], [], []
        for _ in range(bench.pairs + 1):
            works = [Work(prompt(draw, 512), 72) for _ in range(rows)]
            ours.append(bench.serve(works, slots=32).decode_tokens_per_s())
            theirs.append(batch_generator(bench.loaded.model, works, slots=rows).decode_tokens_per_s())
            pairs.append(ours[-1] / theirs[-1])
        floor = statistics.median(ours[1:]) / rows * bench.floor_ms / 1e3
        ratios.append(statistics.median(pairs[1:]))
        say(
            f"decode {rows:2d} rows: ours {spread(ours[1:])} tok/s ({floor:.0%} of the floor), "
            f"BatchGenerator {spread(theirs[1:])}, ratio {spread(pairs[1:], 2)}"
        )
    say(f"decode: geometric mean over 4 to 32 rows {statistics.geometric_mean(ratios[1:]):.2f}")


def sampled(bench: Bench) -> None:
    """Temperature 0.8 and top_p 0.95 with different seeds against greedy, 32 rows."""
    draw, costs = random.Random(1), []
    for _ in range(bench.pairs + 1):
        prompts = [prompt(draw, 512) for _ in range(32)]
        greedy = bench.serve([Work(p, 72) for p in prompts], slots=32).decode_tokens_per_s()
        drawn = bench.serve([Work(p, 72, SAMPLED) for p in prompts], slots=32).decode_tokens_per_s()
        costs.append((greedy / drawn - 1) * 100)
    say(f"sampled: costs {spread(costs[1:], 1)} % over greedy at 32 rows")


def host(bench: Bench) -> None:
    """What the host does per step."""
    draw = random.Random(2)
    for rows in (8, 32):
        times = HostTimes()
        times.wrap(bench.runner, "launch", "launch")
        times.wrap(bench.runner._inputs, "build", "of it: arrays")
        bench.serve([Work(prompt(draw, 64), 200) for _ in range(rows)], slots=32, times=times)
        del bench.runner.launch, bench.runner._inputs.build  # type: ignore[method-assign]
        say(f"host, ms per step at {rows} rows:", times.per_step_ms())


def memory(bench: Bench) -> None:
    """1,000 steps leave nothing behind."""
    draw = random.Random(3)
    bench.serve([Work(prompt(draw, 64), 20) for _ in range(8)], slots=32)
    before_bytes = mx.get_active_memory()
    run = bench.serve([Work(prompt(draw, 64), 1000) for _ in range(8)], slots=32)
    say(
        f"memory after 1,000 steps: {(mx.get_active_memory() - before_bytes) / 2**20:+.1f} MiB active, "
        f"peak {run.peak_bytes / 2**30:.2f} GiB"
    )


def ragged(bench: Bench) -> None:
    """64 requests, prompts of 32 to 8,192, outputs of 64 to 256, 16 slots kept full: ../shared/gpu's workload."""
    draw = random.Random(7)
    lengths: list[int] = []
    while len(lengths) < 64:
        length = int(draw.lognormvariate(7.2, 0.9))
        if 32 <= length <= 8192:
            lengths.append(length)
    outputs = [draw.randint(64, 256) for _ in range(64)]
    works = [Work(prompt(draw, n), m) for n, m in zip(lengths, outputs, strict=True)]

    def report(name: str, run: Run) -> None:
        gaps = run.gaps_s()
        say(
            f"ragged {name}: {run.tokens_per_s:.0f} output tok/s, gap p50 {at(gaps, 0.5) * 1e3:.1f} "
            f"p99 {at(gaps, 0.99) * 1e3:.1f} max {gaps[-1] * 1e3:.0f} ms, peak {run.peak_bytes / 2**30:.1f} GiB"
        )

    for _ in range(2):
        report("ours", bench.serve(works, slots=16, target_stall_s=0.03))
    report("mlx-lm 1, 512", batch_generator(bench.loaded.model, works, slots=16, prefill_batch=1, prefill_step=512))
    report("ours", bench.serve(works, slots=16, target_stall_s=0.03))


def newcomer(bench: Bench) -> None:
    """A 16k prompt arrives on 8 running streams: gaps with it against gaps without, and its prefill's speed."""
    draw = random.Random(4)
    streams = [Work(prompt(draw, 512), 600) for _ in range(8)]
    newcomer = Work(prompt(draw, 16_384), 2)
    p50_s = at(bench.serve(streams, slots=32).gaps_s(), 0.5)
    idle_rates, busy_rates, p90s, p99s = [], [], [], []
    for _ in range(bench.pairs + 1):
        idle = bench.serve([newcomer], slots=32)
        idle_rates.append(len(newcomer.prompt) / (idle.token_times_s[0][0] - idle.started_s))
        arrival = _Arrival(index=8, after_tokens=100)
        busy = bench.serve([*streams, newcomer], slots=32, target_stall_s=p50_s * STALL_SHARE, start=arrival)
        first_s = busy.token_times_s[8][0]
        gaps = busy.gaps_s(arrival.at_s, first_s, requests=range(8))
        busy_rates.append(len(newcomer.prompt) / (first_s - arrival.at_s))
        p90s.append(at(gaps, 0.9) / p50_s)
        p99s.append(at(gaps, 0.99) / p50_s)
    share = statistics.median(busy_rates[1:]) / statistics.median(idle_rates[1:])
    say(
        f"newcomer: p50 without it {p50_s * 1e3:.1f} ms, gaps with it p90 {spread(p90s[1:], 2)}, p99 "
        f"{spread(p99s[1:], 2)} times that; its prefill {spread(busy_rates[1:])} tok/s, on an idle machine "
        f"{spread(idle_rates[1:])}: {share:.0%}"
    )


class _Arrival:
    """Lets the request ``index`` in when all before it have ``after_tokens`` tokens, and notes when."""

    def __init__(self, index: int, after_tokens: int) -> None:
        self._index, self._after_tokens = index, after_tokens
        self.at_s = 0.0

    def __call__(self, index: int, run: Run) -> bool:
        if index < self._index:
            return True
        ready = min(len(run.token_times_s[i]) for i in range(self._index)) > self._after_tokens
        if ready:
            self.at_s = time.perf_counter()
        return ready


def long_context(bench: Bench) -> None:
    """Decode steps at long contexts against mlx-lm's own cache with all rows of equal length, its best case."""
    bench.runner.close()
    for rows, context in ((8, 8192), (4, 32_768), (1, 32_768)):
        blocks_per_row = context // BLOCK_SIZE + 4
        runner = bench.new_runner(slots=rows, num_blocks=rows * blocks_per_row)
        runner.measure_rungs()
        caches = _aligned_caches(bench.loaded, rows, context)
        ours, theirs = [], []
        for _ in range(bench.pairs + 1):
            ours.append(_decode_ms(runner, rows, context, blocks_per_row))
            theirs.append(_aligned_ms(bench.loaded.model, caches, rows, context))
        ratios = [a / b for a, b in zip(ours[1:], theirs[1:], strict=True)]
        say(
            f"long {rows} x {context}: ours {spread(ours[1:], 1)} ms, aligned {spread(theirs[1:], 1)} ms, "
            f"ratio {spread(ratios, 2)}"
        )
        runner.close()
        del caches
        mx.clear_cache()


def _decode_ms(runner: GpuModelRunner, rows: int, context: int, blocks_per_row: int, num: int = 24) -> float:
    """Steps on a pool whose contents do not matter."""
    batches = decode_batches(rows, context, blocks_per_row)
    runner.launch(batches(0)).result()
    return statistics.mean(steps_ms(runner, batches, 1, num))


def _aligned_caches(loaded: LoadedModel, rows: int, context: int) -> list[KVCache]:
    caches = []
    for layer in loaded.layers:
        cache = KVCache()
        shape = (rows, layer.num_kv_heads, context, layer.k_head_dim)
        cache.update_and_fetch(mx.zeros(shape, mx.bfloat16) + 0.01, mx.zeros(shape, mx.bfloat16) + 0.01)
        mx.eval(cache.keys, cache.values)
        caches.append(cache)
    return caches


def _aligned_ms(model: Any, caches: Sequence[KVCache], rows: int, context: int, num: int = 24) -> float:
    for cache in caches:
        cache.offset = context
    tokens = mx.full((rows, 1), 5, mx.int32)

    def step(tokens: mx.array) -> mx.array:
        following = mx.argmax(model(tokens, cache=caches)[:, -1], axis=-1)[:, None].astype(mx.int32)
        mx.async_eval(following)
        return following

    tokens = step(tokens)
    mx.eval(tokens)
    started_s, previous = time.perf_counter(), step(tokens)
    for _ in range(num - 1):
        following = step(previous)
        previous.tolist()
        previous = following
    previous.tolist()
    return (time.perf_counter() - started_s) / num * 1e3


SECTIONS: dict[str, Callable[[Bench], None]] = {
    function.__name__: function for function in (decode, sampled, host, ragged, newcomer, memory, long_context)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=SECTIONS, default=list(SECTIONS), help="sections to run")
    parser.add_argument("--pairs", type=int, default=5, help="alternating pairs (one more is run first, uncounted)")
    options = parser.parse_args()
    bench = Bench(options.pairs)
    for name in options.only:
        try:
            SECTIONS[name](bench)
        except Exception:  # the other sections' figures are wanted all the same
            traceback.print_exc()


if __name__ == "__main__":
    main()
