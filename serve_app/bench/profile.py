"""Fits the cost of steps to what an endpoint does, so that the planner can predict it.

Owns: the small loads that tell the costs apart, and the fit. Must not know: how profiles are stored or used.

Black box on purpose: it works for any endpoint that streams, and HTTP, routing and tokenizing are in the figures as a
client meets them. Two series tell the costs apart:

    prompts of several lengths, alone     TTFT = overhead + chunks x fixed + tokens x token + pairs x pair
    k answers at once, short and long     step = fixed + rows x row + context x token
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from engine.scheduler.robust_fit import RobustFit
from engine.scheduler.step_cost import num_causal_pairs
from serve_app.bench.errors import BenchError
from serve_app.bench.load import EncodedSession, LoadRecord
from serve_app.bench.prompts import PromptWriter, TokenCounter, encode_body
from serve_app.bench.results import read_load
from serve_app.bench.target import Target
from serve_app.capacity.perf_model import FittedTimes
from serve_app.capacity.workload import PlannedCall, PlannedSession, SessionClass, Workload
from serve_app.latency import RequestTiming

SHORT_PROMPT = 32
NUM_REPEATS = 3


@dataclass(frozen=True, slots=True)
class ProfilePlan:
    """What is measured. ``max_chunk_tokens``: the engine's setting, to know in how many steps a prompt is read."""

    prompt_lengths: tuple[int, ...]
    row_counts: tuple[int, ...]
    context_lengths: tuple[int, ...]
    answer_tokens: int = 48
    max_chunk_tokens: int = 512
    max_load_s: float = 300.0


@dataclass(frozen=True, slots=True)
class PromptPoint:
    """A prompt read alone."""

    num_tokens: int
    ttft_s: float


@dataclass(frozen=True, slots=True)
class DecodePoint:
    """Rows decoding together: mean context of all of them, and the time of a step."""

    num_rows: int
    context_tokens: float
    step_s: float


@dataclass(frozen=True, slots=True)
class Fit:
    """The fitted costs. ``residual``: median relative error over all points. ``gains``: g(k) as measured."""

    times: FittedTimes
    overhead_s: float
    residual: float
    gains: dict[int, float]
    prompts: tuple[PromptPoint, ...]
    decodes: tuple[DecodePoint, ...]


Send = Callable[[Sequence[EncodedSession], int], Awaitable[LoadRecord]]


class Prober:
    """Sends the small loads. ``send`` is told the requests and how many clients share them."""

    def __init__(self, target: Target, plan: ProfilePlan, count_tokens: TokenCounter | None, send: Send) -> None:
        self._plan = plan
        self._count_tokens = count_tokens
        self._send = send
        self._number = 0
        # Greedy answers that may not end repeat themselves, and what is repeated is guessed ahead, as people's text is
        # not.
        self._extra = {**target.extra, "temperature": 1.0}

    async def prompt(self, num_tokens: int) -> PromptPoint:
        """Read a prompt alone and answer with one token."""
        (timing,) = await self._load(1, num_tokens, 1)
        return PromptPoint(timing.num_prompt_tokens, timing.ttft_s)

    async def rows(self, num_rows: int, num_tokens: int) -> DecodePoint | None:
        """Decode rows together; None when they were never all at it at once (fewer slots)."""
        timings = await self._load(num_rows, num_tokens, self._plan.answer_tokens)
        return read_decode(timings)

    async def _load(self, num_rows: int, num_tokens: int, answer_tokens: int) -> list[RequestTiming]:
        sessions = tuple(self._session(num_tokens, answer_tokens) for _ in range(num_rows))
        result = read_load(await self._send(sessions, num_rows))
        if result.summary.num_failed:
            raise BenchError(f"A request of the profile failed: {result.errors[0][0]}", "mend that first")
        return [call.timing for call in result.calls if call.timing is not None]

    def _session(self, num_tokens: int, answer_tokens: int) -> EncodedSession:
        self._number += 1
        call = PlannedCall(num_tokens, num_tokens, answer_tokens, 0.0)
        plan = PlannedSession(self._number, "profile", None, 0, (call,))
        # A seed of its own for every request: no cache has seen it.
        written = PromptWriter(f"profile/{self._number}", self._count_tokens).write(_WORKLOAD, plan)
        return EncodedSession(self._number, "profile", ((call, encode_body(written.calls[0], self._extra)),))


_WORKLOAD = Workload.model_validate(
    {
        "name": "profile",
        "endpoint": "completions",
        "sessions": [SessionClass.model_validate({"name": "profile", "prompt_tokens": 1, "output_tokens": 1})],
    }
)


async def measure_profile(prober: Prober, plan: ProfilePlan, report: Callable[[str, float | None], None]) -> Fit:
    """Measure both series and fit them. Raises BenchError when a request fails or the points do not suffice."""
    await prober.rows(1, SHORT_PROMPT)  # graphs and caches of a first request are no part of any later one
    prompts: list[PromptPoint] = []
    for number, length in enumerate(plan.prompt_lengths):
        report(f"prompts of {length} tokens", 0.5 * number / len(plan.prompt_lengths))
        prompts += [await prober.prompt(length) for _ in range(NUM_REPEATS)]
    decodes: list[DecodePoint] = []
    pairs = [(rows, length) for length in plan.context_lengths for rows in plan.row_counts]
    for number, (rows, length) in enumerate(pairs):
        report(f"{rows} answers at once behind {length} tokens", 0.5 + 0.5 * number / len(pairs))
        point = await prober.rows(rows, length)
        decodes += [point] if point is not None else []
    return fit(prompts, decodes, plan.max_chunk_tokens)


def read_decode(timings: Sequence[RequestTiming]) -> DecodePoint | None:
    """The time of a step while all rows decoded: from the last first token to the first last one.

    Tokens may come several in a chunk; a stream's share inside the window is counted in chunks and turned into tokens.
    """
    begins_s = max(timing.chunk_times_s[0] for timing in timings)
    ends_s = min(timing.chunk_times_s[-1] for timing in timings)
    steps, contexts = [], []
    for timing in timings:
        inside = [moment for moment in timing.chunk_times_s if begins_s <= moment <= ends_s]
        if len(inside) < 3:
            return None
        per_chunk = timing.num_output_tokens / len(timing.chunk_times_s)
        steps.append((inside[-1] - inside[0]) / ((len(inside) - 1) * per_chunk))
        contexts.append(timing.num_prompt_tokens + timing.num_output_tokens / 2)
    return DecodePoint(len(timings), statistics.fmean(contexts), statistics.median(steps))


def fit(prompts: Sequence[PromptPoint], decodes: Sequence[DecodePoint], max_chunk_tokens: int) -> Fit:
    """Fit both series with the scheduler's own robust fit. Raises BenchError when there is too little to fit."""
    if len({point.num_tokens for point in prompts}) < 2 or not decodes:
        raise BenchError("Too few measurements to fit a profile.", "give more prompt lengths and row counts")
    decode = RobustFit(scales=(1.0, 8.0, 16_384.0))
    for point in decodes:
        decode.observe((1.0, point.num_rows, point.num_rows * point.context_tokens), point.step_s)
    fixed_s, row_s, context_token_s = decode.coefficients
    chunk = RobustFit(scales=(1.0, 4.0, 1024.0, 1024.0**2))
    for prompt in prompts:
        chunk.observe(_prompt_features(prompt.num_tokens, max_chunk_tokens), prompt.ttft_s)
    overhead_s, step_s, chunk_token_s, chunk_pair_s = chunk.coefficients
    # A prompt's step pays the fixed cost of any step; what it pays on top is the chunk's own.
    chunk_fixed_s = max(0.0, step_s - fixed_s)
    overhead_s = max(0.0, overhead_s + min(0.0, step_s - fixed_s))
    times = FittedTimes(fixed_s, row_s, context_token_s, chunk_fixed_s, chunk_token_s, chunk_pair_s)
    return Fit(
        times,
        overhead_s,
        _residual(chunk, decode, prompts, decodes, max_chunk_tokens),
        _gains(decodes),
        tuple(prompts),
        tuple(decodes),
    )


def _prompt_features(num_tokens: int, max_chunk_tokens: int) -> tuple[float, float, float, float]:
    return (1.0, math.ceil(num_tokens / max_chunk_tokens), num_tokens, num_causal_pairs(0, num_tokens))


def _residual(
    chunk: RobustFit,
    decode: RobustFit,
    prompts: Sequence[PromptPoint],
    decodes: Sequence[DecodePoint],
    max_chunk_tokens: int,
) -> float:
    errors = [
        abs(chunk.predict(_prompt_features(point.num_tokens, max_chunk_tokens)) / point.ttft_s - 1) for point in prompts
    ]
    errors += [
        abs(decode.predict((1.0, point.num_rows, point.num_rows * point.context_tokens)) / point.step_s - 1)
        for point in decodes
    ]
    return statistics.median(errors)


def _gains(decodes: Sequence[DecodePoint]) -> dict[int, float]:
    """g(k) at the shortest context measured."""
    shortest = min(point.context_tokens for point in decodes)
    by_rows = {point.num_rows: point for point in decodes if point.context_tokens <= 2 * shortest}
    if 1 not in by_rows:
        return {}
    alone_s = by_rows[1].step_s
    return {rows: rows * alone_s / point.step_s for rows, point in sorted(by_rows.items())}
