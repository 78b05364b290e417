"""Many calls at once: so many in flight, patience with full queues, answers in the order of the questions.

Owns: that, and nothing of a single call. Must not know: models, replicas.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from serve_app.client.answers import Answer, Ask, Question
from serve_app.errors import answer_for
from serve_app.protocol import Timings, Usage

QUEUE_FULL = "queue_full"
MAX_PAUSE_S = 10.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a batch is. ``num_total`` None: its prompts come from an iterator."""

    num_done: int
    num_failed: int
    num_total: int | None
    num_output_tokens: int


class Batch:
    """Prompts that are taken one by one by workers of one event loop, and the answer to each."""

    def __init__(self, prompts: Iterable[Question], on_progress: Callable[[Progress], None] | None) -> None:
        self._num_total = len(prompts) if isinstance(prompts, Sequence) else None
        self._prompts = enumerate(prompts)
        self._on_progress = on_progress
        self._answers: dict[int, Answer] = {}
        self._num_failed = 0
        self._num_output_tokens = 0

    async def work(self, ask: Callable[[Question], Awaitable[Answer]]) -> None:
        """Answer prompts until there are none left."""
        for number, prompt in self._prompts:
            try:
                answer = await ask(prompt)
            except Exception as error:
                answer = Answer((), (), Usage(), Timings(), error)
            self._answers[number] = answer
            self._num_failed += answer.error is not None
            self._num_output_tokens += answer.usage.num_output_tokens
            if self._on_progress is not None:
                num_done = len(self._answers)
                self._on_progress(Progress(num_done, self._num_failed, self._num_total, self._num_output_tokens))

    def answers(self) -> list[Answer]:
        """All of them, in the prompts' order."""
        return [self._answers[number] for number in sorted(self._answers)]


async def patiently(act: Callable[[], Awaitable[T]], ask: Ask) -> T:
    """Do ``act`` again while a full queue refuses it, after the predicted wait and within ``ask.timeout_s``."""
    deadline_s = time.monotonic() + ask.timeout_s
    while True:
        try:
            return await act()
        except Exception as error:
            pause_s = min(getattr(error, "retry_after_s", None) or 1.0, MAX_PAUSE_S) * random.uniform(0.5, 1.5)
            if answer_for(error).code != QUEUE_FULL or time.monotonic() + pause_s > deadline_s:
                raise
        await asyncio.sleep(pause_s)
