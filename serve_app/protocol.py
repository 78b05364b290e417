"""What travels between those who ask (ingress, Python client) and a replica.

Owns: the frozen messages of one generation and a replica's status. Must not know: HTTP, OpenAI's names, or how a
replica is found. Everything here is small and quick to pickle: a message crosses two process borders on its way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.interfaces import EngineStatus
from engine.request import SamplingParams

Prompt = str | tuple[int, ...]
ChatMessage = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PrefixChain:
    """A prompt as routers see it: names for its beginnings, shortest first, one at the end of each message.

    Each of ``hashes`` (64 bits) covers everything before its place; ``num_tokens`` estimates how many tokens that is.
    Two prompts with a hash in common begin alike up to there. ``conversation`` is the same in every turn of a
    conversation; ``num_prompt_tokens`` is the estimate for the whole call.
    """

    hashes: tuple[int, ...] = ()
    num_tokens: tuple[int, ...] = ()
    conversation: int = 0
    num_prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The functions that an answer may call, as OpenAI writes tools.

    ``forced``: it has to call at least one of these; empty leaves that to the model. ``parallel``: whether it may call
    several times.
    """

    tools: tuple[Mapping[str, Any], ...]
    forced: tuple[str, ...] = ()
    parallel: bool = True


@dataclass(frozen=True, slots=True)
class Route:
    """Why a call was sent to ``replica``: the router's reason and what it expected there. ``total_s``: its cost."""

    replica: str
    reason: str
    total_s: float
    num_cached_tokens: int
    num_usable: int
    decided_unix_s: float


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """One client request. Either ``messages`` (a chat) or ``prompts`` (texts or token ids) is given.

    Every prompt is answered ``n`` times; answer i of prompt p is choice ``p * n + i``. ``messages`` are plain values as
    the model's chat template takes them. ``max_tokens`` None means up to the context's end, and stands above
    ``sampling.max_tokens``. ``timeout_s`` is relative because two machines' clocks differ. ``session_key`` names the
    conversation for the router, and ``prefix`` the beginnings of its prompt (``routing.keys`` makes it, once);
    ``client_request_id`` is the client's own name for the request, for logs only: ``request_id`` is ours and unique.
    ``template_variables`` are for the chat template; ``thinking_effort`` ("" is the model's own) and
    ``thinking_budget`` (tokens) bound what a model thinks before it answers. ``cache_salt`` keeps cached prompts apart.
    ``count_only``: nothing is generated, the only message has the prompt's length. ``key_name``: who asks, where keys
    are needed. ``trace_context``: W3C headers of the span that the call belongs to. ``route``: set by the router.
    ``embeds``: the embedding of each prompt is wanted, and no answer; choice p has that of prompt p, cut to its first
    ``dimensions`` numbers.
    """

    request_id: str
    model: str
    messages: tuple[ChatMessage, ...] = ()
    prompts: tuple[Prompt, ...] = ()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    echo: bool = False
    user: str = ""
    priority: int = 0
    session_key: str = ""
    prefix: PrefixChain = PrefixChain()
    timeout_s: float | None = None
    client_request_id: str = ""
    tool_use: ToolUse | None = None
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    thinking_effort: str = ""
    thinking_budget: int | None = None
    cache_salt: str = ""
    count_only: bool = False
    key_name: str = ""
    trace_context: Mapping[str, str] = field(default_factory=dict)
    route: Route | None = None
    embeds: bool = False
    dimensions: int | None = None

    @property
    def num_prompts(self) -> int:
        """Prompts to answer: a chat is one."""
        return 1 if self.messages else len(self.prompts)

    @property
    def num_choices(self) -> int:
        """Answers in all."""
        return self.num_prompts * self.n


@dataclass(frozen=True, slots=True)
class TokenText:
    """One token as a reader sees it: its text (U+FFFD where its bytes are no whole characters) and its bytes."""

    text: str
    raw: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class LogprobEntry:
    """The chosen token and the likeliest ones besides, likeliest first."""

    chosen: TokenText
    top: tuple[TokenText, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """New of call ``index`` of a choice. ``id`` and ``name`` come once, with the first; ``arguments`` are added up."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """What came for one choice since the last message.

    ``finish_reason`` ("stop", "length" or "tool_calls") is set exactly once. ``stop_reason`` is the stop string or
    token id that ended the answer, None for an end-of-text token. ``thinking`` is what a model thinks before it
    answers. ``embedding``: of a call that embeds, little-endian float32 numbers of length 1 in all; it comes whole, and
    nothing else does.
    """

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[LogprobEntry, ...] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    thinking: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    embedding: bytes = b""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of the whole call. A prompt answered n times counts once. ``num_thinking_tokens`` of the output's were
    thinking, with the marks around it.
    """

    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_thinking_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time went, in seconds since the replica received the call. None = mark not reached.

    ``queued_s``: a slot was given; ``prefill_started_s``: the first step with this call went out.
    """

    queued_s: float | None = None
    prefill_started_s: float | None = None
    first_token_s: float | None = None
    total_s: float | None = None
    num_preemptions: int = 0
    waited_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Deltas:
    """One message of an answer: new text of one or more choices. The last message, and only it, has ``usage``.

    ``prompt_usage``: what is known with the first message of a call with one prompt, its tokens.
    """

    choices: tuple[ChoiceDelta, ...]
    usage: Usage | None = None
    timings: Timings | None = None
    prompt_usage: Usage | None = None


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """What one replica says of itself. ``ready``: a request would be computed now. ``engine`` None: not known.

    ``draining``: it takes nothing new. ``silent_s``: seconds since anything was heard of one that does not answer; what
    else is said of it then is what it said last, or nothing. 0 for one that answers.
    """

    replica_id: str
    node_id: str
    host: str
    model: str
    ready: bool
    num_open_calls: int
    engine: EngineStatus | None = None
    draining: bool = False
    silent_s: float = 0.0
