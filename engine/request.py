"""What a caller asks of the engine, and what comes back for it.

Owns: the frozen values that cross the engine's border: ``EngineRequest`` in, ``TokenOutput`` out. Must not know: text,
HTTP, MLX.

All times are seconds of the machine's monotonic clock, passed in by the caller.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from engine.errors import EngineError


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class WaitReason(StrEnum):
    """What a waiting request waits for."""

    SLOTS = "slots"
    BLOCKS = "blocks"
    STATE = "state"
    HEADROOM = "headroom"
    PREFILL_TURN = "prefill_turn"


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer's text must follow. ``text`` is a JSON Schema, a regular expression, a JSON list of strings to
    choose from, or a grammar in Lark's or GBNF's notation; for "json_object" (any JSON object) it is empty. ``param``:
    the request field that asked for it, which a refusal names.
    """

    kind: Literal["json_object", "json_schema", "regex", "choice", "grammar"]
    text: str = ""
    param: str = "response_format"


@dataclass(frozen=True, slots=True)
class Thinking:
    """The tokens around the text in which a model thinks before it answers.

    ``is_open``: the prompt ends inside of it. After ``budget_tokens`` the end is written for the model.
    """

    start: tuple[int, ...]
    end: tuple[int, ...]
    is_open: bool = False
    budget_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. Validated where requests enter; a neutral value means off.

    ``temperature`` 0 is greedy. ``top_k`` 0, ``top_p`` 1, ``min_p`` 0 and penalties 1 / 0 / 0 are off.
    ``seed`` None means that the engine draws one at admission. ``num_logprobs`` None means no logprobs,
    0 the sampled token's only, n the n likeliest besides. ``grammar`` holds for the text after ``thinking``.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    num_logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    grammar: Grammar | None = None
    thinking: Thinking | None = None

    @property
    def guided(self) -> bool:
        """Whether the host has to see each token before it can say which ones may follow."""
        return self.grammar is not None or (self.thinking is not None and self.thinking.budget_tokens is not None)

    @property
    def greedy(self) -> bool:
        """Whether no random number is drawn."""
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One sequence to generate, as the engine core receives it.

    ``fork_of`` names an earlier request with the same prompt whose blocks this one shares (``n > 1``).
    ``cache_salt`` separates prefix caches: requests share blocks only under equal salts.
    ``priority``: lower runs first. ``deadline_s`` None means no deadline. ``embeds``: the prompt's embedding is wanted,
    no answer; it comes with the only token, which means nothing.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    received_s: float
    priority: int = 0
    user: str = ""
    cache_salt: str = ""
    deadline_s: float | None = None
    fork_of: str | None = None
    embeds: bool = False


@dataclass(frozen=True, slots=True)
class Pause:
    """A preemption: off the slot at ``preempted_s``, computing again at ``resumed_s`` (None: it never did)."""

    preempted_s: float
    resumed_s: float | None = None


@dataclass(frozen=True, slots=True)
class Timeline:
    """When a request passed each mark, and what it waited for. None = mark not reached.

    ``slot``: the one that it held last. ``waited_s`` adds up to the whole wait: from arrival to the first computed
    token of the prompt, every pause, and every step in between that went without this request.
    """

    received_s: float
    admitted_s: float | None = None
    prefill_started_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    num_preemptions: int = 0
    waited_s: Mapping[WaitReason, float] = field(default_factory=dict)
    slot: int | None = None
    pauses: tuple[Pause, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of a sampled token and of the likeliest ones, natural log, likeliest first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """New tokens of one request; the last one of a request carries ``finish_reason``.

    ``timeline`` comes with the first token, as far as it goes, and with the last output.
    ``error`` is set if and only if ``finish_reason`` is ERROR. ``embedding``: float32 numbers in this machine's order.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    error: EngineError | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    timeline: Timeline | None = None
    embedding: bytes | None = None
