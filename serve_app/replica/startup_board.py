"""Where a loading replica tells the one who started it how far it is, and what went wrong.

Owns: one tiny named actor. Must not know: what is loading. Ray Serve reports a failed constructor as a traceback in a
status text; a person needs the typed error with its fix, and needs it before Serve's retries are used up.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from typing import Any

import ray

from engine.errors import StartupError

BOARD_NAME = "metalslots-startup"
BOARD_NAMESPACE = "metalslots"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StartupNote:
    """The newest word of a loading replica: a description, the fraction done if known, or the error that ended it."""

    description: str = ""
    fraction: float | None = None
    error: StartupError | None = None


class StartupBoard:
    """Holds the newest note; an error stays."""

    def __init__(self) -> None:
        self._note = StartupNote()

    def post(self, note: StartupNote) -> None:
        """Replace the note, unless an error is on the board."""
        if self._note.error is None:
            self._note = note

    def read(self) -> StartupNote:
        """Return the newest note."""
        return self._note


def create_board() -> Any:
    """Make the board that replicas started from now on will find. The caller keeps the handle alive."""
    actor: Any = ray.remote(num_cpus=0)(StartupBoard)
    return actor.options(name=BOARD_NAME, namespace=BOARD_NAMESPACE).remote()


class BoardWriter:
    """A replica's side. Where nobody made a board (a fleet deployed from a file), notes go to the log only."""

    def __init__(self) -> None:
        self._board: Any = None
        with contextlib.suppress(ValueError):
            self._board = ray.get_actor(BOARD_NAME, namespace=BOARD_NAMESPACE)

    def progress(self, description: str, fraction: float | None = None) -> None:
        """Say how far loading is. Does not wait."""
        logger.info("%s", description)
        self._post(StartupNote(description, fraction))

    def failed(self, error: StartupError) -> None:
        """Say why loading ended, and wait until it is on the board: the caller is about to raise and end."""
        reference = self._post(StartupNote(str(error), None, error))
        if reference is not None:
            with contextlib.suppress(Exception):
                ray.get(reference, timeout=5)

    def _post(self, note: StartupNote) -> Any:
        if self._board is None:
            return None
        with contextlib.suppress(Exception):
            return self._board.post.remote(note)
        return None
