"""How the decode kernel cuts its work: lanes, tiles of heads, keys a turn, splits of the context.

Owns: the constants of the kernels for a layer's geometry. Pure arithmetic; must not know MLX arrays.
"""

from __future__ import annotations

from dataclasses import dataclass

SIMD_WIDTH = 32
_MAX_HEADS_PER_TILE = 8
_MAX_ELEMS_PER_LANE = 24
_VECTOR_BYTES = 16
_SHARED_BYTES = 16 * 1024
_MAX_SPLITS = 64
LEAST_CHUNK_SPAN = 128
KV_GROUP = 32
"""Numbers that share a scale and a bias in a pool of few bits."""
SCALE_AND_BIAS_BYTES = 4
_MAX_CHUNK_SPLITS = 16
_COST_OF_A_CHUNK_SPLIT = 0.015  # of the time that a round over the whole context takes


@dataclass(frozen=True, slots=True)
class Geometry:
    """What a layer's attention looks like. ``window`` 0 and ``soft_cap`` 0 mean none."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    scale: float
    window: int = 0
    soft_cap: float = 0.0
    has_sinks: bool = False

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class Tuning:
    """What depends on the chip. ``registers``: numbers of queries, and again of results, a lane may hold.

    ``loaded_bytes``: keys and values that a lane has on the way at once, twice as many if it ``loads_ahead`` the next
    turn's before it uses this one's; ``target_groups``: threadgroups that fill the chip; ``longest_span``: positions a
    threadgroup reads at most before the context is split further. ``chunk_simds`` and ``chunk_keys``: simdgroups of a
    threadgroup of chunk attention, 16 rows each, and positions that it reads in a turn (half as many where heads are
    wider than 128). ``chunk_groups``: threadgroups of chunk attention that fill the chip (0: a chunk's context is never
    split). ``pages_chunks``: whether prompt chunks attend by the kernel, not by MLX's attention over gathered blocks.
    ``joins_products``: whether layers with the same input may be one product; then also ``projects_rows``: whether
    products of few rows may be the projection kernel's, and ``rotates_heads``: whether the rotation kernel splits and
    rotates the heads of a joined product. ``fuses_norms``: whether a residual and the norm behind it are one kernel.
    """

    simds: int = 8
    registers: int = 64
    loaded_bytes: int = 128
    loads_ahead: bool = False
    target_groups: int = 1024
    longest_span: int = 512
    chunk_simds: int = 8
    chunk_keys: int = 32
    chunk_groups: int = 0
    pages_chunks: bool = False
    joins_products: bool = False
    projects_rows: bool = False
    rotates_heads: bool = False
    fuses_norms: bool = False


TUNINGS = {
    "cuda": Tuning(
        simds=4,
        registers=32,
        loaded_bytes=64,
        loads_ahead=True,
        chunk_groups=132,  # an H200's multiprocessors; such a threadgroup fills one
        pages_chunks=True,
        joins_products=True,
        projects_rows=True,
        rotates_heads=True,
        fuses_norms=True,
    ),
    # A cautious guess that fits every chip, not measured. MLX's own attention and products are good on Metal.
    "metal": Tuning(registers=32, loaded_bytes=64, target_groups=256),
}


@dataclass(frozen=True, slots=True)
class Tiling:
    """Constants of the decode kernel (paged_decode.inc)."""

    heads: int
    tiles: int
    elems: int
    vec: int
    keys: int
    simds: int
    batch: int
    least: int
    ahead: bool

    @property
    def num_threads(self) -> int:
        """Threads of a threadgroup."""
        return self.simds * SIMD_WIDTH


def largest_divisor(number: int, limit: int) -> int:
    """The largest divisor of ``number`` that is at most ``limit``."""
    return next(candidate for candidate in range(min(number, limit), 0, -1) if number % candidate == 0)


def vector_width(count: int, number_bytes: float) -> int:
    """Numbers moved by one load when a lane moves ``count`` consecutive ones: a power of two, 16 bytes at most."""
    width = int(_VECTOR_BYTES / number_bytes)
    while count % width:
        width //= 2
    return width


def tile_decode(geometry: Geometry, pool_number_bytes: int, tuning: Tuning, kv_bits: int | None = None) -> Tiling:
    """The decode kernel's constants for ``geometry``. With ``kv_bits`` the pool is packed."""
    D = geometry.head_dim
    heads = largest_divisor(geometry.group, _MAX_HEADS_PER_TILE)
    lanes = next(
        (
            lanes
            for lanes in (1, 2, 4, 8, 16, 32)
            if D % lanes == 0 and D // lanes <= _MAX_ELEMS_PER_LANE and D // lanes * heads <= tuning.registers
        ),
        SIMD_WIDTH if D % SIMD_WIDTH == 0 else 16,
    )
    elems = D // lanes
    vec = vector_width(elems, kv_bits / 8 if kv_bits else pool_number_bytes)
    loaded_bytes = elems * kv_bits / 8 + elems // vec * SCALE_AND_BIAS_BYTES if kv_bits else elems * pool_number_bytes
    keys = max(1, int(tuning.loaded_bytes / (2 * loaded_bytes)))
    keys = largest_divisor(geometry.block_size, 1 << (keys.bit_length() - 1))
    workers = tuning.simds * SIMD_WIDTH // lanes
    return Tiling(
        heads=heads,
        tiles=geometry.group // heads,
        elems=elems,
        vec=vec,
        keys=keys,
        simds=tuning.simds,
        batch=largest_divisor(heads, max(1, _SHARED_BYTES // (tuning.simds * D * 4))),
        least=max(workers * keys, geometry.block_size),
        ahead=tuning.loads_ahead,
    )


def num_splits(geometry: Geometry, tiling: Tiling, num_rows: int, max_positions: int, tuning: Tuning) -> int:
    """Into how many splits contexts of up to ``max_positions`` are cut: enough to fill the chip and to bound the
    longest, so that one long row does not keep the others waiting."""
    if geometry.window:
        max_positions = min(max_positions, geometry.window + geometry.block_size)
    groups = num_rows * geometry.num_kv_heads * tiling.tiles
    wanted = max(-(-max_positions // tuning.longest_span), tuning.target_groups // groups, 1)
    return min(wanted, -(-max_positions // tiling.least), _MAX_SPLITS)


def decode_constants(geometry: Geometry, tiling: Tiling) -> dict[str, int]:
    """The decode kernels' template."""
    return {
        "D": geometry.head_dim,
        "KV_HEADS": geometry.num_kv_heads,
        "HEADS": tiling.heads,
        "TILES": tiling.tiles,
        "BLOCK": geometry.block_size,
        "WINDOW": geometry.window,
        "SOFT_CAP": int(geometry.soft_cap > 0),
        "HAS_SINKS": int(geometry.has_sinks),
        "LEAST": tiling.least,
        "SIMDS": tiling.simds,
        "ELEMS": tiling.elems,
        "VEC": tiling.vec,
        "KEYS": tiling.keys,
        "BATCH": tiling.batch,
        "AHEAD": int(tiling.ahead),
    }


def reduce_constants(geometry: Geometry, tiling: Tiling, num_threads: int) -> dict[str, int]:
    """The reduce kernel's template."""
    return {
        "D": geometry.head_dim,
        "NUM_HEADS": geometry.num_heads,
        "BLOCK": geometry.block_size,
        "WINDOW": geometry.window,
        "HAS_SINKS": int(geometry.has_sinks),
        "LEAST": tiling.least,
        "THREADS": num_threads,
    }


def chunk_reduce_constants(geometry: Geometry, num_threads: int) -> dict[str, int]:
    """The chunk reduce kernel's template."""
    return {
        "D": geometry.head_dim,
        "NUM_HEADS": geometry.num_heads,
        "HAS_SINKS": int(geometry.has_sinks),
        "THREADS": num_threads,
    }


def chunk_constants(geometry: Geometry, vec: int, tuning: Tuning) -> dict[str, int]:
    """The chunk attention kernel's template. With 32 positions a turn, keys and values take at most half of Metal's
    threadgroup memory each."""
    return {
        "D": geometry.head_dim,
        "KV_HEADS": geometry.num_kv_heads,
        "GROUP": geometry.group,
        "BLOCK": geometry.block_size,
        "WINDOW": geometry.window,
        "SOFT_CAP": int(geometry.soft_cap > 0),
        "HAS_SINKS": int(geometry.has_sinks),
        "LEAST": LEAST_CHUNK_SPAN,
        "KEYS": tuning.chunk_keys if geometry.head_dim <= 128 else tuning.chunk_keys // 2,
        "SIMDS": tuning.chunk_simds,
        "VEC": vec,
    }


def num_chunk_groups(geometry: Geometry, num_rows: int, tuning: Tuning) -> int:
    """Threadgroups of chunk attention for ``num_rows`` tokens of one KV head and one split."""
    return -(-num_rows * geometry.group // (16 * tuning.chunk_simds))


def num_chunk_splits(geometry: Geometry, num_rows: int, max_positions: int, tuning: Tuning) -> int:
    """Into how many splits chunk attention cuts contexts of up to ``max_positions`` when all chunks of a step together
    have ``num_rows`` tokens. Depends on a step's shape only, not on its positions.

    Threadgroups run in rounds that fill the chip; a split more makes each shorter, and may leave less of the chip idle
    in the last round. Each also costs a partial result.
    """
    if not tuning.chunk_groups:
        return 1
    if geometry.window:
        max_positions = min(max_positions, geometry.window + num_rows)
    most = min(-(-max_positions // LEAST_CHUNK_SPAN), _MAX_CHUNK_SPLITS)
    groups = num_chunk_groups(geometry, num_rows, tuning) * geometry.num_kv_heads

    def cost(splits: int) -> float:
        rounds = -(-groups * splits // tuning.chunk_groups)
        return rounds / splits + _COST_OF_A_CHUNK_SPLIT * splits

    return min(range(1, most + 1), key=cost)


def attends_chunks(geometry: Geometry, number_bytes: int) -> bool:
    """Whether the chunk attention kernel knows this geometry: 16-bit numbers in tiles of 16."""
    return number_bytes == 2 and geometry.head_dim % 16 == 0 and geometry.head_dim <= 256
