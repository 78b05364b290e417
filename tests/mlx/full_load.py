"""Runs one engine at full load and prints what the system charged it with: a process of its own, so that nothing else
is counted. Call: ``python -m tests.mlx.full_load '{"model": ..., "memory": {"budget": ...}}'``.
"""

from __future__ import annotations

import json
import sys
import time

from engine.build import build_core
from engine.config import load_engine_config
from engine.core.memory_readers import system_reader
from engine.request import EngineRequest, FinishReason, SamplingParams

NUM_ANSWER_TOKENS = 24


def main() -> None:
    core = build_core(load_engine_config(json.loads(sys.argv[1])), lambda progress: None)
    stats, facts = core.snapshot().scheduler, core.runner.facts
    reader, top_bytes, num_finished, peak_held = system_reader(), 0, 0, 0
    for index in range(stats.slots):
        core.add(full_length(index, facts.max_model_len, facts.vocab_size))
    while core.has_work:
        outputs = core.step()
        num_finished += sum(output.finish_reason is FinishReason.LENGTH for output in outputs)
        now = core.snapshot().scheduler
        peak_held = max(peak_held, now.num_blocks_total - now.num_blocks_free - now.num_blocks_cached)
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
                "memory": dict(last.memory),
            }
        )
    )


def full_length(index: int, max_model_len: int, vocab_size: int) -> EngineRequest:
    """A request that ends exactly at the longest context; no two begin alike, so no prefix is shared."""
    prompt = tuple((index * 7919 + position * 31) % vocab_size for position in range(max_model_len - NUM_ANSWER_TOKENS))
    sampling = SamplingParams(max_tokens=NUM_ANSWER_TOKENS, temperature=0.8, top_p=0.9, num_logprobs=3, ignore_eos=True)
    return EngineRequest(str(index), prompt, sampling, received_s=time.monotonic())


if __name__ == "__main__":
    main()
