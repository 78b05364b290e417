"""How long a step takes when steps overlap.

Owns: that one rule. Must not know: what a step does.
"""

from __future__ import annotations

import time


class StepClock:
    """A step lasts from the later of its launch and the end of the step before it to its own end."""

    def __init__(self) -> None:
        self._last_end_s = 0.0

    def elapsed_s(self, launched_s: float) -> float:
        """Time of the step that was launched at ``launched_s`` and has just ended."""
        now_s = time.perf_counter()
        elapsed_s = now_s - max(launched_s, self._last_end_s)
        self._last_end_s = now_s
        return elapsed_s
