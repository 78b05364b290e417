"""What `serve` was asked to do: the app file, overridden by what stands on the command line.

Owns: that merge. Must not know: how anything is started. Everything is validated again after the merge.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config import load_engine_config
from engine.errors import ConfigError
from serve_app.config import AppConfig, load_app_config, read_app_config

DEFAULT_SLOTS = "4"
DEFAULT_KEYS_FILE = "configs/keys.yaml"


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """The command line's words; None = not given."""

    config: Path | None = None
    model: str | None = None
    slots: str | None = None
    speculation: str | None = None
    host: str | None = None
    port: int | None = None


def app_settings(options: ServeOptions) -> AppConfig:
    """Merge file and options. Raises ConfigError."""
    engine_options = _given(model=options.model, slots=options.slots, speculation=options.speculation)
    app_options = _given(host=options.host, port=options.port)
    if options.config is None:
        engine = {"slots": DEFAULT_SLOTS, **engine_options}
        return load_app_config({"models": [{"engine": engine}], "keys_file": DEFAULT_KEYS_FILE, **app_options})
    settings = read_app_config(options.config)
    values = settings.model_dump()
    values.update(app_options)
    values["models"] = [_with_engine_options(model, engine_options) for model in values["models"]]
    if engine_options and len(values["models"]) > 1:
        names = ", ".join(model.name for model in settings.models)
        raise ConfigError(
            f"--model, --slots and --speculation mean one model, and {options.config} has several ({names}).",
            "change the file, or leave the options out",
        )
    return load_app_config(values, options.config.parent)


def _with_engine_options(model: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    changed = {**model, "engine": load_engine_config({**model["engine"], **options}).model_dump()}
    if "model" in options:
        # The file's names belong to the model that is replaced.
        del changed["name"], changed["aliases"]
    return changed


def _given(**options: object) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}
