"""One step's work and one step's result: the only thing scheduler and model runner say to each other.

Owns: frozen descriptions. Must not know: how rows are chosen (scheduler) or computed (mlx_backend).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine.errors import EngineError
from engine.request import SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy one whole block of every layer before the step runs (copy-on-write of a shared partial block)."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class BatchRow:
    """What one request computes in one step: positions ``[start, start + num_tokens)``.

    ``token_ids`` and ``block_ids`` are the request's own growing lists, lent read-only for the time of ``launch``:
    copying 128 block tables a step would cost more than scheduling does. Position p lies in
    ``block_ids[p // block_size]``; for sliding-window layers in ``window_block_ids[p // block_size]`` where those have
    a pool of their own (entries behind the window are holes).
    With a step in flight the last computed token may not be known to the host yet: then ``token_ids`` is exactly one
    shorter than ``start + num_tokens`` and the runner takes the token that it sampled last for this request.
    ``draft_token_ids`` are guesses at the tokens that follow the newest one: the row computes them as its last
    positions and samples after each of them and after the newest token. They count in ``num_tokens``, and are in no
    list.
    ``samples`` is True when the row's last position is the request's newest token, so that its logits choose the next
    one; ``output_index`` is that next token's index in the answer (it drives the row's random stream). ``embeds``: what
    the model makes of the last position is wanted besides.
    """

    request_id: str
    slot: int
    start: int
    num_tokens: int
    token_ids: Sequence[int]
    block_ids: Sequence[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    seed: int
    samples: bool
    output_index: int
    embeds: bool = False
    draft_token_ids: tuple[int, ...] = ()
    window_block_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class StateLoad:
    """Before the step runs, the recurrent state of ``slot`` becomes what was saved in ``entry``."""

    entry: int
    slot: int


@dataclass(frozen=True, slots=True)
class StateSave:
    """Save the recurrent state of ``slot`` in ``entry`` as it is after ``num_tokens`` of its sequence.

    The slot's row in this step computes that many: ``start < num_tokens <= start + row.num_tokens``.
    """

    slot: int
    entry: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Rows of one forward pass: decode rows (one token each) first, then prefill chunks.

    State is loaded and saved for models with recurrent layers only. Entries count from the number of slots up: the
    first ones are the slots' own.
    """

    step_index: int
    rows: tuple[BatchRow, ...]
    block_copies: tuple[BlockCopy, ...] = ()
    state_loads: tuple[StateLoad, ...] = ()
    state_saves: tuple[StateSave, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(row.num_tokens for row in self.rows)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The token chosen for one sampling row.

    ``embedding``: for a row that embeds, the last hidden state of its last position as float32 numbers.
    """

    token_id: int
    logprobs: TokenLogprobs | None = None
    embedding: bytes | None = None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Result of a step: a token for every row with ``samples`` (or a failure), and how long the step took. Where steps
    overlap, that is the time since the one before it ended: the scheduler learns from it how large a chunk may be.

    ``failures`` concern single rows; the other rows' results are right. ``further_tokens`` of a row with guesses: one
    more token for each guess that came true before the first that did not.
    """

    step_index: int
    tokens: Mapping[str, SampledToken]
    elapsed_s: float
    failures: Mapping[str, EngineError] = field(default_factory=dict)
    further_tokens: Mapping[str, tuple[SampledToken, ...]] = field(default_factory=dict)
