"""What the checks make of a machine's answers, on a Mac and on Linux."""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from serve_app.files import write_file
from serve_app.node.daemon import daemon_environment, keep_awake_command, read_state
from serve_app.node.installation_checks import check_installation
from serve_app.node.machine_checks import Finding, check_head, check_machine, reach
from serve_app.node.settings import Installation, load_settings
from serve_app.node.ticket import make_head

# As macOS prints them.
PMSET = "AC Power:\n disksleep            0\n sleep                {minutes}\n womp                 1\n"
ROUTE = "   route to: default\n  interface: en0\n"
PORTS = "\nHardware Port: {name}\nDevice: en0\nEthernet Address: 00:00:00:00:00:00\n"
GOOD_MAC = {
    "pmset -g custom": PMSET.format(minutes=0),
    "pmset -g batt": "Now drawing from 'AC Power'\n",
    "route -n get default": ROUTE,
    "networksetup -listallhardwareports": PORTS.format(name="Ethernet"),
    "--getglobalstate": "Firewall is disabled. (State = 0)\n",
    "sysctl -n iogpu.wired_limit_mb": "0\n",
    "sntp -t 3 time.apple.com": "+0.004187 +/- 0.015 time.apple.com 17.253.54.123\n",
}


def answers(known: dict[str, str]) -> Callable[[Sequence[str]], str | None]:
    def ask(command: Sequence[str]) -> str | None:
        text = " ".join(command)
        return next((answer for words, answer in known.items() if words in text), None)

    return ask


def mac(changes: dict[str, str]) -> dict[str, Finding]:
    return {finding.name: finding for finding in check_machine(answers({**GOOD_MAC, **changes}), "Darwin")}


def linux(root: Path, known: dict[str, str]) -> dict[str, Finding]:
    return {finding.name: finding for finding in check_machine(answers(known), "Linux", root)}


def test_a_mac_as_it_should_be_passes_everything() -> None:
    assert {finding.state for finding in mac({}).values()} == {"pass"}


@pytest.mark.parametrize(
    ("name", "question", "answer", "words"),
    [
        ("sleep", "pmset -g custom", PMSET.format(minutes=10), "sleeps after 10 minutes"),
        ("battery", "pmset -g batt", " -InternalBattery-0 (id=1)\t100%\n", "laptop"),
        ("network", "networksetup -listallhardwareports", PORTS.format(name="Wi-Fi"), "en0 is wireless"),
        ("firewall", "--getglobalstate", "Firewall is enabled. (State = 1)\n", "is not let through"),
        ("clock", "sntp -t 3 time.apple.com", "-7.5 +/- 0.1 time.apple.com\n", "-7.5 s off"),
    ],
)
def test_what_a_mac_lacks_is_said_with_its_remedy(name: str, question: str, answer: str, words: str) -> None:
    found = mac({question: answer})[name]
    assert found.state == "warn"
    assert words in found.detail
    assert found.fix


def test_a_firewall_that_lets_the_program_through_passes() -> None:
    found = mac({"--getglobalstate": "(State = 1)", "--getappblocked": "The application is permitted\n"})
    assert found["firewall"].state == "pass"


def test_a_wired_limit_that_was_set_is_shown() -> None:
    found = mac({"sysctl -n iogpu.wired_limit_mb": "57344\n"})
    assert "57,344 MB" in found["wired limit"].detail


@pytest.mark.parametrize("system", ["Darwin", "Linux"])
def test_a_system_that_answers_nothing_fails_nothing(tmp_path: Path, system: str) -> None:
    found = list(check_machine(answers({}), system, tmp_path))
    assert not [finding for finding in found if finding.state == "fail"]


def test_both_systems_are_asked_the_same(tmp_path: Path) -> None:
    assert set(mac({})) == set(linux(tmp_path, {}))


def test_linux_is_read_from_proc_and_sys(tmp_path: Path) -> None:
    (tmp_path / "proc/net").mkdir(parents=True)
    route = "Iface\tDestination\tGateway\nwlan0\t00000000\t0100000A\n"
    (tmp_path / "proc/net/route").write_text(route)
    (tmp_path / "sys/class/net/wlan0/wireless").mkdir(parents=True)
    (tmp_path / "sys/class/power_supply/BAT0").mkdir(parents=True)
    found = linux(tmp_path, {"timedatectl": "no\n", "suspend.target": "LoadState=masked\n"})
    assert {name: found[name].state for name in ("network", "battery", "clock", "sleep")} == {
        "network": "warn",
        "battery": "warn",
        "clock": "warn",
        "sleep": "pass",
    }


def test_a_refusal_by_local_network_privacy_is_called_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> socket.socket:
        raise OSError(errno.EHOSTUNREACH, "No route to host")

    monkeypatch.setattr("sys.platform", "darwin")
    assert "Local Network Privacy" in (reach("10.0.0.1", 6379, refuse) or "")
    monkeypatch.setattr("sys.platform", "linux")
    assert "Local Network Privacy" not in (reach("10.0.0.1", 6379, refuse) or "")


def test_a_head_that_listens_is_reached_and_one_that_does_not_is_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert check_head(f"127.0.0.1:{port}").state == "pass"
    assert check_head(f"127.0.0.1:{port}").state == "fail"


def test_only_a_mac_is_kept_awake() -> None:
    command = keep_awake_command(42, "darwin")
    assert command is not None
    assert list(command)[-2:] == ["-w", "42"]
    assert keep_awake_command(42, "linux") is None


def test_a_daemon_gets_a_home_and_a_path_and_nothing_of_another_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("RAY_ADDRESS", "10.9.9.9:6379")
    environment = daemon_environment()
    assert Path(environment["HOME"]).is_absolute()
    assert "/usr/bin" in environment["PATH"].split(os.pathsep)
    assert not [name for name in environment if name.startswith("RAY_")]


@pytest.fixture
def installation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Installation:
    monkeypatch.setattr("serve_app.node.settings.MAX_PREFIX_BYTES", 1000)
    made = Installation(tmp_path / "prefix")
    make_head(made, load_settings({"role": "head", "address": "10.0.0.1", "head": "10.0.0.1:6379", "tls": True}))
    return made


def note(installation: Installation, state: str, pid: int, since_unix_s: int = 0) -> None:
    text = json.dumps({"state": state, "detail": "why", "since_unix_s": since_unix_s, "pid": pid})
    write_file(installation.state_file, text)


def checked(installation: Installation) -> dict[str, Finding]:
    return {finding.name: finding for finding in check_installation(installation)}


def test_a_running_daemon_with_safe_secrets_passes(installation: Installation) -> None:
    note(installation, "running", os.getpid())
    assert [finding.state for finding in checked(installation).values() if finding.name != "disk"] == ["pass"] * 4


@pytest.mark.parametrize("state", ["waiting for the head", "starting", "ended"])
def test_a_daemon_that_does_not_serve_fails_with_its_own_words(installation: Installation, state: str) -> None:
    note(installation, state, os.getpid())
    assert checked(installation)["daemon"].state == "fail"


def test_a_daemon_that_is_gone_without_a_word_is_not_believed(installation: Installation) -> None:
    # No process has this number: it is above what systems give.
    note(installation, "running", 2**30)
    assert read_state(installation) is None
    assert checked(installation)["daemon"].state == "fail"


def test_a_secret_that_others_can_read_fails(installation: Installation) -> None:
    installation.token_file.chmod(0o644)
    found = checked(installation)["secrets"]
    assert found.state == "fail"
    assert str(installation.token_file) in found.fix
