"""What the scheduler does to a request never shows in its answer: the real demo model in fp32, on the CPU.

Alone = in company = read in small chunks = preempted = found in the prefix cache = forked, token for token; and a
sampled answer depends on its own seed only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import count

import pytest

from engine.core.engine_core import EngineCore
from engine.interfaces import SchedulerStats
from engine.mlx_backend.loaded_model import LoadedModel
from engine.mlx_backend.model_runner import MlxModelRunner
from engine.model_source import resolve_model
from engine.request import EngineRequest, SamplingParams, TokenOutput
from engine.scheduler import Scheduler, SchedulerConfig
from engine.text.tokenizer import load_tokenizer

NUM_TOKENS = 8
BLOCK_SIZE = 16
QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about rain.",
    "Who wrote Hamlet, and when was it first performed? Name a theatre, too, if you know it.",
    "How do I cook rice?",
    "List the planets of the solar system from the innermost to the outermost, one to a line, and nothing else.",
)
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.9, top_p=0.95, ignore_eos=True)


class Engine:
    """Scheduler and MLX runner, stepped by the test."""

    def __init__(self, loaded: LoadedModel, *, num_blocks: int = 160, slots: int = 4, **config: object) -> None:
        max_chunk_tokens = int(str(config.setdefault("max_chunk_tokens", 128)))
        runner = MlxModelRunner(
            loaded, num_blocks=num_blocks, block_size=BLOCK_SIZE, slots=slots, max_chunk_tokens=max_chunk_tokens
        )
        config["max_steps_in_flight"] = runner.max_steps_in_flight
        # No chunk is cut for its time: what is preempted when would depend on the machine's speed.
        settings = SchedulerConfig(slots, num_blocks, BLOCK_SIZE, 2048, target_stall_s=1e3, **config)  # type: ignore[arg-type]
        ticks = count()
        self.scheduler = Scheduler(settings)
        self._core = EngineCore(self.scheduler, runner, lambda: float(next(ticks)))
        self._outputs: dict[str, list[TokenOutput]] = {}

    def add(self, requests: Iterable[EngineRequest]) -> None:
        for request in requests:
            self._core.add(request)
            self._outputs[request.request_id] = []

    def step(self) -> None:
        for output in self._core.step():
            self._outputs[output.request_id].append(output)
        self.scheduler.check_invariants()

    def run(self, requests: Sequence[EngineRequest]) -> list[tuple[int, ...]]:
        """Add, run to the end, and return the answers in the order of the requests."""
        self.add(requests)
        while self._core.has_work:
            self.step()
        return [self.answer(request.request_id) for request in requests]

    def answer(self, request_id: str) -> tuple[int, ...]:
        return tuple(token for output in self._outputs[request_id] for token in output.token_ids)

    def num_cached_tokens(self, request_id: str) -> int:
        return self._outputs[request_id][-1].num_cached_tokens

    @property
    def stats(self) -> SchedulerStats:
        return self.scheduler.stats(0.0)

    def close(self) -> None:
        self._core.close()


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    tokenizer = load_tokenizer(resolve_model("demo"))
    return [tuple(tokenizer.apply_chat_template([{"role": "user", "content": question}])) for question in QUESTIONS]


def ask(prompts: Iterable[tuple[int, ...]], name: str = "r", *, greedy: bool = False) -> list[EngineRequest]:
    """One request per prompt: every other one sampled, with its own seed, unless all are to be greedy."""
    return [
        EngineRequest(f"{name}{i}", prompt, replace(SAMPLED, seed=i) if i % 2 and not greedy else GREEDY, 0.0)
        for i, prompt in enumerate(prompts)
    ]


@pytest.fixture(scope="module")
def alone(demo: LoadedModel, prompts: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    engine = Engine(demo, slots=1, prefix_cache="off")
    answers = [engine.run([request])[0] for request in ask(prompts)]
    engine.close()
    assert all(len(answer) == NUM_TOKENS for answer in answers)
    return answers


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({"prefix_cache": "off"}, id="in company"),
        pytest.param({"slots": 3, "max_chunk_tokens": 7}, id="chunks of 7"),
        pytest.param({"slots": 5, "max_chunk_tokens": 29}, id="chunks of 29"),
    ],
)
def test_company_and_chunks_do_not_show(
    demo: LoadedModel,
    prompts: list[tuple[int, ...]],
    alone: list[tuple[int, ...]],
    config: dict[str, object],
) -> None:
    engine = Engine(demo, **config)  # type: ignore[arg-type]
    answers = engine.run(ask(prompts))
    engine.close()
    assert answers == alone


@pytest.mark.parametrize("prefix_cache", ["shared", "off"])
def test_preemption_does_not_show(
    demo: LoadedModel,
    prompts: list[tuple[int, ...]],
    alone: list[tuple[int, ...]],
    prefix_cache: str,
) -> None:
    """Somebody is taken off every third step."""
    engine = Engine(demo, num_blocks=24, admission_watermark_tokens=0, prefix_cache=prefix_cache)
    requests = ask(prompts)
    engine.add(requests)
    for step in count():
        engine.step()
        if not engine.scheduler.has_unfinished:
            break
        if step % 3 == 2:
            engine.scheduler.preempt_one(0.0)
    answers = [engine.answer(request.request_id) for request in requests]
    num_preemptions, num_output = engine.stats.num_preemptions, engine.stats.num_output_tokens
    engine.close()
    assert num_preemptions >= 3
    assert num_output == len(prompts) * NUM_TOKENS, "a token was sampled twice"
    assert answers == alone


def test_a_prefix_hit_does_not_show(
    demo: LoadedModel, prompts: list[tuple[int, ...]], alone: list[tuple[int, ...]]
) -> None:
    engine = Engine(demo)
    whole_blocks = [prompt[: len(prompt) // BLOCK_SIZE * BLOCK_SIZE] for prompt in prompts]
    engine.run(ask(whole_blocks, "first", greedy=True))
    requests = ask(prompts)
    assert engine.run(requests) == alone
    # A prompt that is cached to its last token computes that one in a copy of its last block.
    again = ask(whole_blocks, "again", greedy=True)
    assert engine.run(again) == [engine.answer(f"first{i}") for i in range(len(prompts))]
    hits = [engine.num_cached_tokens(request.request_id) for request in (*requests, *again)]
    engine.close()
    assert hits == [len(p) for p in whole_blocks] + [len(p) - 1 for p in whole_blocks]


@pytest.mark.parametrize("prefix_cache", ["shared", "off"])
def test_forks_answer_as_they_would_alone(demo: LoadedModel, prompts: list[tuple[int, ...]], prefix_cache: str) -> None:
    prompt = prompts[2]
    seeds = range(3)
    lonely = Engine(demo, slots=1, prefix_cache="off")
    expected = [lonely.run([EngineRequest(f"a{seed}", prompt, replace(SAMPLED, seed=seed), 0.0)])[0] for seed in seeds]
    lonely.close()
    engine = Engine(demo, prefix_cache=prefix_cache)
    forks = [
        EngineRequest(f"n{seed}", prompt, replace(SAMPLED, seed=seed), 0.0, fork_of="n0" if seed else None)
        for seed in seeds
    ]
    answers = engine.run(forks)
    hits = [engine.num_cached_tokens(fork.request_id) for fork in forks[1:]]
    engine.close()
    assert answers == expected
    assert len(set(answers)) > 1
    assert hits == [len(prompt) - 1] * 2


def test_ten_questions_about_one_document(demo: LoadedModel) -> None:
    """1,200 tokens are read once; the second to the tenth compute under 5% of their prompts."""
    tokenizer = load_tokenizer(resolve_model("demo"))
    text = " ".join(f"Section {n}: the office closes at {n % 12} and opens again at {n % 7}." for n in range(90))
    document = tuple(tokenizer.encode(text))[:1200]
    asked = [
        EngineRequest(
            f"q{n}", (*document, *tokenizer.encode(f"\n\nQuestion {n}: when does section {n} open?")), GREEDY, 0.0
        )
        for n in range(10)
    ]
    engine = Engine(demo, slots=10, num_blocks=130, max_chunk_tokens=256)
    engine.run(asked[:1])
    num_before = engine.stats.num_blocks_cached
    engine.run(asked[1:])
    hits = [engine.num_cached_tokens(request.request_id) for request in asked[1:]]
    stats = engine.stats
    engine.close()
    assert len(document) == 1200
    assert all(
        len(r.prompt_token_ids) - hit < 0.05 * len(r.prompt_token_ids) for r, hit in zip(asked[1:], hits, strict=True)
    )
    assert stats.num_blocks_cached - num_before <= 9 * 3, "only the tails took blocks"
