"""Steps that carry guesses give the very tokens that steps without them give, greedy and sampled, on real models."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from engine.batch import BatchRow, SampledToken
from engine.errors import StepFailedError
from engine.interfaces import SchedulerStats
from engine.mlx_backend.loaded_model import LoadedModel
from engine.mlx_backend.speculation import sampling_places, verify
from engine.model_source import resolve_model
from engine.request import EngineRequest, SamplingParams
from engine.scheduler.prompt_lookup import Guess, PromptLookup
from engine.scheduler.speculation import DraftCosts
from engine.text.tokenizer import load_tokenizer
from tests.mlx.test_scheduler_equality import Engine
from tests.mlx.tiny_models import tiny_model

GREEDY = SamplingParams(temperature=0.0)


def row_with(*drafts: int, request_id: str = "r") -> BatchRow:
    return BatchRow(request_id, 0, 4, 1 + len(drafts), [1] * 5, [0], 5, GREEDY, 7, True, 3, draft_token_ids=drafts)


def test_every_guess_has_a_place_with_the_random_numbers_of_its_own_index() -> None:
    places = sampling_places(row_with(8, 9))
    assert [place.output_index for place in places] == [3, 4, 5]
    assert len({place.request_id for place in places}) == 3
    assert {place.seed for place in places} == {7}
    assert sampling_places(row_with()) == [row_with()]


@pytest.mark.parametrize(
    ("sampled", "further"), [((8, 9, 5), (9, 5)), ((8, 4, 5), (4,)), ((7, 9, 5), ()), ((8, 9, 9), (9, 9))]
)
def test_tokens_count_up_to_the_first_wrong_guess(sampled: tuple[int, ...], further: tuple[int, ...]) -> None:
    row = row_with(8, 9)
    places = [place.request_id for place in sampling_places(row)]
    tokens = {name: SampledToken(token) for name, token in zip(places, sampled, strict=True)}
    verified = verify([row], {**tokens, "other": SampledToken(1)}, {})
    assert verified.tokens == {"r": SampledToken(sampled[0]), "other": SampledToken(1)}
    assert verified.further_tokens == {"r": tuple(SampledToken(token) for token in further)}


def test_a_place_that_fails_fails_its_row() -> None:
    row, error = row_with(8, 9), StepFailedError("no numbers")
    first, second, third = (place.request_id for place in sampling_places(row))
    verified = verify([row], {first: SampledToken(8), third: SampledToken(5)}, {second: error})
    assert verified == ({}, {"r": error}, {})


@pytest.fixture
def guesses_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether guesses are tried must not depend on this machine's speed."""
    monkeypatch.setattr(DraftCosts, "ratio", lambda *_: 1.0)


def requests_for(prompts: list[tuple[int, ...]], num_tokens: int) -> list[EngineRequest]:
    settings = (
        {"temperature": 0.0},
        {"temperature": 0.7, "seed": 3, "num_logprobs": 2},
        {"temperature": 0.5, "top_p": 0.8, "seed": 4},
        {"temperature": 0.0, "repetition_penalty": 1.05},
    )
    return [
        EngineRequest(f"r{index}", prompt, SamplingParams(max_tokens=num_tokens, ignore_eos=True, **setting), 0.0)
        for index, (prompt, setting) in enumerate(zip(prompts, settings, strict=False))
    ]


def run(
    loaded: LoadedModel, prompts: list[tuple[int, ...]], num_tokens: int, max_draft_tokens: int
) -> tuple[list[tuple[int, ...]], SchedulerStats]:
    engine = Engine(loaded, slots=8, max_draft_tokens=max_draft_tokens)
    answers = engine.run(requests_for(prompts, num_tokens))
    stats = engine.stats
    engine.close()
    return answers, stats


def guess_from(texts: list[tuple[int, ...]]) -> Callable[[PromptLookup, Sequence[int], int], Guess]:
    """Guesses that are right but for every fifth position: random models do not repeat themselves."""

    def guess(_: PromptLookup, token_ids: Sequence[int], max_tokens: int) -> Guess:
        text = next(text for text in texts if text[: len(token_ids)] == tuple(token_ids))
        positions = range(len(token_ids), min(len(text), len(token_ids) + max_tokens))
        return tuple(text[position] if position % 5 else 199 - text[position] for position in positions)

    return guess


@pytest.mark.usefixtures("guesses_are_free")
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "qwen3_moe", "gpt_oss"])
def test_tiny_models_answer_alike(monkeypatch: pytest.MonkeyPatch, architecture: str) -> None:
    rng = np.random.default_rng(2)
    prompts = [tuple(rng.integers(5, 200, length).tolist()) for length in (9, 30, 17, 24)]
    loaded = tiny_model(architecture)
    plain, _ = run(loaded, prompts, 60, 0)
    texts = [prompt + answer for prompt, answer in zip(prompts, plain, strict=True)]
    monkeypatch.setattr(PromptLookup, "guess", guess_from(texts))
    guessing, stats = run(loaded, prompts, 60, 8)
    assert guessing == plain
    assert stats.num_accepted_tokens > 50
    assert stats.num_draft_tokens > stats.num_accepted_tokens


@pytest.mark.usefixtures("guesses_are_free")
def test_the_demo_model_quotes_its_prompt_in_fewer_steps(demo: LoadedModel) -> None:
    tokenizer = load_tokenizer(resolve_model("demo"))
    text = "The office orders 24 boxes of A4 paper, 6 boxes of pens and 12 notebooks from Miller & Sons every March."
    question = f"Repeat this sentence three times, word for word: {text}"
    prompts = [tuple(tokenizer.apply_chat_template([{"role": "user", "content": question}]))]
    plain, plain_stats = run(demo, prompts, 30, 0)
    guessing, stats = run(demo, prompts, 30, 8)
    assert guessing == plain
    assert "24 boxes of A4 paper, 6 boxes of pens" in tokenizer.decode(guessing[0])
    assert stats.num_steps < 0.6 * plain_stats.num_steps
