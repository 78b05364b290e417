"""What `metalslots models check` finds, as a document and as tables.

Owns: one model against one machine or against all Macs, and how that is shown. Must not know: how memory is planned, or
how options are spelled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from engine.config import EngineConfig
from engine.core.model_files import describe_model_files
from engine.errors import ConfigError
from engine.memory.ledger import format_bytes
from engine.memory.model_shape import ModelShape, read_shape
from engine.memory.plan_inputs import GIB, MachineMemory, PlanInputs
from engine.memory.preflight import (
    CONTEXTS,
    Backend,
    ContextPlan,
    ModelEstimate,
    mac_memory,
    plan_contexts,
)

# Macs as sold, one per memory size: only the size counts here.
MACS = (
    ("M1", 16),
    ("M2", 24),
    ("M3 Pro", 36),
    ("M4 Pro", 48),
    ("M1 Max", 64),
    ("M2 Max", 96),
    ("M5 Max", 128),
    ("M2 Ultra", 192),
    ("M3 Ultra", 256),
    ("M3 Ultra", 512),
)


@dataclass(frozen=True, slots=True)
class Checked:
    """One model on one machine, at each context length."""

    model: str
    backend: Backend
    shape: ModelShape
    inputs: PlanInputs
    rows: tuple[ContextPlan, ...]

    @property
    def fits(self) -> bool:
        """Whether there is a plan at any of the lengths."""
        return any(row.plan for row in self.rows)


def check_model(
    config: EngineConfig, machine: MachineMemory, backend: Backend, max_model_len: int | None = None
) -> Checked:
    """Plan ``config.model`` on ``machine`` at one context length, or at all usual ones up to the model's own.

    Raises ModelNotFoundError or UnsupportedModelError, and ConfigError for a length beyond the model's.
    """
    files = describe_model_files(config.model)
    shape = read_shape(files.config)
    longest = shape.max_model_len
    if max_model_len is not None and max_model_len > longest:
        raise ConfigError(
            f"`--max-model-len` is {max_model_len}; the context of {config.model} is {longest} tokens.",
            f"write at most {longest}",
        )
    contexts = [length for length in CONTEXTS if length < longest] + [longest]
    model = ModelEstimate(shape, files.weights, backend, config.prefill.max_chunk_tokens)
    inputs = PlanInputs.of(config, machine, model.at(max_model_len or longest), max_model_len or longest)
    rows = plan_contexts(inputs, model, [max_model_len] if max_model_len else contexts)
    return Checked(config.model, backend, shape, inputs, tuple(rows))


def check_macs(config: EngineConfig, max_model_len: int | None = None) -> dict[str, Checked]:
    """Plan ``config.model`` on each of ``MACS``."""
    return {
        f"{name}, {gib} GB": check_model(config, mac_memory(gib * GIB), "metal", max_model_len) for name, gib in MACS
    }


def check_document(checked: Checked) -> dict[str, Any]:
    """Everything as one JSON document; unknown is null."""
    machine, model = checked.inputs.machine, checked.inputs.model
    return {
        "model": checked.model,
        "backend": checked.backend,
        "architecture": checked.shape.architecture,
        "layers": checked.shape.num_layers_by_kind,
        "weights_bytes": model.weights_bytes,
        "kv_bytes_per_token": model.kv_bytes_per_token,
        "state_bytes_per_slot": model.state_bytes_per_slot,
        "machine_bytes": machine.total_bytes,
        "foreign_bytes": machine.foreign_bytes,
        "limit_bytes": checked.inputs.limit_bytes,
        "fits": checked.fits,
        "contexts": [_row_document(row) for row in checked.rows],
    }


def _row_document(row: ContextPlan) -> dict[str, Any]:
    return {
        "max_model_len": row.max_model_len,
        "sequence_bytes": row.sequence_bytes,
        "slots_that_fit": row.slots_that_fit,
        "slots": row.plan.slots if row.plan else None,
        "num_blocks": row.plan.num_blocks if row.plan else None,
        "ledger": row.plan.status() if row.plan else None,
        "error": row.error or None,
        "fix": row.fix or None,
    }


def check_view(checked: Checked) -> RenderableType:
    """The facts in one line each, then a table by context length, then what to do where nothing fits."""
    model, shape = checked.inputs.model, checked.shape
    layers = ", ".join(f"{count} {kind}" for kind, count in shape.num_layers_by_kind.items())
    state = f", {format_bytes(model.state_bytes_per_slot)} of state per slot" if model.state_bytes_per_slot else ""
    facts = (
        f"{checked.model}: {shape.architecture}, {layers} layers on {checked.backend}",
        f"weights {format_bytes(model.weights_bytes)}, {model.kv_bytes_per_token / 1024:.1f} KiB of KV cache per token"
        + state,
        f"{format_bytes(checked.inputs.limit_bytes)} of {format_bytes(checked.inputs.machine.total_bytes)} may be used",
    )
    table = Table("context", "KV per sequence", "slots that fit", "taken", "KV pool", box=None)
    for row in checked.rows:
        table.add_row(
            f"{row.max_model_len:,}",
            format_bytes(row.sequence_bytes),
            str(row.slots_that_fit or "-"),
            row.plan.slots_asked if row.plan else "-",
            format_bytes(row.plan.ledger["kv_pool"].num_bytes) if row.plan else "-",
        )
    notes = {note for row in checked.rows if row.plan for note in row.plan.warnings}
    failed = next((row for row in checked.rows if row.plan is None), None)
    advice = [] if failed is None else ["", f"{failed.max_model_len:,} tokens: {failed.error}", f"  fix: {failed.fix}"]
    return Group(*facts, "", table, *sorted(notes)[:1], *advice)


def macs_document(by_mac: dict[str, Checked]) -> dict[str, Any]:
    """Slots that fit, by machine and context length."""
    first = next(iter(by_mac.values()))
    return {
        "model": first.model,
        "macs": {
            name: {str(row.max_model_len): row.slots_that_fit for row in checked.rows}
            for name, checked in by_mac.items()
        },
    }


def macs_view(by_mac: dict[str, Checked]) -> Table:
    """As ``macs_document``, for a terminal."""
    header, *rows = _macs_cells(by_mac)
    table = Table(*header, box=None)
    for row in rows:
        table.add_row(*row)
    return table


def macs_markdown(by_mac: dict[str, Checked]) -> str:
    """As ``macs_document``, for a page."""
    header, *rows = _macs_cells(by_mac)
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *rows))


def _macs_cells(by_mac: dict[str, Checked]) -> list[Sequence[str]]:
    first = next(iter(by_mac.values()))
    cells: list[Sequence[str]] = [["machine", *(f"{row.max_model_len:,}" for row in first.rows)]]
    for name, checked in by_mac.items():
        cells.append([name, *(str(row.slots_that_fit or "-") for row in checked.rows)])
    return cells
