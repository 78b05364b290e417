"""The dashboard's addresses: who may see them, what they send, and that nothing else can get in."""

from __future__ import annotations

import asyncio
import json

import pytest

from serve_app.errors import ReplicaLostError
from serve_app.ingress.auth import COOKIE, KeyBook
from serve_app.ingress.dashboard.observatory import Observatory
from serve_app.ingress.observing import IngressWatch
from serve_app.keys import own_key
from serve_app.protocol import ReplicaStatus
from tests.core_fakes import ChainRunner, answer_text, make_core
from tests.serve_fakes import CHAT, Client, EngineFleet, Reply, ScriptedFleet, client_of, prompt_of, said

KEY, TEXT = own_key()
FORM = {"content-type": "application/x-www-form-urlencoded"}


def guarded(fleet: object | None = None) -> Client:
    return client_of(fleet or ScriptedFleet(*said("hello")), book=KeyBook((KEY,)))


def pictures(reply: Reply) -> list[dict[str, object]]:
    return [event for event in reply.events if isinstance(event, dict)]


async def test_without_keys_the_page_is_open() -> None:
    reply = await client_of(ScriptedFleet()).get("/dashboard")
    assert reply.status == 200
    assert b"<title>metalslots</title>" in reply.body


@pytest.mark.parametrize("path", ["/dashboard", "/dashboard/events", "/dashboard/static/app.js"])
async def test_with_keys_nothing_is_seen_without_one(path: str) -> None:
    reply = await guarded().get(path)
    assert reply.status == 401
    assert b"app.js" not in reply.body
    assert (await guarded().get(path.replace("/events", ""), authorization=f"Bearer {TEXT}")).status == 200


async def test_a_person_is_asked_for_a_key_and_it_is_kept_where_scripts_cannot_read_it() -> None:
    client = guarded()
    page = await client.get("/dashboard")
    assert page.headers["content-type"].startswith("text/html")
    assert b'type="password"' in page.body
    assert (await client.get("/dashboard/static/style.css")).status == 200
    signed = await client.post("/dashboard/sign-in", f"key={TEXT}".encode(), **FORM)
    assert (signed.status, signed.headers["location"]) == (303, "/dashboard")
    cookie = signed.headers["set-cookie"]
    assert f"{COOKIE}={TEXT}" in cookie
    assert "httponly" in cookie.lower()
    assert "samesite=strict" in cookie.lower()
    assert (await client.get("/dashboard", cookie=f"{COOKIE}={TEXT}")).status == 200


@pytest.mark.parametrize("body", [b"key=wrong", b"key=", b"", b"\xff\xfe", b"key=" + b"x" * 3000])
async def test_a_wrong_key_is_a_page_that_says_so(body: bytes) -> None:
    reply = await guarded().post("/dashboard/sign-in", body, **FORM)
    assert reply.status == 401
    assert b'role="alert"' in reply.body or b"An API key is needed." in reply.body
    assert "set-cookie" not in reply.headers


async def test_the_cookie_lets_the_page_ask_questions_and_nobody_else() -> None:
    client = guarded()
    cookie = {"cookie": f"{COOKIE}={TEXT}", "host": "macs.office:8000"}
    own = await client.post("/v1/chat/completions", CHAT, **cookie, origin="http://macs.office:8000")
    assert own.status == 200
    foreign = {"origin": "http://evil.example"}, {"origin": "http://macs.office:9999"}, {"sec-fetch-site": "same-site"}
    for headers in foreign:
        assert (await client.post("/v1/chat/completions", CHAT, **cookie, **headers)).status == 401
    assert (await client.get("/status", cookie=f"{COOKIE}=wrong")).status == 401


async def test_signing_out_takes_the_cookie_away() -> None:
    reply = await guarded().post("/dashboard/sign-out", b"", **FORM, cookie=f"{COOKIE}={TEXT}")
    assert (reply.status, reply.headers["location"]) == (303, "/dashboard")
    assert "max-age=0" in reply.headers["set-cookie"].lower()


async def test_the_page_is_told_to_load_nothing_from_elsewhere() -> None:
    client = client_of(ScriptedFleet())
    policy = (await client.get("/dashboard")).headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for name in ("app.js", "views.js", "charts.js", "dom.js", "format.js", "trial.js", "style.css", "icon.svg"):
        reply = await client.get(f"/dashboard/static/{name}")
        assert reply.status == 200
        assert reply.headers["content-type"].startswith(("text/javascript", "text/css", "image/svg+xml"))
        assert b"//cdn" not in reply.body
    for name in ("index.html", "sign-in.html", "..%2fpages.py", "nothing.js"):
        assert (await client.get(f"/dashboard/static/{name}")).status == 404


async def test_pictures_come_at_once_and_go_on() -> None:
    async with EngineFleet() as fleet:
        await client_of(fleet).post("/v1/chat/completions", {**CHAT, "max_tokens": 5})
        client = guarded(fleet)
        async with client.connection("GET", "/dashboard/events", b"", authorization=f"Bearer {TEXT}") as (reply, _):
            async with asyncio.timeout(20):
                while len(pictures(reply)) < 2:
                    reply.news.clear()
                    await reply.news.wait()
    first, second, *_ = pictures(reply)
    assert first["key"] == KEY.name
    assert first["hour"]["calls"] == 1  # type: ignore[index]
    assert [mac["host"] for mac in first["macs"]] == ["mac"]  # type: ignore[attr-defined]
    assert second["at_unix_s"] > first["at_unix_s"]  # type: ignore[operator]


async def test_a_mac_that_stops_answering_is_shown_as_silent_and_then_forgotten() -> None:
    now_s = 0.0

    class Fleet(ScriptedFleet):
        names: tuple[str, ...] = ("r0", "r1")

        async def statuses(self) -> list[ReplicaStatus]:
            return [ReplicaStatus(name, "n", f"mac-{name}", "chain", True, 0) for name in self.names]

    fleet = Fleet()
    observatory = Observatory(fleet, IngressWatch(), clock=lambda: now_s)
    await observatory.look()
    fleet.names = ("r0",)
    now_s = 3.0
    seen = (await observatory.look())["macs"]
    assert [(mac["replica"], mac["answers"], mac["silent_s"]) for mac in seen] == [("r0", True, 0), ("r1", False, 3.0)]
    now_s = 500.0
    assert [mac["replica"] for mac in (await observatory.look())["macs"]] == ["r0"]


async def test_a_trial_streams_text_and_tells_where_the_time_went() -> None:
    async with EngineFleet(make_core(ChainRunner(step_s=0.001))) as fleet:
        body = {**CHAT, "max_tokens": 6, "temperature": 0, "stream": True}
        reply = await client_of(fleet).post("/dashboard/try", body)
    *events, done = reply.events
    assert done == "[DONE]"
    assert "".join(event.get("text", "") for event in events) == answer_text(prompt_of(CHAT["messages"]), 6)
    last = events[-1]
    timings = last["timings"]
    assert 0 <= timings["prefill_started_s"] <= timings["first_token_s"] <= timings["total_s"]
    assert sum(timings["waited_s"].values()) == pytest.approx(timings["prefill_started_s"], abs=1e-4)
    assert last["usage"]["completion_tokens"] == 6
    assert json.dumps(last)


async def test_a_failure_that_no_replica_knows_of_is_shown() -> None:
    client = client_of(ScriptedFleet(ReplicaLostError("The machine that was answering is silent.")))
    await client.post("/v1/chat/completions", CHAT)
    await client.post("/v1/chat/completions", {**CHAT, "model": "nobody"})
    (failure,) = (await client.get("/dashboard/state")).json["failures"]
    assert (failure["code"], failure["host"]) == ("replica_lost", None)
    assert failure["request_id"].startswith("chatcmpl-")
