"""A day of joins, leaves and preemptions in a few hundred steps, on tiny models; every answer is what it is alone.

Owns: the random traffic, and the judgement by mlx-lm's own forward pass over each whole answer. ``python -m
tests.mlx.soak`` runs it on every module of the zoo that is served in slots (``--steps 300``, some minutes), or on those
that are named.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import mlx.core as mx
import numpy as np

from engine.core.engine_core import EngineCore
from engine.memory.window_blocks import WindowConfig, most_ahead_tokens, num_blocks_needed
from engine.mlx_backend.loaded_model import LoadedModel
from engine.mlx_backend.mlx_lm_parts import Model, make_prompt_cache
from engine.mlx_backend.model_runner import MlxModelRunner
from engine.mlx_backend.probe import prove_form
from engine.mlx_backend.step_model import StepForm
from engine.request import EngineRequest, SamplingParams
from engine.scheduler import Scheduler, SchedulerConfig
from tests.mlx.tiny_models import tiny_model
from tests.model_zoo import built_names

SLOTS = 8
BLOCK_SIZE = 8
NUM_BLOCKS = 56
NUM_SNAPSHOTS = 12
MAX_MODEL_LEN = 128
MAX_CHUNK_TOKENS = 24
MAX_STEPS_IN_FLIGHT = 2
# A token is right when mlx-lm's logits put it this close to the best one: fp32 paths differ by less.
TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class Report:
    """What a soak went through. ``worst``: how far below the best a chosen token's logit was at most, relative."""

    num_answers: int
    num_left: int
    num_preemptions: int
    num_cached_tokens: int
    num_rows_most: int
    worst: float


class Soak:
    """One model under random traffic. ``frees_windows``: sliding-window layers have a pool of their own."""

    def __init__(self, loaded: LoadedModel, seed: int = 0, *, frees_windows: bool = True) -> None:
        self._loaded, self._draw = loaded, random.Random(seed)
        keeps_state = loaded.state_bytes_per_slot > 0
        num_snapshots = NUM_SNAPSHOTS if keeps_state else 0
        window = _window_of(loaded) if frees_windows else None
        runner = MlxModelRunner(
            loaded,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            slots=SLOTS,
            max_chunk_tokens=MAX_CHUNK_TOKENS,
            num_state_snapshots=num_snapshots,
            num_window_blocks=None if window is None else window.num_blocks,
        )
        config = SchedulerConfig(
            SLOTS,
            NUM_BLOCKS,
            BLOCK_SIZE,
            MAX_MODEL_LEN,
            admission_watermark_tokens=0,
            max_chunk_tokens=MAX_CHUNK_TOKENS,
            max_steps_in_flight=MAX_STEPS_IN_FLIGHT,
            num_state_snapshots=num_snapshots if keeps_state else None,
            window=window,
        )
        ticks = count()
        self.scheduler = Scheduler(config)
        self.core = EngineCore(self.scheduler, runner, lambda: float(next(ticks)))
        self._asked: dict[str, tuple[int, ...]] = {}
        self._answers: dict[str, list[int]] = {}
        self._done: list[str] = []
        vocab_size = loaded.facts.vocab_size
        self._openings = [[self._draw.randrange(vocab_size) for _ in range(40)] for _ in range(3)]
        self._num_left = 0

    def run(self, num_steps: int) -> Report:
        """Steps of traffic, then until nobody is left; then every answer is judged."""
        for _ in range(num_steps):
            self._move()
            self._step()
        while self.core.has_work:
            self._step()
        stats = self.scheduler.stats(0.0)
        self.core.close()
        model = self._loaded.model
        worst = max(distance_from_best(model, self._asked[done], self._answers[done]) for done in self._done)
        return Report(
            len(self._done),
            self._num_left,
            stats.num_preemptions,
            stats.num_cached_prompt_tokens,
            stats.peak_running,
            worst,
        )

    def _move(self) -> None:
        draw = self._draw
        open_ids = [request_id for request_id in self._asked if request_id not in self._done]
        while len(open_ids) < SLOTS + 2:
            request_id = f"r{len(self._answers)}"
            open_ids.append(request_id)
            self._ask(request_id)
        if draw.random() < 0.03:
            leaving = draw.choice(open_ids)
            if self.core.cancel(leaving):
                del self._asked[leaving]
                self._num_left += 1
        if draw.random() < 0.05:
            self.scheduler.preempt_one(0.0)

    def _ask(self, request_id: str) -> None:
        draw, vocab_size = self._draw, self._loaded.facts.vocab_size
        opening = draw.choice(self._openings)[: draw.choice([0, 0, 9, 24, 40])]
        prompt = [*opening, *(draw.randrange(vocab_size) for _ in range(draw.randint(1, 25)))]
        sampling = SamplingParams(max_tokens=draw.randint(1, 30), temperature=0.0, ignore_eos=True)
        self.core.add(EngineRequest(request_id, tuple(prompt), sampling, 0.0))
        self._asked[request_id] = tuple(prompt)
        self._answers[request_id] = []

    def _step(self) -> None:
        for output in self.core.step():
            assert output.error is None, output.error
            self._answers[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                self._done.append(output.request_id)
        self.scheduler.check_invariants()


def _window_of(loaded: LoadedModel) -> WindowConfig | None:
    """A pool that is just large enough, and a few blocks for prefixes."""
    windows = [layer.window for layer in loaded.layers if layer.window is not None]
    if not windows:
        return None
    ahead = most_ahead_tokens(MAX_CHUNK_TOKENS, SLOTS, MAX_STEPS_IN_FLIGHT)
    return WindowConfig(max(windows), num_blocks_needed(max(windows), BLOCK_SIZE, SLOTS, ahead) + 6)


def distance_from_best(model: Model, prompt: Sequence[int], answer: Sequence[int]) -> float:
    """The largest relative distance of a chosen token's logit from the best one of mlx-lm's own forward pass."""
    logits = model(mx.array([[*prompt, *answer[:-1]]]), cache=make_prompt_cache(model))[0, len(prompt) - 1 :]
    values = np.array(logits.astype(mx.float32))
    chosen = values[np.arange(len(answer)), list(answer)]
    return float(((values.max(axis=-1) - chosen) / np.abs(values).max()).max())


def soak(loaded: LoadedModel, num_steps: int, seed: int = 0) -> Report:
    """Run a soak. Raises AssertionError when an answer is not the model's own."""
    report = Soak(loaded, seed).run(num_steps)
    assert report.worst <= TOLERANCE, f"an answer is off by {report.worst:.2g}"
    return report


def main() -> int:
    """Soak modules, a line each; 1 if any is wrong."""
    parser = argparse.ArgumentParser(description="Joins, leaves and preemptions on tiny models of mlx-lm's modules.")
    parser.add_argument("modules", nargs="*", help="default: all that can be made")
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    wrong = 0
    for name in options.modules or list(built_names()):
        started_s = time.perf_counter()
        loaded = prove_form(tiny_model(name))
        if loaded.form is StepForm.SINGLE:
            print(f"{name}: one at a time", flush=True)
            continue
        try:
            report = soak(loaded, options.steps)
        except AssertionError as error:
            wrong += 1
            print(f"{name}: WRONG: {error}", flush=True)
            continue
        print(f"{name}: {loaded.form.value}, {time.perf_counter() - started_s:.1f} s, {report}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
