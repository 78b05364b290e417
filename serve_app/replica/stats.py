"""What a replica reports to Ray Serve's autoscaler. Pure.

Owns: names and types of the figures. Ray disables a replica's autoscaling figures for good, with a line in a log, when
the first report holds anything but int and float; so every figure here is one, and unknown is left out.
"""

from __future__ import annotations

from engine.interfaces import EngineStatus


def autoscaling_stats(status: EngineStatus | None, *, draining: bool) -> dict[str, int | float]:
    """Return the queue's depth. Without a running engine: no slots, nothing waiting."""
    if status is None:
        return {"slots": 0, "running": 0, "waiting": 0, "waiting_tokens": 0, "draining": int(draining)}
    scheduler = status.scheduler
    return {
        "slots": scheduler.slots,
        "running": scheduler.num_running,
        "waiting": scheduler.num_waiting,
        "waiting_tokens": scheduler.num_waiting_tokens,
        "draining": int(draining),
    }
