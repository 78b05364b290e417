"""Waves of calls: nobody waits for company, those who wait anyway share one tokenizer call."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from engine.errors import ContextLengthError, InvalidParameterError
from engine.text.tokenizer import Tokenizer
from serve_app.protocol import GenerateCall
from serve_app.replica.admission_batcher import MAX_WAVE_BYTES, AdmissionBatcher
from serve_app.replica.prompts import PreparedCall, ReceivedCall, prepare_calls
from tests.serve_fakes import chat_tokenizer, prompt_of

LIMIT = 100


class Kitchen:
    """Prepares waves of words, each when the test lets it."""

    def __init__(self) -> None:
        self.waves: list[list[str]] = []
        self.gate = threading.Semaphore(0)

    def prepare(self, words: Sequence[str]) -> list[str | Exception]:
        self.waves.append(list(words))
        self.gate.acquire()
        return [ValueError(word) if word.startswith("!") else word.upper() for word in words]

    def batcher(self, *, is_full: Callable[[], bool] = lambda: False, num_threads: int = 1) -> Any:
        return AdmissionBatcher(self.prepare, size_of=len, is_full=is_full, num_threads=num_threads)


async def settle(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - a thread makes it true
            await asyncio.sleep(0.001)


async def test_the_first_goes_at_once_and_those_who_come_meanwhile_go_together() -> None:
    kitchen = Kitchen()
    batcher = kitchen.batcher()
    calls = [asyncio.create_task(batcher.prepare(word)) for word in ("a", "b", "!c", "d")]
    await settle(lambda: kitchen.waves == [["a"]])
    calls[3].cancel()
    await asyncio.sleep(0)
    kitchen.gate.release(2)
    assert await asyncio.gather(*calls[:2]) == ["A", "B"]
    with pytest.raises(ValueError, match="!c"):
        await calls[2]
    assert kitchen.waves == [["a"], ["b", "!c"]]
    batcher.close()


async def test_without_a_free_slot_calls_are_gathered_though_a_thread_is_free() -> None:
    kitchen = Kitchen()
    kitchen.gate.release(9)
    batcher = kitchen.batcher(is_full=lambda: True)
    assert await asyncio.gather(*(batcher.prepare(word) for word in "abc")) == ["A", "B", "C"]
    assert kitchen.waves == [["a", "b", "c"]]
    batcher.close()


async def test_a_long_text_goes_alone_and_beside_the_others() -> None:
    kitchen = Kitchen()
    batcher = kitchen.batcher(is_full=lambda: True, num_threads=2)
    long = "x" * MAX_WAVE_BYTES
    calls = [asyncio.create_task(batcher.prepare(word)) for word in (long, "a", "b")]
    await settle(lambda: len(kitchen.waves) == 2)
    kitchen.gate.release(2)
    await asyncio.gather(*calls)
    assert sorted(kitchen.waves) == [["a", "b"], [long]]
    batcher.close()


async def test_an_error_of_the_wave_itself_reaches_everybody_in_it_and_the_next_wave_runs() -> None:
    def prepare(words: Sequence[str]) -> list[str | Exception]:
        if "bad" in words:
            raise RuntimeError("broken")
        return list(words)

    batcher: AdmissionBatcher[str, str] = AdmissionBatcher(prepare, size_of=len, is_full=lambda: True, num_threads=1)
    ends = await asyncio.gather(*(batcher.prepare(word) for word in ("a", "bad")), return_exceptions=True)
    assert [type(end) for end in ends] == [RuntimeError, RuntimeError]
    assert await batcher.prepare("a") == "a"
    batcher.close()


class CountingTokenizer(Tokenizer):
    """Remembers the batches that it was asked to encode."""

    batches: list[list[str]]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = False) -> list[list[int]]:
        self.batches.append(list(texts))
        return super().encode_batch(texts, add_special_tokens)


def counting_tokenizer() -> CountingTokenizer:
    tokenizer = chat_tokenizer()
    tokenizer.__class__ = CountingTokenizer
    assert isinstance(tokenizer, CountingTokenizer)
    tokenizer.batches = []
    return tokenizer


def received(request_id: str, *prompts: str | tuple[int, ...], chat: str = "") -> ReceivedCall:
    messages = ({"role": "user", "content": chat},) if chat else ()
    return ReceivedCall(GenerateCall(request_id, "chain", messages=messages, prompts=prompts), 1.5)


def test_a_wave_encodes_its_chats_in_one_call_and_equal_texts_once() -> None:
    tokenizer = counting_tokenizer()
    wave = [received("a", chat="hello"), received("b", chat="hello"), received("c", "hello", (1, 2))]
    prepared = prepare_calls(wave, tokenizer, LIMIT)
    assert [len(batch) for batch in tokenizer.batches] == [1, 1], "one text of chats, one plain text"
    chat = tuple(prompt_of([{"role": "user", "content": "hello"}]))
    assert all(isinstance(found, PreparedCall) for found in prepared)
    prompts = [[r.prompt_token_ids for r in found.requests] for found in prepared if isinstance(found, PreparedCall)]
    assert prompts == [[chat], [chat], [tuple(b"hello"), (1, 2)]]
    assert {r.received_s for found in prepared if isinstance(found, PreparedCall) for r in found.requests} == {1.5}


def test_a_call_that_is_wrong_spoils_no_other_of_its_wave() -> None:
    wave = [
        received("surrogate", chat="\ud800"),
        received("good", chat="hello"),
        received("long", "x" * LIMIT),
        received("empty", ()),
        received("bad", "\udfff"),
        received("good too", "hello"),
    ]
    prepared = prepare_calls(wave, chat_tokenizer(), LIMIT)
    kinds = [InvalidParameterError, PreparedCall, ContextLengthError, InvalidParameterError, InvalidParameterError]
    assert [type(found) for found in prepared] == [*kinds, PreparedCall]
