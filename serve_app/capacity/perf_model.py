"""How long a step takes on a machine, as the simulator needs it.

Owns: three sources of step times with one meaning: rates given by hand, coefficients fitted to measured steps, and a
roofline of the machine's specifications. Must not know: schedulers, queues, or where numbers were measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.scheduler.step_cost import StepLoad


class StepTimes(Protocol):
    """Predicts steps."""

    def step_s(self, load: StepLoad) -> float:
        """Seconds of one step with this load."""
        ...


def decode_rows_s(times: StepTimes, num_rows: int, context_tokens: float = 0.0) -> float:
    """Seconds of a step that only decodes ``num_rows`` rows of ``context_tokens`` each."""
    return times.step_s(StepLoad(num_rows, round(num_rows * context_tokens)))


def chunk_s(times: StepTimes, num_tokens: int, context_tokens: float = 0.0) -> float:
    """Seconds of a step that only reads ``num_tokens`` prompt tokens behind ``context_tokens`` others."""
    pairs = round(num_tokens * (context_tokens + num_tokens / 2))
    return times.step_s(StepLoad(0, 0, num_tokens, pairs))


@dataclass(frozen=True, slots=True)
class RateTimes:
    """Rates as on paper: prompts at ``prefill_tokens_per_s``, one answer at ``decode_tokens_per_s``, and k answers
    together at ``batch_gain[k - 1]`` times that. Beyond the list the last gain holds; context costs nothing."""

    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    batch_gain: tuple[float, ...] = (1.0,)

    def gain(self, num_rows: int) -> float:
        """Throughput of ``num_rows`` answers together over that of one."""
        return self.batch_gain[min(num_rows, len(self.batch_gain)) - 1]

    def step_s(self, load: StepLoad) -> float:
        """Prompt tokens and decode rows take turns: their times add up."""
        rows = load.num_decode_rows
        decode_s = rows / (self.decode_tokens_per_s * self.gain(rows)) if rows else 0.0
        return decode_s + load.num_chunk_tokens / self.prefill_tokens_per_s


@dataclass(frozen=True, slots=True)
class FittedTimes:
    """Coefficients of measured steps, as ``metalslots bench profile`` saves them; all in seconds.

    The same model as the scheduler's own (engine/scheduler/step_cost.py): a step costs ``fixed_s``, each decode row
    and each context token that decode rows read; a prompt chunk adds a fixed part, its tokens and its attention pairs.
    """

    fixed_s: float
    row_s: float
    context_token_s: float
    chunk_fixed_s: float
    chunk_token_s: float
    chunk_pair_s: float

    def step_s(self, load: StepLoad) -> float:
        """The sum of the parts that the load has."""
        seconds = self.fixed_s
        seconds += self.row_s * load.num_decode_rows + self.context_token_s * load.num_decode_context_tokens
        if load.num_chunk_tokens:
            seconds += self.chunk_fixed_s + self.chunk_token_s * load.num_chunk_tokens
            seconds += self.chunk_pair_s * load.num_chunk_pairs
        return seconds

    def gains(self, num_rows: Sequence[int], context_tokens: float) -> dict[int, float]:
        """g(k): tokens per second of k rows over those of one, at this context."""
        alone_s = decode_rows_s(self, 1, context_tokens)
        return {k: k * alone_s / decode_rows_s(self, k, context_tokens) for k in num_rows}


@dataclass(frozen=True, slots=True)
class RooflineTimes:
    """An estimate from specifications: a step takes as long as its bytes or its arithmetic, whichever is longer.

    ``weights_bytes`` are read once a step, ``kv_bytes_per_token`` for each context token of a decode row;
    ``flops_per_token`` is twice the active parameters and ``flops_per_pair`` the attention's. Efficiencies are what
    servers reach of the nominal figures.
    """

    bandwidth_bytes_per_s: float
    flops_per_s: float
    weights_bytes: float
    kv_bytes_per_token: float
    flops_per_token: float
    flops_per_pair: float
    bandwidth_efficiency: float = 0.6
    flops_efficiency: float = 0.8

    def step_s(self, load: StepLoad) -> float:
        """The roofline of one step."""
        num_bytes = self.weights_bytes + self.kv_bytes_per_token * load.num_decode_context_tokens
        num_flops = self.flops_per_token * (load.num_decode_rows + load.num_chunk_tokens)
        num_flops += self.flops_per_pair * (load.num_chunk_pairs + load.num_decode_context_tokens)
        bytes_s = num_bytes / (self.bandwidth_efficiency * self.bandwidth_bytes_per_s)
        return max(bytes_s, num_flops / (self.flops_efficiency * self.flops_per_s))
