"""Rows that carry guessed tokens: one sampling place for each guess, and how many guesses came true.

Owns: that rule. Must not know: where guesses come from, the model, the sampler.

Every place is sampled as it would be if the guesses before it were the text: with the row's own random numbers for that
index of the answer. So the token after a right guess is the very token that a step of its own would have chosen, for
greedy and for sampled rows alike, and a wrong guess costs nothing but its computation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from engine.batch import BatchRow, SampledToken
from engine.errors import EngineError


class Verified(NamedTuple):
    """Results by request id, as a ``StepOutput`` has them."""

    tokens: dict[str, SampledToken]
    failures: dict[str, EngineError]
    further_tokens: dict[str, tuple[SampledToken, ...]]


def sampling_places(row: BatchRow) -> list[BatchRow]:
    """The row itself, for the token after its newest one, and one for the token after each guess, in packed order."""
    return [row, *(_place_after(row, index) for index in range(1, len(row.draft_token_ids) + 1))]


def verify(
    rows: Iterable[BatchRow], tokens: Mapping[str, SampledToken], failures: Mapping[str, EngineError]
) -> Verified:
    """Join the places of each of ``rows`` again. A row fails when any of its places does."""
    kept, failed = dict(tokens), dict(failures)
    further: dict[str, tuple[SampledToken, ...]] = {}
    for row in rows:
        names = [_name(row, index) for index in range(1, len(row.draft_token_ids) + 1)]
        results = [kept.pop(name, None) for name in names]
        errors = [error for name in names if (error := failed.pop(name, None)) is not None]
        if errors:
            failed.setdefault(row.request_id, errors[0])
        if row.request_id in failed:
            kept.pop(row.request_id, None)
        elif names:
            further[row.request_id] = _accepted(row, kept[row.request_id], results)
    return Verified(kept, failed, further)


def _accepted(row: BatchRow, token: SampledToken, results: Iterable[SampledToken | None]) -> tuple[SampledToken, ...]:
    accepted: list[SampledToken] = []
    for guess, result in zip(row.draft_token_ids, results, strict=True):
        if token.token_id != guess or result is None:
            break
        accepted.append(result)
        token = result
    return tuple(accepted)


def _place_after(row: BatchRow, index: int) -> BatchRow:
    return dataclasses.replace(row, request_id=_name(row, index), output_index=row.output_index + index)


def _name(row: BatchRow, index: int) -> str:
    # A NUL stands in no request id that comes over HTTP.
    return f"{row.request_id}\0{index}"
