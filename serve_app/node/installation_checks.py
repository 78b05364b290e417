"""What can be asked once metalslots is installed: the daemon's own word, who may read the secrets, certificates, disk.

Owns: those checks. Must not know: how a finding is shown.
"""

from __future__ import annotations

import datetime as dt
import shutil
import stat
import time
from collections.abc import Iterator

from serve_app.node.certificates import days_left
from serve_app.node.daemon import read_state
from serve_app.node.machine_checks import Finding
from serve_app.node.settings import Installation

MIN_FREE_BYTES = 5 * 2**30
MIN_CERTIFICATE_DAYS = 30
# The head is missed, a model loads, a node starts: all that takes less.
PATIENCE_S = 300


def check_installation(installation: Installation) -> Iterator[Finding]:
    """Look at what is installed. Raises ConfigError when nothing is."""
    settings = installation.read()
    yield Finding("role", "pass", f"{settings.role} of {settings.head}, at {settings.address}")
    yield _daemon(installation)
    yield _secrets(installation)
    yield _disk(installation)
    if settings.tls:
        yield _certificate(installation)
    else:
        yield Finding("encryption", "skip", "off: the secret and all prompts travel in clear inside this network")


def _daemon(installation: Installation) -> Finding:
    log = installation.log_folder / "daemon.log"
    note = read_state(installation)
    if note is None or note["state"] == "ended":
        return Finding("daemon", "fail", "it does not run", f"read {log}, and run install.sh or join.sh again")
    detail = f"{note['state']}: {note['detail']}".rstrip(": ")
    if note["state"] == "running":
        return Finding("daemon", "pass", detail)
    since_unix_s = note["since_unix_s"]
    waits_long = isinstance(since_unix_s, int) and time.time() - since_unix_s > PATIENCE_S
    # What it says is what it found out from where it runs, which is what counts on a Mac.
    is_bad = waits_long or note["state"] == "waiting for the head"
    return Finding("daemon", "fail" if is_bad else "warn", detail, f"read {log}; it tries again by itself")


def _secrets(installation: Installation) -> Finding:
    files = [
        installation.token_file,
        installation.ticket_file,
        installation.keys_file,
        *installation.tls_folder.glob("*.key"),
    ]
    loose = [file for file in files if file.exists() and stat.S_IMODE(file.stat().st_mode) & 0o077]
    if loose:
        names = " ".join(str(file) for file in loose)
        return Finding("secrets", "fail", f"others on this machine can read {names}", f"sudo chmod 600 {names}")
    return Finding("secrets", "pass", "only their owner can read them")


def _disk(installation: Installation) -> Finding:
    free_bytes = shutil.disk_usage(installation.prefix).free
    detail = f"{free_bytes / 2**30:.0f} GiB free at {installation.prefix}"
    if free_bytes < MIN_FREE_BYTES:
        return Finding("disk", "warn", detail, "free some, before logs and models fill it")
    return Finding("disk", "pass", detail)


def _certificate(installation: Installation) -> Finding:
    left = days_left((installation.tls_folder / "node.crt").read_text(), dt.datetime.now(dt.UTC))
    detail = f"this machine's certificate is good for {left:.0f} days"
    if left < MIN_CERTIFICATE_DAYS:
        return Finding("encryption", "warn" if left > 0 else "fail", detail, "run install.sh or join.sh again")
    return Finding("encryption", "pass", detail)
