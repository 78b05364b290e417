"""The option of all commands that ask over HTTPS, and what it means. Must not know: what is asked."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Annotated

import typer

from serve_app.node.settings import Installation
from serve_app.trust import trusting

Authority = Annotated[
    Path | None,
    typer.Option(
        "--ca", envvar="METALSLOTS_CA", help="PEM file of an authority to believe over HTTPS, besides the usual ones."
    ),
]


def office_trust(authority: Path | None = None) -> ssl.SSLContext:
    """Believe whom the system believes, the fleet's own authority if this machine belongs to one, and ``authority``.

    Raises ConfigError when ``authority`` cannot be read.
    """
    installation = Installation.here()
    own = installation.tls_folder / "ca.crt" if installation is not None else None
    return trusting(*([own] if own is not None and own.exists() else []), *([authority] if authority else []))
