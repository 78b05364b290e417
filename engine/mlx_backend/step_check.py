"""Compares whole GPU steps with plain packed steps of the same model, when a model is loaded.

Owns: a few steps run both ways. Must not know: what is done about a difference. The trials of kernel_check.py prove
each kernel alone; this proves that a model's layers, as they call it, get from it what the plain operations give.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from engine.batch import BatchRow, StepBatch
from engine.mlx_backend.geometries import pages_chunks
from engine.mlx_backend.gpu_cache import KernelBook
from engine.mlx_backend.gpu_inputs import GpuInputBuilder
from engine.mlx_backend.gpu_model import GpuModel
from engine.mlx_backend.kernel_check import Arrays, Verdict, judge
from engine.mlx_backend.kernels.launch import KernelFactory
from engine.mlx_backend.kernels.tiling import Tuning
from engine.mlx_backend.loaded_model import LoadedModel
from engine.mlx_backend.packed_model import PackedModel
from engine.mlx_backend.row_products import Use
from engine.request import SamplingParams

_NAME = "whole steps"
# Relative L2 distance of logits by the size of the model's numbers, as in probe.py. Where pools have few bits, sums in
# another order move a number here and there to the next code: twice what tiny random models show at most. A wrong block
# makes a distance of more than one.
_TOLERANCES = {None: {4: 1e-3, 2: 0.1}, 8: {4: 0.02, 2: 0.15}, 4: {4: 0.1, 2: 0.3}}
# Per step: (sequence, its tokens in this step). Chunks, then a decode row beside a chunk, then decode rows alone.
_STEPS = (((0, 20), (1, 3)), ((0, 1), (1, 9)), ((0, 1), (1, 1)))
_NUM_SEQUENCES = 2


def steps_trial(
    loaded: LoadedModel, block_size: int, factory: KernelFactory, tuning: Tuning, kv_bits: int | None = None
) -> Verdict:
    """Logits of three steps by the kernels against those by plain operations, over pools of the same kind."""

    def trial() -> tuple[Arrays, Arrays]:
        distances = _distances(loaded, KernelBook(block_size, factory, tuning, kv_bits))
        return [mx.array(distances)], [mx.zeros(len(distances))]

    return judge(_NAME, trial, _TOLERANCES[kv_bits][loaded.compute_dtype.size])


def _distances(loaded: LoadedModel, book: KernelBook) -> list[float]:
    block_size, tuning = book.block_size, book.tuning
    blocks_per_row = -(-32 // block_size)
    num_blocks = _NUM_SEQUENCES * blocks_per_row
    sizes = {"num_blocks": num_blocks, "num_window_blocks": num_blocks, "block_size": block_size}
    max_model_len = loaded.facts.max_model_len
    plain = PackedModel(
        loaded.model,
        loaded.layers,
        dtype=loaded.compute_dtype,
        max_model_len=max_model_len,
        kv_bits=book.kv_bits,
        **sizes,
    )
    ours = GpuModel(loaded, dtype=loaded.compute_dtype, book=book, sampling=None, compiles=False, **sizes)
    if ours.products is not None:
        ours.products.uses = dict.fromkeys(range(1, 9), Use.ALL if tuning.projects_rows else Use.JOINED)
    inputs = GpuInputBuilder(
        block_size=block_size,
        max_model_len=max_model_len,
        slots=_NUM_SEQUENCES,
        vocab_size_tokens=loaded.facts.vocab_size,
        windows=(layer.window or 0 for layer in loaded.layers),
        pages_chunks=pages_chunks(loaded, block_size, tuning),
        num_window_blocks=num_blocks,
    )
    last_tokens = mx.zeros((_NUM_SEQUENCES + 1,), mx.int32)
    distances = []
    for batch in _batches(loaded.facts.vocab_size, blocks_per_row):
        host, step = inputs.build(batch), plain.inputs.build(batch)
        got = _by_request(host.head_rows, ours.logits(host, last_tokens)[0])
        wanted = _by_request(step.sampling_rows, plain.forward(step))
        mx.eval(ours.versions, plain.state())
        distances += [_distance(got[name], wanted[name]) for name in wanted]
    return distances


def _batches(vocab_size: int, blocks_per_row: int) -> list[StepBatch]:
    tokens = np.random.default_rng(3).integers(0, vocab_size, (_NUM_SEQUENCES, 32)).tolist()
    # Blocks in an order that is no order.
    order = [(i * 7 + 3) % (_NUM_SEQUENCES * blocks_per_row) for i in range(_NUM_SEQUENCES * blocks_per_row)]
    order = order if len(set(order)) == len(order) else list(range(len(order)))
    done = [0] * _NUM_SEQUENCES
    batches = []
    for index, work in enumerate(_STEPS):
        rows = []
        for sequence, count in work:
            rows.append(
                BatchRow(
                    request_id=str(sequence),
                    slot=sequence,
                    start=done[sequence],
                    num_tokens=count,
                    token_ids=tokens[sequence],
                    block_ids=order[sequence * blocks_per_row : (sequence + 1) * blocks_per_row],
                    window_block_ids=order[::-1][sequence * blocks_per_row : (sequence + 1) * blocks_per_row],
                    num_prompt_tokens=32,
                    sampling=SamplingParams(temperature=0.0),
                    seed=0,
                    samples=True,
                    output_index=0,
                )
            )
            done[sequence] += count
        batches.append(StepBatch(index, tuple(sorted(rows, key=lambda row: row.num_tokens > 1))))
    return batches


def _by_request(rows: tuple[BatchRow | None, ...], logits: mx.array) -> dict[str, mx.array]:
    return {row.request_id: logits[i] for i, row in enumerate(rows) if row is not None}


def _distance(ours: mx.array, theirs: mx.array) -> float:
    ours, theirs = ours.astype(mx.float32), theirs.astype(mx.float32)
    return float(np.array(mx.linalg.norm(ours - theirs) / mx.maximum(mx.linalg.norm(theirs), 1e-6)))
