"""What guesses gain on this machine: `python -m tests.perf.speculation`.

Alternating pairs on the demo model, one slot of four busy. Prints, for a text that quotes its prompt and for one that
does not, the seconds with and without guesses.
"""

from __future__ import annotations

import time
from statistics import median

import engine.mlx_backend.mlx_lm_parts  # noqa: F401  (the BLAS before MLX)
from engine.core.engine_core import EngineCore
from engine.mlx_backend.loaded_model import LoadedModel
from engine.mlx_backend.loader import load_model
from engine.mlx_backend.model_runner import MlxModelRunner
from engine.model_source import resolve_model
from engine.request import EngineRequest, SamplingParams
from engine.scheduler import Scheduler, SchedulerConfig
from engine.scheduler.speculation import MAX_DRAFT_TOKENS
from engine.text.tokenizer import load_tokenizer

NUM_TOKENS = 120
NUM_PAIRS = 3
ORDERS = "\n".join(
    f"{number}. item-{number * 37 % 100:02d}, {number * 13 % 17} boxes, Miller & Sons" for number in range(8)
)
QUESTIONS = {
    "quotes its prompt": f"Copy this list, word for word:\n{ORDERS}",
    "does not": "Write a short story about a lighthouse keeper and his dog.",
}


def make_engine(loaded: LoadedModel, max_draft_tokens: int) -> EngineCore:
    runner = MlxModelRunner(loaded, num_blocks=200, block_size=16, slots=4, max_chunk_tokens=128)
    config = SchedulerConfig(
        4, 200, 16, 2048, max_steps_in_flight=runner.max_steps_in_flight, max_draft_tokens=max_draft_tokens
    )
    return EngineCore(Scheduler(config), runner, time.monotonic)


def answer_s(core: EngineCore, request: EngineRequest) -> tuple[float, int]:
    """Seconds from the first token to the last, and the steps of the whole."""
    core.add(request)
    start_s, num_steps = None, core.snapshot().scheduler.num_steps
    while core.has_work:
        outputs = core.step()
        if start_s is None and outputs:
            start_s = time.perf_counter()
    assert start_s is not None
    return time.perf_counter() - start_s, core.snapshot().scheduler.num_steps - num_steps


def main() -> None:
    """Measure and print."""
    source = resolve_model("demo")
    loaded, tokenizer = load_model(source, backend="cpu", parity="off"), load_tokenizer(source)
    engines = {name: make_engine(loaded, number) for name, number in (("plain", 0), ("guessing", MAX_DRAFT_TOKENS))}
    for kind, question in QUESTIONS.items():
        prompt = tuple(tokenizer.apply_chat_template([{"role": "user", "content": question}]))
        times: dict[str, list[float]] = {name: [] for name in engines}
        steps = dict.fromkeys(engines, 0)
        for index in range(NUM_PAIRS):
            for name, core in engines.items():
                sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
                taken_s, steps[name] = answer_s(core, EngineRequest(f"{kind}-{name}-{index}", prompt, sampling, 0.0))
                times[name].append(taken_s)
        plain_s, guessing_s = median(times["plain"]), median(times["guessing"])
        stats = engines["guessing"].snapshot().scheduler
        print(
            f"{kind}: {plain_s:.2f} s in {steps['plain']} steps; with guesses {guessing_s:.2f} s in "
            f"{steps['guessing']} steps ({plain_s / guessing_s:.2f} times as fast); "
            f"{stats.num_accepted_tokens} of {stats.num_draft_tokens} guesses came true so far"
        )
    for core in engines.values():
        core.close()


if __name__ == "__main__":
    main()
