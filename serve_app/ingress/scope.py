"""What the layers of the HTTP application leave for each other in a request's scope.

Owns: the names, and reading them. Must not know: who leaves what.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from starlette.types import Scope

from serve_app.keys import ApiKey
from serve_app.protocol import Deltas

if TYPE_CHECKING:
    from serve_app.ingress.observing import Observation

NOTE = "metalslots.note"
KEY = "metalslots.key"
OBSERVATION = "metalslots.observation"


def note_in(scope: Scope) -> Callable[[Deltas], None] | None:
    """A function that is to see every message of the request's answer."""
    note: Callable[[Deltas], None] | None = scope.get(NOTE)
    return note


def key_in(scope: Scope) -> ApiKey | None:
    """The key that the request was let in with."""
    key: ApiKey | None = scope.get(KEY)
    return key


def observation_in(scope: Scope) -> Observation | None:
    """Who watches the request."""
    observation: Observation | None = scope.get(OBSERVATION)
    return observation
