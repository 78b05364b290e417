"""The replica's side without Ray: when messages go out, what they hold, and that leaving a call closes it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import pytest

from engine.core.generation import GenerationDelta
from engine.errors import AdmissionRefusedError, ContextLengthError, InvalidParameterError, RequestError
from engine.request import FinishReason, SamplingParams, Timeline, TokenLogprobs, WaitReason
from serve_app.protocol import Deltas, GenerateCall
from serve_app.replica.fold import CallFolder
from serve_app.replica.stats import autoscaling_stats
from serve_app.replica.stream import batches
from tests.core_fakes import ChainRunner, answer_text, letter_tokenizer, make_core, until
from tests.serve_fakes import EngineFleet

GREEDY = SamplingParams(temperature=0.0)
LONG_S = 3600.0


class Source:
    """A generator that yields what it is given, when it is given, and remembers being closed."""

    def __init__(self) -> None:
        self._items: asyncio.Queue[Any] = asyncio.Queue()
        self.closed = False

    def give(self, *items: Any) -> None:
        for item in items:
            self._items.put_nowait(item)

    async def run(self) -> AsyncGenerator[Any, None]:
        try:
            while (item := await self._items.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.closed = True


def call(prompts: Sequence[str] = ("once",), max_tokens: int = 6, **more: Any) -> GenerateCall:
    return GenerateCall("c1", "chain", prompts=tuple(prompts), sampling=GREEDY, max_tokens=max_tokens, **more)


async def answer(fleet: EngineFleet, asked: GenerateCall) -> list[Deltas]:
    async with fleet.open(asked) as messages:
        return [message async for message in messages]


async def test_the_first_item_goes_out_at_once_and_the_rest_at_the_end_at_the_latest() -> None:
    source = Source()
    async with aclosing(batches([source.run()], lambda: LONG_S)) as arriving:
        source.give("first")
        assert await anext(arriving) == [(0, "first")]
        source.give("second", "third", None)
        assert await anext(arriving) == [(0, "second"), (0, "third")]
        assert [batch async for batch in arriving] == []


async def test_items_travel_together_per_interval_and_none_waits_without_need() -> None:
    source = Source()
    async with aclosing(batches([source.run()], lambda: 0.01)) as arriving:
        source.give(1)
        assert await anext(arriving) == [(0, 1)]
        source.give(2, 3)
        assert await anext(arriving) == [(0, 2), (0, 3)]
        source.give(4)
        assert await anext(arriving) == [(0, 4)]


async def test_the_interval_is_asked_for_anew_each_time() -> None:
    source, intervals_s = Source(), iter((0.0, LONG_S))
    async with aclosing(batches([source.run()], lambda: next(intervals_s))) as arriving:
        for number in (1, 2):
            source.give(number)
            assert await anext(arriving) == [(0, number)]
        source.give(3)
        waiting = asyncio.ensure_future(anext(arriving))
        assert not (await asyncio.wait((waiting,), timeout=0.05))[0]
        waiting.cancel()
        await asyncio.wait((waiting,))


async def test_many_streams_together_send_no_more_messages_than_are_allowed() -> None:
    fleet = EngineFleet(make_core(ChainRunner(step_s=0.002)), max_messages_per_s=4.0)

    async def num_messages(name: str) -> int:
        asked = GenerateCall(name, "chain", prompts=(name,), max_tokens=50)
        return len([message async for message in fleet.runner.generate(asked)])

    async with fleet:
        counts = await asyncio.gather(*(num_messages(name) for name in "abcd"))
    # A second between two messages of a stream; fifty tokens take a tenth of one.
    assert max(counts) <= 5


async def test_several_sources_are_told_apart() -> None:
    sources = [Source(), Source()]
    sources[0].give("a", None)
    sources[1].give("b", "c", None)
    found = [item async for batch in batches([s.run() for s in sources], lambda: 0.0) for item in batch]
    assert sorted(found) == [(0, "a"), (1, "b"), (1, "c")]


async def test_an_error_comes_after_what_came_before_it_and_closes_the_others() -> None:
    broken, other = Source(), Source()
    broken.give("last words", RuntimeError("broken"))
    arriving = batches([broken.run(), other.run()], lambda: 0.0)
    assert await anext(arriving) == [(0, "last words")]
    with pytest.raises(RuntimeError, match="broken"):
        await anext(arriving)
    assert (broken.closed, other.closed) == (True, True)


@pytest.mark.parametrize("started", [True, False])
async def test_leaving_closes_every_source(started: bool) -> None:
    sources = [Source(), Source()]
    arriving = batches([source.run() for source in sources], lambda: LONG_S)
    if started:
        sources[0].give("x")
        await anext(arriving)
        await arriving.aclose()
    else:
        waiting = asyncio.ensure_future(anext(arriving))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert [source.closed for source in sources] == [True, True]


def delta(index: int = 0, **more: Any) -> GenerationDelta:
    values: dict[str, Any] = {
        "request_id": "c1",
        "index": index,
        "text": "",
        "token_ids": (),
        "logprobs": (),
        "finish_reason": None,
        "stop_reason": None,
        "num_prompt_tokens": 3,
        "num_output_tokens": 1,
        "num_cached_tokens": 2,
        "timeline": None,
    }
    return GenerationDelta(**{**values, **more})


def test_deltas_of_one_choice_are_joined_and_choices_numbered_over_prompts() -> None:
    folder = CallFolder(letter_tokenizer(), num_prompts=2, n=2)
    parts = [
        (0, delta(1, text="a", token_ids=(1,))),
        (1, delta(0, text="x")),
        (0, delta(1, text="b", token_ids=(2, 3))),
    ]
    message = folder.fold(parts)
    assert [(c.index, c.text, c.token_ids) for c in message.choices] == [(1, "ab", (1, 2, 3)), (2, "x", ())]
    assert message.usage is None


def test_only_the_last_message_has_usage_and_times() -> None:
    timeline = Timeline(10.0, 10.5, 10.5, 11.0, 12.0, 1, {WaitReason.SLOTS: 0.5})
    folder = CallFolder(letter_tokenizer(), num_prompts=1, n=2)
    first = folder.fold([(0, delta(0, finish_reason=FinishReason.STOP, num_output_tokens=4, timeline=timeline))])
    assert (first.usage, folder.finished) == (None, False)
    last = folder.fold([(0, delta(1, finish_reason=FinishReason.LENGTH, num_output_tokens=5, timeline=timeline))])
    assert folder.finished
    assert last.usage is not None
    assert (last.usage.num_prompt_tokens, last.usage.num_output_tokens, last.usage.num_cached_tokens) == (3, 9, 2)
    assert last.timings is not None
    assert (last.timings.queued_s, last.timings.first_token_s, last.timings.total_s) == (0.5, 1.0, 2.0)
    assert last.timings.waited_s == {"slots": 1.0}


@pytest.mark.parametrize(("stop_reason", "num_shown"), [(None, 1), (7, 1), ("END", 2)])
def test_the_token_that_ended_the_answer_has_no_logprobs(stop_reason: str | int | None, num_shown: int) -> None:
    logprobs = (TokenLogprobs(97, -0.1, ((97, -0.1), (98, -1.0))), TokenLogprobs(256, -0.2))
    ended = delta(logprobs=logprobs, finish_reason=FinishReason.STOP, stop_reason=stop_reason)
    (choice,) = CallFolder(letter_tokenizer(), 1, 1).fold([(0, ended)]).choices
    assert len(choice.logprobs) == num_shown
    assert choice.logprobs[0].chosen.text == "a"
    assert [top.raw for top in choice.logprobs[0].top] == [b"a", b"b"]


async def test_a_call_is_answered_and_the_number_of_open_calls_returns_to_zero() -> None:
    async with EngineFleet() as fleet:
        messages = await answer(fleet, call(["once", "far"], n=2, echo=True))
        assert fleet.runner.num_open == 0
    texts = {index: "".join(c.text for m in messages for c in m.choices if c.index == index) for index in range(4)}
    assert texts == {i: text + answer_text(text.encode(), 6) for i, text in enumerate(["once", "once", "far", "far"])}
    assert [message.usage is not None for message in messages] == [False] * (len(messages) - 1) + [True]


async def test_the_first_token_is_a_message_and_those_of_a_flush_interval_are_another() -> None:
    gate = threading.Semaphore(1)
    fleet = EngineFleet(make_core(ChainRunner(gate=gate)), flush_interval_s=LONG_S)
    async with fleet, fleet.open(call(max_tokens=40)) as messages:
        first = await anext(messages)
        gate.release(100)
        rest = [message async for message in messages]
    assert len(first.choices[0].token_ids) == 1
    assert [len(message.choices[0].token_ids) for message in rest] == [39]


@pytest.mark.parametrize(
    ("asked", "kind", "param"),
    [
        (call(["x" * 512]), ContextLengthError, "prompt"),
        (call(["x", "y" * 600]), ContextLengthError, "prompt"),
        (call(["x"], n=100), InvalidParameterError, "n"),
        (call(["x"] * 100), InvalidParameterError, "prompt"),
        (GenerateCall("c", "chain", prompts=((999,),)), InvalidParameterError, "prompt"),
        (
            GenerateCall("c", "chain", prompts=("x",), sampling=SamplingParams(top_k=257)),
            InvalidParameterError,
            "top_k",
        ),
        (
            GenerateCall("c", "chain", prompts=("x",), sampling=SamplingParams(logit_bias=((300, 1.0),))),
            InvalidParameterError,
            "logit_bias",
        ),
        (
            GenerateCall("c", "chain", messages=({"role": "user", "content": "x" * 600},)),
            ContextLengthError,
            "messages",
        ),
    ],
)
async def test_what_can_never_be_answered_is_refused_before_the_first_message(
    asked: GenerateCall, kind: type[RequestError], param: str
) -> None:
    async with EngineFleet() as fleet:
        with pytest.raises(kind) as caught:
            await answer(fleet, asked)
        assert caught.value.param == param
        assert (await answer(fleet, call()))[-1].usage is not None


async def test_a_full_queue_refuses_with_the_expected_wait() -> None:
    runner = ChainRunner(step_s=0.001)
    async with EngineFleet(make_core(runner, slots=1, max_waiting_requests=1)) as fleet:
        running = [asyncio.ensure_future(answer(fleet, _numbered(i, max_tokens=200))) for i in range(2)]
        await until(fleet.engine, lambda: fleet.engine.status().scheduler.num_waiting == 1)
        with pytest.raises(AdmissionRefusedError) as caught:
            await answer(fleet, _numbered(2))
        assert caught.value.retry_after_s > 0
        await asyncio.gather(*running)


def _numbered(number: int, max_tokens: int = 4) -> GenerateCall:
    return GenerateCall(f"c{number}", "chain", prompts=("once",), sampling=GREEDY, max_tokens=max_tokens)


async def test_leaving_a_call_frees_every_slot_it_held() -> None:
    runner = ChainRunner(step_s=0.001)
    async with EngineFleet(make_core(runner)) as fleet:
        async with fleet.open(call(["a", "b"], max_tokens=400, n=2)) as messages:
            await anext(messages)
        assert fleet.runner.num_open == 0
        await answer(fleet, _numbered(9))
        scheduler = fleet.engine.status().scheduler
        assert (scheduler.num_running, scheduler.num_cancelled) == (0, 4)


async def test_figures_for_the_autoscaler_are_numbers_whatever_the_engines_state() -> None:
    async with EngineFleet() as fleet:
        status = fleet.engine.status()
    for figures in (autoscaling_stats(status, draining=True), autoscaling_stats(None, draining=False)):
        assert {"slots", "running", "waiting", "waiting_tokens"} <= set(figures)
        assert all(type(value) in (int, float) for value in figures.values())
