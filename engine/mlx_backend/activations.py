"""Measures what a step needs besides weights and pool.

Owns: one worst step on the served path and its peak memory. Must not know: how the memory plan uses the figure.
"""

from __future__ import annotations

import gc

import mlx.core as mx

from engine.batch import BatchRow, StepBatch
from engine.mlx_backend.loaded_model import LoadedModel
from engine.mlx_backend.packed_model import PackedModel
from engine.mlx_backend.row_model import RowModel
from engine.mlx_backend.sampler import Sampler
from engine.mlx_backend.step_model import StepForm
from engine.request import SamplingParams

_BLOCK_SIZE_TOKENS = 16
# The CPU frees each layer's memory before the next layer runs, so two layers (the first may be unlike the others)
# show the peak in a fraction of the time. A GPU holds memory of layers that are still queued: all must run.
_NUM_CPU_LAYERS = 2


def measure_activation_bytes(loaded: LoadedModel, num_tokens: int, slots: int = 1, kv_bits: int | None = None) -> int:
    """Peak bytes of a step beyond weights and pool: a chunk of ``num_tokens`` that ends at the longest context and
    ``slots`` decode rows at the longest context, all sampled with top_p."""
    model = loaded.step_model(
        num_blocks=1,
        block_size=_BLOCK_SIZE_TOKENS,
        dtype=loaded.compute_dtype,
        num_state_entries=slots + 1,
        kv_bits=kv_bits,
    )
    if isinstance(model, RowModel):
        model.settles = False
    batch = _worst_step(loaded.facts.max_model_len, num_tokens, slots, alone=loaded.form is StepForm.SINGLE)
    step = model.build(batch)
    before_bytes = _start_measuring()
    logits = model.forward(step)
    if loaded.backend == "cpu" and isinstance(model, PackedModel | RowModel):
        mx.eval([array for pool in model.pools[: _NUM_CPU_LAYERS + 1] for array in pool.arrays()])
    else:
        mx.eval(model.state(), logits)
    forward_bytes = mx.get_peak_memory() - before_bytes
    del logits
    model.close()
    return max(forward_bytes, _measure_sampling_bytes(loaded, batch.rows))


def _worst_step(max_model_len: int, num_tokens: int, slots: int, *, alone: bool) -> StepBatch:
    """``alone``: the chunk only, and that at the beginning."""
    num_tokens = min(num_tokens, max_model_len)
    # Every entry of the block table is the same block: contents do not matter here, and the pool stays tiny.
    table = [0] * (-(-max_model_len // _BLOCK_SIZE_TOKENS))
    token_ids = [0] * max_model_len
    sampling = SamplingParams(temperature=1.0, top_p=0.9)
    rows = tuple(
        BatchRow(
            request_id=str(slot),
            slot=slot,
            start=0 if alone else max_model_len - count,
            num_tokens=count,
            token_ids=token_ids,
            block_ids=table,
            num_prompt_tokens=max_model_len,
            sampling=sampling,
            seed=0,
            samples=True,
            output_index=0,
        )
        for slot, count in enumerate([num_tokens] if alone else [*[1] * slots, num_tokens])
    )
    return StepBatch(0, rows)


def _measure_sampling_bytes(loaded: LoadedModel, rows: tuple[BatchRow, ...]) -> int:
    before_bytes = _start_measuring()
    logits = mx.random.normal((len(rows), loaded.facts.vocab_size), dtype=loaded.compute_dtype)
    sampler = Sampler(len(rows), loaded.facts.vocab_size, host_may_wait=loaded.backend == "cpu")
    mx.eval(sampler.sample(logits, rows).arrays())
    return mx.get_peak_memory() - before_bytes


def _start_measuring() -> int:
    # Arrays that only wait for Python's collector would go in the middle, and the peak would look lower than it is.
    gc.collect()
    mx.clear_cache()
    mx.reset_peak_memory()
    return mx.get_active_memory()
