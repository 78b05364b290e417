"""The load-time parity check: passes right models, refuses wrong ones with the place of the difference."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from engine.errors import UnsupportedModelError
from engine.mlx_backend import paged_cache
from engine.mlx_backend.gathered_attention import attend
from engine.mlx_backend.probe import check_parity
from tests.mlx.tiny_models import tiny_model

RIGHT = [
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "qwen2_moe",
    "mixtral",
    "olmo2",
    "olmo3",
    "phi",
    "phi3",
    "phimoe",
    "glm4",
    "glm4_moe",
    "gpt_oss",
    "gemma",
    "gemma3_text",
    "cohere",
    "cohere2",
    "starcoder2",
    "stablelm",
    "granite",
    "granitemoe",
    "gpt2",
    "internlm2",
    "ernie4_5",
    "seed_oss",
    "nemotron",
    "mimo",
    "helium",
    "Klear",
]


@pytest.mark.parametrize("architecture", RIGHT)
def test_right_models_pass(architecture: str) -> None:
    check_parity(tiny_model(architecture))


def test_attention_inherited_from_another_file_is_found() -> None:
    check_parity(tiny_model("smollm3", layer_types=None))


def test_windows_are_those_of_the_models_own_cache() -> None:
    assert [layer.window for layer in tiny_model("gemma3_text").layers] == [12, 12, None]


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("gemma2", "computes attention in its own way"),
        ("deepseek_v3", "through the attention mask"),
        ("qwen3_next", "keeps its state in a ArraysCache"),
        ("smollm3", "masks a window of 12 tokens over a cache that keeps all"),
    ],
)
def test_models_that_cannot_be_paged_are_refused(architecture: str, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        check_parity(tiny_model(architecture))
    assert caught.value.fix


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_difference_is_refused_and_placed(monkeypatch: pytest.MonkeyPatch, layer: int) -> None:
    loaded = tiny_model("qwen3")
    calls = 0

    def attend_wrongly(*args: Any) -> mx.array:
        nonlocal calls
        calls += 1
        out = attend(*args)
        return out * 1.5 if (calls - 1) % len(loaded.layers) == layer else out

    monkeypatch.setattr(paged_cache, "attend", attend_wrongly)
    with pytest.raises(UnsupportedModelError, match=rf"keys first at layer {layer + 1} "):
        check_parity(loaded)


def test_a_model_that_fails_in_a_packed_step_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> mx.array:
        raise ValueError("offset must be an int")

    monkeypatch.setattr(paged_cache, "attend", fail)
    with pytest.raises(UnsupportedModelError, match="ValueError: offset must be an int"):
        check_parity(tiny_model("qwen3"))
