"""``python -m tests.perf.single_stream [--pairs 7]``: one request here beside ``mlx_lm.generate`` on the same weights.

Both in one process, on the same BLAS with one thread, in turn; each pair has a prompt of its own, so that no cache has
seen it. Greedy, guesses off, the end of text banned on both sides. A time is from the prompt to the last token; ours
contains scheduler and sampling. Needs a quiet machine for the elapsed figure; the CPU figure needs none.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import engine.mlx_backend.mlx_lm_parts as mlx_lm_parts  # isort: skip - the BLAS before MLX
import mlx.core as mx
from mlx_lm.generate import generate_step

from engine.core.engine_core import EngineCore
from engine.mlx_backend.export import export_folder
from engine.mlx_backend.loader import load_model
from engine.mlx_backend.mlx_lm_parts import Model
from engine.model_source import resolve_model
from engine.request import EngineRequest, SamplingParams
from tests.perf.speculation import make_engine

SHAPES = ((64, 128), (1024, 64))
DEFAULT_PAIRS = 7


@dataclass(frozen=True, slots=True)
class Taken:
    """What one request took."""

    elapsed_s: float
    cpu_s: float


def timed(run: Callable[[], int], num_tokens: int) -> Taken:
    """Run it and check that it gave so many tokens."""
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    given = run()
    taken = Taken(time.perf_counter() - began_s, time.process_time() - began_cpu_s)
    assert given == num_tokens, f"{given} tokens instead of {num_tokens}"
    return taken


def ours(core: EngineCore, request: EngineRequest) -> int:
    """Answer one request; returns its number of tokens."""
    core.add(request)
    num_tokens = 0
    while core.has_work:
        num_tokens += sum(len(output.token_ids) for output in core.step())
    return num_tokens


def theirs(model: Model, prompt: Sequence[int], num_tokens: int) -> int:
    """The loop inside ``mlx_lm.generate``, which goes on after an end of text."""
    return sum(1 for _ in generate_step(mx.array(prompt), model, max_tokens=num_tokens))


def compare(core: EngineCore, model: Model, shape: tuple[int, int], num_pairs: int) -> str:
    """Alternating pairs of one shape (prompt and answer tokens); returns the line to print."""
    num_prompt, num_answer = shape
    sampling = SamplingParams(max_tokens=num_answer, temperature=0.0, ignore_eos=True)
    pairs: list[tuple[Taken, Taken]] = []
    # The first pair warms both and does not count.
    for number in range(num_pairs + 1):
        draw = random.Random(f"{shape}-{number}")
        prompt = tuple(draw.randrange(1_000, 40_000) for _ in range(num_prompt))
        request = EngineRequest(f"{num_prompt}-{number}", prompt, sampling, 0.0)
        sides = [lambda r=request: ours(core, r), lambda p=prompt: theirs(model, p, num_answer)]
        order = (0, 1) if number % 2 else (1, 0)
        taken = {side: timed(sides[side], num_answer) for side in order}
        pairs.append((taken[0], taken[1]))
    return f"{num_prompt} in, {num_answer} out: " + ", ".join(
        f"{name} {_ratios([getattr(b, field) / getattr(a, field) for a, b in pairs[1:]])}"
        for name, field in (("speed", "elapsed_s"), ("by CPU time", "cpu_s"))
    )


def _ratios(ratios: Sequence[float]) -> str:
    return f"{median(ratios):.3f} x ({min(ratios):.3f}..{max(ratios):.3f})"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=DEFAULT_PAIRS)
    options = parser.parse_args()
    source = resolve_model("demo")
    with tempfile.TemporaryDirectory() as folder:
        # A model of its own: what our engine does to its modules would help or hinder here.
        export_folder(source, Path(folder), backend="cpu")
        model, _ = mlx_lm_parts.load_model(Path(folder))
    core = make_engine(load_model(source, backend="cpu", parity="off"), 0)
    print("ours as a multiple of mlx_lm.generate, median of pairs (range):")
    for shape in SHAPES:
        print(compare(core, model, shape, options.pairs), flush=True)
    core.close()


if __name__ == "__main__":
    main()
