"""Fixed sizes for steps on a GPU: how many rows and how wide a block table a compiled step has.

Owns: the ladder of row counts, and which rung is taken for a number of rows once their times are known. Pure.

A step is compiled per size, so sizes are few. More rows are not always slower: matrix products change their algorithm
with the number of rows, and a step of 16 rows was seen to take longer than one of 32. Where a higher rung was measured
to be clearly faster, it is taken.
"""

from __future__ import annotations

from collections.abc import Mapping

RUNGS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
_LEAST_GAIN = 0.1  # less is within what a short measurement is off


def rung_for(num_rows: int, times_s: Mapping[int, float] | None = None) -> int:
    """The rung for ``num_rows`` rows; ``times_s`` are measured step times by rung."""
    natural = next(rung for rung in RUNGS if rung >= num_rows)
    if not times_s or natural not in times_s:
        return natural
    fastest = min((rung for rung in RUNGS if rung >= natural and rung in times_s), key=lambda rung: times_s[rung])
    return fastest if times_s[fastest] < times_s[natural] * (1 - _LEAST_GAIN) else natural


def rungs_up_to(num_rows: int) -> tuple[int, ...]:
    """All rungs that a batch of up to ``num_rows`` rows can use."""
    return RUNGS[: RUNGS.index(rung_for(num_rows)) + 1]


def token_rung(num_tokens: int) -> int:
    """Packed tokens of a step's prompt chunks, for ``num_tokens`` real ones."""
    step = 64 if num_tokens <= 512 else 128 if num_tokens <= 2048 else 512
    return -(-num_tokens // step) * step


def token_rungs(num_tokens: int) -> list[int]:
    """All token rungs of chunks of up to ``num_tokens`` tokens."""
    rungs = [token_rung(1)]
    while rungs[-1] < num_tokens:
        rungs.append(token_rung(rungs[-1] + 1))
    return rungs


def table_width(num_blocks: int, least: int, most: int) -> int:
    """Columns of a block table that holds ``num_blocks``: a power of two times ``least``, ``most`` at most."""
    width = least
    while width < num_blocks:
        width *= 2
    return min(width, most)
