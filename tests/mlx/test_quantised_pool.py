"""KV pools of 8 and 4 bits: what is read back, what it takes, and that answers stay independent of their company."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from engine import build
from engine.batch import BatchRow, StepBatch
from engine.config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.core.model_files import expect_model
from engine.errors import ConfigError
from engine.mlx_backend.input_batch import Run
from engine.mlx_backend.kernels.reference import HeldPool, hold
from engine.mlx_backend.loaded_model import LoadedModel
from engine.mlx_backend.model_runner import MlxModelRunner
from engine.mlx_backend.paged_cache import LayerPool, LayerShape
from engine.mlx_backend.probe import prove_form
from engine.mlx_backend.quantised_pool import QuantisedLayerPool, check_kv_bits
from engine.model_source import resolve_model
from engine.request import EngineRequest, SamplingParams
from engine.scheduler import Scheduler, SchedulerConfig
from engine.text.tokenizer import load_tokenizer
from tests.mlx.driver import Driver, Sequence
from tests.mlx.tiny_models import tiny_model

SHAPE = LayerShape(2, 64, 32)
LARGEST_ERROR = {8: 0.03, 4: 0.4}  # half a step of numbers that span about five


def pools_with_random_contents(bits: int) -> tuple[LayerPool, LayerPool]:
    rng = np.random.default_rng(0)
    plain, packed = LayerPool(SHAPE, 6, 16, mx.float32), QuantisedLayerPool(SHAPE, 6, 16, mx.float32, bits)
    rows = np.arange(40)[:, None] + np.arange(2) * 7 * 16
    keys, values = (mx.array(rng.normal(size=(40, 2, 1, size)).astype(np.float32)) for size in (64, 32))
    for pool in (plain, packed):
        pool.write(keys, values, mx.array(rows.astype(np.int32)))
    return plain, packed


@pytest.mark.parametrize("bits", [8, 4])
def test_what_is_read_is_what_was_written_but_for_rounding(bits: int) -> None:
    plain, packed = pools_with_random_contents(bits)
    blocks = mx.array([[[0, 2, 6], [7, 9, 13]]], mx.int32)
    for source in (Run(3, 30), blocks):
        for ours, theirs in zip(packed.read(source), plain.read(source), strict=True):
            assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
            assert np.abs(np.array(ours) - np.array(theirs)).max() < LARGEST_ERROR[bits]
    assert not np.array(packed.read_blocks([5, 6])[0]).any()


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("bits", [8, 4])
def test_the_kernels_reference_packs_as_the_pool_does(bits: int, dtype: mx.Dtype) -> None:
    """Bit by bit, for groups of every kind: one sign, both, far from zero, tiny, constant, nothing."""
    rng = np.random.default_rng(4)
    numbers = rng.normal(size=(64, 1, 1, 64)).astype(np.float32)
    numbers[:8] = np.abs(numbers[:8])
    numbers[8:16] = -np.abs(numbers[8:16])
    numbers[16:24] += 100
    numbers[24:32] *= 1e-6
    numbers[32:35] = np.array([0.0, 3.0, -2.0]).reshape(3, 1, 1, 1)
    vectors = mx.array(numbers).astype(dtype)
    pool = QuantisedLayerPool(LayerShape(1, 64, 64), 4, 16, dtype, bits)
    pool.write(vectors, vectors, mx.arange(64)[:, None])
    parts = hold(vectors.reshape(64, 64), dtype, bits)
    for held, wanted in zip(pool.arrays()[:3], parts, strict=True):
        np.testing.assert_array_equal(np.array(held)[:64], np.array(wanted))
    read, _ = pool.read(Run(0, 64))
    wanted, _ = HeldPool(parts, parts, bits).numbers()
    # In units of each vector's largest number, which is what a scale and a bias are rounded by.
    error = mx.abs(read[0, 0].astype(mx.float32) - wanted) / (mx.abs(wanted).max(axis=-1, keepdims=True) + 0.1)
    assert float(mx.max(error)) <= {mx.float32: 1e-7, mx.float16: 1e-3, mx.bfloat16: 4e-3}[dtype]


@pytest.mark.parametrize("bits", [8, 4])
def test_blocks_are_copied_and_cleared_whole(bits: int) -> None:
    _, packed = pools_with_random_contents(bits)
    before = [np.array(array) for array in packed.read_blocks([0, 1])]
    packed.copy_blocks(np.array([0, 1]), np.array([4, 3]))
    for old, copied in zip(before, packed.read_blocks([4, 3]), strict=True):
        np.testing.assert_array_equal(old, copied)
    packed.clear_blocks([4])
    assert not any(np.array(array).any() for array in packed.read_blocks([4]))
    np.testing.assert_array_equal(before[0], packed.read_blocks([0, 1])[0])


@pytest.mark.parametrize(("bits", "least"), [(8, 3.5), (4, 6.3)])
def test_bytes_are_counted_as_they_are(bits: int, least: float) -> None:
    pool = QuantisedLayerPool(SHAPE, 99, 16, mx.float32, bits)
    held = sum(array.nbytes for array in pool.arrays())
    assert held == SHAPE.bytes_per_token(mx.float32, bits) * 100 * 16
    assert SHAPE.bytes_per_token(mx.float32) / SHAPE.bytes_per_token(mx.float32, bits) > least


def test_the_files_promise_what_loading_finds(demo: LoadedModel) -> None:
    config = EngineConfig(kv_bits=8, max_model_len=512)
    expected = expect_model(config, resolve_model("demo"), "cpu")
    assert expected is not None
    assert expected.kv_bytes_per_token == demo.kv_bytes_per_token(mx.float32, 8) == 46080 * 9 // 32


def test_an_engine_with_few_bits_says_so_and_answers(monkeypatch: pytest.MonkeyPatch, demo: LoadedModel) -> None:
    monkeypatch.setattr(build, "load_model", lambda *_, **__: demo)
    config = EngineConfig(kv_bits=8, slots=2, max_model_len=512, backend="cpu")
    core = build.build_core(config, lambda _: None)
    assert core.runner.facts.kv_bytes_per_token == demo.kv_bytes_per_token(mx.float32, 8)
    assert any("Keys and values have 8 bits" in sentence for sentence in core.runner.facts.disclosures)
    prompt = tuple(load_tokenizer(resolve_model("demo")).encode("The capital of France is"))
    core.add(EngineRequest("r", prompt, SamplingParams(max_tokens=4, temperature=0.0), 0.0))
    outputs = []
    while core.has_work:
        outputs += core.step()
    assert "Paris" in load_tokenizer(resolve_model("demo")).decode([t for o in outputs for t in o.token_ids])
    core.close()


def wide_model() -> LoadedModel:
    return tiny_model("llama", hidden_size=128, head_dim=32, layer_types=None)


@pytest.mark.parametrize("bits", [8, 4])
def test_an_answer_is_the_same_alone_in_company_and_in_chunks(bits: int) -> None:
    loaded = wide_model()
    rng = np.random.default_rng(1)
    prompts = [rng.integers(5, 200, length).tolist() for length in (5, 33, 17, 48)]
    answers = []
    for num_rows, chunk in ((1, 64), (4, 7), (2, 13)):
        runner = MlxModelRunner(loaded, num_blocks=60, block_size=8, slots=4, max_chunk_tokens=64, kv_bits=bits)
        sequences = [Sequence(str(index), list(prompt)) for index, prompt in enumerate(prompts)]
        size = chunk
        Driver(runner, 60, 8).generate(sequences, num_rows, 8, lambda remaining, size=size: min(remaining, size))
        assert runner.facts.kv_bytes_per_token == loaded.kv_bytes_per_token(mx.float32, bits)
        runner.close()
        answers.append([sequence.output for sequence in sequences])
    assert answers.count(answers[0]) == 3


@pytest.mark.parametrize("architecture", ["gemma2", "gemma3_text", "qwen3_next", "deepseek_v3"])
def test_every_form_of_steps_and_prefix_hits(architecture: str) -> None:
    sizes = ("head_dim", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    loaded = prove_form(tiny_model(architecture, **dict.fromkeys(sizes, 32)))
    check_kv_bits(loaded.layers, 8)
    prompt = tuple(np.random.default_rng(3).integers(5, 200, 40).tolist())
    slots, snapshots = 2, 4
    runner = MlxModelRunner(
        loaded,
        num_blocks=40,
        block_size=8,
        slots=slots,
        max_chunk_tokens=32,
        kv_bits=8,
        num_state_snapshots=snapshots,
    )
    config = SchedulerConfig(
        slots,
        40,
        8,
        256,
        max_chunk_tokens=32,
        max_steps_in_flight=2,
        num_state_snapshots=snapshots if loaded.state_bytes_per_slot else None,
    )
    core = EngineCore(Scheduler(config), runner, lambda: 0.0)
    answers = []
    for index in range(2):
        sampling = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
        core.add(EngineRequest(str(index), prompt, sampling, 0.0))
        outputs = []
        while core.has_work:
            outputs += core.step()
        answers.append([token for output in outputs for token in output.token_ids])
    assert answers[0] == answers[1]
    assert outputs[-1].num_cached_tokens > 0
    core.close()


@pytest.mark.parametrize("bits", [8, 4])
def test_steps_write_the_pool_in_place(bits: int) -> None:
    loaded, num_blocks = wide_model(), 20_000
    runner = MlxModelRunner(loaded, num_blocks=num_blocks, block_size=16, slots=4, max_chunk_tokens=64, kv_bits=bits)
    assert runner.max_steps_in_flight == 1
    driver = Driver(runner, num_blocks, 16)
    sequences = [Sequence(str(index), list(range(5, 45))) for index in range(3)]
    driver.step([(sequence, 40) for sequence in sequences])
    before_bytes = mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in range(20):
        driver.step([(sequence, 1) for sequence in sequences])
    layer_bytes = num_blocks * 16 * loaded.kv_bytes_per_token(mx.float32, bits) // loaded.facts.num_layers
    assert mx.get_peak_memory() - before_bytes < layer_bytes / 20
    runner.close()


def test_vectors_that_are_no_whole_groups_are_refused() -> None:
    check_kv_bits([SHAPE], 8)
    check_kv_bits([LayerShape(1, 80, 80)], None)
    with pytest.raises(ConfigError, match="layer 1 keeps vectors of 80 numbers"):
        check_kv_bits([SHAPE, LayerShape(1, 80, 80)], 8)
    with pytest.raises(ConfigError, match="in no pool"):
        check_kv_bits([], 4)


def test_few_bits_change_the_logits_little() -> None:
    loaded = wide_model()
    prompt = np.random.default_rng(2).integers(5, 200, 40).tolist()
    logits = {}
    for bits in (None, 8, 4):
        model = loaded.step_model(num_blocks=10, block_size=8, dtype=mx.float32, kv_bits=bits)
        row = BatchRow("r", 0, 0, 40, prompt, list(range(5)), 40, SamplingParams(), 0, True, 0)
        logits[bits] = np.array(model.forward(model.build(StepBatch(0, (row,)))))
        model.close()
    spread = logits[None].std()
    assert np.abs(logits[8] - logits[None]).max() < 0.05 * spread
    assert np.abs(logits[4] - logits[None]).max() < 0.8 * spread
