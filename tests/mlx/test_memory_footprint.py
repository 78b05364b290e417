"""What the operating system charges an engine at full load stays within what was planned for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

ROOT = Path(__file__).parents[2]
MIB = 2**20


def run_at_full_load(num_per_slot: int = 1, **config: Any) -> dict[str, Any]:
    values = {"backend": "cpu", "parity": "off", **config}
    command = [sys.executable, "-m", "tests.mlx.full_load", json.dumps(values), str(num_per_slot)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def check_within_plan(result: dict[str, Any], budget_bytes: int) -> None:
    memory = result["memory"]
    planned = memory["permanent_bytes"] + memory["per_request_bytes"]
    assert result["peak_running"] == result["slots"]
    assert memory["limit_bytes"] == budget_bytes
    assert planned <= budget_bytes
    assert result["footprint_bytes"] <= planned
    # A plan that is far too large would hold back slots: what was planned is mostly used.
    assert result["footprint_bytes"] >= 0.75 * planned


@pytest.mark.timeout(300)
def test_the_demo_model() -> None:
    result = run_at_full_load(model="demo", slots=4, max_model_len=512, memory={"budget": "1100MiB"})
    check_within_plan(result, 1100 * MIB)
    assert result["num_finished"] == 4
    assert result["peak_blocks_held"] == 4 * 32


@pytest.mark.timeout(300)
def test_after_a_burst_has_drained_a_request_of_half_the_budget_is_admitted_at_once() -> None:
    result = run_at_full_load(3, model="demo", slots=2, max_model_len=512, memory={"budget": "1000MiB"})
    check_within_plan(result, 1000 * MIB)
    assert result["num_finished"] == 6
    assert result["peak_blocks_held"] == 2 * 32, "the burst reached the limit"
    late = result["late"]
    assert late["num_blocks_held_before"] == 0
    assert late["num_blocks_held"] == 32 > late["num_blocks_free_before"], "cached prefixes have to give way"
    assert late["num_running_after_one_step"] == 1
    assert set(late["waits_s"]) <= {"prefill_turn"}, "within its first step"
    assert late["finish_reason"] == "length"


@pytest.mark.timeout(300)
def test_a_model_of_a_gibibyte_whose_budget_decides_the_slots(tmp_path: Path) -> None:
    write_random_llama(tmp_path)
    result = run_at_full_load(model=str(tmp_path), max_model_len=256, memory={"budget": "1600MiB"})
    assert result["memory"]["weights_bytes"] > 1024 * MIB
    assert 1 < result["slots"] < 16
    assert result["num_finished"] == result["slots"]
    check_within_plan(result, 1600 * MIB)


def write_random_llama(folder: Path) -> None:
    """A llama of 280 million half-precision weights: 1.1 GB once the CPU backend holds them in float32."""
    hidden, feed_forward, layers, vocab, kv_width = 1024, 4096, 15, 16_384, 1024
    config = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": feed_forward,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "vocab_size": vocab,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    shapes = {"model.embed_tokens": (vocab, hidden), "model.norm": (hidden,)}
    for index in range(layers):
        layer = f"model.layers.{index}."
        shapes |= {
            layer + "self_attn.q_proj": (hidden, hidden),
            layer + "self_attn.k_proj": (kv_width, hidden),
            layer + "self_attn.v_proj": (kv_width, hidden),
            layer + "self_attn.o_proj": (hidden, hidden),
            layer + "mlp.gate_proj": (feed_forward, hidden),
            layer + "mlp.up_proj": (feed_forward, hidden),
            layer + "mlp.down_proj": (hidden, feed_forward),
            layer + "input_layernorm": (hidden,),
            layer + "post_attention_layernorm": (hidden,),
        }
    random = np.random.default_rng(7)
    block = random.standard_normal(feed_forward * hidden * 4, dtype=np.float32).astype(np.float16) * np.float16(0.02)
    weights = {
        f"{name}.weight": np.ones(shape, np.float16) if len(shape) == 1 else block[: np.prod(shape)].reshape(shape)
        for name, shape in shapes.items()
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "mlx"})
