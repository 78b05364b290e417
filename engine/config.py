"""The engine's configuration: keys, ranges, defaults, and errors that name the closest key.

Owns: validation of what a person writes in YAML or on the command line. Must not know: how memory or slots are
resolved.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from engine.errors import ConfigError

MAX_SLOTS = 128
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_ALIASES = {"parallel": "slots"}


def parse_bytes(value: object) -> object:
    """Turn "12GiB", "500 MB" or a number into bytes; other values pass through for pydantic to refuse."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", value, re.IGNORECASE)
    if match is None:
        return value
    return int(float(match.group(1)) * _UNITS[(match.group(2) or "").lower()])


def _parse_slots(value: object) -> object:
    if isinstance(value, str) and re.fullmatch(r"\d+", value):
        return int(value)
    return value


Bytes = Annotated[Annotated[int, Field(ge=0)] | Literal["auto"], BeforeValidator(parse_bytes)]
Slots = Annotated[Annotated[int, Field(ge=1, le=MAX_SLOTS)] | Literal["auto"], BeforeValidator(_parse_slots)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class MemoryConfig(_Section):
    """``budget``: bytes the engine may use in all; ``headroom``: bytes left for the person's other programs."""

    budget: Bytes = "auto"
    headroom: Bytes = "auto"


class PrefillConfig(_Section):
    """How long running streams may stall for a newcomer's prompt, and the largest chunk when nobody is decoding."""

    target_stall_ms: float = Field(default=500.0, gt=0)
    max_chunk_tokens: int = Field(default=512, ge=16)


class EngineConfig(_Section):
    """One engine on one machine. Unknown keys are refused with the closest known one.

    ``kv_bits``: keys and values are held with so many bits instead of ``kv_dtype``. ``profile``: a file of
    `metalslots bench profile`, whose measured gain caps automatic slots. ``adapter``: a folder that `mlx_lm.lora`
    wrote, applied to the model. ``embeddings``: "auto" gives them if the model's files say that it was made for them,
    "last-token" takes any model's last hidden state. ``speculation`` "auto": rows that decode carry guesses where
    measured times say that it pays.
    """

    model: str = "demo"
    adapter: str | None = None
    slots: Slots = "auto"
    max_model_len: int | None = Field(default=None, ge=16)
    block_size: Literal[8, 16, 32, 64] = 16
    kv_dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    kv_bits: Literal[8, 4] | None = None
    memory: MemoryConfig = MemoryConfig()
    prefill: PrefillConfig = PrefillConfig()
    prefix_cache: Literal["shared", "per-user", "off"] = "shared"
    embeddings: Literal["auto", "last-token", "off"] = "auto"
    speculation: Literal["auto", "off"] = "auto"
    overcommit: Literal["warn", "refuse"] = "warn"
    profile: str | None = None
    max_waiting_requests: int = Field(default=256, ge=0)
    max_waiting_tokens: int = Field(default=1_000_000, ge=0)
    admission_watermark_tokens: int = Field(default=256, ge=0)
    parity: Literal["check", "off"] = "check"
    backend: Literal["auto", "metal", "cuda", "cpu"] = "auto"
    watchdog_s: float = Field(default=60.0, gt=0)


def load_engine_config(values: Mapping[str, Any]) -> EngineConfig:
    """Validate ``values``. Raises ConfigError naming the key, the given value and the closest known key."""
    renamed = {_ALIASES.get(key, key): value for key, value in values.items()}
    if len(renamed) < len(values):
        raise ConfigError("Both `slots` and its alias `parallel` are given.", "keep one of them")
    try:
        return EngineConfig.model_validate(renamed)
    except ValidationError as error:
        raise describe_validation_error(error, EngineConfig) from error


def read_engine_config(path: Path) -> EngineConfig:
    """Read a YAML file. Raises ConfigError when it is missing, not a mapping, or wrong."""
    return load_engine_config(read_yaml_mapping(path))


def require_context(asked: int | None, own: int) -> None:
    """Raise ConfigError when the ``max_model_len`` that was asked for is beyond the model's own context."""
    if asked is not None and asked > own:
        raise ConfigError(f"`max_model_len` is {asked}; this model's context is {own}.", f"write at most {own}")


def read_yaml_mapping(path: Path) -> dict[str, Any]:
    """Read a YAML mapping. Raises ConfigError naming the file and the place of a syntax error."""
    try:
        values = yaml.safe_load(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.", "check its path") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no text.", "name a YAML file in UTF-8") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}.", "mend the line that is named") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds a {type(values).__name__}, not keys and values.", "write `key: value` lines")
    return {str(key): value for key, value in values.items()}


def describe_validation_error(error: ValidationError, model: type[BaseModel]) -> ConfigError:
    """Turn pydantic's first finding into one sentence and one fix."""
    first = error.errors()[0]
    path = [str(part) for part in first["loc"] if not str(part).startswith(("function-", "constrained-", "literal["))]
    # A union reports one finding per member type; the member's name ("int") is no part of the key.
    path = [part for part in path if part not in ("int", "str", "float")]
    key = ".".join(path)
    if first["type"] == "extra_forbidden":
        known = list(_keys_at(model, path[:-1]))
        closest = difflib.get_close_matches(path[-1], known, n=1, cutoff=0.5)
        fix = f"write `{closest[0]}`" if closest else f"use one of: {', '.join(sorted(known))}"
        return ConfigError(f"Unknown configuration key `{key}`.", fix)
    if key in ("memory.budget", "memory.headroom"):
        return ConfigError(f"`{key}` is {first['input']!r}.", 'write "auto", or a size such as 8GiB')
    if path[:1] == ["slots"]:
        return ConfigError(f"`slots` is {first['input']!r}.", f'write "auto" or a whole number from 1 to {MAX_SLOTS}')
    return ConfigError(f"`{key}` is {first['input']!r}: {first['msg']}.", f"correct `{key}`")


def _keys_at(model: type[BaseModel], path: list[str]) -> list[str]:
    for part in path:
        annotation = model.model_fields[part].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return list(model.model_fields)
