"""Two Macs on Ray: one trace through all processes, the fleet's metrics at one address, log files, and the dashboard
in a browser while a replica and an ingress die."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.browser import browser, needs_browser, page_at
from tests.fleet_nodes import Fleet
from tests.fleet_replicas import BLOCK_SIZE
from tests.otlp_collector import Collector, collector
from tests.serve_endpoint import eventually, user

pytestmark = pytest.mark.timeout(300)

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SCALING = {"min_replicas": 1, "max_replicas": 2, "up_after_s": 0.5, "down_after_s": 600.0}
MODEL = {"name": "chain", "replicas": 1, "scaling": SCALING, "engine": {"slots": 4, "block_size": BLOCK_SIZE}}
BODY: dict[str, Any] = {"model": "chain", "messages": user("hello"), "max_tokens": 20, "temperature": 0}


@pytest.fixture(scope="module")
def spans() -> Iterator[Collector]:
    with collector() as running:
        yield running


@pytest.fixture(scope="module")
def fleet(spans: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    nodes = Fleet(2)
    nodes.environment |= {"OTEL_EXPORTER_OTLP_ENDPOINT": spans.url, "OTEL_BSP_SCHEDULE_DELAY": "200"}
    logs = {"format": "json", "folder": str(tmp_path_factory.mktemp("logs"))}
    with nodes:
        nodes.deploy(
            "tests.fleet_replicas:FleetReplica",
            models=[MODEL],
            replica={"shutdown_grace_s": 1.0},
            ingress={"replicas": 2},
            logs=logs,
        )
        nodes.logs = Path(logs["folder"])  # type: ignore[attr-defined]
        yield nodes


def ask(fleet: Fleet, **headers: str) -> httpx.Response:
    reply = httpx.post(f"{fleet.url}/v1/chat/completions", json=BODY, headers=headers, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply


def metrics(fleet: Fleet) -> str:
    return httpx.get(f"{fleet.url}/metrics", timeout=30).text


def total(text: str, name: str) -> float:
    return sum(float(value) for value in re.findall(rf"^{name}{{[^}}]*}} (\S+)$", text, re.MULTILINE))


def test_load_scales_the_fleet_up_and_the_decision_is_told_with_its_reason(fleet: Fleet) -> None:
    async def crowd() -> None:
        async with httpx.AsyncClient(timeout=120) as client:
            body = {**BODY, "max_tokens": 300}
            await asyncio.gather(*(client.post(f"{fleet.url}/v1/chat/completions", json=body) for _ in range(12)))

    asyncio.run(crowd())
    eventually(lambda: len(fleet.replicas()) == 2)
    text = metrics(fleet)
    assert 'metalslots_autoscaling_decisions_total{model_name="chain",direction="up"} 1.0' in text
    assert 'metalslots_replicas_wanted{model_name="chain"} 2.0' in text


def test_one_trace_goes_through_client_ingress_router_and_replica(fleet: Fleet, spans: Collector) -> None:
    reply = ask(fleet, traceparent=f"00-{TRACE_ID}-{PARENT_ID}-01")
    names = {"POST /v1/chat/completions", "route", "chat chain", "queue", "prefill", "decode"}
    eventually(lambda: {span.name for span in spans.trace(TRACE_ID)} == names)
    by_name = {span.name: span for span in spans.trace(TRACE_ID)}
    server, route, call = (by_name[name] for name in ("POST /v1/chat/completions", "route", "chat chain"))
    assert server.parent_id == PARENT_ID
    assert route.parent_id == call.parent_id == server.span_id
    assert {by_name[name].parent_id for name in ("queue", "prefill", "decode")} == {call.span_id}
    assert call.process != server.process, "two processes"
    assert call.attributes["metalslots.route.reason"] == route.attributes["metalslots.route.reason"]
    assert reply.headers["x-route"].startswith(route.attributes["metalslots.route.reason"])
    assert call.attributes["gen_ai.response.id"] == reply.json()["id"]
    assert call.attributes["gen_ai.usage.output_tokens"] == 20


def test_whichever_ingress_is_asked_tells_of_the_whole_fleet(fleet: Fleet) -> None:
    before = total(metrics(fleet), "vllm:generation_tokens_total")
    for _ in range(6):
        ask(fleet)
    text = metrics(fleet)
    assert total(text, "vllm:generation_tokens_total") == before + 6 * 20
    engines = set(re.findall(r'^metalslots_ready{model_name="chain",engine="([^"]+)"}', text, re.MULTILINE))
    assert len(engines) == 2
    ingresses = set(re.findall(r'^metalslots_http_requests_total{ingress="([^"]+)"', text, re.MULTILINE))
    assert len(ingresses) == 2
    posts = r"metalslots_http_requests_total{ingress=\S+,path=\"/v1/chat/completions\",status=\"200\"} (\S+)"
    assert sum(map(float, re.findall(posts, text))) >= 6


def test_every_call_has_a_line_in_its_replicas_log(fleet: Fleet) -> None:
    request_id = ask(fleet).json()["id"]
    files = sorted(fleet.logs.glob("MetalReplica-chain-*.log"))  # type: ignore[attr-defined]
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    (line,) = [line for line in lines if line.get("request_id") == request_id]
    assert (line["event"], line["outcome"], line["output_tokens"]) == ("call_finished", "ok", 20)
    assert line["route"]["reason"] in ("cached", "cold", "moved")


@needs_browser
def test_the_dashboard_goes_on_when_a_replica_and_an_ingress_die(fleet: Fleet) -> None:
    with browser() as running, page_at(running, f"{fleet.url}/dashboard") as page:
        page.wait_for_selector("#connection[data-state=live]")
        page.wait_for_function("() => document.querySelectorAll('.mac .pill.good').length === 2")
        page.wait_for_selector("#scaling li")
        _kill(fleet, "MetalReplica")
        page.wait_for_selector(".mac .pill.bad")
        assert "not answer" in page.inner_text("#summary")
        page.wait_for_function("() => document.querySelectorAll('.mac .pill.good').length === 2")
        _kill(fleet, "Ingress")
        page.evaluate("window.seen = document.getElementById('connection').dataset.state")
        page.wait_for_selector("#connection[data-state=live]")
        page.fill("#trial-tokens", "12")
        page.click("#trial button[type=submit]")
        page.wait_for_selector("#trial-timeline .timeline")
        assert len(page.inner_text("#trial-answer")) == 12


def _kill(fleet: Fleet, deployment: str) -> None:
    """End one replica of a deployment as a crash does."""
    processes = [process for node in fleet.nodes for process in node.processes]
    for process in processes:
        try:
            if process.cmdline()[:1] and process.cmdline()[0].startswith(f"ray::ServeReplica:metalslots:{deployment}"):
                process.kill()
                return
        except psutil.NoSuchProcess:
            continue
    raise AssertionError(f"no process of {deployment}")
