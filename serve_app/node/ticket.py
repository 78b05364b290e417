"""Making a machine the head, and making another one a member with what the head hands it.

Owns: the fleet's secret, the join ticket, and writing an installation's files. Must not know: daemons, or what runs.

A ticket is one file that holds all that a new machine needs. Who reads it can run code on every machine of the fleet.
"""

from __future__ import annotations

import datetime as dt
import platform
import secrets
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from engine.config import describe_validation_error, read_yaml_mapping
from engine.errors import ConfigError
from serve_app.files import write_file
from serve_app.node.certificates import KeyPair, make_authority, make_certificate
from serve_app.node.settings import Installation, NodeSettings, load_settings

TOKEN_BYTES = 32
LOOPBACK_NAMES = ("localhost", "127.0.0.1")


class Ticket(BaseModel):
    """What the head hands to a new machine. The authority is there when the fleet encrypts."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    head: str
    token: str
    ray: str
    python: str
    authority_certificate: str | None = None
    authority_key: str | None = None

    @property
    def authority(self) -> KeyPair | None:
        """The fleet's authority."""
        if self.authority_certificate is None or self.authority_key is None:
            return None
        return KeyPair(self.authority_certificate, self.authority_key)


def make_head(installation: Installation, settings: NodeSettings) -> Ticket:
    """Write the head's files and its ticket. Done again, it keeps the secret and the authority that are there."""
    tls = installation.tls_folder
    if installation.token_file.exists():
        token = installation.token_file.read_text().strip()
    else:
        token = secrets.token_hex(TOKEN_BYTES)
    authority = None
    if settings.tls:
        authority = _read_pair(tls, "ca") or make_authority(_now())
        _write_pair(tls, "ca", authority)
    ticket = Ticket(
        head=settings.head,
        token=token,
        ray=version("ray"),
        python=python_minor(),
        authority_certificate=authority.certificate if authority else None,
        authority_key=authority.key if authority else None,
    )
    _write(installation, settings, ticket)
    write_file(installation.ticket_file, yaml.safe_dump(ticket.model_dump(exclude_none=True), sort_keys=False))
    return ticket


def make_member(
    installation: Installation, ticket: Ticket, *, address: str, labels: Sequence[str], first_port: int
) -> NodeSettings:
    """Write a member's files. Raises ConfigError when this environment cannot join the head's Ray."""
    require_same_versions(ticket)
    settings = load_settings(
        {
            "role": "member",
            "address": address,
            "head": ticket.head,
            "tls": ticket.authority is not None,
            "labels": list(labels),
            "first_port": first_port,
        }
    )
    _write(installation, settings, ticket)
    if authority := ticket.authority:
        write_file(installation.tls_folder / "ca.crt", authority.certificate, mode=0o644)
    return settings


def read_ticket(path: Path) -> Ticket:
    """Read a ticket. Raises ConfigError."""
    try:
        return Ticket.model_validate(read_yaml_mapping(path))
    except ValidationError as error:
        raise describe_validation_error(error, Ticket) from error


def require_same_versions(ticket: Ticket) -> None:
    """Raise ConfigError naming what differs: machines of one fleet run one Ray on one Python."""
    for name, theirs, ours in (("Ray", ticket.ray, version("ray")), ("Python", ticket.python, python_minor())):
        if theirs != ours:
            raise ConfigError(
                f"The head runs {name} {theirs}, and this environment {ours}.",
                f"install from the same checkout as the head, with {name} {theirs}",
            )


def python_minor() -> str:
    """This Python's version as far as it has to agree, such as 3.12."""
    return ".".join(platform.python_version_tuple()[:2])


def _write(installation: Installation, settings: NodeSettings, ticket: Ticket) -> None:
    installation.write(settings)
    write_file(installation.token_file, ticket.token)
    # Made anew each time: an address may have changed, and a certificate ends.
    if authority := ticket.authority:
        names = [settings.address, platform.node(), *LOOPBACK_NAMES]
        _write_pair(installation.tls_folder, "node", make_certificate(authority, list(dict.fromkeys(names)), _now()))


def _read_pair(folder: Path, name: str) -> KeyPair | None:
    certificate, key = folder / f"{name}.crt", folder / f"{name}.key"
    return KeyPair(certificate.read_text(), key.read_text()) if certificate.exists() and key.exists() else None


def _write_pair(folder: Path, name: str, pair: KeyPair) -> None:
    write_file(folder / f"{name}.crt", pair.certificate, mode=0o644)
    write_file(folder / f"{name}.key", pair.key)


def _now() -> dt.datetime:
    return dt.datetime.now(dt.UTC)
