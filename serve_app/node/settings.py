"""What one machine of the fleet is: head or member, at which address, on which ports, with which secrets.

Owns: the installation folder's layout, ``etc/node.yaml``, and what follows from both: the environment and the command
line of this machine's Ray. Must not know: how the daemon is supervised, or what is deployed.

Everything lies below one folder, the *prefix*, and a secret is only ever named by its file: what stands on a command
line or in an environment can be read in a list of processes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from engine.config import describe_validation_error, read_yaml_mapping
from engine.errors import ConfigError
from serve_app.config import label_resource, ray_environment
from serve_app.files import write_file

PREFIX_VARIABLE = "METALSLOTS_PREFIX"
DEFAULT_HEAD_PORT = 6379
DEFAULT_FIRST_PORT = 20_000
NUM_PORTS = 1_000
# The first ones have names; Ray's workers get the others.
NUM_NAMED_PORTS = 10
# Prompts and tokens go over gRPC, so the object store stays almost empty; a Mac's memory is for the model.
OBJECT_STORE_BYTES = 256 * 2**20
# Logical: controller, proxies and ingresses must fit on any machine; the model asks for `metal` and for no CPU.
NUM_CPUS = 8
# How long the other Macs go on answering while the head is away (Ray's own default is a minute).
HEAD_ABSENCE_S = 600
# How long Ray itself drains a node that is told to end. Short: who stops a machine on purpose has drained the app on
# it before, and Ray waits all this time for its proxy, which has nothing to finish then.
RAY_DRAIN_S = 5
# A Unix socket's path may have 103 bytes on macOS, and Ray needs about 80 of them below its folder.
MAX_PREFIX_BYTES = 24


class NodeSettings(BaseModel):
    """``etc/node.yaml``. ``head``: the head's address and port, on the head itself its own.

    ``labels`` are what ``models[].only_on`` asks for. ``tls``: Ray's own connections are encrypted, with the
    certificates in ``etc/tls``. This machine's Ray listens on ``first_port`` and the 999 ports after it.
    ``keep_state``: the head's Ray keeps on disk what it knows, so that a restart of it ends nobody (alpha in Ray).
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    role: Literal["head", "member"]
    address: str = Field(min_length=1, pattern=r"^[A-Za-z0-9.:_-]+$")
    head: str = Field(pattern=r"^[A-Za-z0-9._-]+:[0-9]{1,5}$")
    tls: bool = False
    labels: tuple[str, ...] = ()
    first_port: int = Field(default=DEFAULT_FIRST_PORT, ge=1024, le=65_535 - NUM_PORTS)
    keep_state: bool = False

    @model_validator(mode="after")
    def _head_is_at_its_address(self) -> NodeSettings:
        if self.role == "head" and self.head_host != self.address:
            raise ValueError(f"the head is at {self.head_host}, but its own address is {self.address}")
        if self.keep_state and self.role != "head":
            raise ValueError("only the head has a state to keep")
        if self.first_port <= self.head_port < self.first_port + NUM_PORTS:
            raise ValueError(f"the head's port {self.head_port} is one of the {NUM_PORTS} from {self.first_port} on")
        return self

    @property
    def head_host(self) -> str:
        """The head's address without its port."""
        return self.head.rpartition(":")[0]

    @property
    def head_port(self) -> int:
        """The port of the head's global control service."""
        return int(self.head.rpartition(":")[2])


class Installation:
    """The folder that holds all of metalslots on this machine."""

    def __init__(self, prefix: Path) -> None:
        self.prefix = prefix.absolute()
        self.settings_file = self.prefix / "etc" / "node.yaml"
        self.token_file = self.prefix / "etc" / "token"
        self.ticket_file = self.prefix / "etc" / "join-ticket"
        self.tls_folder = self.prefix / "etc" / "tls"
        self.app_file = self.prefix / "etc" / "app.yaml"
        self.keys_file = self.prefix / "etc" / "keys.yaml"
        self.state_file = self.prefix / "run" / "node.json"
        self.log_folder = self.prefix / "log"
        self.ray_folder = self.prefix / "ray"
        self.models_folder = self.prefix / "models"
        self.head_state_folder = self.prefix / "run" / "ray-state"

    @classmethod
    def here(cls) -> Installation | None:
        """The one that the environment names, if any."""
        prefix = os.environ.get(PREFIX_VARIABLE)
        return cls(Path(prefix)) if prefix else None

    def read(self) -> NodeSettings:
        """Read the settings. Raises ConfigError."""
        if not self.settings_file.exists():
            raise ConfigError(f"{self.prefix} is no installation.", "make one with k8s-free-deploy/bin/install.sh")
        return load_settings(read_yaml_mapping(self.settings_file))

    def write(self, settings: NodeSettings) -> None:
        """Keep the settings. Raises ConfigError when the prefix is too long for Ray's sockets."""
        if len(str(self.prefix).encode()) > MAX_PREFIX_BYTES:
            raise ConfigError(
                f"{self.prefix} is too long: a socket's path below it would pass the 103 bytes that macOS allows.",
                f"choose a folder of at most {MAX_PREFIX_BYTES} bytes, such as /opt/metalslots",
            )
        for folder in (self.log_folder, self.ray_folder, self.models_folder, self.state_file.parent):
            folder.mkdir(parents=True, exist_ok=True)
        values = settings.model_dump(mode="json")
        write_file(self.settings_file, yaml.safe_dump(values, sort_keys=False), mode=0o644)

    def environment(self, settings: NodeSettings) -> dict[str, str]:
        """The variables for every process on this machine that is, or speaks to, a part of this fleet's Ray."""
        values = {
            **ray_environment(),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.token_file),
            # Homebrew brings each Mac the patch version of its day; what Ray pickles only depends on the minor one.
            "RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL": "minor",
            "RAY_gcs_rpc_server_reconnect_timeout_s": str(HEAD_ABSENCE_S),
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": str(RAY_DRAIN_S),
            "HF_HOME": str(self.models_folder),
            PREFIX_VARIABLE: str(self.prefix),
        }
        if settings.tls:
            values |= {
                "RAY_USE_TLS": "1",
                "RAY_TLS_SERVER_CERT": str(self.tls_folder / "node.crt"),
                "RAY_TLS_SERVER_KEY": str(self.tls_folder / "node.key"),
                "RAY_TLS_CA_CERT": str(self.tls_folder / "ca.crt"),
            }
        if settings.keep_state:
            values |= {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(self.head_state_folder)}
        return values

    def ray_arguments(self, settings: NodeSettings) -> list[str]:
        """Arguments of ``ray start``: everything explicit, so that nothing depends on what Ray finds out by itself."""
        first = settings.first_port
        resources = {"metal": 1, **{label_resource(label): 1 for label in settings.labels}}
        if settings.role == "head":
            # No dashboard, which runs what it is sent, and no autoscaler, which has no machines to buy.
            role = ["--head", f"--port={settings.head_port}", "--include-dashboard=false", "--no-monitor"]
            # Ray opens it in any case.
            role.append(f"--ray-client-server-port={first + 6}")
        else:
            role = [f"--address={settings.head}"]
        return [
            *role,
            f"--node-ip-address={settings.address}",
            f"--resources={json.dumps(resources)}",
            f"--num-cpus={NUM_CPUS}",
            f"--object-store-memory={OBJECT_STORE_BYTES}",
            f"--temp-dir={self.ray_folder}",
            "--dashboard-host=127.0.0.1",
            f"--node-manager-port={first}",
            f"--object-manager-port={first + 1}",
            f"--dashboard-agent-listen-port={first + 2}",
            f"--dashboard-agent-grpc-port={first + 3}",
            f"--runtime-env-agent-port={first + 4}",
            f"--metrics-export-port={first + 5}",
            f"--min-worker-port={first + NUM_NAMED_PORTS}",
            f"--max-worker-port={first + NUM_PORTS - 1}",
            "--disable-usage-stats",
            "--block",
        ]


def load_settings(values: Mapping[str, object]) -> NodeSettings:
    """Validate ``values``. Raises ConfigError."""
    labels = values.get("labels")
    if isinstance(labels, list):
        values = {**values, "labels": tuple(labels)}
    try:
        return NodeSettings.model_validate(values)
    except ValidationError as error:
        raise describe_validation_error(error, NodeSettings) from error
