"""What a KV pool of few bits costs in quality: `python -m tests.perf.kv_quality [MODEL]`.

Passages of this repository's documentation go through the model with each kind of pool; printed are perplexity, how
often the likeliest next token stays the same, and the mean divergence from the plain pool's distributions.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import engine.mlx_backend.mlx_lm_parts  # noqa: F401  (the BLAS before MLX)

# isort: split
import mlx.core as mx

from engine.batch import BatchRow, StepBatch
from engine.mlx_backend.loaded_model import LoadedModel
from engine.mlx_backend.loader import load_model
from engine.mlx_backend.packed_model import PackedModel
from engine.model_source import resolve_model
from engine.request import SamplingParams
from engine.text.tokenizer import load_tokenizer

PASSAGE_TOKENS = 512
PAGES = ("scheduling.md", "memory.md", "api.md", "operations.md")
BLOCK_SIZE = 16


def log_probabilities(loaded: LoadedModel, tokens: list[int], kv_bits: int | None) -> NDArray[np.float32]:
    """Of every token given the ones before it, ``[tokens, vocab]``; the passage is read in two chunks."""
    model = loaded.step_model(
        num_blocks=PASSAGE_TOKENS // BLOCK_SIZE, block_size=BLOCK_SIZE, dtype=loaded.compute_dtype, kv_bits=kv_bits
    )
    assert isinstance(model, PackedModel)
    parts = []
    half = len(tokens) // 2
    for start, count in ((0, half), (half, len(tokens) - half)):
        blocks = list(range(PASSAGE_TOKENS // BLOCK_SIZE))
        row = BatchRow("r", 0, start, count, tokens, blocks, len(tokens), SamplingParams(), 0, True, 0)
        step = dataclasses.replace(model.build(StepBatch(0, (row,))), head_rows=mx.arange(count))
        logits = model.forward(step).astype(mx.float32)
        parts.append(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        mx.eval(parts, model.state())
    model.close()
    return np.array(mx.concatenate(parts))


def main() -> None:
    """Measure and print."""
    source = resolve_model(sys.argv[1] if len(sys.argv) > 1 else "demo")
    loaded, tokenizer = load_model(source, parity="off"), load_tokenizer(source)
    folder = Path(__file__).parents[2] / "docs"
    results: dict[int | None, list[tuple[float, float, float]]] = {None: [], 8: [], 4: []}
    for page in PAGES:
        tokens = tokenizer.encode((folder / page).read_text(encoding="utf-8"))[:PASSAGE_TOKENS]
        plain = log_probabilities(loaded, tokens, None)
        for bits, rows in results.items():
            found = plain if bits is None else log_probabilities(loaded, tokens, bits)
            loss = -found[np.arange(len(tokens) - 1), tokens[1:]].mean()
            same = (found.argmax(axis=1) == plain.argmax(axis=1)).mean()
            divergence = (np.exp(plain) * (plain - found)).sum(axis=1).mean()
            rows.append((float(loss), float(same), float(divergence)))
    base = loaded.kv_bytes_per_token(loaded.compute_dtype)
    for bits, rows in results.items():
        loss, same, divergence = np.mean(rows, axis=0)
        size = loaded.kv_bytes_per_token(loaded.compute_dtype, bits)
        name = loaded.facts.compute_dtype if bits is None else f"{bits} bits"
        print(
            f"{name}: {size:,} bytes a token (1/{base / size:.1f}), perplexity {np.exp(loss):.3f}, "
            f"same likeliest token {100 * same:.1f}%, divergence {divergence:.5f} nats"
        )


if __name__ == "__main__":
    main()
