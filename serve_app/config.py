"""The app's configuration: which models are served, where, and with which limits.

Owns: validation of ``configs/apps/*.yaml``, the names that follow from it, and the environment of Ray's processes.
Must not know: HTTP, or how an engine is built; the engine's own keys are ``engine.config``'s.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from engine.config import (
    MAX_SLOTS,
    EngineConfig,
    describe_validation_error,
    load_engine_config,
    parse_bytes,
    read_engine_config,
    read_yaml_mapping,
)
from engine.errors import ConfigError
from serve_app.keys import ApiKey, read_keys
from serve_app.telemetry.logs import LogConfig

APP_NAME = "metalslots"
INGRESS_NAME = "Ingress"
# Requests let through to the engine although it will refuse them: its refusal carries a predicted wait, Ray's does not.
REFUSAL_HEADROOM = 64

ByteCount = Annotated[int, BeforeValidator(parse_bytes), Field(gt=0)]


def ray_environment() -> dict[str, str]:
    """Return the variables that every Ray process (head, worker, driver) must have before Ray is first imported."""
    return {
        # Between deployments: half the CPU of a message, and no object store in its way.
        "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
        "RAY_SERVE_LOG_TO_STDERR": "0",
        # Write request logs a thousand at a time instead of one by one.
        "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1000",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",
        # A replica that Ray kills by force takes its child along otherwise (seen on Linux): the engine process, which
        # notices by itself that its parent is gone and frees the model in order.
        "RAY_kill_child_processes_on_worker_exit": "false",
        # Ray's default of 15 leaves a replica and its engine a thirtieth of what any busy program gets on Linux, and a
        # step's host work is on the way of every token. What keeps a Mac usable is the memory guard.
        "RAY_worker_niceness": "0",
        # A head that comes back after a reboot knows nobody. Members notice at this check, end, and are started anew by
        # their daemons: after 45 to 50 s by default, after 2 to 9 with this (Ray 2.60).
        "RAY_raylet_liveness_self_check_interval_ms": "5000",
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def label_resource(label: str) -> str:
    """Name of the Ray resource that a Mac with this label offers; see ``ModelConfig.only_on``."""
    return f"label:{label}"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ScalingConfig(_Section):
    """How many replicas a model has, by its load: ``ceil(requests / (slots * target_load)) + num_spare``.

    More after ``up_after_s`` of more need, fewer after ``down_after_s`` of less.
    """

    min_replicas: int = Field(default=1, ge=0)
    max_replicas: int = Field(ge=1)
    num_spare: int = Field(default=0, ge=0)
    target_load: float = Field(default=0.75, gt=0, le=1)
    up_after_s: float = Field(default=2.0, ge=0)
    down_after_s: float = Field(default=300.0, ge=0)

    @model_validator(mode="after")
    def _limits_are_in_order(self) -> ScalingConfig:
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"`min_replicas` ({self.min_replicas}) is above `max_replicas` ({self.max_replicas})")
        return self


class ModelConfig(_Section):
    """One served model: the name that clients send, other names for it, its engine, and how many Macs serve it.

    With ``scaling`` the load says how many, and ``replicas`` is how many there are at first. ``only_on``: only Macs
    that were installed with this label serve it; without it, any.
    """

    name: str = Field(min_length=1)
    aliases: tuple[str, ...] = ()
    engine: EngineConfig
    replicas: int = Field(default=1, ge=1)
    scaling: ScalingConfig | None = None
    only_on: str | None = Field(default=None, pattern=r"^[A-Za-z0-9._-]+$")

    @property
    def deployment_name(self) -> str:
        """Name of the Serve deployment that serves this model."""
        slug = re.sub(r"[^A-Za-z0-9_.-]", "-", self.name)
        # Two names may have one slug.
        return f"MetalReplica-{slug}" if slug == self.name else f"MetalReplica-{slug}-{_short_hash(self.name)}"

    @property
    def max_ongoing_requests(self) -> int:
        """Calls that one replica takes at once: its slots, its engine's waiting queue, and some that it refuses."""
        slots = self.engine.slots if isinstance(self.engine.slots, int) else MAX_SLOTS
        return slots + self.engine.max_waiting_requests + REFUSAL_HEADROOM


class IngressConfig(_Section):
    """The HTTP side. ``keep_alive_s``: silence after which a waiting stream gets a comment line. ``heartbeat_s``: how
    often each ingress says something to every replica, whether or not anybody asks.

    ``cors_origins``: web pages of these origins ("*": of all) may ask from a browser; none may by default.
    """

    replicas: int = Field(default=1, ge=1)
    num_cpus: float = Field(default=0.25, ge=0)
    max_ongoing_requests: int = Field(default=1000, ge=1)
    keep_alive_s: float = Field(default=10.0, gt=0)
    heartbeat_s: float = Field(default=60.0, gt=0)
    status_timeout_s: float = Field(default=2.0, gt=0)
    cors_origins: tuple[str, ...] = ()


class ReplicaConfig(_Section):
    """The replicas' side of Ray Serve.

    ``engine_runs`` "thread" is for tests. ``router``: how the replica of a request is chosen, "cost" by waiting and
    reading (docs/routing.md); ``report_period_s``: how often replicas tell routers what they have to do.
    ``flush_interval_ms``: tokens that come within it travel in one message, since a message costs about a millisecond
    of CPU over the two hops; it grows when a replica's streams together would send more than ``max_messages_per_s``.
    ``shutdown_grace_s``: how long running answers may take
    when a replica is to stop; killing a process that holds wired Metal memory can strand that memory until reboot.
    """

    engine_runs: Literal["process", "thread"] = "process"
    flush_interval_ms: float = Field(default=30.0, ge=0)
    max_messages_per_s: float = Field(default=160.0, gt=0)
    router: Literal["cost", "power-of-two", "round-robin"] = "cost"
    report_period_s: float = Field(default=0.5, gt=0)
    max_queued_requests: int = Field(default=256, ge=1)
    health_check_period_s: float = Field(default=2.0, gt=0)
    health_check_timeout_s: float = Field(default=5.0, gt=0)
    shutdown_grace_s: float = Field(default=120.0, ge=0)
    max_start_attempts: int = Field(default=3, ge=1)


class LimitsConfig(_Section):
    """What one request may ask: the size of its body, and the time until its last token."""

    max_body_bytes: ByteCount = 8 * 2**20
    request_timeout_s: float = Field(default=600.0, gt=0)


class HttpsConfig(_Section):
    """Files that hold the HTTP port's certificate and its key (PEM), at the same place on every Mac."""

    certificate: str
    key: str


class AppConfig(_Section):
    """Everything that is deployed together. Unknown keys are refused with the closest known one.

    ``keys_file``: who may ask; ``keys`` are read from it. Without keys only this machine itself may.
    """

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=1, le=65535)
    models: tuple[ModelConfig, ...] = Field(default=(), min_length=1)
    ingress: IngressConfig = IngressConfig()
    replica: ReplicaConfig = ReplicaConfig()
    limits: LimitsConfig = LimitsConfig()
    logs: LogConfig = LogConfig()
    https: HttpsConfig | None = None
    keys_file: str | None = None
    keys: tuple[ApiKey, ...] = ()

    @property
    def url(self) -> str:
        """The address that is listened on."""
        return f"{'https' if self.https else 'http'}://{self.host}:{self.port}"

    @property
    def engines(self) -> tuple[EngineConfig, ...]:
        """The engine configurations, in the order of the models."""
        return tuple(model.engine for model in self.models)


def load_app_config(values: Mapping[str, Any], folder: Path = Path()) -> AppConfig:
    """Validate ``values``; file names of engines are relative to ``folder``.

    Without ``models`` the demo model is served. Raises ConfigError naming the key, the given value and the closest
    known key.
    """
    entries = values.get("models", [{}])
    if not isinstance(entries, list | tuple):
        raise ConfigError(f"`models` is {entries!r}.", "write a list, one entry for each model")
    models = tuple(_load_model(entry, f"models.{index}", folder) for index, entry in enumerate(entries))
    _require_distinct_names(models)
    keys_file = values.get("keys_file")
    keys = read_keys(folder / keys_file) if isinstance(keys_file, str) else ()
    try:
        config = AppConfig.model_validate({**_with_tuples(values), "models": models, "keys": keys})
    except ValidationError as error:
        raise describe_validation_error(error, AppConfig) from error
    _require_keys_beyond_loopback(config)
    return config


def read_app_config(path: Path) -> AppConfig:
    """Read a YAML file. Raises ConfigError when it is missing, not a mapping, or wrong."""
    return load_app_config(read_yaml_mapping(path), path.parent)


def _load_model(entry: object, where: str, folder: Path) -> ModelConfig:
    if not isinstance(entry, Mapping):
        raise ConfigError(f"`{where}` is {entry!r}.", "write keys and values: name, engine, replicas")
    engine = _load_engine(entry.get("engine", {}), where, folder)
    values = {"name": _default_name(engine.model), **entry, "engine": engine}
    if isinstance(values.get("aliases"), list):
        values["aliases"] = tuple(values["aliases"])
    try:
        return ModelConfig.model_validate(values)
    except ValidationError as error:
        found = describe_validation_error(error, ModelConfig)
        raise ConfigError(f"In `{where}`: {found.message}", found.fix) from error


def _load_engine(value: object, where: str, folder: Path) -> EngineConfig:
    if isinstance(value, str):
        return read_engine_config(folder / value)
    if isinstance(value, Mapping):
        return load_engine_config(value)
    raise ConfigError(f"`{where}.engine` is {value!r}.", "write the engine's keys, or the name of a file with them")


def _default_name(model: str) -> str:
    path = Path(model).expanduser()
    return path.stem if path.is_absolute() or path.suffix == ".gguf" or model.startswith(".") else model


def _require_distinct_names(models: tuple[ModelConfig, ...]) -> None:
    seen: set[str] = set()
    for model in models:
        for name in (model.name, *model.aliases):
            if name in seen:
                raise ConfigError(f"Two models are called `{name}`.", "give one of them another `name`")
            seen.add(name)


def _with_tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    """YAML has lists only; the configuration is frozen all through."""
    ingress = values.get("ingress")
    if not (isinstance(ingress, Mapping) and isinstance(ingress.get("cors_origins"), list)):
        return dict(values)
    return {**values, "ingress": {**ingress, "cors_origins": tuple(ingress["cors_origins"])}}


def _require_keys_beyond_loopback(config: AppConfig) -> None:
    if config.keys or _is_loopback(config.host):
        return
    raise ConfigError(
        f"`host` is {config.host}, which others can reach, and there are no API keys.",
        "make one with `metalslots keys add NAME` and name its file in `keys_file`, or keep `host: 127.0.0.1`",
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:6]
