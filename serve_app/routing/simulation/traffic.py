"""Conversations of an office, in the arithmetic of its requirements. Pure.

Owns: when requests come, how long they are, and what they repeat. Must not know: machines, rules.

A request continues a live conversation, or with probability 1 / ``turns`` begins one; a conversation's prompt has 6,000
or 24,000 tokens, of which a turn repeats nine tenths; answers are lognormal. Requests come as a Poisson process. Each
conversation belongs to one of ``num_groups`` groups with a system prompt of ``num_head_tokens`` in common.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from serve_app.protocol import PrefixChain
from serve_app.routing.simulation.machine import Job

SHORT_TOKENS = 6_000
LONG_TOKENS = 24_000
REPEATED_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class Traffic:
    """A load. ``num_live``: conversations that go on at a time, one for each person."""

    requests_per_hour: float
    num_live: int = 100
    long_share: float = 0.25
    turns: float = 5.0
    output_tokens: float = 700.0
    output_cv: float = 0.6
    num_head_tokens: int = 0
    num_groups: int = 1
    seed: int = 3

    @property
    def prompt_tokens(self) -> float:
        """Tokens of a prompt in the mean."""
        return SHORT_TOKENS + (LONG_TOKENS - SHORT_TOKENS) * self.long_share


@dataclass(slots=True)
class _Conversation:
    number: int
    num_tokens: int
    group: int


def requests(traffic: Traffic, num: int) -> Iterator[Job]:
    """Yield ``num`` requests in the order of their arrival."""
    draw = random.Random(traffic.seed)
    variance = math.log(1 + traffic.output_cv**2)
    mean = math.log(traffic.output_tokens) - variance / 2
    live: list[_Conversation] = []
    now_s, num_begun = 0.0, 0
    for index in range(num):
        now_s += draw.expovariate(traffic.requests_per_hour / 3600)
        if not live or draw.random() < 1 / traffic.turns:
            conversation = _begin(traffic, draw, num_begun)
            num_begun += 1
            if len(live) < traffic.num_live:
                live.append(conversation)
            else:
                live[draw.randrange(len(live))] = conversation
        else:
            conversation = live[draw.randrange(len(live))]
        output = draw.lognormvariate(mean, math.sqrt(variance))
        prefix = _prefix(traffic, conversation, draw)
        yield Job(f"q{index}", prefix, prefix.conversation, output, now_s)


def _begin(traffic: Traffic, draw: random.Random, number: int) -> _Conversation:
    num_tokens = LONG_TOKENS if draw.random() < traffic.long_share else SHORT_TOKENS
    return _Conversation(draw.getrandbits(63), num_tokens, number % traffic.num_groups)


def _prefix(traffic: Traffic, conversation: _Conversation, draw: random.Random) -> PrefixChain:
    repeated = int(conversation.num_tokens * REPEATED_SHARE)
    names = [conversation.number, draw.getrandbits(63)]
    ends = [repeated, conversation.num_tokens]
    if traffic.num_head_tokens:
        names.insert(0, conversation.group + 1)
        ends.insert(0, min(traffic.num_head_tokens, repeated))
    return PrefixChain(tuple(names), tuple(ends), conversation.number, conversation.num_tokens)
