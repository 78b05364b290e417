"""The Python client where tools live: a Ray actor, a Ray job, a script; and a batch that is left half done."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from typing import Any

import pytest
import ray

from engine.request import SamplingParams
from serve_app.client import Ask, connect
from tests.core_fakes import answer_text
from tests.serve_endpoint import Endpoint, eventually

BATCH = """
import sys
from engine.request import SamplingParams
from serve_app.client import Ask, connect
num_prompts, max_tokens = int(sys.argv[1]), int(sys.argv[2])
ask = Ask(max_tokens=max_tokens, sampling=SamplingParams(temperature=0.0))
prompts = [f"prompt {number}" for number in range(num_prompts)]
with connect(*sys.argv[3:]) as metal:
    answers = metal.generate_many(prompts, ask, raw=True, on_progress=lambda done: print(done.num_done, flush=True))
print(answers[-1].text)
"""
NUM_PROMPTS = 300
SHORT = Ask(max_tokens=4, sampling=SamplingParams(temperature=0.0))


def script(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "ignore", "-c", BATCH, *arguments]
    return subprocess.Popen(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True)


def address_of_ray() -> str:
    address: str = ray.get_runtime_context().gcs_address
    return address


@pytest.mark.parametrize("how", ["script", "job"])
def test_hundreds_of_prompts_from_another_process(chain: Endpoint, how: str) -> None:
    # A job's driver is told where its Ray is by the environment.
    where = {"RAY_ADDRESS": address_of_ray()} if how == "job" else {}
    process = script(str(NUM_PROMPTS), "8", *([address_of_ray()] if how == "script" else []), **where)
    lines = process.communicate(timeout=120)[0].splitlines()
    assert process.returncode == 0
    expected = answer_text(f"prompt {NUM_PROMPTS - 1}".encode(), 8)
    assert lines[-2:] == [str(NUM_PROMPTS), expected]


def test_inside_an_actor(chain: Endpoint) -> None:
    @ray.remote(num_cpus=0)
    class Tool:
        def answer(self, prompts: list[str]) -> list[str]:
            with connect() as metal:
                return [answer.text for answer in metal.generate_many(prompts, SHORT, raw=True)]

    @ray.remote(num_cpus=0)
    class LoopTool:
        async def answer(self, prompts: list[str]) -> list[str]:
            # An actor with a loop must not wait in it: it connects in a thread.
            metal = await asyncio.to_thread(connect)
            answers = await metal.agenerate_many(prompts, SHORT, raw=True)
            return [answer.text for answer in answers]

    tools: list[Any] = [Tool, LoopTool]
    answers = [ray.get(tool.remote().answer.remote(["a", "b", "c"])) for tool in tools]
    assert answers == [[answer_text(prompt.encode(), 4) for prompt in "abc"]] * 2


def test_a_script_that_is_interrupted_leaves_nothing_running(chain: Endpoint) -> None:
    process = script("1000", "100", address_of_ray())
    assert process.stdout is not None
    assert process.stdout.readline() == "1\n"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode != 0
    eventually(lambda: chain.status()["num_open_calls"] == 0)
    eventually(lambda: chain.scheduler()["num_running"] + chain.scheduler()["num_waiting"] == 0)
