"""From a folder to a running engine: what each kind of model gets of memory and scheduler, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from engine.build import build_core
from engine.config import load_engine_config
from engine.core.engine_core import EngineCore
from engine.errors import UnsupportedModelError
from engine.request import EngineRequest, SamplingParams
from tests.mlx.soak import TOLERANCE, distance_from_best
from tests.model_zoo import build


def save(module: str, folder: Path) -> Any:
    model, config = build(module)
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 3}))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    return model


def start(folder: Path, **changes: Any) -> EngineCore:
    values = {
        "model": str(folder),
        "slots": 4,
        "backend": "cpu",
        "max_model_len": 256,
        "prefill": {"max_chunk_tokens": 32},
    }
    return build_core(load_engine_config({**values, **changes}), lambda _progress: None)


def answers(core: EngineCore, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    got: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    for i, prompt in enumerate(prompts):
        core.add(EngineRequest(str(i), tuple(prompt), sampling, 0.0))
    while core.has_work:
        for output in core.step():
            assert output.error is None
            got[output.request_id] += output.token_ids
    return list(got.values())


PROMPTS = [[(7 * i + 3 * j) % 200 for i in range(length)] for j, length in enumerate((60, 3, 41, 17))]


@pytest.mark.parametrize("module", ["gemma3_text", "qwen3_next", "recurrent_gemma", "mamba2"])
def test_models_of_each_kind_answer_as_alone(module: str, tmp_path: Path) -> None:
    model = save(module, tmp_path)
    core = start(tmp_path)
    for prompt, answer in zip(PROMPTS, answers(core, PROMPTS, 40), strict=True):
        assert distance_from_best(model, prompt, answer) <= TOLERANCE
    memory = core.snapshot().memory
    core.close()
    assert bool(memory["state_bytes"]) == (module != "gemma3_text")
    assert bool(memory["kv_window_bytes"]) == (module in ("gemma3_text", "recurrent_gemma"))
    assert memory["kv_held_bytes"] == memory["kv_window_held_bytes"] == 0


def test_a_window_takes_the_same_at_any_length(tmp_path: Path) -> None:
    save("gemma3_text", tmp_path)
    window_bytes, pool_bytes = [], []
    for max_model_len in (128, 512):
        core = start(tmp_path, max_model_len=max_model_len)
        window_bytes.append(core.snapshot().memory["kv_window_bytes"])
        pool_bytes.append(core.snapshot().memory["kv_pool_bytes"])
        core.close()
    assert window_bytes[0] == window_bytes[1]
    assert float(pool_bytes[1] or 0) > 3 * float(pool_bytes[0] or 1)


def test_what_is_served_alone_gets_one_slot(tmp_path: Path) -> None:
    model = save("longcat_flash_ngram", tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"one person at a time only.*changes its shape") as caught:
        start(tmp_path)
    assert caught.value.fix == "write `slots: 1`"
    core = start(tmp_path, slots="auto")
    assert core.snapshot().scheduler.slots == 1
    for prompt, answer in zip(PROMPTS, answers(core, PROMPTS, 10), strict=True):
        assert distance_from_best(model, prompt, answer) <= TOLERANCE
    core.close()
