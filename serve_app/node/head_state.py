"""What the head's Ray keeps on its disk, so that it knows its members when it starts again.

Owns: when that is to be forgotten. Must not know: what is in it. Ray reads it at its start (REP-64, alpha in Ray 2.60);
what another release, another Ray or another address has left would bring back a fleet that there is no more.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from importlib.metadata import version
from pathlib import Path

from serve_app.files import write_file
from serve_app.node.settings import NodeSettings


class HeadState:
    """One head's. ``folder``: Ray's, and a file beside it that says who made it."""

    def __init__(self, folder: Path, settings: NodeSettings) -> None:
        self._folder = folder
        self._note = folder.with_name(f"{folder.name}.made-by")
        # A release is an environment of its own.
        self._maker = "\n".join((sys.prefix, f"ray {version('ray')}", settings.head))

    def prepare(self) -> None:
        """Before Ray's start: keep what is this head's own, and forget anything else."""
        with contextlib.suppress(OSError):
            if self._note.read_text() == self._maker:
                return
        self.forget()
        self._folder.mkdir(parents=True, mode=0o700)
        write_file(self._note, self._maker)

    def forget(self) -> None:
        """Ray begins empty the next time, as it does without a state."""
        self._note.unlink(missing_ok=True)
        shutil.rmtree(self._folder, ignore_errors=True)
