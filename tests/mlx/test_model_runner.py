"""The runner on tiny random models: any chunking, any batch, any block table gives mlx-lm's own greedy text."""

from __future__ import annotations

import random

import mlx.core as mx
import numpy as np
import pytest

from engine.batch import BlockCopy, StepBatch
from engine.errors import StepFailedError
from engine.mlx_backend.activations import measure_activation_bytes
from engine.mlx_backend.loaded_model import LoadedModel
from engine.mlx_backend.mlx_lm_parts import make_prompt_cache
from engine.mlx_backend.model_runner import KvDtype, MlxModelRunner
from engine.mlx_backend.step_clock import StepClock
from engine.request import SamplingParams
from tests.mlx.driver import Driver, Sequence
from tests.mlx.tiny_models import build, tiny_model

NUM_BLOCKS = 64
BLOCK_SIZE = 8


def make_runner(loaded: LoadedModel, *, num_blocks: int = NUM_BLOCKS, kv_dtype: KvDtype = "auto") -> MlxModelRunner:
    return MlxModelRunner(
        loaded, num_blocks=num_blocks, block_size=BLOCK_SIZE, slots=8, max_chunk_tokens=32, kv_dtype=kv_dtype
    )


def random_prompts(count: int, longest: int, vocab_size: int = 200) -> list[list[int]]:
    draw = random.Random(5)
    return [[draw.randrange(vocab_size) for _ in range(draw.randint(1, longest))] for _ in range(count)]


def greedy(loaded: LoadedModel, prompt: list[int], num_tokens: int) -> list[int]:
    """mlx-lm's own path, one sequence with its own cache."""
    cache = make_prompt_cache(loaded.model)
    tokens: list[int] = []
    feed = prompt
    for _ in range(num_tokens):
        logits = loaded.model(mx.array([feed]), cache=cache)[0, -1]
        tokens.append(int(mx.argmax(logits).item()))
        feed = tokens[-1:]
    return tokens


@pytest.mark.parametrize(
    "architecture", ["llama", "qwen3", "mixtral", "gpt_oss", "gemma3_text", "cohere2", "granite", "gpt2"]
)
@pytest.mark.parametrize("num_rows", [1, 3, 8])
def test_greedy_text_in_random_chunks(architecture: str, num_rows: int) -> None:
    loaded = tiny_model(architecture)
    prompts = random_prompts(10, 40)
    draw = random.Random(num_rows)
    runner = make_runner(loaded)
    sequences = [Sequence(str(i), list(prompt)) for i, prompt in enumerate(prompts)]
    Driver(runner, NUM_BLOCKS, BLOCK_SIZE).generate(sequences, num_rows, 6, lambda left: draw.randint(1, left))
    runner.close()
    assert [s.output for s in sequences] == [greedy(loaded, prompt, 6) for prompt in prompts]


@pytest.mark.parametrize("architecture", ["llama", "gpt_oss", "gemma3_text"])
@pytest.mark.parametrize("shuffled", [True, False])
def test_long_rows_side_by_side_and_scattered(architecture: str, shuffled: bool) -> None:
    loaded = tiny_model(architecture)
    draw = random.Random(1)
    prompts = [[draw.randrange(200) for _ in range(length)] for length in (125, 30, 126, 260, 200, 1, 65)]
    runner = make_runner(loaded, num_blocks=200)
    sequences = [Sequence(str(i), list(prompt)) for i, prompt in enumerate(prompts)]
    driver = Driver(runner, 200, BLOCK_SIZE, shuffled=shuffled)
    driver.generate(sequences, 5, 6, lambda left: min(left, 50))
    runner.close()
    assert [s.output for s in sequences] == [greedy(loaded, prompt, 6) for prompt in prompts]


def test_logits_do_not_depend_on_batch_mates() -> None:
    loaded = tiny_model()
    prompts = random_prompts(8, 60)
    alone, together = (
        [Sequence(str(i), list(p), SamplingParams(temperature=0.0, num_logprobs=3)) for i, p in enumerate(prompts)]
        for _ in range(2)
    )
    for sequences, num_rows in ((alone, 1), (together, 8)):
        runner = make_runner(loaded)
        Driver(runner, NUM_BLOCKS, BLOCK_SIZE).generate(sequences, num_rows, 4)
        runner.close()
    for one, many in zip(alone, together, strict=True):
        assert one.output == many.output
        for a, b in zip(one.sampled, many.sampled, strict=True):
            assert a.logprobs is not None
            assert b.logprobs is not None
            assert a.logprobs.logprob == pytest.approx(b.logprobs.logprob, abs=1e-5)


def test_a_preempted_request_goes_on_as_if_nothing_had_happened() -> None:
    loaded = tiny_model()
    (prompt,) = random_prompts(1, 30)
    runner = make_runner(loaded)
    driver = Driver(runner, NUM_BLOCKS, BLOCK_SIZE)
    sequence = Sequence("a", list(prompt))
    driver.step([(sequence, len(prompt))])
    for _ in range(3):
        driver.step([(sequence, 1)])
    driver.finish(sequence)
    driver.step([(sequence, len(sequence.token_ids))])  # prompt and answer so far, recomputed in one chunk
    driver.step([(sequence, 1)])
    assert sequence.output == greedy(loaded, prompt, 6)


def test_a_copied_block_continues_on_its_own() -> None:
    loaded = tiny_model()
    (prompt,) = random_prompts(1, 30)
    prompt = prompt[:13]  # one full block, shared, and a partial one, copied
    runner = make_runner(loaded)
    driver = Driver(runner, NUM_BLOCKS, BLOCK_SIZE)
    first = Sequence("a", list(prompt))
    driver.step([(first, 13)])
    fork = Sequence("b", [*prompt, 17], num_prompt_tokens=13, num_computed=13)
    target = driver.free.pop()
    fork.block_ids = [first.block_ids[0], target]
    driver.step([(first, 1), (fork, 1)], (BlockCopy(first.block_ids[1], target),))
    driver.step([(first, 1), (fork, 1)])
    assert first.output == greedy(loaded, prompt, 3)
    assert fork.output[1:] == greedy(loaded, [*prompt, 17], 2)


def test_a_row_with_broken_logits_fails_alone_and_leaves_nothing_behind() -> None:
    model, _ = build("llama")
    loaded = tiny_model()
    table = np.array(loaded.model.model.embed_tokens.weight)
    table[7] = np.nan
    model.model.embed_tokens.weight = mx.array(table)
    broken_model = LoadedModel(model, loaded.config, loaded.facts, loaded.device, loaded.layers, loaded.compute_dtype)
    runner = make_runner(broken_model, num_blocks=8)
    driver = Driver(runner, 8, BLOCK_SIZE)
    good, bad = Sequence("good", [1, 2, 3]), Sequence("bad", [1, 7] + [5] * 20)
    output = driver.step([(good, 3), (bad, 22)])
    assert set(output.tokens) == {"good"}
    assert isinstance(output.failures["bad"], StepFailedError)
    driver.free.extend(bad.block_ids)  # the very next block given out is one of the broken row's
    later = Sequence("later", [4, 9, 11])
    driver.step([(good, 1), (later, 3)])
    driver.step([(good, 1), (later, 1)])
    assert good.output == greedy(loaded, [1, 2, 3], 3)
    assert later.output == greedy(loaded, [4, 9, 11], 2)


def test_a_chunk_that_does_not_sample_returns_no_token() -> None:
    runner = make_runner(tiny_model())
    driver = Driver(runner, NUM_BLOCKS, BLOCK_SIZE)
    sequence = Sequence("a", list(range(20)))
    output = driver.step([(sequence, 12)])
    assert output.tokens == {}
    assert output.elapsed_s > 0


OVERLAPPED = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, repetition_penalty=1.4, frequency_penalty=0.5),
    SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(temperature=0.0, num_logprobs=2),
    SamplingParams(temperature=0.8, presence_penalty=1.0, logit_bias=((5, 2.0),), num_logprobs=0),
)


def test_overlapped_steps_sample_the_same_tokens() -> None:
    loaded = tiny_model()
    prompts = random_prompts(len(OVERLAPPED), 40)
    results = []
    for overlapped in (False, True):
        runner = make_runner(loaded)
        driver = Driver(runner, NUM_BLOCKS, BLOCK_SIZE)
        sequences = [
            Sequence(str(i), list(prompt), params, seed=i)
            for i, (prompt, params) in enumerate(zip(prompts, OVERLAPPED, strict=True))
        ]
        driver.step([(s, len(s.token_ids)) for s in sequences])
        if overlapped:
            driver.decode_overlapped(sequences, 12)
        else:
            for _ in range(12):
                driver.step([(s, 1) for s in sequences])
        results.append([s.output for s in sequences])
        runner.close()
    assert results[0] == results[1]
    assert {len(output) for output in results[0]} == {13}


def test_decode_steps_overlap_and_chunks_do_not() -> None:
    runner = make_runner(tiny_model())
    driver = Driver(runner, NUM_BLOCKS, BLOCK_SIZE)
    sequence = Sequence("a", list(range(20)))
    assert runner.max_steps_in_flight == 2
    driver.step([(sequence, 20)])
    assert runner.max_steps_in_flight == 1
    driver.step([(sequence, 1)])
    assert runner.max_steps_in_flight == 2


def test_a_step_takes_the_time_that_its_launch_took_too(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = [0.0]

    def launching(*arrays: object) -> None:
        # On the CPU nearly all of a long step is computed in here.
        seconds[0] += 5.0

    runner = make_runner(tiny_model())
    runner._clock = StepClock(lambda: seconds[0])
    monkeypatch.setattr(mx, "async_eval", launching)
    driver = Driver(runner, NUM_BLOCKS, BLOCK_SIZE)
    assert driver.step([(Sequence("a", list(range(20))), 20)]).elapsed_s == 5.0


def test_the_step_before_takes_none_of_the_time_of_a_chunk_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = [0.0]
    runner = make_runner(tiny_model())
    driver = Driver(runner, NUM_BLOCKS, BLOCK_SIZE)
    running, newcomer = Sequence("a", list(range(20))), Sequence("b", list(range(40)))
    driver.step([(running, 20)])
    runner._clock = StepClock(lambda: seconds[0])
    decoding = driver.launch([(running, 1)])
    seconds[0] = 1.0

    def launching(*arrays: object) -> None:
        seconds[0] += 5.0

    monkeypatch.setattr(mx, "async_eval", launching)
    reading = driver.launch([(newcomer, 40)])
    assert driver.read(decoding, [running]).elapsed_s == 1.0
    assert driver.read(reading, [newcomer]).elapsed_s == 5.0


@pytest.mark.parametrize("overlapped", [False, True])
def test_steps_write_the_pool_in_place(overlapped: bool) -> None:
    loaded = tiny_model()
    num_blocks = 40_000
    runner = make_runner(loaded, num_blocks=num_blocks)
    pool_bytes = num_blocks * BLOCK_SIZE * loaded.facts.kv_bytes_per_token
    driver = Driver(runner, num_blocks, BLOCK_SIZE)
    sequences = [Sequence(str(i), list(range(1, 20))) for i in range(4)]
    driver.step([(s, 19) for s in sequences])
    before_bytes = mx.get_active_memory()
    mx.reset_peak_memory()
    if overlapped:
        driver.decode_overlapped(sequences, 40)
    else:
        for _ in range(40):
            driver.step([(s, 1) for s in sequences])
    assert mx.get_peak_memory() - before_bytes < pool_bytes / (2 * loaded.facts.num_layers) / 10
    assert mx.get_active_memory() - before_bytes < 1e6
    runner.close()


def test_close_frees_the_pool() -> None:
    loaded = tiny_model()
    before_bytes = mx.get_active_memory()
    runner = make_runner(loaded, num_blocks=2_000)
    assert mx.get_active_memory() - before_bytes >= 2_000 * BLOCK_SIZE * loaded.facts.kv_bytes_per_token
    runner.close()
    assert mx.get_active_memory() - before_bytes < 1e6
    with pytest.raises(AssertionError, match="closed"):
        runner.launch(StepBatch(0, ()))


def test_a_half_precision_pool_halves_the_bytes_and_stays_close() -> None:
    loaded = tiny_model()
    runner = make_runner(loaded, kv_dtype="float16")
    assert runner.facts.kv_bytes_per_token * 2 == loaded.facts.kv_bytes_per_token
    params = SamplingParams(temperature=0.0, num_logprobs=0)
    half, full = (Sequence("a", list(range(30)), params) for _ in range(2))
    Driver(runner, NUM_BLOCKS, BLOCK_SIZE).generate([half], 1, 3)
    Driver(make_runner(loaded), NUM_BLOCKS, BLOCK_SIZE).generate([full], 1, 3)
    for a, b in zip(half.sampled, full.sampled, strict=True):
        assert a.logprobs is not None
        assert b.logprobs is not None
        assert a.logprobs.logprob == pytest.approx(b.logprobs.logprob, abs=0.02)


def test_activations_grow_with_the_chunk() -> None:
    loaded = tiny_model()
    small, large = (measure_activation_bytes(loaded, num_tokens, slots=2) for num_tokens in (32, 256))
    hidden_bytes = 256 * 96 * 4
    assert small < large
    assert large > hidden_bytes


def test_steps_of_another_thread_are_refused() -> None:
    import threading

    runner = make_runner(tiny_model())
    caught: list[BaseException] = []

    def launch() -> None:
        try:
            runner.launch(StepBatch(0, ()))
        except AssertionError as error:
            caught.append(error)

    thread = threading.Thread(target=launch)
    thread.start()
    thread.join()
    assert "belongs to the thread" in str(caught[0])
