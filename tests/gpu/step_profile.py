"""``python -m tests.gpu.step_profile``: where a step's time goes, kernel by kernel.

Steps of a model of Llama 3 8B's shape, one in flight: decode steps of some rows by every way to compute their products,
then eight rows with a chunk of a prompt. For each the wall time, then (recorded) how long the GPU was busy on what.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from engine.batch import BatchRow, StepBatch
from engine.mlx_backend.gpu_runner import GpuModelRunner
from engine.mlx_backend.row_products import RowProducts
from tests.gpu.benchmark import Bench, say, spread
from tests.gpu.kernel_times import busy_ms, by_name, record
from tests.gpu.serving import GREEDY, Batches, decode_batches, steps_ms

_CONTEXT = 544
_BLOCKS_PER_ROW = 64
_STEPS = 24
_PROFILED_STEPS = 6
_CHUNK_START = 8192


def mixed_batches(rows: int, num_tokens: int) -> Batches:
    """Decode steps with a chunk of ``num_tokens`` of a long prompt."""
    decoding, start = decode_batches(rows, _CONTEXT, _BLOCKS_PER_ROW), rows * _BLOCKS_PER_ROW
    table = list(range(start, start + 1400))
    prompt: list[int] = [7] * 20_000

    def batch(step: int) -> StepBatch:
        at = _CHUNK_START + step % 8 * num_tokens
        chunk = BatchRow("chunk", rows, at, num_tokens, prompt, table, len(prompt), GREEDY, 0, False, 0)
        return StepBatch(step, (*decoding(step).rows, chunk))

    return batch


def wall(runner: GpuModelRunner, label: str, batches: Batches) -> None:
    """Print the wall time of one case."""
    steps_ms(runner, batches, 0, 6)
    say(f"{label}: wall {spread(steps_ms(runner, batches, 8, _STEPS), 2)} ms")


def profile(runner: GpuModelRunner, label: str, batches: Batches, details: bool) -> None:
    """Print what the GPU did in one case."""
    steps_ms(runner, batches, 0, 6)
    runs = record(lambda: steps_ms(runner, batches, 40, _PROFILED_STEPS))
    total, gaps = busy_ms(runs)
    long_gaps = [gap for gap in gaps if gap > 0.01]
    say(
        f"{label}: GPU busy {total / _PROFILED_STEPS:.2f} ms, {len(runs) / _PROFILED_STEPS:.0f} kernels, short gaps "
        f"{(sum(gaps) - sum(long_gaps)) / _PROFILED_STEPS:.2f} ms, {len(long_gaps) / _PROFILED_STEPS:.0f} over 10 us"
    )
    for line in by_name(runs, _PROFILED_STEPS) if details else ():
        print("      ", line, flush=True)


def each_use(products: RowProducts | None, num_rows: int) -> Iterator[tuple[str, bool]]:
    """Sets every way to compute the products of steps of ``num_rows`` rows in turn: its name, and whether it is the one
    that was chosen."""
    if products is None:
        yield "as the model has them", True
        return
    uses, chunk_use = dict(products.uses), products.chunk_use
    chosen = uses.get(num_rows, chunk_use)
    for use in products.choices(num_rows):
        products.uses, products.chunk_use = dict.fromkeys(uses, use), use
        yield use.name, use is chosen
    products.uses, products.chunk_use = uses, chunk_use


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 4, 16, 32], help="decode rows")
    parser.add_argument("--chunks", nargs="*", type=int, default=[64, 256, 512], help="a chunk's tokens beside 8 rows")
    parser.add_argument("--details", action="store_true", help="times by kernel, of the way that was chosen")
    parser.add_argument("--wall-only", action="store_true", help="record nothing")
    options = parser.parse_args()
    bench = Bench(pairs=1)
    assert bench.runner._model is not None
    products = bench.runner._model.products
    cases = [(f"{rows} rows", rows, decode_batches(rows, _CONTEXT, _BLOCKS_PER_ROW)) for rows in options.rows]
    cases += [(f"8 rows + {num} at {_CHUNK_START}", 8 + num, mixed_batches(8, num)) for num in options.chunks]
    for label, num_rows, batches in cases:
        for name, chosen in each_use(products, num_rows):
            wall(bench.runner, f"{label}, {name}{' (chosen)' if chosen else ''}", batches)
    for label, num_rows, batches in cases if not options.wall_only else ():
        for name, chosen in each_use(products, num_rows):
            profile(bench.runner, f"{label}, {name}", batches, options.details and chosen)


if __name__ == "__main__":
    main()
