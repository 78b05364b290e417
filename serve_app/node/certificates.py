"""The fleet's own certificates, for Ray's connections and for HTTPS inside the office.

Owns: making the authority once, and each machine's certificate from it. Must not know: who uses them.

The authority's key is as powerful as the fleet's secret: who has it can make a machine that the others believe. It lies
on the head only, and goes to a new machine inside the join ticket, where it is used and not kept.
"""

from __future__ import annotations

import datetime as dt
import ipaddress
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from engine.errors import ConfigError

AUTHORITY_DAYS = 3650
# The longest that Apple's systems accept of an authority that a user has added.
NODE_DAYS = 820
# A machine whose clock is behind must not refuse what was made just now.
CLOCK_SLACK = dt.timedelta(days=1)


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A certificate and its private key, both PEM text."""

    certificate: str
    key: str


def make_authority(now: dt.datetime) -> KeyPair:
    """Return a new authority for one fleet."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "metalslots fleet")])
    builder = (
        _builder(name, name, key.public_key(), now, AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    return KeyPair(_pem(builder.sign(key, hashes.SHA256())), _key_pem(key))


def make_certificate(authority: KeyPair, names: list[str], now: dt.datetime) -> KeyPair:
    """Return a certificate for one machine, which is server and client of the others.

    ``names``: its addresses and host names. Raises ConfigError when ``authority`` is none.
    """
    try:
        issuer = x509.load_pem_x509_certificate(authority.certificate.encode())
        issuer_key = serialization.load_pem_private_key(authority.key.encode(), password=None)
    except ValueError as error:
        raise ConfigError(f"The fleet's authority cannot be read: {error}.", "make a new ticket on the head") from error
    assert isinstance(issuer_key, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])])
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    builder = (
        _builder(subject, issuer.subject, key.public_key(), now, NODE_DAYS)
        .add_extension(x509.SubjectAlternativeName([_general_name(name) for name in names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
    )
    return KeyPair(_pem(builder.sign(issuer_key, hashes.SHA256())), _key_pem(key))


def days_left(certificate: str, now: dt.datetime) -> float:
    """Days until a PEM certificate ends; negative when it has."""
    return (x509.load_pem_x509_certificate(certificate.encode()).not_valid_after_utc - now) / dt.timedelta(days=1)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: dt.datetime, days: int
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SLACK)
        .not_valid_after(now + dt.timedelta(days=days))
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def _key_pem(key: ec.EllipticCurvePrivateKey) -> str:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()
