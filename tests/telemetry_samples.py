"""Records of calls and statuses of engines for tests of what is made from them."""

from __future__ import annotations

from typing import Any

from engine.core.generation import AnswerAccount
from engine.interfaces import EngineStatus, SchedulerStats
from engine.request import FinishReason, Pause, Timeline, WaitReason
from serve_app.protocol import GenerateCall, Route
from serve_app.telemetry.families import Family
from serve_app.telemetry.record import AnswerRecord, CallRecord, ReplicaName, TokenGaps
from tests.core_fakes import FACTS

REPLICA = ReplicaName("r1", "n1", "mac-1")
ROUTE = Route("r1", "cached", 0.25, 64, 3, 1_700_000_000.0)
TIMELINE = Timeline(
    received_s=100.0,
    admitted_s=100.5,
    prefill_started_s=101.0,
    first_token_s=103.0,
    finished_s=110.0,
    num_preemptions=1,
    waited_s={WaitReason.SLOTS: 0.5, WaitReason.PREFILL_TURN: 0.5, WaitReason.BLOCKS: 2.0},
    slot=2,
    pauses=(Pause(105.0, 107.0),),
)


def make_answer(choice: int = 0, finish: FinishReason = FinishReason.STOP, **account: Any) -> AnswerRecord:
    """An answer of ten tokens to a hundred, waited for, preempted once."""
    values: dict[str, Any] = {
        "index": choice,
        "finish_reason": finish,
        "num_prompt_tokens": 100,
        "num_output_tokens": 10,
        "num_cached_tokens": 64,
        "timeline": TIMELINE,
    }
    return AnswerRecord(choice, AnswerAccount(**(values | account)), TokenGaps(9, 7.0, 2.5))


def make_record(*answers: AnswerRecord, outcome: str = "ok", **call: Any) -> CallRecord:
    """A finished chat."""
    values: dict[str, Any] = {
        "request_id": "chatcmpl-1",
        "model": "demo",
        "messages": ({"role": "user", "content": "the secret question"},),
        "max_tokens": 20,
        "key_name": "anna",
        "route": ROUTE,
    }
    call_values = GenerateCall(**(values | call))
    return CallRecord(call_values, REPLICA, 100.0, 110.0, 1_700_000_000.0, outcome, answers or (make_answer(),))


def make_status(**scheduler: Any) -> EngineStatus:
    """A running engine with two of four slots in use, and a ledger."""
    values: dict[str, Any] = dict.fromkeys(SchedulerStats.__dataclass_fields__, 0)
    values |= {"predicted_wait_s": 1.5, "prefill_tokens_per_s": 500.0, "usual_answer_s": 2.0}
    values |= {"waiting_on": {"slots": 1}}
    values |= {"slots": 4, "num_running": 2, "num_waiting": 1, "num_blocks_total": 100, "num_blocks_free": 60}
    memory = {"weights_bytes": 1000, "headroom_bytes": 500, "foreign_bytes": None, "guard_stage": "trimmed"}
    memory |= {"guard_action_drop_prefixes": 3}
    stats = SchedulerStats(**(values | {"num_blocks_cached": 15} | scheduler))
    return EngineStatus("running", FACTS, "4", stats, memory, heartbeat_age_s=0.1)


def values_of(families: list[Family] | tuple[Family, ...]) -> dict[str, float]:
    """Samples by name, with labels as Prometheus writes them."""
    found = {}
    for family in families:
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sample.labels)
            key = f"{sample.name}{{{labels}}}" if labels else sample.name
            assert key not in found, f"{key} twice"
            found[key] = sample.value
    return found
