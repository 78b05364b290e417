"""Metrics: vLLM's names, few labels, one text for many replicas, quick to make."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.request import FinishReason, Timeline
from serve_app.telemetry.call_metrics import CallMetrics
from serve_app.telemetry.engine_metrics import engine_families
from serve_app.telemetry.families import Family, Sample, counter, exposition, gauge, joined, labelled
from serve_app.telemetry.recorder import Tokens
from tests.telemetry_samples import make_answer, make_record, make_status, values_of

ROOT = Path(__file__).parents[2]
# What the queries of vLLM's own boards for Grafana ask for.
VLLM_NAMES = {
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:e2e_request_latency_seconds_sum",
    "vllm:generation_tokens_total",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:kv_cache_usage_perc",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:prompt_tokens_total",
    "vllm:request_decode_time_seconds_sum",
    "vllm:request_generation_tokens_bucket",
    "vllm:request_prefill_time_seconds_sum",
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_queue_time_seconds_sum",
    "vllm:request_success_total",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:prefix_cache_hits_total",
    "vllm:prefix_cache_queries_total",
    "vllm:num_preemptions_total",
}


def filled(num: int = 1) -> CallMetrics:
    metrics = CallMetrics(4096)
    for _ in range(num):
        metrics.tokens(Tokens(10, [0.7] * 9, [(100, 64)]))
        metrics.finished(make_record())
    return metrics


def all_families() -> list[Family]:
    engine = engine_families(make_status(), ready=True, num_open_calls=3, draining=False)
    return labelled([*filled().families(), *engine], model_name="demo", engine="mac-1")


def test_a_record_is_counted_once_in_every_metric() -> None:
    values = values_of(filled().families())
    assert values["vllm:generation_tokens_total"] == 10
    assert values["vllm:prompt_tokens_total"] == 100
    assert values["vllm:prefix_cache_hits_total"] == 64
    assert values['vllm:request_success_total{finished_reason="stop"}'] == 1
    assert values['metalslots_calls_total{outcome="ok"}'] == 1
    assert values['metalslots_routing_decisions_total{reason="cached"}'] == 1
    assert values['metalslots_wait_seconds_total{reason="blocks"}'] == 2.0
    assert values['metalslots_wait_seconds_total{reason="headroom"}'] == 0.0
    for name, seconds in (("queue", 1.0), ("prefill", 2.0), ("decode", 7.0), ("inference", 9.0)):
        assert values[f"vllm:request_{name}_time_seconds_sum"] == pytest.approx(seconds)
    assert values["vllm:time_to_first_token_seconds_sum"] == pytest.approx(3.0)
    assert values["vllm:e2e_request_latency_seconds_sum"] == pytest.approx(10.0)
    assert values["vllm:request_time_per_output_token_seconds_sum"] == pytest.approx(7.0 / 9)
    assert values["vllm:inter_token_latency_seconds_count"] == 9


def test_what_was_never_let_in_counts_as_a_call_and_not_as_an_answer() -> None:
    metrics = CallMetrics(4096)
    refused = make_answer(finish=FinishReason.ERROR, num_output_tokens=0, timeline=Timeline(100.0, finished_s=100.0))
    metrics.finished(make_record(refused, outcome="queue_full"))
    values = values_of(metrics.families())
    assert values['metalslots_calls_total{outcome="queue_full"}'] == 1
    assert values['vllm:request_success_total{finished_reason="error"}'] == 0
    assert values["vllm:e2e_request_latency_seconds_count"] == 0


def test_the_engines_figures() -> None:
    values = values_of(engine_families(make_status(), ready=True, num_open_calls=3, draining=False))
    assert values["vllm:num_requests_running"] == 2
    assert values["vllm:kv_cache_usage_perc"] == pytest.approx(0.25)
    assert values['metalslots_waiting_requests{reason="slots"}'] == 1
    assert values['metalslots_waiting_requests{reason="blocks"}'] == 0
    assert values['metalslots_memory_bytes{term="weights"}'] == 1000
    assert 'metalslots_memory_bytes{term="foreign"}' not in values, "unknown is left out"
    assert values['metalslots_memory_guard_stage{stage="trimmed"}'] == 1
    assert values['metalslots_memory_guard_actions_total{action="drop_prefixes"}'] == 3
    assert values_of(engine_families(None, ready=False, num_open_calls=0, draining=False))["metalslots_ready"] == 0


def test_the_names_that_vllms_boards_ask_for_are_there() -> None:
    names = {sample.name for family in all_families() for sample in family.samples}
    assert names >= VLLM_NAMES


def test_our_board_asks_for_nothing_that_is_not_there() -> None:
    text = (ROOT / "configs" / "grafana.json").read_text()
    board = json.loads(text)
    queries = " ".join(target["expr"] for panel in board["panels"] for target in panel.get("targets", ()))
    asked = set(re.findall(r"\b(?:vllm:|metalslots_)[a-z0-9_]+", queries))
    names = {sample.name for family in all_families() for sample in family.samples}
    # Those are the ingress's.
    names |= {"metalslots_http_errors_total", "metalslots_http_requests_total", "metalslots_replicas"}
    names |= {"metalslots_replicas_wanted", "metalslots_autoscaling_decisions_total"}
    assert asked <= names
    assert len(asked) > 20


def test_many_replicas_are_one_text_that_prometheus_reads() -> None:
    one, other = all_families(), labelled(filled(2).families(), model_name="demo", engine="mac-2")
    text = exposition(joined([*one, *other]))
    found = {family.name: family for family in text_string_to_metric_families(text.decode())}
    samples = {sample.labels["engine"]: sample.value for sample in found["vllm:prompt_tokens"].samples}
    assert samples == {"mac-1": 100.0, "mac-2": 200.0}
    assert found["vllm:time_to_first_token_seconds"].type == "histogram"
    assert text.count(b"# TYPE vllm:prompt_tokens_total counter") == 1
    # The library's own writer and reader agree with ours about every sample.
    ours = {(s.name, *sorted(s.labels.items())): s.value for family in found.values() for s in family.samples}
    given = {(s.name, *sorted(s.labels)): s.value for family in [*one, *other] for s in family.samples}
    assert ours == given


def test_labels_are_few_and_none_names_a_request_or_a_person() -> None:
    labels = {name for family in all_families() for sample in family.samples for name, _ in sample.labels}
    assert labels <= {
        "action", "engine", "finished_reason", "le", "model_name", "outcome", "reason", "stage", "state", "term",
    }  # fmt: skip
    few, many = filled(1).families(), filled(300).families()
    assert sum(len(family.samples) for family in few) == sum(len(family.samples) for family in many)


def test_values_are_written_with_their_labels() -> None:
    families = [gauge("a", "A.", ({"x": 'quo"te'}, 1.5), ({"x": "y"}, None)), counter("b", "B.", ({}, 2))]
    text = exposition(families)
    assert b'a{x="quo\\"te"} 1.5' in text
    assert b"b_total 2.0" in text
    odd = gauge("c", "Two\nlines.", ({"x": 'back\\slash "and"\nmore'}, 1.0))
    (family,) = text_string_to_metric_families(exposition([odd]).decode())
    assert family.samples[0].labels == {"x": 'back\\slash "and"\nmore'}
    assert families[0].samples == (Sample("a", (("x", 'quo"te'),), 1.5),)
