"""What a machine must be like to be a good part of a fleet: awake, wired, in time, reachable.

Owns: the questions to the operating system and what their answers mean; on a Mac and on Linux each has its own way, and
one that has no sense on a system says so. Must not know: installations. Nothing but the standard library is imported,
so that ``python -m serve_app.node.machine_checks [HEAD:PORT]`` works before anything is installed.
"""

from __future__ import annotations

import errno
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

State = Literal["pass", "warn", "fail", "skip"]
# Runs a command and returns what it prints, or None when it fails or does not exist.
Ask = Callable[[Sequence[str]], str | None]

COMMAND_LIMIT_S = 10.0
CONNECT_LIMIT_S = 3.0
# Serve averages load over seconds of wall clock, and TLS and logs compare times.
MAX_CLOCK_ERROR_S = 1.0
FIREWALL = "/usr/libexec/ApplicationFirewall/socketfilterfw"
LOCAL_NETWORK_PRIVACY = (
    "macOS keeps this process from the local network (Local Network Privacy): it may run as a daemon of "
    "/Library/LaunchDaemons, not as an agent and not from a closed session"
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. ``fix``: what to do unless it passed."""

    name: str
    state: State
    detail: str
    fix: str = ""


def check_machine(ask: Ask, system: str, root: Path = Path("/")) -> Iterator[Finding]:
    """Look at this machine. ``system``: "Darwin" or "Linux"; ``root``: where Linux keeps its /proc and /sys."""
    if system == "Darwin":
        yield from (_mac_awake(ask), _mac_battery(ask), _mac_network(ask), _mac_firewall(ask))
        yield from (_mac_wired_limit(ask), _mac_clock(ask))
    else:
        yield from (_linux_awake(ask), _linux_battery(root), _linux_network(root))
        yield Finding("firewall", "skip", "not looked at here; the ports are named in docs/operations.md")
        yield Finding("wired limit", "skip", "only a Mac has one")
        yield _linux_clock(ask)


def check_head(head: str) -> Finding:
    """Whether this process reaches the head. ``head``: host:port."""
    host, _, port = head.rpartition(":")
    reason = reach(host, int(port))
    if reason is None:
        return Finding("head", "pass", f"{head} is reached from this session; the daemon must reach it itself")
    return Finding("head", "fail", reason, "start the head first, and see that no firewall is between")


def reach(host: str, port: int, connect: Callable[..., socket.socket] = socket.create_connection) -> str | None:
    """Why this process cannot reach ``host:port``, in words; None when it can."""
    try:
        connect((host, port), timeout=CONNECT_LIMIT_S).close()
    except OSError as error:
        # macOS answers so where it forbids; where there is really no way, to say it is worth a look all the same.
        if error.errno == errno.EHOSTUNREACH and sys.platform == "darwin":
            return f"{host}:{port}: {error.strerror}. {LOCAL_NETWORK_PRIVACY}"
        return f"{host}:{port}: {error}"
    return None


def ask_system(command: Sequence[str]) -> str | None:
    """Run a command and return what it prints; None when it fails, hangs or does not exist."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _mac_awake(ask: Ask) -> Finding:
    text = ask(["pmset", "-g", "custom"]) or ask(["pmset", "-g"])
    if text is None:
        return Finding("sleep", "skip", "pmset does not answer")
    # One value for each power source.
    minutes = [int(value) for value in re.findall(r"^\s*sleep\s+(\d+)", text, re.MULTILINE)]
    if minutes and not any(minutes):
        return Finding("sleep", "pass", "this Mac never sleeps")
    found = f"this Mac sleeps after {max(minutes)} minutes" if minutes else "pmset names no sleep setting"
    return Finding("sleep", "warn", found, "sudo pmset -a sleep 0 disksleep 0 powernap 0 womp 1 autorestart 1")


def _linux_awake(ask: Ask) -> Finding:
    # systemctl ends with 1 for what is not enabled, so its words are taken from both.
    state = (ask(["systemctl", "show", "--property=LoadState", "suspend.target"]) or "").strip()
    if state == "LoadState=masked":
        return Finding("sleep", "pass", "suspend is masked: this machine never sleeps")
    if not state:
        return Finding("sleep", "skip", "no systemd: nothing suspends this machine by itself")
    return Finding("sleep", "pass", "a Linux server does not sleep by itself; a desktop session may make it")


def _mac_battery(ask: Ask) -> Finding:
    return _battery("InternalBattery" in (ask(["pmset", "-g", "batt"]) or ""))


def _linux_battery(root: Path) -> Finding:
    return _battery(any((root / "sys/class/power_supply").glob("BAT*")))


def _battery(has_battery: bool) -> Finding:
    if not has_battery:
        return Finding("battery", "pass", "no laptop")
    return Finding("battery", "warn", "a laptop: it sleeps when its lid is closed", "use a machine that stays")


def _mac_network(ask: Ask) -> Finding:
    route = re.search(r"interface:\s*(\S+)", ask(["route", "-n", "get", "default"]) or "")
    ports = ask(["networksetup", "-listallhardwareports"]) or ""
    if route is None:
        return Finding("network", "skip", "no default route")
    port = re.search(rf"Hardware Port: (.+)\nDevice: {re.escape(route[1])}\n", ports)
    return _network(route[1], wireless=port is not None and "wi-fi" in port[1].lower())


def _linux_network(root: Path) -> Finding:
    try:
        lines = (root / "proc/net/route").read_text().splitlines()[1:]
    except OSError:
        lines = []
    routes = [line.split() for line in lines]
    interface = next((fields[0] for fields in routes if fields[1] == "00000000"), None)
    if interface is None:
        return Finding("network", "skip", "no default route")
    return _network(interface, wireless=(root / "sys/class/net" / interface / "wireless").exists())


def _network(interface: str, *, wireless: bool) -> Finding:
    if wireless:
        found = f"{interface} is wireless: each dropout is a machine lost, and its model loaded again"
        return Finding("network", "warn", found, "use a cable, and give the machine a fixed address")
    return Finding("network", "pass", f"{interface} is wired")


def _mac_firewall(ask: Ask) -> Finding:
    text = ask([FIREWALL, "--getglobalstate"])
    if text is None:
        return Finding("firewall", "skip", "the application firewall does not answer")
    if "disabled" in text.lower() or "State = 0" in text:
        return Finding("firewall", "pass", "the application firewall is off")
    python = str(Path(sys.executable).resolve())
    allowed = ask([FIREWALL, "--getappblocked", python]) or ""
    if "permit" in allowed.lower():
        return Finding("firewall", "pass", f"on, and lets {python} take connections")
    return Finding(
        "firewall",
        "warn",
        f"on, and {python} is not let through",
        f"sudo {FIREWALL} --add {python} && sudo {FIREWALL} --unblockapp {python}",
    )


def _mac_wired_limit(ask: Ask) -> Finding:
    text = (ask(["sysctl", "-n", "iogpu.wired_limit_mb"]) or "").strip()
    if not text.isdigit():
        return Finding("wired limit", "skip", "this system names none")
    if text == "0":
        return Finding("wired limit", "pass", "macOS chooses: about two thirds to three quarters of the memory")
    return Finding("wired limit", "pass", f"the GPU may hold {int(text):,} MB")


def _mac_clock(ask: Ask) -> Finding:
    found = re.search(r"^\s*([+-]\d+\.\d+)", ask(["sntp", "-t", "3", "time.apple.com"]) or "", re.MULTILINE)
    if found is None:
        return Finding("clock", "skip", "no time server answers")
    error_s = float(found[1])
    if abs(error_s) > MAX_CLOCK_ERROR_S:
        detail = f"the clock is {error_s:+.1f} s off"
        return Finding("clock", "warn", detail, "sudo systemsetup -setusingnetworktime on")
    return Finding("clock", "pass", f"{error_s:+.3f} s off")


def _linux_clock(ask: Ask) -> Finding:
    text = (ask(["timedatectl", "show", "--property=NTPSynchronized", "--value"]) or "").strip()
    if text == "yes":
        return Finding("clock", "pass", "synchronised")
    if text == "no":
        return Finding("clock", "warn", "the clock is not synchronised", "sudo timedatectl set-ntp true")
    return Finding("clock", "skip", "timedatectl does not answer")


def main(arguments: Sequence[str]) -> int:
    """Print the findings; the exit code is 1 when one has failed."""
    findings = list(check_machine(ask_system, platform.system()))
    findings += [check_head(head) for head in arguments]
    for finding in findings:
        print(f"{finding.name:<11}{finding.state:<5} {finding.detail}")
        if finding.fix and finding.state != "pass":
            print(f"{'':<17}fix: {finding.fix}")
    return int(any(finding.state == "fail" for finding in findings))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
