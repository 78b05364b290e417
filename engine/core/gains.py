"""Reads what batching gains on this machine from a profile, the file that `metalslots bench profile` writes.

Owns: the keys of that file that the engine needs. Must not know: how a profile is measured.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from engine.errors import ConfigError

_FIX = "measure again with `metalslots bench profile`, or remove `profile`"


class _Profile(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    model: str
    gains: dict[int, float]


def read_gains(path: str, model: str) -> dict[int, float]:
    """Return g(k) by slot count. Raises ConfigError when there is no profile, or it was measured with another model."""
    try:
        profile = _Profile.model_validate_json(Path(path).expanduser().read_bytes())
    except OSError as error:
        raise ConfigError(f"`profile` {path} cannot be read: {error.strerror}.", _FIX) from error
    except ValidationError as error:
        raise ConfigError(f"`profile` {path} is no profile of a machine.", _FIX) from error
    if profile.model != model:
        raise ConfigError(f"`profile` {path} was measured with {profile.model!r}; this is {model!r}.", _FIX)
    return profile.gains
