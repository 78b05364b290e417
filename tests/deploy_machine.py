"""A machine of stand-ins for the scripts of k8s-free-deploy: every command writes down how it was called."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "k8s-free-deploy"
LIMIT_S = 60

# A command that only writes down how it was called; %s is what it does besides.
STUB = '#!/bin/sh\necho "$(basename "$0") $*" >>"$CALLS"\n%s\n'
# Stands in for the installed command: it knows just enough for the scripts to go on.
METALSLOTS = """
case "$*" in
    "node make-head"*) printf 'role: head\\naddress: 10.0.0.1\\n' >"$METALSLOTS_PREFIX/etc/node.yaml" ;;
    "node make-member"*) printf 'role: member\\naddress: 10.0.0.2\\n' >"$METALSLOTS_PREFIX/etc/node.yaml" ;;
    "drain"*)
        echo '{"replicas": 1, "open_calls": 0}'
        [ ! -f "$METALSLOTS_PREFIX/drained-elsewhere" ] || touch "$METALSLOTS_PREFIX/broken"
        [ ! -f "$METALSLOTS_PREFIX/busy" ]
        ;;
    "ready"*) [ ! -f "$METALSLOTS_PREFIX/broken" ] ;;
esac
"""
# `print` succeeds while the daemon is loaded.
LAUNCHCTL = """
case $1 in
    print) [ -f "$LOADED" ] ;;
    bootstrap) [ ! -f "$LOADED" ] && touch "$LOADED" ;;
    bootout) rm "$LOADED" ;;
esac
"""


class Machine:
    """A machine of stand-ins: its commands, its folders, and what was said to it."""

    def __init__(self, folder: Path, system: str) -> None:
        self.folder = folder
        self.prefix = folder / "opt" / "metalslots"
        self.daemons = folder / "daemons"
        self.daemons.mkdir()
        self.environment_folder = folder / "environment"
        (self.environment_folder / "bin").mkdir(parents=True)
        self._calls = folder / "calls"
        self._variables = {
            "PATH": f"{folder / 'bin'}:/usr/bin:/bin",
            "CALLS": str(self._calls),
            "LOADED": str(folder / "loaded"),
            "METALSLOTS_LAUNCHD_FOLDER": str(self.daemons),
            "METALSLOTS_SYSTEMD_FOLDER": str(self.daemons),
            "METALSLOTS_FIREWALL": str(folder / "bin" / "socketfilterfw"),
        }
        (folder / "bin").mkdir()
        self._stub(folder / "bin" / "uname", f"echo {system}")
        self._stub(folder / "bin" / "id", "case $1 in -u) echo 0 ;; *) echo office ;; esac")
        for name in ("chown", "pmset", "systemctl", "socketfilterfw"):
            self._stub(folder / "bin" / name, "")
        self._stub(folder / "bin" / "launchctl", LAUNCHCTL)
        self._stub(self.environment_folder / "bin" / "metalslots", METALSLOTS)
        self._stub(self.environment_folder / "bin" / "python", "echo 2.60.0 3 11")

    def _stub(self, path: Path, does: str) -> None:
        path.write_text(STUB % does)
        path.chmod(0o755)

    def run(self, script: str, *options: str, shell: str = "sh") -> subprocess.CompletedProcess[str]:
        """Run a script as an administrator would."""
        self._calls.write_text("")
        return subprocess.run(
            [shell, str(DEPLOY / "bin" / script), "--prefix", str(self.prefix), *options],
            env=self._variables,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            stdin=subprocess.DEVNULL,
        )

    def succeed(self, script: str, *options: str) -> list[str]:
        """Run a script that must succeed; returns the commands that it has called."""
        done = self.run(script, *options)
        assert done.returncode == 0, done.stdout + done.stderr
        return self.calls()

    def calls(self) -> list[str]:
        """The commands called by the last run, but for harmless questions."""
        return [line for line in self._calls.read_text().splitlines() if not line.startswith(("uname", "id "))]

    def install(self, *options: str) -> list[str]:
        """Install the head."""
        use = ("--environment", str(self.environment_folder))
        return self.succeed("install.sh", "--address", "10.0.0.1", *use, *options)
