"""Faults on demand: a plan of what shall go wrong at which step, and a runner that carries it out.

Owns: the seam through which tests break the engine. Reached only by ``AsyncEngine``'s ``faults`` argument or by
wrapping a runner by hand: no configuration key, option or message from outside leads here. Must not know: MLX.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from engine.batch import StepBatch, StepOutput
from engine.errors import StepFailedError
from engine.interfaces import ModelFacts, ModelRunner, PendingStep


class FaultKind(StrEnum):
    """What can go wrong in a step."""

    RAISE = "raise"
    RAISE_IN_RESULT = "raise_in_result"
    OUT_OF_MEMORY = "out_of_memory"
    FAIL_ROW = "fail_row"
    SLOW = "slow"
    HANG = "hang"
    ABORT = "abort"
    KILL = "kill"
    REFUSE_START = "refuse_start"


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """``kind`` strikes at ``num_steps`` launched steps in a row, the first being number ``at_step`` (from 0).

    ``slow_s`` is how long SLOW takes. FAIL_ROW fails the sampling row whose request id comes first.
    """

    kind: FaultKind
    at_step: int = 0
    num_steps: int = 1
    slow_s: float = 0.1

    def strikes(self, step: int) -> bool:
        """Whether the fault happens at launched step number ``step``."""
        return self.at_step <= step < self.at_step + self.num_steps


class FaultyRunner:
    """A ModelRunner that passes everything to another one, except at the steps of its plans."""

    def __init__(self, runner: ModelRunner, plans: Sequence[FaultPlan]) -> None:
        self._runner = runner
        self._plans = tuple(plans)
        self._num_launched = 0

    @property
    def facts(self) -> ModelFacts:
        """Facts of the wrapped runner's model."""
        return self._runner.facts

    @property
    def max_steps_in_flight(self) -> int:
        """As the wrapped runner says."""
        return self._runner.max_steps_in_flight

    def launch(self, batch: StepBatch) -> PendingStep:
        """Launch ``batch``, or do what the plan says for this step."""
        step = self._num_launched
        self._num_launched += 1
        plan = next((plan for plan in self._plans if plan.strikes(step)), None)
        if plan is None:
            return self._runner.launch(batch)
        match plan.kind:
            case FaultKind.RAISE:
                raise RuntimeError(f"injected: step {step} raises")
            case FaultKind.OUT_OF_MEMORY:
                raise MemoryError(f"injected: step {step} cannot allocate")
            case FaultKind.HANG:
                threading.Event().wait()
            case FaultKind.ABORT:
                os.abort()
            case FaultKind.KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            case FaultKind.SLOW:
                threading.Event().wait(plan.slow_s)
        return _FaultyStep(self._runner.launch(batch), batch, plan.kind)

    def release(self, request_ids: Sequence[str]) -> None:
        """Pass on."""
        self._runner.release(request_ids)

    def close(self) -> None:
        """Pass on."""
        self._runner.close()


class _FaultyStep:
    def __init__(self, step: PendingStep, batch: StepBatch, kind: FaultKind) -> None:
        self._step = step
        self._batch = batch
        self._kind = kind

    def result(self) -> StepOutput:
        output = self._step.result()
        if self._kind is FaultKind.RAISE_IN_RESULT:
            raise RuntimeError(f"injected: step {self._batch.step_index} raises when it is read")
        if self._kind is not FaultKind.FAIL_ROW or not output.tokens:
            return output
        victim = min(output.tokens)
        tokens = {request_id: token for request_id, token in output.tokens.items() if request_id != victim}
        error = StepFailedError(f"injected: row {victim} fails")
        return StepOutput(output.step_index, tokens, output.elapsed_s, {**output.failures, victim: error})
