"""What a request has received, what its caller has taken, and what can still be begun anew."""

from __future__ import annotations

import asyncio

import pytest

from engine.core.open_requests import OpenRequest, OpenRequests
from engine.errors import EngineDeadError
from engine.request import FinishReason, TokenOutput
from tests.core_fakes import EOS, letter_tokenizer, make_request

TOKENIZER = letter_tokenizer()


async def test_what_was_not_delivered_is_forgotten_when_it_begins_again() -> None:
    opened = OpenRequest(make_request("a"), TOKENIZER)
    opened.take(TokenOutput("a", tuple(b"old")), 1.0)
    assert not opened.has_delivered
    opened.begin_again()
    opened.take(TokenOutput("a", tuple(b"new"), finish_reason=FinishReason.LENGTH), 2.0)
    delta = await opened.next_delta()
    assert (delta.text, delta.num_output_tokens) == ("new", 3)
    assert opened.has_delivered
    with pytest.raises(AssertionError):
        opened.begin_again()


async def test_a_caller_that_waits_goes_on_waiting_when_it_begins_again() -> None:
    opened = OpenRequest(make_request("a"), TOKENIZER)
    waiting = asyncio.create_task(opened.next_delta())
    await asyncio.sleep(0)
    opened.take(TokenOutput("a", tuple(b"old")), 1.0)
    opened.begin_again()
    await asyncio.sleep(0)
    assert not waiting.done()
    opened.take(TokenOutput("a", tuple(b"new")), 2.0)
    assert (await waiting).text == "new"


async def test_deltas_before_an_error_are_delivered_first() -> None:
    opened = OpenRequest(make_request("a"), TOKENIZER)
    opened.take(TokenOutput("a", tuple(b"some")), 1.0)
    opened.fail(EngineDeadError("gone"), 2.0)
    opened.fail(EngineDeadError("again"), 3.0)
    assert (await opened.next_delta()).text == "some"
    with pytest.raises(EngineDeadError, match="gone"):
        await opened.next_delta()


async def test_several_answers_are_several_sequences() -> None:
    opened = OpenRequest(make_request("a", n=3, seed=5), TOKENIZER)
    assert [sequence.request_id for sequence in opened.sequences] == ["a/0", "a/1", "a/2"]
    assert [sequence.fork_of for sequence in opened.sequences] == [None, "a/0", "a/0"]
    assert [sequence.sampling.seed for sequence in opened.sequences] == [5, 6, 7]
    for number, index in enumerate((1, 0, 2), 1):
        opened.take(TokenOutput(f"a/{index}", (ord("x"),), finish_reason=FinishReason.LENGTH), 1.0)
        assert opened.ended == (number == 3)
        assert (await opened.next_delta()).index == index


async def test_the_tokenizers_ends_are_ends_unless_asked_otherwise() -> None:
    (sequence,) = OpenRequest(make_request("a", stop_token_ids=(7,)), TOKENIZER).sequences
    assert sequence.sampling.stop_token_ids == (7, EOS)
    (sequence,) = OpenRequest(make_request("a", stop_token_ids=(7,), ignore_eos=True), TOKENIZER).sequences
    assert sequence.sampling.stop_token_ids == (7,)


async def test_the_book_forgets_a_request_once() -> None:
    book = OpenRequests()
    opened = OpenRequest(make_request("a", n=2), TOKENIZER)
    book.add(opened)
    assert book.of_sequence("a/1") is opened
    assert book.remove(opened)
    assert not book.remove(opened)
    assert book.of_sequence("a/1") is None
    assert len(book) == 0
