"""Steps that were launched and whose results are not in yet.

Owns: which requests are in which launched step, and the blocks that must not change hands before a step is over. Must
not know: what a result means.

A request can end (cancel, deadline, end token) while its next row is already running. That row still writes one
position of the blocks which the request held. So blocks leave a table at once but return to the pool only when the
newest launched step is over: no step ever writes to a block that somebody else holds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.batch import StepBatch
from engine.scheduler.request_state import Request
from engine.scheduler.state_snapshots import SavedState
from engine.scheduler.step_cost import StepLoad


@dataclass(slots=True)
class LaunchedStep:
    """``requests`` are the rows' requests in order. ``num_draft_tokens`` come on top of ``load``; ``scheduled_s`` is
    when the step was chosen. ``block_ids`` and ``window_block_ids`` return to their pools after the step. ``saved``:
    the recurrent states that it saves, by the arrival of their request.
    """

    batch: StepBatch
    requests: tuple[Request, ...]
    load: StepLoad
    num_draft_tokens: int = 0
    scheduled_s: float = 0.0
    block_ids: list[list[int]] = field(default_factory=list)
    window_block_ids: list[list[int]] = field(default_factory=list)
    released_ids: list[str] = field(default_factory=list)
    saved: dict[int, list[SavedState]] = field(default_factory=dict)


class InFlightSteps:
    """Launched steps, oldest first."""

    def __init__(self) -> None:
        self._steps: dict[int, LaunchedStep] = {}

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def newest(self) -> LaunchedStep | None:
        """The step launched last, if its result is still to come."""
        return next(reversed(self._steps.values())) if self._steps else None

    @property
    def num_blocks_draining(self) -> int:
        """References that return to the pool when the launched steps are over."""
        return sum(len(block_ids) for step in self._steps.values() for block_ids in step.block_ids)

    def launch(self, step: LaunchedStep) -> None:
        """A step goes out."""
        self._steps[step.batch.step_index] = step
        for request in step.requests:
            request.num_rows_in_flight += 1

    def land(self, step_index: int) -> LaunchedStep:
        """A step's result, or failure, came in. Steps land in the order of their launch."""
        assert self._steps, f"step {step_index} was not launched"
        assert step_index == next(iter(self._steps)), f"step {step_index} lands before an older one"
        step = self._steps.pop(step_index)
        for request in step.requests:
            request.num_rows_in_flight -= 1
        return step

    def drained_blocks(self) -> list[int]:
        """Every block id that is still draining, once per reference."""
        return [block_id for step in self._steps.values() for ids in step.block_ids for block_id in ids]

    def drained_window_blocks(self) -> list[int]:
        """The same of sliding-window layers' blocks."""
        return [block_id for step in self._steps.values() for ids in step.window_block_ids for block_id in ids]

    def draining_ids(self) -> set[str]:
        """Requests that are gone but still have a row in a launched step."""
        return {request_id for step in self._steps.values() for request_id in step.released_ids}
