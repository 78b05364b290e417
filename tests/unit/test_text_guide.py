"""Thinking, its budget, and the grammar after it."""

from __future__ import annotations

import random

import numpy as np
import pytest

from engine.request import Grammar, SamplingParams, Thinking
from engine.text.guide import AnswerGuide
from engine.text.structured import GrammarCompiler
from tests.core_fakes import EOS, letter_tokenizer

START, END = ord("<"), tuple(b"</t>")
COMPILER = GrammarCompiler(letter_tokenizer(), vocab_size=257)


def guide(grammar: Grammar | None = None, *, is_open: bool = False, budget_tokens: int | None = None) -> AnswerGuide:
    thinking = Thinking((START,), END, is_open, budget_tokens)
    return AnswerGuide(SamplingParams(grammar=grammar, thinking=thinking), COMPILER)


def allowed(guide: AnswerGuide) -> set[int]:
    masks = np.zeros((2, COMPILER.mask_width), dtype=np.int32)
    guide.fill_mask(masks, 1)
    assert not masks[0].any()
    bits = np.unpackbits(masks[1].view(np.uint8), bitorder="little")[:257]
    return set(np.flatnonzero(bits).tolist())


def say(guide: AnswerGuide, text: bytes) -> None:
    for token_id in text:
        assert token_id in allowed(guide)
        guide.accept(token_id)


EVERYTHING = set(range(257))
YES = Grammar("choice", '["yes", "no"]')


def test_without_thinking_the_grammar_holds_from_the_first_token() -> None:
    asked = AnswerGuide(SamplingParams(grammar=YES), COMPILER)
    assert allowed(asked) == set(b"yn")
    say(asked, b"yes")
    assert allowed(asked) == {EOS}


def test_a_model_may_think_first_and_must_not_end_there() -> None:
    asked = guide(YES)
    assert allowed(asked) == {*b"yn", START}
    say(asked, b"<hm")
    assert allowed(asked) == EVERYTHING - {EOS}
    say(asked, b"</t>")
    assert allowed(asked) == set(b"yn")


def test_an_answer_without_thinking_cannot_begin_to_think_later() -> None:
    asked = guide(YES)
    say(asked, b"y")
    assert allowed(asked) == set(b"e")


@pytest.mark.parametrize("budget", [0, 1, 5])
@pytest.mark.parametrize("is_open", [True, False])
def test_a_spent_budget_writes_the_end_of_thinking(budget: int, is_open: bool) -> None:
    asked = guide(YES, is_open=is_open, budget_tokens=budget)
    if not is_open:
        say(asked, b"<")
    say(asked, b"x" * budget)
    for token_id in END:
        assert allowed(asked) == {token_id}
        asked.accept(token_id)
    assert allowed(asked) == set(b"yn")


def test_a_budget_without_a_grammar_leaves_the_answer_free() -> None:
    asked = guide(is_open=True, budget_tokens=3)
    assert allowed(asked) == EVERYTHING
    say(asked, b"abc")
    say(asked, b"</t>")
    assert allowed(asked) == EVERYTHING


def test_random_walks_end_inside_the_grammar() -> None:
    for seed in range(50):
        draw = random.Random(seed)
        asked = guide(YES, budget_tokens=draw.randrange(20))
        said: list[int] = []
        while not said or said[-1] != EOS:
            said.append(draw.choice(sorted(allowed(asked))))
            asked.accept(said[-1])
        text = bytes(said[:-1])
        assert text.rsplit(bytes(END), 1)[-1] in (b"yes", b"no")
