"""Every mlx-lm model module that can be made here is served as docs/models.md says, and those in slots are right."""

from __future__ import annotations

import pytest

from engine.mlx_backend.probe import prove_form
from tests.mlx.long_chats import LongChats, check
from tests.mlx.model_table import line_of, table, table_in_page
from tests.mlx.soak import soak
from tests.mlx.tiny_models import tiny_model
from tests.model_zoo import module_names

# Of every form and kind of cache, and the best-known families. All others: python -m tests.mlx.soak.
SOAKED = ["gemma2", "gemma3n", "gpt_oss", "deepseek_v3", "jamba", "lfm2", "mamba2", "nemotron_h", "qwen3_5", "llama4"]
NAMED = {
    *("qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "gemma2", "gemma3", "gpt_oss", "llama4", "deepseek_v3"),
    *("glm4_moe", "mamba2", "nemotron_h", "lfm2", "phi3", "mistral3"),
}


def test_the_page_says_what_the_probe_finds() -> None:
    lines = [line_of(module) for module in module_names()]
    in_slots = {line.module for line in lines if line.served == "slots"}
    assert len(in_slots) >= 60
    assert in_slots >= NAMED
    assert table(lines) == table_in_page(), "run `python -m tests.mlx.model_table --write`"


@pytest.mark.parametrize("module", SOAKED)
def test_joins_leaves_and_preemptions_do_not_show(module: str) -> None:
    report = soak(prove_form(tiny_model(module)), num_steps=60)
    assert report.num_rows_most == 8
    assert report.num_preemptions > 0
    assert report.num_answers > 15


def test_chats_on_a_hybrid_keep_what_they_keep() -> None:
    """3,000 steps: python -m tests.mlx.long_chats."""
    loaded = prove_form(tiny_model("qwen3_next"))
    chats = LongChats(loaded)
    chats.run(250)
    seen = check(chats, loaded)
    chats.close()
    assert seen["later_turns"] >= 20
