"""Batches of the Python client over a stand-in for Serve's handle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from engine.errors import AdmissionRefusedError, ContextLengthError
from serve_app.client import Ask, Client, Progress
from serve_app.client.connection import EMBED_AT_ONCE
from serve_app.errors import ModelUnknownError
from serve_app.protocol import ChoiceDelta, Deltas, GenerateCall, Usage
from tests.serve_fakes import said


class Replicas:
    """Says every prompt again. Beyond ``num_places`` it refuses; a prompt "long" is too long."""

    def __init__(self, num_places: int = 1000) -> None:
        self._num_places = num_places
        self.gate = asyncio.Event()
        self.gate.set()
        self.arrived = asyncio.Semaphore(0)
        self.num_open = 0
        self.peak = 0
        self.num_refused = 0
        self.num_cancelled = 0

    def options(self, **_options: Any) -> Replicas:
        return self

    def remote(self, call: GenerateCall) -> Reply:
        return Reply(self, call)


def vectors_of(call: GenerateCall) -> Deltas:
    """For each prompt its number and the dimensions that were asked for."""
    if "long" in call.prompts:
        raise ContextLengthError(9, 8, "input")
    rows = [np.array([float(str(prompt)), call.dimensions or 0], "<f4").tobytes() for prompt in call.prompts]
    choices = tuple(ChoiceDelta(i, finish_reason="stop", embedding=row) for i, row in enumerate(rows))
    return Deltas(choices, Usage(1, 0, 0))


class Reply:
    """One call."""

    def __init__(self, replicas: Replicas, call: GenerateCall) -> None:
        self._replicas = replicas
        self._messages = self._answer(call)

    def cancel(self) -> None:
        self._replicas.num_cancelled += 1

    async def __anext__(self) -> Deltas:
        return await anext(self._messages)

    async def _answer(self, call: GenerateCall) -> AsyncIterator[Deltas]:
        replicas = self._replicas
        if replicas.num_open >= replicas._num_places:
            replicas.num_refused += 1
            raise AdmissionRefusedError("requests", replicas._num_places, replicas.num_open, 0.01)
        replicas.num_open += 1
        replicas.peak = max(replicas.peak, replicas.num_open)
        replicas.arrived.release()
        try:
            await replicas.gate.wait()
            await asyncio.sleep(0)
            text = str(call.prompts[0])
            if call.embeds:
                assert len(call.prompts) <= EMBED_AT_ONCE
                yield vectors_of(call)
                return
            if text == "long":
                raise ContextLengthError(9, 8, "prompt")
        finally:
            replicas.num_open -= 1
        for message in said(text, "!"):
            yield message


async def test_thousands_are_asked_so_many_at_once_and_answered_in_order() -> None:
    replicas = Replicas()
    seen: list[Progress] = []
    prompts = [str(number) for number in range(2000)]
    answers = await Client({"m": replicas}).agenerate_many(prompts, raw=True, max_in_flight=7, on_progress=seen.append)
    assert [answer.text for answer in answers] == [f"{prompt}!" for prompt in prompts]
    assert replicas.peak == 7
    assert [progress.num_done for progress in seen] == list(range(1, 2001))
    assert seen[-1] == Progress(2000, 0, 2000, 4000)


async def test_an_error_stands_in_its_answer_and_stops_nothing() -> None:
    seen: list[Progress] = []
    metal = Client({"m": Replicas()})
    answers = await metal.agenerate_many(iter(["a", "long", "b"]), raw=True, on_progress=seen.append)
    assert [answer.error is None for answer in answers] == [True, False, True]
    assert seen[-1] == Progress(3, 1, None, 4)
    with pytest.raises(ContextLengthError):
        _ = answers[1].text


async def test_what_a_full_queue_refuses_is_asked_again_until_the_time_is_up() -> None:
    replicas = Replicas(num_places=3)
    answers = await Client({"m": replicas}).agenerate_many([str(n) for n in range(50)], raw=True, max_in_flight=10)
    assert all(answer.error is None for answer in answers)
    assert replicas.num_refused > 0
    (refused,) = await Client({"m": Replicas(num_places=0)}).agenerate_many(["x"], Ask(timeout_s=0.0), raw=True)
    assert isinstance(refused.error, AdmissionRefusedError)


async def test_leaving_a_batch_cancels_what_runs_and_asks_no_more() -> None:
    replicas = Replicas()
    replicas.gate.clear()
    batch = asyncio.create_task(Client({"m": replicas}).agenerate_many([str(n) for n in range(50)], max_in_flight=5))
    for _ in range(5):
        await replicas.arrived.acquire()
    batch.cancel()
    with pytest.raises(asyncio.CancelledError):
        await batch
    assert replicas.num_open == 0
    assert replicas.num_cancelled == 5


async def test_thousands_are_embedded_in_calls_of_a_few_and_stand_in_order() -> None:
    inputs = [str(number) for number in range(1000)]
    found = await Client({"m": Replicas(num_places=5)}).aembed(inputs, dimensions=2)
    assert found.dtype == np.float32
    assert found.tolist() == [[float(number), 2.0] for number in range(1000)]
    assert (await Client({"m": Replicas()}).aembed([])).shape == (0, 0)
    with pytest.raises(ContextLengthError):
        await Client({"m": Replicas()}).aembed(["1", "long"])


def test_outside_an_event_loop_and_a_model_that_nobody_serves() -> None:
    metal = Client({"m": Replicas()})
    assert metal.embed(["7"], dimensions=3).tolist() == [[7.0, 3.0]]
    assert [answer.text for answer in metal.generate_many(["a", "b"], raw=True)] == ["a!", "b!"]
    with pytest.raises(ModelUnknownError):
        metal.generate_many(["a"], Ask(model="other"))


async def test_one_text_in_the_place_of_several_is_not_taken_for_its_characters() -> None:
    metal = Client({"m": Replicas()})
    with pytest.raises(TypeError, match="put it into a list"):
        await metal.agenerate_many("hello")
    with pytest.raises(TypeError, match="put it into a list"):
        await metal.aembed("hello")
    with pytest.raises(ValueError, match="max_in_flight is 0"):
        await metal.agenerate_many(["hello"], max_in_flight=0)
