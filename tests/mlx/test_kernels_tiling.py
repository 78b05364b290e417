"""How kernels are cut, as arithmetic."""

from __future__ import annotations

import dataclasses

from engine.mlx_backend.kernels.tiling import TUNINGS, Geometry, num_chunk_splits

LLAMA = Geometry(num_heads=32, num_kv_heads=8, head_dim=128, block_size=16, scale=0.1)


def test_splits_leave_little_of_the_last_round_idle() -> None:
    # 48 threadgroups a split: two splits are 96 of 132 in one round, five are 240 of 264 in two.
    assert num_chunk_splits(LLAMA, 192, 16_384, TUNINGS["cuda"]) == 5
    assert num_chunk_splits(LLAMA, 320, 16_384, TUNINGS["cuda"]) == 3


def test_chunks_of_few_tokens_are_split_until_the_chip_is_full() -> None:
    splits = {n: num_chunk_splits(LLAMA, n, 16_384, TUNINGS["cuda"]) for n in (512, 256, 128, 64, 16)}
    assert splits == {512: 1, 256: 2, 128: 4, 64: 8, 16: 8}


def test_contexts_are_not_split_further_than_they_reach() -> None:
    windowed = dataclasses.replace(LLAMA, window=60)
    assert num_chunk_splits(LLAMA, 64, 300, TUNINGS["cuda"]) == 3
    assert num_chunk_splits(windowed, 64, 16_384, TUNINGS["cuda"]) == 1
    assert num_chunk_splits(LLAMA, 64, 16_384, TUNINGS["metal"]) == 1
