"""The engine as everything above it sees it: asynchronous, one class for the thread and the process.

Owns: requests from the moment they are given to their last delta, whatever happens to the engine meanwhile. Must not
know: MLX, HTTP, Ray. Belongs to one event loop.

A request of which nothing was delivered yet survives the engine's death: it is submitted again to the next life, once.
One that has ends with EngineDeadError.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import AsyncGenerator, Callable, Sequence

from engine.config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.core.faults import FaultPlan
from engine.core.generation import GenerationDelta, GenerationRequest, RequestAccount
from engine.core.messages import Cancel, Complete, Launch, OnProgress, Outputs, Snapshot, Submit
from engine.core.open_requests import OpenRequest, OpenRequests
from engine.core.process_transport import KILL_MARGIN_S, REAP_S, ProcessTransport
from engine.core.supervisor import EngineState, Supervisor
from engine.core.transport import ThreadTransport, Transport
from engine.core.validation import validate_request
from engine.errors import (
    AdmissionRefusedError,
    DeadlineExceededError,
    EngineDeadError,
    EngineError,
    InvalidParameterError,
    RequestCancelledError,
    RequestFailedError,
)
from engine.interfaces import EngineStatus, ModelFacts
from engine.request import TokenOutput
from engine.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

__all__ = ["AsyncEngine", "GenerationDelta", "GenerationRequest"]

# -P: the child must not find another `engine` in the folder it happens to be started in.
ENGINE_COMMAND = (sys.executable, "-P", "-m", "engine.build")
# Freeing a large model's wired memory takes seconds on Metal, and cutting it short can strand that memory until reboot.
TEARDOWN_S = 60.0 if sys.platform == "darwin" else 5.0
# The longest that ``close`` takes beyond its grace: teardown, the child's own second try after SIGTERM, then SIGKILL.
CLOSE_LIMIT_S = 2 * TEARDOWN_S + KILL_MARGIN_S + REAP_S
MAX_SUBMISSIONS = 2
# The engine ends overdue requests itself and knows more about them; the front steps in when it has not by then.
OVERDUE_SLACK_S = 0.5
# What a refused caller is told while the engine restarts: about what loading a model takes.
RESTART_RETRY_S = 10.0


class AsyncEngine:
    """One engine. Make it with ``in_process`` (service) or ``in_thread`` (tests), then ``start`` it.

    ``on_account`` is told once of every request that was let in, when it is over: complete, failed or left, and the
    engine has told its times. ``max_held`` bounds the requests kept while the engine restarts.
    """

    def __init__(
        self,
        make_transport: Callable[[int], Transport],
        tokenizer: Tokenizer,
        *,
        watchdog_s: float,
        max_held: int,
    ) -> None:
        self._supervisor = Supervisor(make_transport, self, watchdog_s)
        self._tokenizer = tokenizer
        self._max_held = max_held
        self._open = OpenRequests()
        self._parting = OpenRequests()
        self.on_account: Callable[[RequestAccount], None] | None = None
        self._snapshot: Snapshot | None = None
        self._start_decided = asyncio.Event()

    @classmethod
    def in_thread(
        cls,
        build: Callable[[], EngineCore],
        tokenizer: Tokenizer,
        *,
        watchdog_s: float = 60.0,
        max_held: int = 256,
        teardown_s: float = TEARDOWN_S,
    ) -> AsyncEngine:
        """The loop on a thread of this process. ``build`` is called on that thread, once per life."""
        return cls(
            lambda _life: ThreadTransport(lambda _on_progress: build(), teardown_s),
            tokenizer,
            watchdog_s=watchdog_s,
            max_held=max_held,
        )

    @classmethod
    def in_process(
        cls,
        config: EngineConfig,
        tokenizer: Tokenizer,
        *,
        command: Sequence[str] = ENGINE_COMMAND,
        faults: Sequence[Sequence[FaultPlan]] = (),
        teardown_s: float = TEARDOWN_S,
    ) -> AsyncEngine:
        """The loop in a process of its own, started by ``command``.

        ``faults`` breaks life ``i`` as ``faults[i]`` says; only tests pass it.
        """

        def make_transport(life: int) -> Transport:
            plans = tuple(faults[life]) if life < len(faults) else ()
            return ProcessTransport(command, Launch(config, teardown_s, plans))

        return cls(make_transport, tokenizer, watchdog_s=config.watchdog_s, max_held=config.max_waiting_requests)

    @property
    def healthy(self) -> bool:
        """False when this engine will never answer again and has to be replaced. True during a restart in place."""
        return self._supervisor.state not in (EngineState.DEAD, EngineState.STOPPED)

    @property
    def ready(self) -> bool:
        """Whether a request would be computed now: False while the engine starts, restarts or stops."""
        return self._supervisor.state is EngineState.RUNNING

    @property
    def facts(self) -> ModelFacts:
        """Facts of the served model. Raises EngineDeadError before the engine has started."""
        if self._supervisor.started is None:
            raise EngineDeadError("The engine has not started.")
        return self._supervisor.started.facts

    @property
    def engine_pid(self) -> int | None:
        """The process that holds the model: this one when the engine is a thread. None before the first start."""
        return self._supervisor.pid

    @property
    def num_restarts(self) -> int:
        """How often the engine was started again in place."""
        return max(0, self._supervisor.num_lives - 1)

    async def start(self, on_progress: OnProgress | None = None) -> None:
        """Load the model. Raises StartupError as the engine raised it, or EngineDeadError."""
        await self._supervisor.start(on_progress)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationDelta, None]:
        """The deltas of all ``n`` answers as they come.

        Closing the iterator early ends the sequences within a step. The first ``__anext__`` raises RequestError or
        AdmissionRefusedError before any delta; later ones RequestFailedError or EngineDeadError.
        """
        opened = await self._admit(request)
        num_unfinished = request.n
        overdue = self._watch_deadline(opened)
        try:
            while num_unfinished:
                delta = await opened.next_delta()
                num_unfinished -= delta.finish_reason is not None
                yield delta
        finally:
            if overdue is not None:
                overdue.cancel()
            self._part(opened)

    def cancel(self, request_id: str) -> bool:
        """End an open request from outside: its iterator raises RequestCancelledError. False when it is not open."""
        opened = self._open.get(request_id)
        if opened is None:
            return False
        self._end(opened, RequestCancelledError("The request was cancelled."))
        return True

    def holds(self, request_id: str) -> bool:
        """Whether the account of a request that was let in is still to come."""
        return request_id in self._open or request_id in self._parting

    def status(self) -> EngineStatus:
        """What is known now. Raises EngineDeadError before the engine has started."""
        facts = self.facts
        started = self._supervisor.started
        assert started is not None
        snapshot = self._snapshot or started.snapshot
        failure = self._supervisor.last_failure
        return EngineStatus(
            state=self._supervisor.state,
            model=facts,
            slots_asked=started.slots_asked,
            scheduler=snapshot.scheduler,
            memory=snapshot.memory,
            heartbeat_age_s=self._supervisor.heard_age_s,
            num_restarts=self.num_restarts,
            last_failure=None if failure is None else failure.message,
            running=snapshot.running,
            waiting=snapshot.waiting,
        )

    async def close(self, grace_s: float = 0.0) -> None:
        """Take nothing new, let open requests run for ``grace_s``, free the model, end the engine."""
        await self._supervisor.close(grace_s)
        self._fail_open(RequestCancelledError("The engine is stopping."))
        self._end_partings()
        self._start_decided.set()

    # What the supervisor calls.

    @property
    def waits_for_engine(self) -> bool:
        """Whether any request is open."""
        return len(self._open) > 0

    def engine_running(self) -> None:
        """Submit what was kept while no engine ran."""
        self._snapshot = None
        self._start_decided.set()
        self._supervisor.work_begins()
        for opened in self._open:
            self._submit(opened)

    def engine_said(self, outputs: Outputs) -> None:
        """Distribute one step's outputs."""
        if outputs.snapshot is not None:
            self._snapshot = outputs.snapshot
        now_s = time.monotonic()
        complete: list[str] = []
        for output in outputs.outputs:
            # A name may be used again: what comes first concerns who had it first.
            parting = self._parting.of_sequence(output.request_id)
            opened = self._open.of_sequence(output.request_id)
            if parting is not None:
                parting.note_account(output)
                self._part(parting)
            elif opened is not None and self._take(opened, output, now_s):
                complete.append(output.request_id)
        if complete:
            self._supervisor.send(Complete(tuple(complete)))

    def engine_lost(self, error: EngineDeadError, *, for_good: bool) -> None:
        """Fail what cannot go on; the rest waits for the next life."""
        self._end_partings()
        if for_good:
            self._start_decided.set()
            self._fail_open(error)
            return
        for opened in self._open:
            if opened.has_delivered or opened.num_submissions >= MAX_SUBMISSIONS:
                self._end(opened, error)
            else:
                opened.begin_again()

    def _take(self, opened: OpenRequest, output: TokenOutput, now_s: float) -> bool:
        """Give ``output`` to its request; True when a stop string has completed the answer before the engine did."""
        error = output.error
        is_complete = False
        if error is None:
            try:
                is_complete = opened.take(output, now_s)
            except Exception as defect:
                logger.exception("the text of request %s could not be made", output.request_id)
                error = RequestFailedError(f"The answer's text could not be made: {type(defect).__name__}.")
        if error is not None:
            opened.note_account(output)
            self._end(opened, error)
        elif opened.ended:
            self._part(opened)
            self._supervisor.request_finished()
        return is_complete

    async def _admit(self, request: GenerationRequest) -> OpenRequest:
        if self._supervisor.state is EngineState.STARTING:
            await self._start_decided.wait()
        state = self._supervisor.state
        if state not in (EngineState.RUNNING, EngineState.RESTARTING):
            failure = self._supervisor.last_failure
            raise EngineDeadError(failure.message if failure is not None else f"The engine is {state}.")
        request = validate_request(request, self.facts)
        if request.request_id in self._open:
            raise InvalidParameterError(f"Request {request.request_id!r} is open already.", "request_id")
        if state is EngineState.RESTARTING and len(self._open) >= self._max_held:
            raise AdmissionRefusedError("requests", self._max_held, len(self._open), RESTART_RETRY_S)
        opened = OpenRequest(request, self._tokenizer)
        if not self.waits_for_engine:
            self._supervisor.work_begins()
        self._open.add(opened)
        if state is EngineState.RUNNING:
            self._submit(opened)
        return opened

    def _submit(self, opened: OpenRequest) -> None:
        opened.num_submissions += 1
        self._supervisor.send(Submit(opened.sequences))

    def _watch_deadline(self, opened: OpenRequest) -> asyncio.TimerHandle | None:
        """End the request when its deadline passes although the engine hangs, loads or restarts."""
        deadline_s = opened.request.deadline_s
        if deadline_s is None:
            return None
        error = DeadlineExceededError("The request was not done at its deadline.")
        left_s = deadline_s - time.monotonic() + OVERDUE_SLACK_S
        return asyncio.get_running_loop().call_later(left_s, self._end, opened, error)

    def _end(self, opened: OpenRequest, error: EngineError) -> None:
        opened.fail(error, time.monotonic())
        self._part(opened)

    def _part(self, opened: OpenRequest) -> None:
        """Its caller gets no more of this request. It is over when the engine has told all that it knows of it."""
        untold = opened.untold_ids if self._supervisor.hears else ()
        if self._open.remove(opened):
            if untold:
                self._supervisor.send(Cancel(untold))
                self._parting.add(opened)
        elif untold or not self._parting.remove(opened):
            return
        if not untold and self.on_account is not None:
            self.on_account(opened.account(time.monotonic()))

    def _end_partings(self) -> None:
        """The engine will tell nothing more."""
        for opened in self._parting:
            self._part(opened)

    def _fail_open(self, error: EngineDeadError | RequestCancelledError) -> None:
        for opened in self._open:
            self._end(opened, error)
