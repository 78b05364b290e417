"""What is known of a fleet in which a replica hangs: everything of the others, and for how long it has been silent."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from serve_app.autoscaling import journal
from serve_app.autoscaling.journal import NotedScaling, ScalingHistory
from serve_app.ingress.dashboard.observatory import REMEMBERED_S, Observatory
from serve_app.ingress.fleet import ServedModel, ServeFleet
from serve_app.ingress.observing import IngressWatch
from serve_app.protocol import ReplicaStatus
from serve_app.routing.journal import JOURNAL, Presence
from serve_app.telemetry.observer import ReplicaView
from tests.serve_fakes import client_of
from tests.telemetry_samples import make_status

DEPLOYMENT = "MetalReplica-chain"
TIMEOUT_S = 0.05
FIRST = ReplicaStatus("r1", "node-1", "mac-1", "chain", True, 1, make_status())
SECOND = ReplicaStatus("r2", "node-2", "mac-2", "chain", True, 2, make_status())


class Answer:
    """One replica's answer; an ``...`` never comes."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self.cancelled = False

    async def get_async(self) -> Any:
        if self._value is ...:
            await asyncio.Event().wait()
        if isinstance(self._value, Exception):
            raise self._value
        return self._value

    def cancel(self) -> None:
        self.cancelled = True


class Handle:
    """Serve's handle as far as asking everybody goes. ``answers`` None: there is no replica."""

    deployment_name = DEPLOYMENT

    def __init__(self) -> None:
        self.values: Sequence[Any] | None = None
        self.answers: list[Answer] = []

    def broadcast(self, method: str) -> Handle:
        return self

    async def _fetch_replica_results_async(self) -> list[Answer]:
        if self.values is None:
            raise RuntimeError("no replica")
        self.answers = [Answer(value) for value in self.values]
        return self.answers


@pytest.fixture
def handle() -> Iterator[Handle]:
    yield Handle()
    JOURNAL.note_present(DEPLOYMENT, {})


def fleet_of(handle: Handle) -> ServeFleet:
    return ServeFleet([ServedModel("chain", 0)], {"chain": handle}, TIMEOUT_S)


def present(*names: str, age_s: float = 0.0) -> None:
    heard_s = time.monotonic() - age_s
    JOURNAL.note_present(DEPLOYMENT, {name: Presence(f"node-{name[1:]}", heard_s) for name in names})


async def test_a_frozen_replica_hides_nobody_and_is_marked(handle: Handle) -> None:
    fleet = fleet_of(handle)
    present("r1", "r2")
    handle.values = (FIRST, SECOND)
    assert await fleet.statuses() == [FIRST, SECOND]
    present("r1", "r2", age_s=30.0)
    handle.values = (FIRST, ...)
    first, second = await fleet.statuses()
    assert first == FIRST
    assert second == replace(SECOND, ready=False, engine=None, silent_s=second.silent_s)
    assert 30 <= second.silent_s < 40
    assert [answer.cancelled for answer in handle.answers] == [False, True], "it must not pile up there"


async def test_one_that_has_never_answered_is_known_by_its_place(handle: Handle) -> None:
    present("r1", "r2")
    handle.values = (FIRST, RuntimeError("died"))
    _, second = await fleet_of(handle).statuses()
    assert (second.replica_id, second.node_id, second.host, second.ready) == ("r2", "node-2", "", False)
    assert second.silent_s >= TIMEOUT_S, "it reports, and does not answer"


async def test_one_that_comes_or_goes_meanwhile_is_not_silent(handle: Handle) -> None:
    fleet = fleet_of(handle)
    present("r1", "r2")
    handle.values = (FIRST, SECOND)
    await fleet.statuses()

    async def changed() -> list[Answer]:
        present("r1", "r3")
        return [Answer(FIRST)]

    handle._fetch_replica_results_async = changed  # type: ignore[method-assign]
    assert await fleet.statuses() == [FIRST]


async def test_without_replicas_there_is_nothing(handle: Handle) -> None:
    assert await fleet_of(handle).statuses() == []


async def test_health_and_status_say_so(handle: Handle) -> None:
    client = client_of(fleet_of(handle))
    present("r1", "r2")
    handle.values = (FIRST, ...)
    assert (await client.get("/health")).json == {"status": "ok", "ready_replicas": {"chain": 1}}
    replicas = (await client.get("/status")).json["replicas"]
    assert [(it["replica_id"], it["ready"], it["silent_s"] > 0) for it in replicas] == [
        ("r1", True, False),
        ("r2", False, True),
    ]
    present("r2")
    handle.values = (...,)
    assert (await client.get("/health")).status == 503


async def test_the_page_keeps_what_it_showed_and_shows_who_has_never_answered(handle: Handle) -> None:
    now_s = 1000.0
    observatory = Observatory(fleet_of(handle), IngressWatch(), clock=lambda: now_s)
    present("r1", "r2", "r3")
    handle.values = (ReplicaView(FIRST), ReplicaView(SECOND), ...)
    macs = (await observatory.look())["macs"]
    assert {mac["host"]: mac["answers"] for mac in macs} == {"mac-1": True, "mac-2": True, "node-3": False}
    now_s += REMEMBERED_S + 1
    handle.values = (ReplicaView(FIRST), ..., ...)
    macs = {mac["host"]: mac for mac in (await observatory.look())["macs"]}
    assert macs["mac-2"]["silent_s"] == REMEMBERED_S + 1
    assert len(macs["mac-2"]["slots"]) == 4
    assert macs.keys() == {"mac-1", "mac-2", "node-3"}, "as long as Serve counts them"
    present("r1")
    handle.values = (ReplicaView(FIRST),)
    assert [mac["host"] for mac in (await observatory.look())["macs"]] == ["mac-1"]


async def test_metrics_do_not_wait_for_a_head_that_is_away(handle: Handle, monkeypatch: pytest.MonkeyPatch) -> None:
    back, num_reading = threading.Event(), 0
    history = ScalingHistory(2, 1, (NotedScaling(1.0, 1, 2, "work"),))

    def read(deployment: str) -> ScalingHistory:
        nonlocal num_reading
        num_reading += 1
        assert back.wait(30)
        return history

    monkeypatch.setattr(journal, "read", read)
    fleet = ServeFleet([ServedModel("chain", 0)], {"chain": handle}, TIMEOUT_S, scaled={"chain": DEPLOYMENT})
    assert await fleet.scaling() == await fleet.scaling() == {"chain": ScalingHistory()}
    assert num_reading == 1, "one thread is enough to wait"
    back.set()
    await asyncio.gather(*fleet._reading.values())
    assert await fleet.scaling() == {"chain": history}
