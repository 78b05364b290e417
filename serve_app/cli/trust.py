"""Whom the commands believe over HTTPS. Owns: TLS contexts for them. Must not know: what is asked."""

from __future__ import annotations

import ssl
from pathlib import Path

from serve_app.node.settings import Installation


def office_trust() -> ssl.SSLContext:
    """Believe whom the system believes, and the fleet's own authority if this machine belongs to one."""
    context = ssl.create_default_context()
    installation = Installation.here()
    if installation is not None and (installation.tls_folder / "ca.crt").exists():
        context.load_verify_locations(installation.tls_folder / "ca.crt")
    return context


def pinned(certificate: Path) -> ssl.SSLContext:
    """Believe this one certificate only, under whatever name: for a server's question to itself."""
    context = ssl.create_default_context(cafile=str(certificate))
    context.check_hostname = False
    # Without it a certificate counts only with the whole chain up to its authority.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context
