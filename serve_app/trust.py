"""Whom clients believe over HTTPS, and how a refusal is told. Owns: TLS contexts. Must not know: what is asked."""

from __future__ import annotations

import ssl
from pathlib import Path
from urllib.parse import urlsplit

from engine.errors import ConfigError, StartupError

# OpenSSL's X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH.
_WRONG_NAME = (62, 64)


class UntrustedError(StartupError):
    """A server's certificate is not believed; ``fix`` is one thing to do."""


def trusting(*authorities: Path) -> ssl.SSLContext:
    """Believe whom the system believes, and whom the files ``authorities`` (PEM) hold. Raises ConfigError."""
    context = ssl.create_default_context()
    for file in authorities:
        try:
            context.load_verify_locations(file)
        except OSError as error:  # ssl.SSLError is one
            reason = "it holds no certificate" if isinstance(error, ssl.SSLError) else error.strerror
            raise ConfigError(
                f"The authority {file} cannot be used: {reason}.", "name a PEM file of certificates"
            ) from error
    return context


def pinned(certificate: Path) -> ssl.SSLContext:
    """Believe this one certificate only, under whatever name: for a server's question to itself."""
    context = ssl.create_default_context(cafile=str(certificate))
    context.check_hostname = False
    # Without it a certificate counts only with the whole chain up to its authority.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def untrusted(url: str, error: BaseException) -> UntrustedError | None:
    """What ``error``, with which asking ``url`` failed, says of the server's certificate; None if it is not that."""
    cause = _refusal_in(error)
    if cause is None:
        return None
    parts = urlsplit(url)
    message = f"The certificate of {parts.scheme}://{parts.netloc} is not trusted: {cause.verify_message.rstrip('.')}."
    if cause.verify_code in _WRONG_NAME:
        return UntrustedError(message, "ask it by a name or an address that its certificate is for")
    return UntrustedError(message, "name the file of its authority with --ca; a fleet's is etc/tls/ca.crt on each Mac")


def _refusal_in(error: BaseException | None) -> ssl.SSLCertVerificationError | None:
    # aiohttp's error is of this class too, but what the TLS library said is in an attribute; httpx has it as a cause.
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError) and hasattr(error, "verify_message"):
            return error
        error = getattr(error, "certificate_error", None) or error.__cause__ or error.__context__
    return None
