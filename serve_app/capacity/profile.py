"""A measured machine: the coefficients that `metalslots bench profile` fits and the planner reads.

Owns: the file. Must not know: how they are fitted or used.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from engine.errors import ConfigError
from serve_app.capacity.perf_model import FittedTimes

SCHEMA = "metalslots.profile/1"


@dataclass(frozen=True, slots=True)
class MachineProfile:
    """``overhead_s``: what a request takes besides its steps (HTTP, routing, tokenizing), before its first token.

    ``residual``: median relative error of the fit. ``gains``: measured g(k), tokens per second of k rows over one.
    ``max_chunk_tokens`` and ``target_stall_s`` are the engine's settings during the measurement.
    """

    schema: str
    measured_at: str
    machine: str
    model: str
    times: FittedTimes
    overhead_s: float
    residual: float
    gains: dict[int, float]
    max_chunk_tokens: int
    target_stall_s: float


_ADAPTER: TypeAdapter[MachineProfile] = TypeAdapter(MachineProfile)


def write_profile(profile: MachineProfile, path: Path) -> None:
    """Write a profile; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_ADAPTER.dump_json(profile, indent=1))


def read_profile(path: Path) -> MachineProfile:
    """Read a profile. Raises ConfigError when it is missing or none of this version."""
    try:
        return _ADAPTER.validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}.", "make it with `metalslots bench profile`"
        ) from error
    except ValidationError as error:
        raise ConfigError(f"{path} is no profile of this version ({SCHEMA}).", "make it anew") from error
