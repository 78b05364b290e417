"""The fleet's certificates, proved by the TLS library itself: two machines shake hands, strangers do not."""

from __future__ import annotations

import datetime as dt
import ssl
from dataclasses import astuple
from pathlib import Path

import pytest

from engine.errors import ConfigError
from serve_app.cli.trust import office_trust
from serve_app.files import write_file
from serve_app.node.certificates import KeyPair, days_left, make_authority, make_certificate
from serve_app.node.settings import Installation
from serve_app.trust import pinned

NOW = dt.datetime.now(dt.UTC)
AUTHORITY = make_authority(NOW)


def context(purpose: ssl.Purpose, pair: KeyPair, authority: KeyPair, folder: Path) -> ssl.SSLContext:
    """Both sides show a certificate and ask for one, as Ray's nodes do."""
    file = folder / "pair.pem"
    file.write_text(pair.certificate + pair.key)
    made = ssl.create_default_context(purpose, cadata=authority.certificate)
    made.verify_mode = ssl.CERT_REQUIRED
    made.load_cert_chain(file)
    return made


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> None:
    """Raise ssl.SSLError unless both believe each other. No socket: the bytes are carried by hand."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        client.wrap_bio(to_client, to_server, server_hostname=name),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(4):
        for side in sides:
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    sides[1].write(b"x")
    assert sides[0].read(1) == b"x"


@pytest.mark.parametrize("name", ["10.0.0.2", "mac-2.local"])
def test_two_machines_of_a_fleet_believe_each_other_by_address_and_by_name(tmp_path: Path, name: str) -> None:
    one = make_certificate(AUTHORITY, ["10.0.0.1"], NOW)
    two = make_certificate(AUTHORITY, ["10.0.0.2", "mac-2.local"], NOW)
    client = context(ssl.Purpose.SERVER_AUTH, one, AUTHORITY, tmp_path)
    shake_hands(context(ssl.Purpose.CLIENT_AUTH, two, AUTHORITY, tmp_path), client, name)


def test_a_machine_at_another_address_is_not_believed(tmp_path: Path) -> None:
    pair = make_certificate(AUTHORITY, ["10.0.0.1"], NOW)
    sides = [
        context(purpose, pair, AUTHORITY, tmp_path) for purpose in (ssl.Purpose.CLIENT_AUTH, ssl.Purpose.SERVER_AUTH)
    ]
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(*sides, "10.0.0.9")


def test_a_machine_of_another_fleet_is_not_believed(tmp_path: Path) -> None:
    stranger = make_authority(NOW)
    server = context(ssl.Purpose.CLIENT_AUTH, make_certificate(AUTHORITY, ["10.0.0.1"], NOW), AUTHORITY, tmp_path)
    client = context(ssl.Purpose.SERVER_AUTH, make_certificate(stranger, ["10.0.0.2"], NOW), AUTHORITY, tmp_path)
    with pytest.raises(ssl.SSLError):
        shake_hands(server, client, "10.0.0.1")


def test_a_machines_certificate_makes_no_others(tmp_path: Path) -> None:
    member = make_certificate(AUTHORITY, ["10.0.0.2"], NOW)
    forged = make_certificate(member, ["10.0.0.1"], NOW)
    forged = KeyPair(forged.certificate + member.certificate, forged.key)
    honest = make_certificate(AUTHORITY, ["10.0.0.3"], NOW)
    client = context(ssl.Purpose.SERVER_AUTH, honest, AUTHORITY, tmp_path)
    with pytest.raises(ssl.SSLError):
        shake_hands(context(ssl.Purpose.CLIENT_AUTH, forged, AUTHORITY, tmp_path), client, "10.0.0.1")


def test_days_left_count_down() -> None:
    pair = make_certificate(AUTHORITY, ["10.0.0.1"], NOW)
    assert 819 < days_left(pair.certificate, NOW) <= 820
    assert days_left(pair.certificate, NOW + dt.timedelta(days=900)) < 0


def test_an_authority_that_cannot_be_read_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        make_certificate(KeyPair("nothing", "nothing"), ["10.0.0.1"], NOW)


@pytest.mark.parametrize(("shown", "believed"), [(0, True), (1, False)])
def test_a_server_that_asks_itself_believes_its_own_certificate_only(
    tmp_path: Path, shown: int, believed: bool
) -> None:
    pairs = [make_certificate(AUTHORITY, [f"10.0.0.{number}"], NOW) for number in (1, 2)]
    (tmp_path / "own.crt").write_text(pairs[0].certificate)
    (tmp_path / "pair.pem").write_text(pairs[shown].certificate + pairs[shown].key)
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(tmp_path / "pair.pem")
    client = pinned(tmp_path / "own.crt")
    if believed:
        shake_hands(server, client, "127.0.0.1")
    else:
        with pytest.raises(ssl.SSLError):
            shake_hands(server, client, "127.0.0.1")


def test_the_fleets_authority_is_believed_besides_the_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installation = Installation(tmp_path)
    write_file(installation.tls_folder / "ca.crt", AUTHORITY.certificate)
    monkeypatch.setenv("METALSLOTS_PREFIX", str(tmp_path))
    (tmp_path / "pair.pem").write_text("".join(astuple(make_certificate(AUTHORITY, ["10.0.0.1"], NOW))))
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(tmp_path / "pair.pem")
    shake_hands(server, office_trust(), "10.0.0.1")
    monkeypatch.delenv("METALSLOTS_PREFIX")
    with pytest.raises(ssl.SSLError):
        shake_hands(server, office_trust(), "10.0.0.1")
