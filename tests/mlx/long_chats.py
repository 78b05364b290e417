"""Chats of several turns at 8 rows for thousands of steps on a hybrid model, watching what is held.

Owns: the traffic, the samples of memory and live arrays, the judgement of every answer. ``python -m
tests.mlx.long_chats`` runs 3,000 steps and prints what was seen.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import mlx.core as mx

from engine.core.engine_core import EngineCore
from engine.memory.plan_inputs import STATE_SNAPSHOTS_PER_SLOT
from engine.mlx_backend.loaded_model import LoadedModel
from engine.mlx_backend.model_runner import MlxModelRunner
from engine.mlx_backend.probe import prove_form
from engine.request import EngineRequest, SamplingParams
from engine.scheduler import Scheduler, SchedulerConfig
from tests.mlx.soak import TOLERANCE, distance_from_best
from tests.mlx.tiny_models import tiny_model

SLOTS = 8
BLOCK_SIZE = 8
MAX_MODEL_LEN = 448
NUM_BLOCKS = SLOTS * 72
NUM_SNAPSHOTS = STATE_SNAPSHOTS_PER_SLOT * SLOTS
_TURN_TOKENS = 12
_SAMPLE_EVERY_STEPS = 50


@dataclass(frozen=True, slots=True)
class Sample:
    """What is held at a moment: MLX's bytes, live arrays, the process's resident bytes, bytes of recurrent state."""

    step: int
    active_bytes: int
    num_arrays: int
    resident_bytes: int
    state_bytes: int


@dataclass(slots=True)
class Chat:
    """One conversation: its tokens so far and the request that runs."""

    token_ids: list[int]
    request_id: str = ""
    num_turns: int = 0


@dataclass(frozen=True, slots=True)
class Turn:
    """A finished answer. ``num_old_tokens``: what an earlier turn had computed of the prompt."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    num_old_tokens: int
    num_cached_tokens: int

    @property
    def recomputed_share(self) -> float:
        """How much of what was computed before is computed again."""
        return 1.0 - self.num_cached_tokens / self.num_old_tokens


class LongChats:
    """Eight chats at a time; each begins with a prompt of 100 to 200 tokens and goes on until its context is full."""

    def __init__(self, loaded: LoadedModel, seed: int = 0) -> None:
        self._draw, self._vocab_size = random.Random(seed), loaded.facts.vocab_size
        self._runner = MlxModelRunner(
            loaded,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            slots=SLOTS,
            max_chunk_tokens=64,
            num_state_snapshots=NUM_SNAPSHOTS,
        )
        config = SchedulerConfig(
            SLOTS,
            NUM_BLOCKS,
            BLOCK_SIZE,
            MAX_MODEL_LEN,
            max_chunk_tokens=64,
            max_steps_in_flight=2,
            num_state_snapshots=NUM_SNAPSHOTS,
        )
        self._core = EngineCore(Scheduler(config), self._runner, lambda: 0.0)
        self._chats = [Chat(self._tokens(self._draw.randint(100, 200))) for _ in range(SLOTS)]
        self._answers: dict[str, list[int]] = {}
        self._num_asked = 0
        self.turns: list[Turn] = []
        self.samples: list[Sample] = []
        for chat in self._chats:
            self._ask(chat)

    def run(self, num_steps: int) -> None:
        """Steps of chats, sampling what is held."""
        for step in range(1, num_steps + 1):
            for output in self._core.step():
                assert output.error is None, output.error
                self._answers[output.request_id] += output.token_ids
                if output.finish_reason is not None:
                    self._next_turn(output.request_id, output.num_cached_tokens)
            if step % _SAMPLE_EVERY_STEPS == 0:
                self.samples.append(self._sample(step))

    def close(self) -> None:
        """Free the pools."""
        self._core.close()

    def _next_turn(self, request_id: str, num_cached_tokens: int) -> None:
        chat = next(chat for chat in self._chats if chat.request_id == request_id)
        answer = self._answers.pop(request_id)
        num_old_tokens = len(chat.token_ids) - _TURN_TOKENS if chat.num_turns else 0
        self.turns.append(Turn(tuple(chat.token_ids), tuple(answer), num_old_tokens, num_cached_tokens))
        chat.num_turns += 1
        chat.token_ids = [*chat.token_ids, *answer, *self._tokens(_TURN_TOKENS)]
        if len(chat.token_ids) > MAX_MODEL_LEN - 64:
            chat.token_ids, chat.num_turns = self._tokens(self._draw.randint(100, 200)), 0
        self._ask(chat)

    def _ask(self, chat: Chat) -> None:
        chat.request_id = f"c{self._num_asked}"
        self._num_asked += 1
        sampling = SamplingParams(max_tokens=self._draw.randint(20, 50), temperature=0.0, ignore_eos=True)
        self._core.add(EngineRequest(chat.request_id, tuple(chat.token_ids), sampling, 0.0))
        self._answers[chat.request_id] = []

    def _tokens(self, count: int) -> list[int]:
        return [self._draw.randrange(self._vocab_size) for _ in range(count)]

    def _sample(self, step: int) -> Sample:
        gc.collect()
        num_arrays = sum(isinstance(thing, mx.array) for thing in gc.get_objects())
        return Sample(step, mx.get_active_memory(), num_arrays, _resident_bytes(), self._runner.state_bytes)


def check(chats: LongChats, loaded: LoadedModel) -> dict[str, float | int]:
    """Judge answers, memory and recomputed tokens. Returns what was seen; raises AssertionError."""
    distances = [distance_from_best(loaded.model, turn.prompt, turn.answer) for turn in chats.turns]
    assert max(distances) <= TOLERANCE, "an answer is not what it is alone"
    later = [turn for turn in chats.turns if turn.num_old_tokens]
    # The first samples still see prompts of a first turn and functions that compile.
    steady = chats.samples[len(chats.samples) // 3 :]
    assert len({sample.state_bytes for sample in steady}) == 1, "recurrent state grows"
    seen = {
        "turns": len(chats.turns),
        "later_turns": len(later),
        "worst_recomputed_share": max(turn.recomputed_share for turn in later),
        "mean_recomputed_share": sum(turn.recomputed_share for turn in later) / len(later),
        "worst_distance": max(distances),
        "state_bytes": steady[0].state_bytes,
        "active_bytes_least": min(sample.active_bytes for sample in steady),
        "active_bytes_most": max(sample.active_bytes for sample in steady),
        "arrays_least": min(sample.num_arrays for sample in steady),
        "arrays_most": max(sample.num_arrays for sample in steady),
        "resident_bytes_first": steady[0].resident_bytes,
        "resident_bytes_last": steady[-1].resident_bytes,
    }
    assert seen["worst_recomputed_share"] < 0.10, seen
    _assert_flat([sample.active_bytes for sample in steady], "memory")
    _assert_flat([sample.num_arrays for sample in steady], "the number of live arrays")
    return seen


def _assert_flat(values: Sequence[int], what: str) -> None:
    half = len(values) // 2
    early, late = max(values[:half]), max(values[half:])
    assert late <= 1.02 * early, f"{what} grows: {early:,} to {late:,}"


def _resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    except OSError:
        return 0


def main() -> int:
    """Run and print one JSON object."""
    parser = argparse.ArgumentParser(description="Chats of several turns on a hybrid model at 8 rows.")
    parser.add_argument("--module", default="qwen3_next")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--samples", action="store_true", help="print every sample, too")
    options = parser.parse_args()
    loaded = prove_form(tiny_model(options.module))
    chats = LongChats(loaded)
    chats.run(options.steps)
    for sample in chats.samples if options.samples else ():
        print(json.dumps(asdict(sample)))
    print(json.dumps({"module": options.module, "form": loaded.form.value, **check(chats, loaded)}))
    chats.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
