"""The sampler against a reference in numpy, and its distributions with fixed seeds."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from engine.batch import BatchRow, SampledToken
from engine.errors import StepFailedError
from engine.mlx_backend.noise import gumbel, row_keys
from engine.mlx_backend.sampler import Sampler
from engine.request import SamplingParams

V = 300
Floats = npt.NDArray[np.float64]


def make_row(
    request_id: str = "a",
    *,
    seed: int = 0,
    output_index: int = 0,
    token_ids: Rows[int] = (1, 2, 3),
    num_prompt_tokens: int = 3,
    **sampling: Any,
) -> BatchRow:
    return BatchRow(
        request_id=request_id,
        slot=0,
        start=len(token_ids) - 1,
        num_tokens=1,
        token_ids=token_ids,
        block_ids=(),
        num_prompt_tokens=num_prompt_tokens,
        sampling=SamplingParams(**sampling),
        seed=seed,
        samples=True,
        output_index=output_index,
    )


def make_logits(num_rows: int, seed: int = 0, vocab_size: int = V, scale: float = 2.0) -> npt.NDArray[np.float32]:
    return (np.random.default_rng(seed).normal(size=(num_rows, vocab_size)) * scale).astype(np.float32)


def sample(
    logits: npt.NDArray[np.float32], rows: Rows[BatchRow], *, host_may_wait: bool = True, sampler: Sampler | None = None
) -> dict[str, SampledToken]:
    sampler = sampler or Sampler(len(rows), logits.shape[-1], host_may_wait=host_may_wait)
    samples = sampler.sample(mx.array(logits), tuple(rows))
    mx.eval(samples.arrays())
    tokens, failures = samples.read()
    assert not failures
    return tokens


def tokens_of(logits: npt.NDArray[np.float32], rows: Rows[BatchRow], **options: Any) -> list[int]:
    tokens = sample(logits, rows, **options)
    return [tokens[row.request_id].token_id for row in rows]


def reference_logits(logits: npt.NDArray[np.float32], row: BatchRow) -> Floats:
    """Bias and penalties, written from their definitions."""
    changed = logits.astype(np.float64)
    params, answer = row.sampling, row.token_ids[row.num_prompt_tokens :]
    for token, bias in params.logit_bias:
        changed[token] += bias
    for token in set(row.token_ids):
        changed[token] *= 1 / params.repetition_penalty if changed[token] > 0 else params.repetition_penalty
    for token in set(answer):
        changed[token] -= params.presence_penalty + params.frequency_penalty * list(answer).count(token)
    return changed


def reference_probabilities(logits: npt.NDArray[np.float32], row: BatchRow) -> Floats:
    """top_k, then top_p on what is left, then min_p; ties at the edge stay."""
    params = row.sampling
    scores = reference_logits(logits, row) / params.temperature
    p = np.exp(scores - scores.max())
    if params.top_k:
        p[p < np.sort(p)[-min(params.top_k, len(p))]] = 0
    p /= p.sum()
    if params.top_p < 1:
        order = np.argsort(-p)
        before = np.cumsum(p[order]) - p[order]
        p[p < p[order][before < params.top_p].min()] = 0
    p[p < params.min_p * p.max()] = 0
    return p / p.sum()


def reference_token(logits: npt.NDArray[np.float32], row: BatchRow) -> int:
    if row.sampling.greedy:
        return int(reference_logits(logits, row).argmax())
    noise = np.array(gumbel(row_keys([row.seed], [row.output_index]), len(logits)))[0]
    with np.errstate(divide="ignore"):
        return int((np.log(reference_probabilities(logits, row)) + noise).argmax())


SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 1.5, "top_p": 0.9},
    {"temperature": 0.8, "top_p": 0.05},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 2.0, "top_k": 40, "top_p": 0.7},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 10_000},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 1.0, "top_k": 50, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 0.0, "repetition_penalty": 1.8},
    {"temperature": 0.0, "presence_penalty": 2.0, "frequency_penalty": 0.7},
    {"temperature": 0.9, "repetition_penalty": 0.8, "presence_penalty": -1.0, "frequency_penalty": -0.3, "top_p": 0.8},
    {"temperature": 0.0, "logit_bias": ((17, 100.0),)},
    {"temperature": 1.0, "logit_bias": ((17, -100.0), (299, 5.0), (0, 3.5)), "top_k": 3},
]


def make_rows(seed: int = 0) -> list[BatchRow]:
    draw = np.random.default_rng(seed)
    return [
        make_row(
            str(i),
            seed=int(draw.integers(2**63)),
            output_index=i,
            token_ids=draw.integers(0, V, 12).tolist() * 2,
            num_prompt_tokens=10,
            **settings,
        )
        for i, settings in enumerate(SETTINGS)
    ]


@pytest.mark.parametrize("host_may_wait", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_a_mixed_batch_equals_the_reference(seed: int, host_may_wait: bool) -> None:
    rows, logits = make_rows(seed), make_logits(len(SETTINGS), seed)
    expected = [reference_token(logits[i], row) for i, row in enumerate(rows)]
    assert tokens_of(logits, rows, host_may_wait=host_may_wait) == expected


def test_a_row_is_sampled_alike_alone_and_in_any_batch() -> None:
    rows, logits = make_rows(), make_logits(len(SETTINGS))
    together = tokens_of(logits, rows)
    alone = [tokens_of(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    backwards = tokens_of(logits[::-1].copy(), rows[::-1])[::-1]
    assert together == alone == backwards


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.8},
        {"temperature": 1.3, "top_k": 6},
        {"temperature": 1.0, "min_p": 0.1},
    ],
)
def test_draws_follow_the_distribution(settings: dict[str, Any]) -> None:
    vocab_size, num_draws = 20, 4000
    logits = make_logits(1, seed=3, vocab_size=vocab_size, scale=1.0)
    row = make_row(**settings)
    expected = reference_probabilities(logits[0], row) * num_draws
    drawn = tokens_of(
        np.repeat(logits, num_draws, axis=0),
        [make_row(str(i), seed=7, output_index=i, **settings) for i in range(num_draws)],
    )
    counts = np.bincount(drawn, minlength=vocab_size)
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    chi_square = float((((counts - expected) ** 2)[kept] / expected[kept]).sum())
    degrees = int(kept.sum()) - 1
    assert chi_square < degrees + 4 * np.sqrt(2 * degrees)


def test_noise_is_uniform_and_independent_across_seeds_indices_and_tokens() -> None:
    def uniforms(keys: mx.array) -> Floats:
        return np.exp(-np.exp(-np.array(gumbel(keys, 500), dtype=np.float64)))

    by_seed = uniforms(row_keys(range(200), [0] * 200))
    by_index = uniforms(row_keys([5] * 200, range(200)))
    for values in (by_seed, by_index):
        counts, _ = np.histogram(values, bins=50, range=(0, 1))
        expected = values.size / 50
        assert ((counts - expected) ** 2 / expected).sum() < 49 + 4 * np.sqrt(2 * 49)
        for other in (np.roll(values, 1, axis=0), np.roll(values, 1, axis=1)):
            correlation = np.corrcoef(values.ravel(), other.ravel())[0, 1]
            assert abs(correlation) < 4 / np.sqrt(values.size)


def test_extreme_noise_never_hides_the_only_allowed_token() -> None:
    logits = np.full((64, V), -np.inf, dtype=np.float32)
    logits[:, 123] = -3.0
    rows = [make_row(str(i), seed=i, temperature=1.0) for i in range(64)]
    assert set(tokens_of(logits, rows)) == {123}


def test_equal_requests_repeat_and_other_seeds_differ() -> None:
    logits = make_logits(1, scale=0.1)
    draws = [tokens_of(logits, [make_row(seed=seed, temperature=1.0)])[0] for seed in [1, 1, *range(2, 30)]]
    assert draws[0] == draws[1]
    assert len(set(draws)) > 15


@pytest.mark.parametrize("host_may_wait", [True, False])
def test_a_nucleus_wider_than_the_candidates_is_exact(host_may_wait: bool) -> None:
    vocab_size = 5000
    logits = make_logits(3, vocab_size=vocab_size, scale=0.3)  # nearly flat: 0.9 of the mass takes thousands of tokens
    rows = [
        make_row(str(i), seed=i, temperature=1.0, top_p=p, top_k=k)
        for i, (p, k) in enumerate([(0.9, 0), (1.0, 2000), (0.5, 3000)])
    ]
    for i, row in enumerate(rows):
        assert (reference_probabilities(logits[i], row) > 0).sum() > 1024
    for index in range(20):
        rows = [
            make_row(
                r.request_id,
                seed=r.seed,
                output_index=index,
                temperature=1.0,
                top_p=r.sampling.top_p,
                top_k=r.sampling.top_k,
            )
            for r in rows
        ]
        assert tokens_of(logits, rows, host_may_wait=host_may_wait) == [
            reference_token(logits[i], row) for i, row in enumerate(rows)
        ]


def test_greedy_takes_the_first_of_equal_tokens() -> None:
    logits = np.zeros((2, V), dtype=np.float32)
    logits[1, [40, 90]] = 1.0
    assert tokens_of(logits, [make_row("a", temperature=0.0), make_row("b", temperature=0.0)]) == [0, 40]


def test_counts_follow_a_request_from_step_to_step_and_start_again_after_a_release() -> None:
    sampler = Sampler(2, V, host_may_wait=True)
    logits = make_logits(2, seed=9)
    histories = [[5, 6, 7], [8, 9]]
    for step in range(12):
        rows = [
            make_row(
                str(i),
                token_ids=tokens,
                num_prompt_tokens=[3, 2][i],
                output_index=step,
                temperature=0.0,
                frequency_penalty=1.5,
                repetition_penalty=1.3,
            )
            for i, tokens in enumerate(histories)
        ]
        expected = [reference_token(logits[i], row) for i, row in enumerate(rows)]
        assert tokens_of(logits, rows, sampler=sampler) == expected
        for history, token in zip(histories, expected, strict=True):
            history.append(token)
        if step == 5:
            sampler.forget(["0"])  # preempted: its counts are rebuilt from its tokens
        if step == 8:
            sampler.forget(["1"])
            histories[1] = [1, 2]  # another request takes the place
    assert len(set(histories[0])) > 4


def test_logprobs_are_those_of_the_model_itself() -> None:
    logits = make_logits(3, seed=4)
    rows = [
        make_row("a", temperature=0.0, num_logprobs=5, logit_bias=((11, 50.0),)),
        make_row("b", temperature=0.0),
        make_row("c", temperature=2.0, num_logprobs=0, seed=3),
    ]
    tokens = sample(logits, rows)
    reference = logits - np.log(np.exp(logits.astype(np.float64)).sum(axis=-1, keepdims=True))
    first, third = tokens["a"].logprobs, tokens["c"].logprobs
    assert tokens["b"].logprobs is None
    assert first is not None
    assert third is not None
    assert tokens["a"].token_id == first.token_id == 11
    assert first.logprob == pytest.approx(reference[0, 11], abs=1e-5)
    assert [token for token, _ in first.top] == np.argsort(-reference[0])[:5].tolist()
    assert [value for _, value in first.top] == pytest.approx(np.sort(reference[0])[::-1][:5].tolist(), abs=1e-5)
    assert third.top == ()
    assert third.logprob == pytest.approx(reference[2, tokens["c"].token_id], abs=1e-5)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_broken_logits_fail_their_row_alone(poison: float) -> None:
    logits = make_logits(3)
    logits[1, 7] = poison
    logits[2, :250] = -np.inf
    rows = [make_row(str(i), temperature=float(i > 0), seed=i) for i in range(3)]
    samples = Sampler(3, V, host_may_wait=True).sample(mx.array(logits), tuple(rows))
    tokens, failures = samples.read()
    assert set(tokens) == {"0", "2"}
    assert isinstance(failures["1"], StepFailedError)
    assert tokens["2"].token_id >= 250


def test_half_precision_logits_are_sampled_in_fp32() -> None:
    logits = make_logits(1, seed=2)
    half = mx.array(logits).astype(mx.bfloat16)
    row = make_row(temperature=0.0, num_logprobs=0)
    tokens, _ = Sampler(1, V, host_may_wait=True).sample(half, (row,)).read()
    rounded = np.array(half.astype(mx.float32), dtype=np.float64)[0]
    details = tokens["a"].logprobs
    assert details is not None
    assert details.logprob == pytest.approx(rounded.max() - np.log(np.exp(rounded).sum()), abs=1e-5)
