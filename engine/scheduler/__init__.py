"""Which request computes what in the next step. Pure: no clock, thread, device or text."""

from engine.scheduler.scheduler import Scheduler, SchedulerConfig

__all__ = ["Scheduler", "SchedulerConfig"]
