"""Chains of hashes: equal beginnings have equal names, different ones never do."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.protocol import PrefixChain
from serve_app.routing.keys import (
    LINK_BYTES,
    NUM_FIRST_LINKS,
    NUM_LAST_LINKS,
    chat_prefix,
    place_of,
    prompts_prefix,
    salted,
)

SYSTEM = {"role": "system", "content": "You are terse."}
ROLES = st.sampled_from(["user", "assistant"])
TEXTS = st.text(max_size=20)
MESSAGES = st.lists(st.fixed_dictionaries({"role": ROLES, "content": TEXTS}), max_size=6)


def message(text: str, role: str = "user") -> dict[str, str]:
    return {"role": role, "content": text}


def num_shared(one: PrefixChain, other: PrefixChain) -> int:
    return len(set(one.hashes) & set(other.hashes))


@given(MESSAGES, MESSAGES)
def test_a_later_turn_repeats_the_chain_of_the_earlier_and_goes_on(said: list[Any], more: list[Any]) -> None:
    before, after = chat_prefix([SYSTEM, *said]), chat_prefix([SYSTEM, *said, *more])
    assert after.hashes[: len(before.hashes)] == before.hashes
    assert after.num_tokens[: len(before.num_tokens)] == before.num_tokens
    assert len(after.hashes) == len(before.hashes) + len(more)


@given(MESSAGES, MESSAGES)
def test_chains_share_exactly_the_messages_that_are_alike(one: list[Any], other: list[Any]) -> None:
    num_alike = 0
    while num_alike < min(len(one), len(other)) and one[num_alike] == other[num_alike]:
        num_alike += 1
    assert num_shared(chat_prefix(one), chat_prefix(other)) == num_alike


@given(st.lists(TEXTS, min_size=2, max_size=2), st.lists(TEXTS, min_size=2, max_size=2))
def test_text_cannot_move_from_one_message_to_the_next_unnoticed(one: list[str], other: list[str]) -> None:
    chains = [chat_prefix([message(text) for text in texts]) for texts in (one, other)]
    assert (chains[0] == chains[1]) == (one == other)


def test_tools_and_system_are_a_part_of_their_own_and_come_first() -> None:
    tool = {"type": "function", "function": {"name": "search"}}
    plain, with_tool = chat_prefix([SYSTEM, message("hi")]), chat_prefix([SYSTEM, message("hi")], [tool])
    assert num_shared(plain, with_tool) == 0
    another = chat_prefix([SYSTEM, message("other")], [tool])
    assert with_tool.hashes[0] == another.hashes[0]
    assert num_shared(with_tool, another) == 1


def test_the_order_of_keys_within_a_message_does_not_matter() -> None:
    assert chat_prefix([{"role": "user", "content": "x"}]) == chat_prefix([{"content": "x", "role": "user"}])


@pytest.mark.parametrize("head", [[], [SYSTEM], [message("s" * 3 * LINK_BYTES, "system")]])
def test_every_turn_of_a_conversation_has_the_same_place(head: list[Any]) -> None:
    first = [*head, message("hello")]
    chains = [chat_prefix(first), chat_prefix([*first, message("a", "assistant"), message("b")])]
    assert chains[0].conversation == chains[1].conversation
    assert chains[0].conversation != chat_prefix([*head, message("bye")]).conversation
    assert place_of("", chains[0]) == chains[0].conversation
    assert place_of("session-1", chains[0]) == place_of("session-1", PrefixChain()) != place_of("session-2", chains[0])


def test_a_document_at_the_start_of_a_long_message_is_shared() -> None:
    document = "d" * 5 * LINK_BYTES
    one, other = (chat_prefix([message(document + question)]) for question in ("who?", "when?"))
    assert num_shared(one, other) == 5
    assert one.num_tokens[4] == pytest.approx(5 * LINK_BYTES / 4, rel=0.01)


def test_a_very_long_conversation_keeps_its_first_and_its_last_links() -> None:
    said = [message(str(index)) for index in range(200)]
    before, after = chat_prefix(said), chat_prefix([*said, message("a", "assistant"), message("next")])
    assert len(after.hashes) == NUM_FIRST_LINKS + NUM_LAST_LINKS
    assert before.hashes[:NUM_FIRST_LINKS] == after.hashes[:NUM_FIRST_LINKS]
    assert before.hashes[-1] in after.hashes
    assert list(after.num_tokens) == sorted(after.num_tokens)


def test_plain_prompts_share_their_beginnings_and_all_of_them_count() -> None:
    text = "p" * 3 * LINK_BYTES
    one = prompts_prefix([text + "one"])
    assert num_shared(one, prompts_prefix([text + "two", "more"])) == 3
    assert prompts_prefix([text, text]).num_prompt_tokens == 2 * prompts_prefix([text]).num_prompt_tokens
    ids = prompts_prefix([tuple(range(1000))])
    assert ids.num_prompt_tokens == 1000
    assert prompts_prefix([]) == PrefixChain()


def test_a_salt_gives_everything_another_name_and_none_leaves_it() -> None:
    names = chat_prefix([message("x"), message("y")]).hashes
    assert salted(names, "") == names
    assert not set(salted(names, "anna")) & set(names)
    assert not set(salted(names, "anna")) & set(salted(names, "ben"))


@pytest.mark.parametrize("content", ["\ud800", "ж" * 10, None, [{"type": "text", "text": "x"}]])
def test_any_content_has_a_name(content: Any) -> None:
    assert chat_prefix([{"role": "user", "content": content}]).hashes
