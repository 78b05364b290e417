"""``python -m tests.fleet_calls ADDRESS DEPLOYMENT SECONDS PER_SECOND MAX_TOKENS``: calls by handle, open loop.

Prints a line once calls have been made for ``WARM_UP_S``, and at the end one JSON object: what became of every call. A
call is lost when it neither ended nor failed within ``LIMIT_S``.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import ray
from ray import serve

from engine.request import SamplingParams
from serve_app.config import APP_NAME
from serve_app.errors import answer_for
from serve_app.protocol import GenerateCall
from serve_app.routing.stream import ReplicaStream

WARM_UP_S = 2.0
LIMIT_S = 60.0


@dataclass
class Calls:
    """What became of them. ``longest_s``: the longest time that a call took to its end, whichever that was.

    ``disturbed_until_s``: when the last call ended that was not completed by the first replica it was given to.
    """

    num: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    num_moved: int = 0
    longest_s: float = 0.0
    disturbed_until_s: float = 0.0

    async def make(self, handle: Any, max_tokens: int) -> None:
        """One call to its end."""
        self.num += 1
        call = GenerateCall(
            f"call-{self.num}",
            "chain",
            prompts=(f"prompt {self.num} " * 8,),
            sampling=SamplingParams(temperature=0.0),
            max_tokens=max_tokens,
        )
        began_s = time.monotonic()
        stream = ReplicaStream(handle, call)
        num_messages = 0
        try:
            async with asyncio.timeout(LIMIT_S), stream:
                async for _ in stream:
                    num_messages += 1
            outcome = "completed"
        except TimeoutError:
            outcome = "lost"
        except Exception as error:
            outcome = ("cut: " if num_messages else "refused: ") + str(answer_for(error).code)
        self.outcomes[outcome] += 1
        self.num_moved += stream.num_moves
        ended_s = time.monotonic()
        self.longest_s = max(self.longest_s, ended_s - began_s)
        if stream.num_moves or outcome != "completed":
            self.disturbed_until_s = max(self.disturbed_until_s, ended_s)


async def run(deployment: str, duration_s: float, per_s: float, max_tokens: int) -> dict[str, Any]:
    """Make calls for ``WARM_UP_S`` and ``duration_s``, wait for all of them, and return what became of them."""
    handle: Any = serve.get_deployment_handle(deployment, APP_NAME)
    calls = Calls()
    tasks = []
    began_s = 0.0
    for number in range(int((WARM_UP_S + duration_s) * per_s)):
        if number == int(WARM_UP_S * per_s):
            print("warm", flush=True)
            began_s = time.monotonic()
        tasks.append(asyncio.create_task(calls.make(handle, max_tokens)))
        await asyncio.sleep(1 / per_s)
    await asyncio.gather(*tasks)
    return {
        "calls": calls.num,
        "outcomes": calls.outcomes,
        "moved": calls.num_moved,
        "longest_s": round(calls.longest_s, 2),
        "disturbed_for_s": round(max(0.0, calls.disturbed_until_s - began_s), 2),
    }


def main(address: str, deployment: str, duration_s: str, per_s: str, max_tokens: str) -> None:
    """Do it."""
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    print(json.dumps(asyncio.run(run(deployment, float(duration_s), float(per_s), int(max_tokens)))))


if __name__ == "__main__":
    main(*sys.argv[1:])
