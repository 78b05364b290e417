"""A machine's settings, its secrets and its ticket: what is written, who can read it, what is refused."""

from __future__ import annotations

import datetime as dt
import json
import stat
from pathlib import Path

import pytest

from engine.errors import ConfigError
from serve_app.node import ticket as tickets
from serve_app.node.settings import Installation, NodeSettings, load_settings
from serve_app.node.ticket import Ticket, make_head, make_member, read_ticket

HEAD = {"role": "head", "address": "10.0.0.1", "head": "10.0.0.1:6379"}


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Installation:
    return installation(monkeypatch, tmp_path / "head")


def installation(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Installation:
    # pytest's folders are longer than a socket's path leaves room for.
    monkeypatch.setattr("serve_app.node.settings.MAX_PREFIX_BYTES", 1000)
    return Installation(folder)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_settings_are_read_as_they_were_written(head: Installation) -> None:
    settings = load_settings({**HEAD, "tls": True, "labels": ["studio"], "first_port": 30_000})
    head.write(settings)
    assert head.read() == settings


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"adress": "10.0.0.1"}, "Unknown configuration key `adress`"),
        ({"role": "boss"}, "`role` is 'boss'"),
        ({"head": "10.0.0.9:6379"}, "the head is at 10.0.0.9"),
        ({"head": "10.0.0.1:20500"}, "the head's port 20500 is one of"),
        ({"address": "10.0.0.1; reboot"}, "`address` is '10.0.0.1; reboot'"),
        ({"first_port": 65_000}, "`first_port` is 65000"),
    ],
)
def test_wrong_settings_are_refused_by_name(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_settings({**HEAD, **changes})


def test_a_prefix_too_long_for_rays_sockets_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 100)
    with pytest.raises(ConfigError, match="too long"):
        Installation(long).write(load_settings(HEAD))
    assert not long.exists()


def test_no_secret_stands_on_rays_command_line_or_in_its_environment(head: Installation) -> None:
    settings = load_settings({**HEAD, "tls": True})
    ticket = make_head(head, settings)
    visible = [*head.ray_arguments(settings), *head.environment(settings).values()]
    key = (head.tls_folder / "node.key").read_text()
    assert not [text for text in visible if ticket.token in text or key in text]
    environment = head.environment(settings)
    assert environment["RAY_AUTH_MODE"] == "token"
    assert Path(environment["RAY_AUTH_TOKEN_PATH"]).read_text() == ticket.token
    assert environment["RAY_USE_TLS"] == "1"


def test_a_member_offers_its_labels_and_one_metal_and_opens_no_head_port(head: Installation) -> None:
    settings = load_settings({**HEAD, "role": "member", "address": "10.0.0.2", "labels": ["studio"]})
    arguments = head.ray_arguments(settings)
    (resources,) = [json.loads(text.partition("=")[2]) for text in arguments if text.startswith("--resources=")]
    assert resources == {"metal": 1, "label:studio": 1}
    assert "--address=10.0.0.1:6379" in arguments
    assert not [text for text in arguments if text.startswith(("--head", "--port", "--include-dashboard"))]


def test_the_dashboard_is_off_and_bound_to_loopback_in_any_case(head: Installation) -> None:
    arguments = head.ray_arguments(load_settings(HEAD))
    assert "--include-dashboard=false" in arguments
    assert "--dashboard-host=127.0.0.1" in arguments


def test_every_port_of_a_node_is_fixed_and_its_own(head: Installation) -> None:
    settings = load_settings(HEAD)
    ports = [
        int(text.partition("=")[2])
        for text in head.ray_arguments(settings)
        if "port=" in text and not text.startswith("--port=")
    ]
    assert len(set(ports)) == len(ports)
    assert all(settings.first_port <= port < settings.first_port + 1000 for port in ports)


def test_secrets_are_readable_to_their_owner_only(head: Installation) -> None:
    make_head(head, load_settings({**HEAD, "tls": True}))
    secret = [head.token_file, head.ticket_file, head.tls_folder / "ca.key", head.tls_folder / "node.key"]
    assert [mode(path) for path in secret] == [0o600] * len(secret)


def test_making_the_head_again_keeps_its_secret_and_its_authority(head: Installation) -> None:
    settings = load_settings({**HEAD, "tls": True})
    first = make_head(head, settings)
    assert make_head(head, settings) == first
    assert read_ticket(head.ticket_file) == first


def test_a_member_gets_the_secret_and_a_certificate_but_not_the_authoritys_key(
    monkeypatch: pytest.MonkeyPatch, head: Installation, tmp_path: Path
) -> None:
    ticket = make_head(head, load_settings({**HEAD, "tls": True}))
    member = installation(monkeypatch, tmp_path / "member")
    settings = make_member(member, ticket, address="10.0.0.2", labels=["studio"], first_port=20_000)
    assert member.read() == settings == replace_role(settings)
    assert member.token_file.read_text() == ticket.token
    assert (member.tls_folder / "ca.crt").read_text() == (head.tls_folder / "ca.crt").read_text()
    assert sorted(path.name for path in member.tls_folder.iterdir()) == ["ca.crt", "node.crt", "node.key"]


def replace_role(settings: NodeSettings) -> NodeSettings:
    return settings.model_copy(update={"role": "member", "tls": True})


@pytest.mark.parametrize(("field", "value"), [("ray", "2.1.0"), ("python", "3.9")])
def test_a_machine_with_another_ray_or_python_is_refused_and_told_which(
    monkeypatch: pytest.MonkeyPatch, head: Installation, tmp_path: Path, field: str, value: str
) -> None:
    ticket = make_head(head, load_settings(HEAD)).model_copy(update={field: value})
    member = installation(monkeypatch, tmp_path / "member")
    with pytest.raises(ConfigError, match=value) as error:
        make_member(member, ticket, address="10.0.0.2", labels=[], first_port=20_000)
    assert value in error.value.fix
    assert not member.prefix.exists()


def test_a_ticket_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ticket"
    path.write_text("head: 10.0.0.1:6379\n")
    with pytest.raises(ConfigError, match="`token`"):
        read_ticket(path)


def test_certificates_are_made_anew_while_the_authority_stays(
    monkeypatch: pytest.MonkeyPatch, head: Installation
) -> None:
    settings = load_settings({**HEAD, "tls": True})
    make_head(head, settings)
    before = (head.tls_folder / "node.crt").read_text()
    later = dt.datetime.now(dt.UTC) + dt.timedelta(days=400)
    monkeypatch.setattr(tickets, "_now", lambda: later)
    make_head(head, settings)
    assert (head.tls_folder / "node.crt").read_text() != before


def test_a_ticket_without_encryption_has_no_authority() -> None:
    ticket = Ticket(head="10.0.0.1:6379", token="t", ray="2", python="3.11")
    assert ticket.authority is None
