"""API keys: who may ask, and how much.

Owns: the keys file, making keys, recognising one. Must not know: HTTP, or what has been used of a limit.

A key is 256 random bits, so its plain SHA-256 cannot be guessed back; only that is kept.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from engine.config import describe_validation_error, read_yaml_mapping
from engine.errors import ConfigError
from serve_app.files import write_file

PREFIX = "sk-metalslots-"


class ApiKey(BaseModel):
    """One person or program. Limits of None are none; lower ``priority`` runs first."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: str = Field(min_length=1, max_length=64, pattern=r"^[\w.@-]+$")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    requests_per_minute: int | None = Field(default=None, ge=1)
    tokens_per_minute: int | None = Field(default=None, ge=1)
    max_parallel: int | None = Field(default=None, ge=1)
    priority: int = Field(default=0, ge=-100, le=100)

    @property
    def is_limited(self) -> bool:
        """Whether a request of this key may be refused for what it has used."""
        return any(limit is not None for limit in (self.requests_per_minute, self.tokens_per_minute, self.max_parallel))


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """Return the keys in ``path``; none when there is no such file. Raises ConfigError."""
    if not path.exists():
        return ()
    entries = read_yaml_mapping(path).get("keys") or []
    if not isinstance(entries, list):
        raise ConfigError(f"`keys` in {path} is no list.", "make it with `metalslots keys add NAME`")
    try:
        keys = tuple(ApiKey.model_validate(entry) for entry in entries)
    except ValidationError as error:
        raise describe_validation_error(error, ApiKey) from error
    names = [key.name for key in keys]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"Two keys in {path} are called `{twice}`.", "give one of them another name")
    return keys


def add_key(path: Path, name: str, **limits: int | None) -> str:
    """Add a key called ``name`` to the file and return its text, which is kept nowhere. Raises ConfigError."""
    keys = read_keys(path)
    if any(key.name == name for key in keys):
        raise ConfigError(f"There is a key called `{name}` in {path}.", "choose another name, or remove it first")
    text = PREFIX + secrets.token_urlsafe(32)
    try:
        key = ApiKey(name=name, sha256=_digest(text), **{k: v for k, v in limits.items() if v is not None})
    except ValidationError as error:
        raise describe_validation_error(error, ApiKey) from error
    _write(path, [*keys, key])
    return text


def own_key() -> tuple[ApiKey, str]:
    """A key for the server's own questions to itself, and its text. It is in no file."""
    text = PREFIX + secrets.token_urlsafe(32)
    return ApiKey(name="metalslots", sha256=_digest(text)), text


def remove_key(path: Path, name: str) -> None:
    """Take the key called ``name`` out of the file. Raises ConfigError when there is none."""
    keys = read_keys(path)
    kept = [key for key in keys if key.name != name]
    if len(kept) == len(keys):
        raise ConfigError(f"There is no key called `{name}` in {path}.", "see `metalslots keys list`")
    _write(path, kept)


def find_key(keys: Iterable[ApiKey], text: str) -> ApiKey | None:
    """Return the key whose text is ``text``. Takes the same time whichever it is, or none."""
    digest = _digest(text)
    found = None
    for key in keys:
        if hmac.compare_digest(key.sha256, digest):
            found = key
    return found


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _write(path: Path, keys: Iterable[ApiKey]) -> None:
    entries: list[dict[str, Any]] = [key.model_dump(exclude_defaults=True) for key in keys]
    # Whole or not at all: a server may be reading it, and a half-written file would lock everybody out.
    write_file(path, yaml.safe_dump({"keys": entries}, sort_keys=False))
