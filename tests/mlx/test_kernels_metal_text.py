"""The kernels' Metal text, checked by clang: a wrong address space or overload fails here and not on a user's Mac."""

from __future__ import annotations

import dataclasses
import re

import pytest

import engine.mlx_backend  # noqa: F401  (loads the BLAS before MLX)
from engine.mlx_backend.kernels import dialect
from engine.mlx_backend.kernels.dialect import ALL_TEXTS, PROJECT, KernelText
from engine.mlx_backend.kernels.tiling import TUNINGS, Geometry, chunk_constants, decode_constants, tile_decode
from tests.metal_syntax import CLANG, problems

pytestmark = pytest.mark.skipif(CLANG is None, reason="needs clang (Debian: apt install clang)")

GEOMETRY = Geometry(8, 2, 128, 16, 0.1, 40, 30.0, True)
TILING = tile_decode(GEOMETRY, 2, TUNINGS["metal"])
CONSTANTS = {
    **decode_constants(GEOMETRY, TILING),
    **chunk_constants(GEOMETRY, 8, TUNINGS["metal"]),
    "HEADS": 8,
    "NUM_HEADS": 8,
    "THREADS": 256,
    "SIMDS": 4,
    "KEYS": 16,
    "ROWS": 8,
    "FEATS": 2,
    "TURNS": 2,
    "K": 4096,
    "BITS": 4,
}
METAL_TEXTS = [text for text in ALL_TEXTS if text is not PROJECT]  # that is for CUDA alone
_SMALL_NAMES = ("block_table", "seq_lens", "scales", "version", "span", "sinks", "targets", "pairs", "chunks")
SMALL = frozenset((*_SMALL_NAMES, "positions", "epsilon"))


def check(text: KernelText, small: frozenset[str] = SMALL, types: tuple[str, str] = ("bfloat16_t", "half")) -> str:
    return problems(text, *types, {name: CONSTANTS[name] for name in text.constants}, small)


@pytest.mark.parametrize("text", METAL_TEXTS, ids=lambda text: text.name)
@pytest.mark.parametrize("small", [frozenset(), SMALL], ids=["large arrays", "small arrays"])
def test_metal_accepts(text: KernelText, small: frozenset[str]) -> None:
    assert check(text, small) == ""
    if not text.name.startswith(("paged_chunk_whole", "paged_chunk_split")):  # 16-bit numbers only
        assert check(text, small, ("float", "float")) == ""


@dataclasses.dataclass(frozen=True)
class _Changed(KernelText):
    old: str = ""
    new: str = ""

    def body(self, target: dialect.Target) -> str:
        body = super().body(target)
        assert self.old in body
        return body.replace(self.old, self.new)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        pytest.param("  float q[HEADS]", "  P* q_at = (P*)q;\n  float q[HEADS]", "no address space", id="no space"),
        pytest.param("fetch_piece(to_keys[u][p],", "fetch_piece(shared_top[0],", "", id="undeclared yet"),
        pytest.param(
            "hold_piece(held, k_new, new_row + i)",
            "hold_piece(held, q[0], 0)",
            "no matching function",
            id="thread as device",
        ),
        pytest.param("max(top, s)", "max(top, 1)", "ambiguous", id="an overload Metal has not"),
        pytest.param("const Offset new_row", "const long long new_row", "not in Metal", id="long long"),
        pytest.param("float top[HEADS];", "double top[HEADS];", "not in Metal", id="double"),
        pytest.param(
            "store_piece(keys_held,", "k_pool[0] = held.numbers[0]; store_piece(keys_held,", "", id="const written"
        ),
    ],
)
def test_metal_refuses(old: str, new: str, message: str) -> None:
    fields = {field.name: getattr(dialect.DECODE_WHOLE, field.name) for field in dataclasses.fields(KernelText)}
    found = check(_Changed(**fields, old=old, new=new))
    assert found != ""
    assert re.search(message, found), found
