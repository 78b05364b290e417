"""The file that a run leaves behind: everything needed to repeat it, plot it or doubt it.

Owns: the document's shape, writing and reading it. Must not know: how figures come about or are shown.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from serve_app.bench.errors import BenchError
from serve_app.bench.machine import CpuUse, Machine
from serve_app.bench.plan import BenchPlan, Level
from serve_app.bench.results import LoadResult
from serve_app.bench.status_probe import SlotSample

SCHEMA = "metalslots.bench/1"
# A microsecond: finer digits are noise and double the file.
DIGITS = 6


@dataclass(frozen=True, slots=True)
class LevelRun:
    """One load as it went. ``idle_cores``: how many cores were busy in the moment before it started."""

    level: Level
    repeat: int
    seed: str
    result: LoadResult
    slots: tuple[SlotSample, ...]
    cpu: CpuUse
    idle_cores: float


@dataclass(frozen=True, slots=True)
class AnswerCheck:
    """Answers given under load beside the same requests sent alone. ``first_difference``: character, text, text."""

    num_checked: int
    num_equal: int
    first_difference: tuple[int, str, str] | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the figures may be quoted, and every reason why not."""

    valid: bool
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """The endpoint as it was asked, and what it said of itself."""

    label: str
    base_url: str
    model: str
    eos_ban: str
    num_slots_intended: int | None
    status: Any = None
    command: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RunDocument:
    """A whole run against one endpoint."""

    schema: str
    started_at: str
    command: tuple[str, ...]
    target: TargetFacts
    plan: BenchPlan
    machine: Machine
    runs: tuple[LevelRun, ...]
    answers: AnswerCheck | None
    verdict: Verdict


_ADAPTER: TypeAdapter[RunDocument] = TypeAdapter(RunDocument)


def to_json(document: RunDocument) -> dict[str, Any]:
    """The document as plain values, times in seconds, rounded to microseconds."""
    rounded = _rounded(_ADAPTER.dump_python(document, mode="json"))
    assert isinstance(rounded, dict)
    return rounded


def write_document(document: RunDocument, path: Path) -> None:
    """Write the document; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(to_json(document), indent=1, ensure_ascii=False))


def read_document(path: Path) -> RunDocument:
    """Read a document. Raises BenchError when it is no document of this version."""
    try:
        return _ADAPTER.validate_json(path.read_bytes())
    except OSError as error:
        raise BenchError(f"{path} cannot be read: {error.strerror}.", "check the path") from error
    except ValidationError as error:
        raise BenchError(f"{path} is no result of this version ({SCHEMA}).", "make it anew") from error


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, DIGITS)
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return value
