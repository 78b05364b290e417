"""The scripts of k8s-free-deploy: their shell, their steps, and what they say to launchd and systemd.

Those two, and everything else that belongs to a Mac, are stand-ins here that write down what they are told. The flow
with real nodes is tests/serve/test_office_path.py.
"""

from __future__ import annotations

import configparser
import os
import plistlib
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.deploy_machine import DEPLOY, LIMIT_S, ROOT, STUB, Machine

SCRIPTS = sorted(path.name for path in (DEPLOY / "bin").glob("*.sh"))
SHELLCHECK = Path(sys.executable).with_name("shellcheck")


@pytest.fixture
def mac(tmp_path: Path) -> Machine:
    return Machine(tmp_path, "Darwin")


@pytest.fixture
def linux(tmp_path: Path) -> Machine:
    return Machine(tmp_path, "Linux")


def saying(calls: Sequence[str], *words: str) -> list[str]:
    """Of the calls those that begin with one of the words, in order."""
    return [call for call in calls if call.startswith(words)]


def test_shellcheck_finds_nothing() -> None:
    scripts = [DEPLOY / "bin" / name for name in SCRIPTS]
    done = subprocess.run(
        [SHELLCHECK, *scripts, DEPLOY / "lib" / "keep-alive.sh"], cwd=DEPLOY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_names_every_option_that_the_script_takes(mac: Machine, script: str) -> None:
    done = mac.run(script, "--help")
    assert done.returncode == 0
    body = (DEPLOY / "bin" / script).read_text().partition("while [ $# -gt 0 ]")[2].partition("done\n")[0]
    options = {word.rstrip(")") for word in body.split() if word.startswith("--") and word.endswith(")")}
    assert [option for option in sorted(options) if option not in done.stdout] == []


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_unknown_option_is_bad_usage(mac: Machine, script: str) -> None:
    done = mac.run(script, "--colour")
    assert done.returncode == 2
    assert "--colour" in done.stderr


@pytest.mark.parametrize(
    "options",
    [
        ("--address", "10.0.0.1;reboot"),
        ("--address", "10.0.0.1", "--label", "<x/>"),
        ("--address", "10.0.0.1", "--prefix", "/"),
        ("--address", "10.0.0.1", "--user", "a b"),
        ("--address", "10.0.0.1", "--supervisor", "cron"),
        ("--address", "10.0.0.1", "--app", "/nowhere.yaml"),
        ("--address",),
        (),
    ],
)
def test_what_cannot_work_or_would_need_quoting_is_refused_before_the_first_step(
    mac: Machine, options: tuple[str, ...]
) -> None:
    done = mac.run("install.sh", *options)
    assert done.returncode == 2
    assert done.stdout == ""
    assert not mac.prefix.exists()


@pytest.mark.parametrize("system", ["Darwin", "Linux"])
@pytest.mark.parametrize("script", ["install.sh", "join.sh"])
def test_a_dry_run_says_every_step_and_changes_nothing(tmp_path: Path, system: str, script: str) -> None:
    machine = Machine(tmp_path, system)
    ticket = tmp_path / "ticket"
    ticket.touch()
    options = ["--address", "10.0.0.1", "--environment", str(machine.environment_folder), "--dry-run"]
    options += ["--ticket", str(ticket)] if script == "join.sh" else []
    done = machine.run(script, *options, shell="bash")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("would run:") >= 6
    assert not machine.prefix.exists()
    assert list(machine.daemons.iterdir()) == []
    asked = ("launchctl print", "systemctl is-active")
    assert [call for call in machine.calls() if not call.startswith(asked)] == []


def test_installing_registers_a_daemon_of_launchd_that_starts_at_boot(mac: Machine) -> None:
    calls = mac.install("--user", "office")
    plist = plistlib.loads((mac.daemons / "metalslots.node.plist").read_bytes())
    assert plist["ProgramArguments"] == [str(mac.prefix / "bin" / "metalslots"), "node", "run"]
    assert plist["UserName"] == "office"
    assert plist["RunAtLoad"] is plist["KeepAlive"] is True
    assert plist["ExitTimeOut"] >= 120
    assert plist["SoftResourceLimits"]["NumberOfFiles"] == 65536
    # The environment is the daemon's own affair: nothing secret can stand where everybody may read.
    assert "EnvironmentVariables" not in plist
    assert saying(calls, "pmset") == ["pmset -a sleep 0 disksleep 0 powernap 0 womp 1 autorestart 1"]
    assert len(saying(calls, "socketfilterfw")) == 2
    assert saying(calls, "launchctl boot") == [
        f"launchctl bootstrap system {mac.daemons / 'metalslots.node.plist'}",
    ]
    assert saying(calls, "chown") == [f"chown -R office {mac.prefix}"]


def test_installing_again_starts_the_daemon_with_its_new_definition(mac: Machine) -> None:
    mac.install()
    release = (mac.prefix / "current").readlink()
    calls = mac.install("--label", "studio")
    assert [call.split()[1] for call in saying(calls, "launchctl boot")] == ["bootout", "bootstrap"]
    assert (mac.prefix / "current").readlink() == release
    (made,) = [call for call in calls if "make-head" in call]
    assert "--label studio" in made


def test_the_gpus_memory_limit_is_set_again_at_every_boot(mac: Machine) -> None:
    mac.install("--wired-limit-mb", "57344")
    plist = plistlib.loads((mac.daemons / "metalslots.wired-limit.plist").read_bytes())
    assert plist["ProgramArguments"] == ["/usr/sbin/sysctl", "iogpu.wired_limit_mb=57344"]
    assert plist["RunAtLoad"] is True


def test_installing_on_linux_registers_a_unit_of_systemd(linux: Machine) -> None:
    calls = linux.install("--user", "office", "--supervisor", "systemd")
    path = linux.daemons / "metalslots.node.service"
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string(path.read_text())
    assert unit["Service"]["User"] == "office"
    assert unit["Service"]["ExecStart"] == f"{linux.prefix}/bin/metalslots node run"
    assert unit["Service"]["Restart"] == "always"
    assert saying(calls, "systemctl") == [
        "systemctl daemon-reload",
        "systemctl enable --quiet metalslots.node.service",
        "systemctl restart metalslots.node.service",
    ]
    assert saying(calls, "pmset", "launchctl", "socketfilterfw") == []


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_itself_accepts_the_unit(linux: Machine) -> None:
    linux.install("--user", "root", "--supervisor", "systemd")
    # It asks that the user and the program exist.
    done = subprocess.run(
        ["systemd-analyze", "verify", linux.daemons / "metalslots.node.service"], capture_output=True, text=True
    )
    assert "metalslots.node" not in done.stderr, done.stderr


def test_only_the_administrator_may_register_daemons(mac: Machine) -> None:
    (mac.folder / "bin" / "id").write_text("#!/bin/sh\necho 501\n")
    done = mac.run("install.sh", "--address", "10.0.0.1", "--environment", str(mac.environment_folder))
    assert done.returncode == 1
    assert "sudo" in done.stderr
    assert not mac.prefix.exists()


def test_without_an_environment_one_is_made_from_this_checkout(mac: Machine) -> None:
    python = mac.folder / "bin" / "python3.12"
    # Makes what `venv` would, out of the stand-ins.
    python.write_text(STUB % f'[ "$2" != venv ] || cp -R {mac.environment_folder} "$3"')
    python.chmod(0o755)
    calls = mac.succeed("install.sh", "--address", "10.0.0.1", "--python", "python3.12")
    release = mac.prefix / "releases" / (mac.prefix / "current").readlink().name
    assert release.is_dir()
    pip = "python -m pip install --quiet --disable-pip-version-check --no-input"
    assert f"{pip} -c {ROOT}/constraints.txt {ROOT}[cpu]" in calls
    # On a Mac Metal computes.
    assert saying(calls, "python -m engine.mlx_backend.blas") == []


def test_a_half_made_environment_is_no_release(mac: Machine) -> None:
    python = mac.folder / "bin" / "python3.12"
    python.write_text(STUB % '[ "$2" != venv ] || { mkdir -p "$3/bin"; exit 1; }')
    python.chmod(0o755)
    done = mac.run("install.sh", "--address", "10.0.0.1", "--python", "python3.12")
    assert done.returncode != 0
    assert list((mac.prefix / "releases").iterdir()) == []
    assert not (mac.prefix / "current").exists()


def upgrade(machine: Machine, *options: str) -> subprocess.CompletedProcess[str]:
    return machine.run("upgrade.sh", "--environment", str(machine.environment_folder), *options)


def test_an_upgrade_drains_before_it_stops_and_waits_until_the_model_is_back(mac: Machine) -> None:
    mac.install()
    old = (mac.prefix / "current").readlink()
    done = upgrade(mac)
    assert done.returncode == 0, done.stderr
    steps = saying(mac.calls(), "metalslots ready", "metalslots drain", "launchctl boot", "metalslots node state")
    assert [step.replace(str(mac.daemons), "DAEMONS") for step in steps] == [
        "metalslots ready 10.0.0.1 --others --wait 60",
        "metalslots drain 10.0.0.1 --wait 600 --json",
        "metalslots ready 10.0.0.1 --others --wait 60",
        "launchctl bootout system/metalslots.node",
        "launchctl bootstrap system DAEMONS/metalslots.node.plist",
        "metalslots node state --wait 180",
        "metalslots ready 10.0.0.1 --replicas 1 --wait 1800",
    ]
    assert (mac.prefix / "current").readlink() != old
    assert old.is_symlink()


def test_an_upgrade_that_does_not_answer_is_undone(mac: Machine) -> None:
    mac.install()
    old = (mac.prefix / "current").readlink()
    (mac.prefix / "broken").touch()
    done = upgrade(mac, "--alone")
    assert done.returncode == 1
    assert "back to" in done.stdout
    assert (mac.prefix / "current").readlink() == old
    assert [call.split()[1] for call in saying(mac.calls(), "launchctl boot")] == ["bootout", "bootstrap"] * 2


def test_nothing_is_stopped_while_no_other_machine_answers(mac: Machine) -> None:
    mac.install()
    old = (mac.prefix / "current").readlink()
    (mac.prefix / "broken").touch()
    done = upgrade(mac)
    assert done.returncode != 0
    assert saying(mac.calls(), "launchctl bootout", "metalslots drain") == []
    assert (mac.prefix / "current").readlink() == old
    assert len(list((mac.prefix / "releases").iterdir())) == 1


def test_two_machines_that_are_upgraded_at_once_do_not_both_stop(mac: Machine) -> None:
    mac.install()
    # The other one is drained while this one is.
    (mac.prefix / "drained-elsewhere").touch()
    done = upgrade(mac)
    assert done.returncode == 1
    assert "one machine at a time" in done.stderr
    assert saying(mac.calls(), "metalslots undrain") == ["metalslots undrain 10.0.0.1"]
    assert saying(mac.calls(), "launchctl bootout") == []


def test_a_machine_that_is_still_busy_goes_on_with_its_old_code(mac: Machine) -> None:
    mac.install()
    old = (mac.prefix / "current").readlink()
    (mac.prefix / "busy").touch()
    done = upgrade(mac)
    assert done.returncode == 1
    assert saying(mac.calls(), "metalslots undrain") == ["metalslots undrain 10.0.0.1"]
    assert saying(mac.calls(), "launchctl bootout") == []
    assert (mac.prefix / "current").readlink() == old
    assert len(list((mac.prefix / "releases").iterdir())) == 1


def test_another_ray_is_not_brought_in_by_the_way(mac: Machine) -> None:
    mac.install()
    other = mac.folder / "other"
    shutil.copytree(mac.environment_folder, other)
    (other / "bin" / "python").write_text("#!/bin/sh\necho 2.61.0 3 11\n")
    done = mac.run("upgrade.sh", "--environment", str(other))
    assert done.returncode == 1
    assert "2.61.0" in done.stderr
    assert "--new-ray" in done.stderr
    assert saying(mac.calls(), "metalslots drain", "launchctl bootout") == []


def test_after_two_upgrades_one_old_release_is_left_to_go_back_to(mac: Machine) -> None:
    mac.install()
    for _ in range(3):
        assert upgrade(mac).returncode == 0
    assert len(list((mac.prefix / "releases").iterdir())) == 2


@pytest.mark.parametrize("system", ["Darwin", "Linux"])
def test_removing_leaves_nothing_and_can_be_done_twice(tmp_path: Path, system: str) -> None:
    machine = Machine(tmp_path, system)
    supervisor = ("--supervisor", "launchd" if system == "Darwin" else "systemd")
    machine.install(*supervisor)
    calls = machine.succeed("remove.sh", "--yes", *supervisor)
    assert saying(calls, "metalslots drain") == ["metalslots drain 10.0.0.1 --wait 600 --json"]
    assert not machine.prefix.exists()
    assert list(machine.daemons.iterdir()) == []
    assert machine.succeed("remove.sh", "--yes", *supervisor) == []


def test_nothing_is_removed_without_a_yes(mac: Machine) -> None:
    mac.install()
    done = mac.run("remove.sh")
    assert done.returncode == 1
    assert mac.prefix.exists()
    assert saying(mac.calls(), "launchctl bootout") == []


def test_a_folder_that_is_no_installation_is_left_alone(mac: Machine) -> None:
    mac.prefix.mkdir(parents=True)
    (mac.prefix / "thesis.txt").touch()
    mac.succeed("remove.sh", "--yes")
    assert (mac.prefix / "thesis.txt").exists()


def test_draining_with_stop_and_undo(mac: Machine) -> None:
    mac.install()
    calls = mac.succeed("drain.sh", "--stop", "--wait", "5")
    assert saying(calls, "metalslots drain", "launchctl bootout") == [
        "metalslots drain 10.0.0.1 --wait 5 --json",
        "launchctl bootout system/metalslots.node",
    ]
    calls = mac.succeed("drain.sh", "--undo")
    assert calls[-1] == "metalslots undrain 10.0.0.1"


def test_the_check_before_an_installation_needs_no_environment(linux: Machine) -> None:
    variables = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        ["sh", str(DEPLOY / "bin" / "check.sh"), "--prefix", str(linux.prefix), "--supervisor", "none"],
        env=variables,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    assert "Python" in done.stdout
    assert "clock" in done.stdout
