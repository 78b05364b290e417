"""What a replica says of itself to routers, and how that travels in Serve's routing statistics. Pure.

Owns: the fields, their packing, and reading what another version packed. Must not know: how figures are measured, or
what a router makes of them. Written about once a second; the two lists are packed, because Serve hashes and pickles
every report for every router.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b

Figure = int | float | str | bool | bytes | None

_TAG_BYTES = 4


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """A moment of one replica. None is not known (yet).

    ``sequence`` grows with every report, so that a router sees silence without comparing clocks. ``num_unread_tokens``:
    prompt tokens still to be computed before a newcomer's. ``prefill_tokens_per_s`` and ``answer_s`` (a usual answer
    from its first to its last token, decoded beside what runs now) are measured, as is ``answer_row_s``, what each
    further row would add to it; ``answer_tokens`` is its length here. ``open_tags``: the calls that the figures count.
    ``prefixes``: beginnings of prompts whose K and V are still cached, as far as the replica can tell.
    """

    sequence: int
    slots: int
    num_running: int = 0
    num_waiting: int = 0
    num_unread_tokens: int = 0
    prefill_tokens_per_s: float | None = None
    answer_s: float | None = None
    answer_row_s: float | None = None
    answer_tokens: float | None = None
    ready: bool = True
    draining: bool = False
    open_tags: frozenset[int] = frozenset()
    prefixes: frozenset[int] = frozenset()


def reported_answers_s(
    step_s: Callable[[int], float], num_tokens: float, num_running: int, slots: int
) -> tuple[float, float]:
    """``answer_s`` and ``answer_row_s`` of a simulated replica whose decode steps of n rows take ``step_s(n)``.

    The engine's cost of a row is the same for each; a curve has one in the mean.
    """
    row_s = (step_s(slots) - step_s(1)) / max(1, slots - 1)
    return num_tokens * step_s(min(num_running + 1, slots)), num_tokens * row_s


def tag_of(request_id: str) -> int:
    """Return a short name of a call. Two open calls of one name would only make a router's count off by one."""
    return int.from_bytes(blake2b(request_id.encode(), digest_size=_TAG_BYTES).digest(), "little")


def to_stats(report: ReplicaReport) -> dict[str, Figure]:
    """Return the report as Serve carries it."""
    return {
        "sequence": report.sequence,
        "slots": report.slots,
        "running": report.num_running,
        "waiting": report.num_waiting,
        "unread_tokens": report.num_unread_tokens,
        "prefill_tokens_per_s": report.prefill_tokens_per_s,
        "answer_s": report.answer_s,
        "answer_row_s": report.answer_row_s,
        "answer_tokens": report.answer_tokens,
        "ready": report.ready,
        "draining": report.draining,
        "open_tags": _packed("I", report.open_tags),
        "prefixes": _packed("Q", report.prefixes),
    }


def from_stats(stats: Mapping[str, Figure]) -> ReplicaReport | None:
    """Return the report in ``stats``; None when there is none, as before a replica's first report.

    Fields that are missing get their defaults and unknown ones are left out: during a rolling update replicas of two
    versions report to routers of two versions.
    """
    if not isinstance(stats.get("sequence"), int) or not isinstance(stats.get("slots"), int):
        return None
    return ReplicaReport(
        sequence=_count(stats, "sequence"),
        slots=_count(stats, "slots"),
        num_running=_count(stats, "running"),
        num_waiting=_count(stats, "waiting"),
        num_unread_tokens=_count(stats, "unread_tokens"),
        prefill_tokens_per_s=_measured(stats, "prefill_tokens_per_s"),
        answer_s=_measured(stats, "answer_s"),
        answer_row_s=_measured(stats, "answer_row_s"),
        answer_tokens=_measured(stats, "answer_tokens"),
        ready=bool(stats.get("ready", True)),
        draining=bool(stats.get("draining", False)),
        open_tags=_unpacked("I", stats.get("open_tags")),
        prefixes=_unpacked("Q", stats.get("prefixes")),
    )


def _packed(code: str, numbers: Iterable[int]) -> bytes:
    # Sorted, so that equal reports are equal bytes.
    return array(code, sorted(numbers)).tobytes()


def _unpacked(code: str, packed: Figure) -> frozenset[int]:
    numbers = array(code)
    if isinstance(packed, bytes) and len(packed) % numbers.itemsize == 0:
        numbers.frombytes(packed)
    return frozenset(numbers)


def _count(stats: Mapping[str, Figure], name: str) -> int:
    value = stats.get(name)
    return int(value) if isinstance(value, int | float) else 0


def _measured(stats: Mapping[str, Figure], name: str) -> float | None:
    value = stats.get(name)
    return float(value) if isinstance(value, int | float) and value > 0 else None
