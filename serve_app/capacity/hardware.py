"""Machines that one can buy and models that one can run, as specifications: estimates, never measurements.

Owns: bandwidth and arithmetic of Apple's chips, what a step then takes, and the memory that is left for conversations.
Must not know: demands or fleets. A measured profile is worth more than anything here.

Bandwidths are Apple's nominal figures; GPU arithmetic is cores x 256 x clock in fp32 (twice the Max for an Ultra), and
for the M5 Max the fp16 rate of its matrix units as their author estimated it before release. Nobody has run this
project on one of these machines yet.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from engine.errors import ConfigError
from engine.memory.ledger import plan_memory
from engine.memory.plan_inputs import GIB, MachineMemory, ModelBytes, PlanInputs
from serve_app.capacity.perf_model import RooflineTimes
from serve_app.capacity.planner import MachineKind

# Share of a Mac's memory that Metal lets the GPU hold.
WORKING_SET_SHARE = 0.75
_TYPICAL_VOCABULARY = 150_000
_BLOCK_TOKENS = 16
# K and V in 16 bits take as many bytes per token as one query head per KV head takes operations per pair.
_QUERY_HEADS_PER_KV_HEAD = 4


@dataclass(frozen=True, slots=True)
class Chip:
    """Memory bandwidth in GB/s and GPU arithmetic in TFLOP/s."""

    bandwidth_gb_per_s: float
    tflops: float


CHIPS = {
    "m1": Chip(68, 2.6),
    "m2": Chip(100, 3.55),
    "m3": Chip(100, 3.6),
    "m4": Chip(120, 3.8),
    "m5": Chip(153, 3.8),
    "m1-max": Chip(400, 10.4),
    "m2-max": Chip(400, 13.6),
    "m3-max": Chip(400, 14.3),
    "m4-max": Chip(546, 17.2),
    "m5-max": Chip(614, 70.0),
    "m1-ultra": Chip(800, 21.2),
    "m2-ultra": Chip(800, 27.2),
    "m3-ultra": Chip(819, 28.6),
}


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model by its numbers. ``active_params``: used for one token, fewer than all in a mixture of experts."""

    params: float
    active_params: float
    bits_per_weight: float
    kv_bytes_per_token: float
    max_model_len: int = 32_768

    @property
    def weights_bytes(self) -> float:
        """The weights as held in memory."""
        return self.params * self.bits_per_weight / 8


def chip_named(name: str) -> Chip:
    """Look a chip up. Raises ConfigError with the closest name."""
    if name in CHIPS:
        return CHIPS[name]
    closest = difflib.get_close_matches(name, CHIPS, n=1)
    raise ConfigError(f"No chip is called {name!r}.", f"write {closest[0] if closest else ' or '.join(CHIPS)}")


def estimated_kind(chip_name: str, memory_gib: float, model: ModelSpec) -> MachineKind:
    """A machine of this chip and memory that runs ``model``, from specifications alone."""
    chip = chip_named(chip_name)
    times = RooflineTimes(
        bandwidth_bytes_per_s=chip.bandwidth_gb_per_s * 1e9,
        flops_per_s=chip.tflops * 1e12,
        # Of a mixture of experts one row's share of them is what a step reads at least; several rows read more.
        weights_bytes=model.weights_bytes * model.active_params / model.params,
        kv_bytes_per_token=model.kv_bytes_per_token,
        flops_per_token=2 * model.active_params,
        flops_per_pair=model.kv_bytes_per_token * _QUERY_HEADS_PER_KV_HEAD,
    )
    name = f"{chip_name}, {memory_gib:g} GiB (estimate)"
    return MachineKind(name, times, kv_tokens=lambda slots: _kv_tokens(memory_gib, model, slots))


def auto_slots(memory_gib: float, model: ModelSpec, gains: Mapping[int, float]) -> int:
    """The slots that ``slots: auto`` would choose: what memory holds, capped where the predicted gain flattens."""
    return plan_memory(_inputs(memory_gib, model, None, gains)).slots


def _kv_tokens(memory_gib: float, model: ModelSpec, slots: int) -> int:
    return plan_memory(_inputs(memory_gib, model, slots, {})).num_blocks * _BLOCK_TOKENS


def _inputs(memory_gib: float, model: ModelSpec, slots: int | None, gains: Mapping[int, float]) -> PlanInputs:
    total_bytes = int(memory_gib * GIB)
    return PlanInputs(
        machine=MachineMemory(total_bytes, working_set_bytes=int(total_bytes * WORKING_SET_SHARE)),
        model=ModelBytes(int(model.weights_bytes), int(model.kv_bytes_per_token), _TYPICAL_VOCABULARY),
        max_model_len=model.max_model_len,
        block_size=_BLOCK_TOKENS,
        slots_asked="auto" if slots is None else slots,
        gains=gains,
    )
