"""What can go wrong with a load test itself. Failures of single requests are results, not errors."""

from __future__ import annotations

from engine.errors import StartupError


class BenchError(StartupError):
    """The load test cannot be run, or its result cannot be read; ``fix`` is one thing to do."""
