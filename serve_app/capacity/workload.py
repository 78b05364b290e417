"""Who asks what: kinds of conversation with their lengths, drawn reproducibly from a seed.

Owns: the workload's model and the plan of each session as numbers. Must not know: texts (the bench writes those),
arrival times, endpoints or costs. The bench and the simulator draw the same sessions from the same seed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from serve_app.capacity.lengths import Fixed, Lengths


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SharedPrefix(_Section):
    """A common head of the prompt (a system prompt, a document): ``share`` of the sessions begin with one of
    ``groups`` heads of ``tokens`` tokens."""

    tokens: int = Field(gt=0)
    groups: int = Field(default=1, ge=1)
    share: float = Field(default=1.0, ge=0, le=1)


class SessionClass(_Section):
    """One kind of session. The first call's prompt has ``prompt_tokens``, a shared head included; each later call
    repeats the whole conversation, adds ``new_tokens`` and comes ``think_s`` after the answer before it."""

    name: str
    weight: float = Field(default=1.0, gt=0)
    prompt_tokens: Lengths
    output_tokens: Lengths
    shared_prefix: SharedPrefix | None = None
    calls: Lengths = Fixed(value=1)
    new_tokens: Lengths = Fixed(value=0)
    think_s: Lengths = Fixed(value=0)


class Workload(_Section):
    """A mixture of session classes. ``endpoint``: which API the bench calls."""

    name: str
    description: str = ""
    endpoint: Literal["chat", "completions"] = "chat"
    sessions: tuple[SessionClass, ...] = Field(min_length=1)

    def scaled(self, factor: float) -> Workload:
        """The same workload with every token count ``factor`` times as large, to fit a smaller context."""
        return self.model_copy(update={"sessions": tuple(_scale_class(each, factor) for each in self.sessions)})


def _scale_class(each: SessionClass, factor: float) -> SessionClass:
    prefix = each.shared_prefix
    if prefix is not None:
        prefix = prefix.model_copy(update={"tokens": max(1, round(prefix.tokens * factor))})
    return each.model_copy(
        update={
            "prompt_tokens": each.prompt_tokens.scaled(factor),
            "output_tokens": each.output_tokens.scaled(factor),
            "new_tokens": each.new_tokens.scaled(factor),
            "shared_prefix": prefix,
        }
    )


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """One call of a session: ``prompt_tokens`` in all, ``new_tokens`` of them unseen by the call before it."""

    prompt_tokens: int
    new_tokens: int
    output_tokens: int
    think_s: float


@dataclass(frozen=True, slots=True)
class PlannedSession:
    """A session's calls in order. The first ``prefix_tokens`` tokens are those of shared head ``prefix_group``."""

    index: int
    class_name: str
    prefix_group: int | None
    prefix_tokens: int
    calls: tuple[PlannedCall, ...]


def plan_session(workload: Workload, seed: str, index: int) -> PlannedSession:
    """Draw session ``index``. It depends on workload, seed and index alone, never on how many others are drawn."""
    rng = random.Random(f"{seed}:{index}")
    each = rng.choices(workload.sessions, [c.weight for c in workload.sessions])[0]
    group, prefix_tokens = _draw_prefix(each, rng)
    calls = tuple(_draw_calls(each, rng, prefix_tokens))
    return PlannedSession(index, each.name, group, prefix_tokens, calls)


def plan_sessions(workload: Workload, seed: str, num_sessions: int) -> tuple[PlannedSession, ...]:
    """The first ``num_sessions`` sessions of a seed."""
    return tuple(plan_session(workload, seed, index) for index in range(num_sessions))


def _draw_prefix(each: SessionClass, rng: random.Random) -> tuple[int | None, int]:
    prefix = each.shared_prefix
    if prefix is None or rng.random() >= prefix.share:
        return None, 0
    return rng.randrange(prefix.groups), prefix.tokens


def _draw_calls(each: SessionClass, rng: random.Random, prefix_tokens: int) -> Iterator[PlannedCall]:
    # A prompt that is all shared head would be answered from the cache whole; one own token keeps it a request.
    prompt_tokens = max(_count(each.prompt_tokens.draw(rng)), prefix_tokens + 1)
    new_tokens, output_tokens = prompt_tokens, 0
    for index in range(_count(each.calls.draw(rng))):
        if index:
            new_tokens = output_tokens + _count(each.new_tokens.draw(rng))
            prompt_tokens += new_tokens
        output_tokens = _count(each.output_tokens.draw(rng))
        think_s = each.think_s.draw(rng) if index else 0.0
        yield PlannedCall(prompt_tokens, new_tokens, output_tokens, think_s)


def _count(value: float) -> int:
    return max(1, round(value))


def poisson_arrivals_s(seed: str, rate_per_s: float, num: int) -> Iterator[float]:
    """Moments at which ``num`` sessions begin: exponential gaps, the first session at 0. Bench and simulator share it,
    so that a simulated load can be the very one that was measured."""
    rng = random.Random(f"{seed}:arrivals")
    at_s = 0.0
    for _ in range(num):
        yield at_s
        at_s += rng.expovariate(rate_per_s)
