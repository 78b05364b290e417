"""Turns planned sessions into texts of the planned length, the same for every endpoint.

Owns: the words, the exact lengths, the message lists. Must not know: clocks or sockets.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from serve_app.capacity.workload import PlannedCall, PlannedSession, Workload

TokenCounter = Callable[[str], int]

# Common nouns that are one token in byte-level BPE vocabularies, at the start of a text and after a space: n words are
# n tokens for most models even when no tokenizer is at hand.
_WORD_LIST = """
river stone window letter engine market winter paper ocean signal forest bridge travel number planet anchor journal
yellow apple table house water light night music school summer spring doctor teacher artist writer reader machine
country castle church street square circle metal wood glass plastic sugar bread fruit orange horse lion flower grass
tree branch leaf root seed soil sand rock hill lake coast ship boat train plane car road path gate door wall floor
room office chair clock watch phone radio camera picture story song game team player gold iron lead energy power
force speed weight height depth width length color shape size sound voice north south east west center border region
nation people family mother father brother friend leader member worker report question answer reason result method
system process project plan budget price cost value profit trade supply demand customer order
"""
WORDS = tuple(_WORD_LIST.split())
MAX_CORRECTIONS = 20


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """One request, ready to send: ``body`` is JSON without what depends on the endpoint (model, EOS ban)."""

    plan: PlannedCall
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class WrittenSession:
    """A session's requests in order."""

    plan: PlannedSession
    calls: tuple[WrittenCall, ...]


class PromptWriter:
    """Writes texts of random words. With ``count_tokens`` lengths are exact; without, one word counts as one token."""

    def __init__(self, seed: str, count_tokens: TokenCounter | None = None) -> None:
        self._seed = seed
        self._count_tokens = count_tokens

    def text(self, key: str, num_tokens: int) -> str:
        """``num_tokens`` tokens of words that depend on the seed and ``key`` alone."""
        rng = random.Random(f"{self._seed}:{key}")
        words = rng.choices(WORDS, k=num_tokens)
        if self._count_tokens is None:
            return " ".join(words)
        for _ in range(MAX_CORRECTIONS):
            excess = self._count_tokens(" ".join(words)) - num_tokens
            if excess == 0 or len(words) == 1:
                break
            # Words longer than a token make the text too long by a share of its words: dropping half of the excess
            # converges from either side without overshooting to and fro.
            if excess > 0:
                del words[-max(1, excess // 2) :]
            else:
                words += rng.choices(WORDS, k=-excess)
        return " ".join(words)

    def write(self, workload: Workload, session: PlannedSession) -> WrittenSession:
        """Write every call of ``session``."""
        bodies = _chat_bodies if workload.endpoint == "chat" else _completion_bodies
        parts = list(self._parts(session))
        calls = (WrittenCall(call, body) for call, body in zip(session.calls, bodies(parts), strict=True))
        return WrittenSession(session, tuple(calls))

    def _parts(self, session: PlannedSession) -> Iterator[_Part]:
        head = ""
        if session.prefix_group is not None:
            head = self.text(f"head/{session.class_name}/{session.prefix_group}", session.prefix_tokens)
        answer, answer_tokens = "", 0
        for number, call in enumerate(session.calls):
            known_tokens = answer_tokens if number else session.prefix_tokens
            question = self.text(f"{session.index}/{number}", call.new_tokens - known_tokens)
            yield _Part(head if number == 0 else "", answer, question, call.output_tokens)
            # The answer that goes into the next prompt is written here and not taken from the endpoint: otherwise two
            # endpoints whose answers differ would be asked different things from the second call on.
            answer, answer_tokens = (
                self.text(f"{session.index}/{number}/answer", call.output_tokens),
                call.output_tokens,
            )


@dataclass(frozen=True, slots=True)
class _Part:
    head: str
    answer_before: str
    question: str
    output_tokens: int


def _completion_bodies(parts: list[_Part]) -> Iterator[dict[str, Any]]:
    prompt = ""
    for part in parts:
        prompt = " ".join(text for text in (prompt, part.head, part.answer_before, part.question) if text)
        yield {"prompt": prompt, "max_tokens": part.output_tokens}


def _chat_bodies(parts: list[_Part]) -> Iterator[dict[str, Any]]:
    messages: list[dict[str, str]] = []
    for part in parts:
        if part.head:
            messages.append({"role": "system", "content": part.head})
        if part.answer_before:
            messages.append({"role": "assistant", "content": part.answer_before})
        messages.append({"role": "user", "content": part.question})
        yield {"messages": list(messages), "max_tokens": part.output_tokens}


def encode_body(call: WrittenCall, extra: Mapping[str, Any]) -> bytes:
    """The bytes to post. Encoded before the load starts: 24,000 tokens of JSON would hold up the client's clock."""
    return json.dumps({**call.body, **extra}, ensure_ascii=False).encode()
