"""Workloads: the same seed gives the same sessions, lengths follow their distributions, files are read."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from engine.errors import ConfigError
from serve_app.bench.errors import BenchError
from serve_app.bench.prompts import PromptWriter
from serve_app.bench.workload_files import DEFAULT_WORKLOAD, WORKLOAD_FOLDER, load_workload
from serve_app.capacity.lengths import Lengths
from serve_app.capacity.workload import SessionClass, SharedPrefix, Workload, plan_session, plan_sessions

ADAPTER: TypeAdapter[Lengths] = TypeAdapter(Lengths)
AGENTS = Workload(
    name="agents",
    sessions=(
        SessionClass.model_validate(
            {
                "name": "agent",
                "prompt_tokens": 40,
                "output_tokens": 5,
                "calls": 3,
                "new_tokens": 7,
                "think_s": 0.5,
                "shared_prefix": {"tokens": 25, "groups": 1},
            }
        ),
    ),
)


@pytest.mark.parametrize(
    "values",
    [
        300,
        {"kind": "uniform", "low": 100, "high": 500},
        {"kind": "log_uniform", "low": 50, "high": 1500},
        {"kind": "lognormal", "mean": 700, "cv": 0.6},
        {"kind": "lognormal", "mean": 700, "cv": 0},
        {"kind": "mixture", "values": {6000: 0.75, 24000: 0.25}},
    ],
)
def test_draws_have_the_stated_moments(values: object) -> None:
    lengths = ADAPTER.validate_python(values)
    rng = random.Random(1)
    draws = [lengths.draw(rng) for _ in range(40_000)]
    assert sum(draws) / len(draws) == pytest.approx(lengths.mean, rel=0.02)
    assert sum(x * x for x in draws) / len(draws) == pytest.approx(lengths.second_moment, rel=0.05)
    assert lengths.scaled(0.5).mean == pytest.approx(lengths.mean / 2)


def test_a_session_depends_on_its_own_index_alone() -> None:
    few, many = plan_sessions(DEFAULT_WORKLOAD, "7", 3), plan_sessions(DEFAULT_WORKLOAD, "7", 50)
    assert many[:3] == few
    assert plan_session(DEFAULT_WORKLOAD, "7", 40) == many[40]
    assert plan_sessions(DEFAULT_WORKLOAD, "8", 3) != few


def test_later_calls_repeat_the_conversation_and_add_to_it() -> None:
    first, second, third = plan_session(AGENTS, "1", 0).calls
    assert (first.prompt_tokens, first.new_tokens, first.think_s) == (40, 40, 0.0)
    assert (second.prompt_tokens, second.new_tokens, second.think_s) == (52, 12, 0.5)
    assert third.prompt_tokens == 64


def test_a_shared_head_is_the_same_text_in_every_session_that_has_it() -> None:
    prefix = SharedPrefix(tokens=30, groups=2, share=0.5)
    each = DEFAULT_WORKLOAD.sessions[0].model_copy(update={"shared_prefix": prefix})
    workload = DEFAULT_WORKLOAD.model_copy(update={"sessions": (each,)})
    heads: dict[int | None, set[str]] = {}
    for session in plan_sessions(workload, "7", 60):
        prompt = PromptWriter("7").write(workload, session).calls[0].body["prompt"]
        heads.setdefault(session.prefix_group, set()).add(" ".join(prompt.split()[:30]))
        assert len(prompt.split()) == session.calls[0].prompt_tokens
    assert set(heads) == {None, 0, 1}
    assert len(heads[0]) == len(heads[1]) == 1
    assert heads[0] != heads[1]
    assert len(heads[None]) > 10


def test_a_chat_grows_by_answer_and_question() -> None:
    calls = PromptWriter("7").write(AGENTS, plan_session(AGENTS, "7", 0)).calls
    assert [len(call.body["messages"]) for call in calls] == [2, 4, 6]
    assert calls[1].body["messages"][:2] == calls[0].body["messages"]
    assert [m["role"] for m in calls[1].body["messages"]] == ["system", "user", "assistant", "user"]
    for call in calls:
        assert sum(len(m["content"].split()) for m in call.body["messages"]) == call.plan.prompt_tokens


@pytest.mark.parametrize("tokens_per_word", [1.0, 1.7, 0.6])
def test_lengths_are_corrected_by_the_tokenizer(tokens_per_word: float) -> None:
    def count(text: str) -> int:
        return round(len(text.split()) * tokens_per_word)

    writer = PromptWriter("7", count)
    for num_tokens in (5, 50, 777):
        assert abs(count(writer.text("x", num_tokens)) - num_tokens) <= 1
    assert writer.text("x", 50) == PromptWriter("7", count).text("x", 50)


def test_the_default_workload_is_the_one_in_the_file() -> None:
    assert load_workload(str(WORKLOAD_FOLDER / "ladder.yaml")) == DEFAULT_WORKLOAD == load_workload(None)


@pytest.mark.parametrize("path", sorted(WORKLOAD_FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_workload_file_can_be_planned_and_written(path: Path) -> None:
    workload = load_workload(path.stem)
    assert workload.name == path.stem
    assert workload.description
    for session in plan_sessions(workload.scaled(0.1), "7", 20):
        assert len(PromptWriter("7").write(workload, session).calls) == len(session.calls)


@pytest.mark.parametrize("name", [p.stem for p in WORKLOAD_FOLDER.glob("demo-*.yaml")])
def test_demo_workloads_fit_the_demo_models_context(name: str) -> None:
    calls = [call for session in plan_sessions(load_workload(name), "7", 2000) for call in session.calls]
    assert max(call.prompt_tokens + call.output_tokens for call in calls) < 8192 - 256


def test_an_unknown_workload_is_answered_with_the_known_ones() -> None:
    with pytest.raises(BenchError, match="ladder"):
        load_workload("no-such")


def test_a_misspelt_key_names_the_closest_one(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\nsessions:\n  - {name: a, prompt_tokens: 5, output_token: 4}\n")
    with pytest.raises(ConfigError, match="output_token"):
        load_workload(str(path))
