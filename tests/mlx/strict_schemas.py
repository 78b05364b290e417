"""Strict schemas over the demo model's tokens: seeded random answers, all valid, and what a token costs.

python -m tests.mlx.strict_schemas [--count 200]
"""

from __future__ import annotations

import argparse
import json
import random
import time
from typing import Any

import jsonschema
import numpy as np

from engine.model_source import resolve_model
from engine.request import Grammar
from engine.text.structured import GrammarCompiler
from engine.text.tokenizer import load_tokenizer


def make_schemas(count: int = 20) -> list[dict[str, Any]]:
    """Objects of one to five bounded fields of every kind."""
    draw = random.Random(7)
    kinds: list[dict[str, Any]] = [
        {"type": "string", "maxLength": 8},
        {"type": "integer", "minimum": 0, "maximum": 999},
        {"type": "boolean"},
        {"enum": ["red", "green", None]},
        {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        {"type": "string", "format": "date"},
    ]
    schemas = []
    for _ in range(count):
        fields = {f"field_{i}": draw.choice(kinds) for i in range(draw.randint(1, 5))}
        schemas.append(
            {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
        )
    return schemas


def main() -> None:
    """Sample answers from the masks alone, over the demo model's own tokens, and time each part."""
    parser = argparse.ArgumentParser(description="Random answers inside strict schemas.")
    parser.add_argument("--count", type=int, default=200)
    count = parser.parse_args().count
    tokenizer = load_tokenizer(resolve_model("demo"))
    compiler = GrammarCompiler(tokenizer, vocab_size=tokenizer.vocab_size)
    schemas = make_schemas()
    mask_s, accept_s, compile_s, num_tokens = [], [], [], 0
    for number in range(count):
        draw, schema = np.random.default_rng(number), schemas[number % len(schemas)]
        started_s = time.perf_counter()
        matcher = compiler.matcher(Grammar("json_schema", json.dumps(schema)))
        compile_s.append(time.perf_counter() - started_s)
        masks, answer = np.zeros((1, compiler.mask_width), dtype=np.int32), []
        while True:
            started_s = time.perf_counter()
            matcher.fill_mask(masks, 0)
            mask_s.append(time.perf_counter() - started_s)
            token = int(draw.choice(np.flatnonzero(np.unpackbits(masks[0].view(np.uint8), bitorder="little"))))
            if token in tokenizer.eos_token_ids:
                break
            started_s = time.perf_counter()
            matcher.accept(token)
            accept_s.append(time.perf_counter() - started_s)
            answer.append(token)
            num_tokens += 1
        jsonschema.validate(json.loads(tokenizer.decode(answer)), schema)
    for name, values in (("compile", compile_s), ("mask", mask_s), ("accept", accept_s)):
        print(f"{name}: median {np.median(values) * 1e6:.0f} us, 99% {np.quantile(values, 0.99) * 1e6:.0f} us")
    print(f"{count} answers over {len(schemas)} schemas, {num_tokens} tokens: all valid")


if __name__ == "__main__":
    main()
