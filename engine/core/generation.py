"""What callers of the engine ask for and what they get back.

Owns: the request of one client (one prompt, ``n`` answers) and the pieces in which answers arrive. Must not know: HTTP,
how answers are produced.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.request import FinishReason, SamplingParams, Timeline, TokenLogprobs


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt and how to continue it.

    ``stop``: strings that end an answer; their text is not part of it. ``n``: how many answers; answer ``i`` of a
    seeded request uses ``seed + i``. ``received_s`` and ``deadline_s`` are monotonic seconds. ``max_tokens`` beyond the
    end of the context is clipped to it, and the answer then ends with LENGTH. ``continues_text``: the answer goes on
    from the prompt's text, so a space before its first word is kept. ``shown_token_ids``: special tokens that are
    written in the answer's text all the same, because its reader looks for them. ``embeds``: no answer is wanted, but
    the prompt's embedding, which the only delta brings.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    received_s: float
    stop: tuple[str, ...] = ()
    n: int = 1
    priority: int = 0
    user: str = ""
    cache_salt: str = ""
    deadline_s: float | None = None
    continues_text: bool = False
    shown_token_ids: tuple[int, ...] = ()
    embeds: bool = False


@dataclass(frozen=True, slots=True)
class AnswerAccount:
    """How one answer ended. CANCELLED: its caller left, or its request failed by another answer's error.

    Counts are those of the tokens that were read, as in ``GenerationDelta``; ``timeline`` is the engine's, or as much
    of it as was told before the engine was lost.
    """

    index: int
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    timeline: Timeline


@dataclass(frozen=True, slots=True)
class RequestAccount:
    """A request that is over, with all its answers."""

    request_id: str
    answers: tuple[AnswerAccount, ...]


@dataclass(frozen=True, slots=True)
class GenerationDelta:
    """What became known of answer ``index``. ``finish_reason`` is set on the last delta of an index and on no other.

    ``text`` is only ever added to, never changed. ``token_ids`` and ``num_output_tokens`` count every sampled token,
    the one that ended the answer too. ``stop_reason`` is the stop string or stop token that ended it, None for the
    model's own end. ``num_cached_tokens`` is known from the first delta on, ``timeline`` from the last. ``made_s``:
    when the text was made, in monotonic seconds. ``embedding``: the last hidden state of the prompt's last
    token, float32 numbers as bytes, where one was asked for.
    """

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    timeline: Timeline | None
    made_s: float = 0.0
    embedding: bytes | None = None
