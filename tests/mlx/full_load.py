"""Runs one engine at full load and prints what the system charged it with: a process of its own, so that nothing else
is counted. After the load has drained one more request comes, of full length.
Call: ``python -m tests.mlx.full_load '{"model": ..., "memory": {"budget": ...}}' [REQUESTS_PER_SLOT]``.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from engine.build import build_core
from engine.config import load_engine_config
from engine.core.engine_core import EngineCore
from engine.core.memory_readers import system_reader
from engine.request import EngineRequest, FinishReason, SamplingParams

NUM_ANSWER_TOKENS = 24


def main() -> None:
    core = build_core(load_engine_config(json.loads(sys.argv[1])), lambda progress: None)
    stats, facts = core.snapshot().scheduler, core.runner.facts
    reader, top_bytes, num_finished, peak_held = system_reader(), 0, 0, 0
    num_requests = stats.slots * int(sys.argv[2] if len(sys.argv) > 2 else 1)
    for index in range(num_requests):
        core.add(full_length(index, facts.max_model_len, facts.vocab_size))
    while core.has_work:
        outputs = core.step()
        num_finished += sum(output.finish_reason is FinishReason.LENGTH for output in outputs)
        now = core.snapshot().scheduler
        peak_held = max(peak_held, now.num_blocks_total - now.num_blocks_free - now.num_blocks_cached)
        top_bytes = max(top_bytes, reader.read().footprint_bytes or 0)
    late = one_more(core, full_length(num_requests, facts.max_model_len, facts.vocab_size))
    top_bytes = max(top_bytes, reader.read().footprint_bytes or 0)
    last = core.snapshot()
    core.close()
    print(
        json.dumps(
            {
                "slots": stats.slots,
                "num_finished": num_finished,
                "peak_running": last.scheduler.peak_running,
                "peak_blocks_held": peak_held,
                "footprint_bytes": top_bytes,
                "late": late,
                "memory": dict(last.memory),
            }
        )
    )


def one_more(core: EngineCore, request: EngineRequest) -> dict[str, Any]:
    """Run ``request`` alone. Returns the blocks it held, its steps before it ran, what it waited for, how it ended."""
    before = core.snapshot().scheduler
    core.add(request)
    outputs = core.step()
    first = core.snapshot().scheduler
    num_held = 0
    while core.has_work:
        outputs = [*outputs, *core.step()]
        now = core.snapshot().scheduler
        num_held = max(num_held, now.num_blocks_total - now.num_blocks_free - now.num_blocks_cached)
    timeline = outputs[-1].timeline
    assert timeline is not None
    return {
        "num_blocks_held_before": before.num_blocks_total - before.num_blocks_free - before.num_blocks_cached,
        "num_blocks_free_before": before.num_blocks_free,
        "num_running_after_one_step": first.num_running,
        "num_blocks_held": num_held,
        "waits_s": {str(reason): wait_s for reason, wait_s in timeline.waited_s.items() if wait_s},
        "finish_reason": str(outputs[-1].finish_reason),
    }


def full_length(index: int, max_model_len: int, vocab_size: int) -> EngineRequest:
    """A request that ends exactly at the longest context; no two begin alike, so no prefix is shared."""
    prompt = tuple((index * 7919 + position * 31) % vocab_size for position in range(max_model_len - NUM_ANSWER_TOKENS))
    sampling = SamplingParams(max_tokens=NUM_ANSWER_TOKENS, temperature=0.8, top_p=0.9, num_logprobs=3, ignore_eos=True)
    return EngineRequest(str(index), prompt, sampling, received_s=time.monotonic())


if __name__ == "__main__":
    main()
