"""Greedy text of the demo model: mlx-lm's own single stream = packed steps at 1, 3 and 8 rows."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step

from engine.mlx_backend.loaded_model import LoadedModel
from engine.mlx_backend.model_runner import MlxModelRunner
from engine.mlx_backend.probe import check_parity
from engine.model_source import resolve_model
from engine.text.tokenizer import load_tokenizer
from tests.mlx.driver import Driver, Sequence

QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about rain.",
    "List three uses of a brick.",
    "Who wrote Hamlet?",
    "How do I cook rice?",
    "What is 12 times 13?",
    "Name a large river in Africa.",
    "Translate 'good morning' into Spanish.",
    "Why is the sky blue? Answer for a child of five, in two short sentences, without using the word light.",
    "def fibonacci(n):",
    "Give me a title for a talk about office plants.",
    "What does HTTP stand for?",
    "Continue: 1, 1, 2, 3, 5,",
    "Is a tomato a fruit?",
    "Write an apology to a customer whose parcel came three days late, and offer a voucher of ten euros.",
    "List the planets.",
    "What year did the Berlin wall fall?",
    "Summarise: The meeting moved from Monday to Tuesday because two of the team were ill.",
    "Hello!",
    "Explain recursion in one sentence.",
)
NUM_TOKENS = 6


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = load_tokenizer(resolve_model("demo"))
    return [tokenizer.apply_chat_template([{"role": "user", "content": question}]) for question in QUESTIONS]


@pytest.fixture(scope="module")
def expected(demo: LoadedModel, prompts: list[list[int]]) -> list[list[int]]:
    return [
        [int(token) for token, _ in generate_step(mx.array(prompt), demo.model, max_tokens=NUM_TOKENS)]
        for prompt in prompts
    ]


@pytest.mark.parametrize("num_rows", [1, 3, 8])
def test_greedy_text_equals_mlx_lm(
    demo: LoadedModel, prompts: list[list[int]], expected: list[list[int]], num_rows: int
) -> None:
    runner = MlxModelRunner(demo, num_blocks=100, block_size=16, slots=num_rows, max_chunk_tokens=64)
    sequences = [Sequence(str(i), list(prompt)) for i, prompt in enumerate(prompts)]
    Driver(runner, 100, 16).generate(sequences, num_rows, NUM_TOKENS)
    runner.close()
    assert [sequence.output for sequence in sequences] == expected


def test_the_demo_model_passes_its_parity_check(demo: LoadedModel) -> None:
    check_parity(demo)


def test_facts_of_the_demo_model(demo: LoadedModel) -> None:
    facts = demo.facts
    assert (facts.vocab_size, facts.max_model_len, facts.num_layers) == (49152, 8192, 30)
    assert facts.kv_bytes_per_token == 46080
    assert facts.weights_bytes == 538_060_032
    assert facts.eos_token_ids == (2,)
    assert facts.compute_dtype == "float32"
    assert "BLAS" in facts.device
