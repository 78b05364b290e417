"""The dashboard's picture, drawn for a terminal.

Owns: how it looks there. Must not know: where the picture comes from. Colours say nothing that words do not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

Json = Mapping[str, Any]
_SLOT_WIDTH = 30
_NUM_LINES = 5
_GIB = 2**30
_REASONS = {
    "slots": "a slot",
    "blocks": "KV memory",
    "state": "state memory",
    "headroom": "memory headroom",
    "prefill_turn": "its turn",
}


def view(url: str, picture: Json) -> RenderableType:
    """Return everything, most important first."""
    parts: list[RenderableType] = [_head(url, picture), _figures(picture)]
    for mac in picture["macs"]:
        parts += [Text(), *_mac(mac)]
    parts += _waiting(picture["waiting"])
    for title, lines in (("Autoscaler", _scaling(picture["scaling"])), ("Errors", _failures(picture["failures"]))):
        if lines:
            parts += [Text(), Text(title, style="bold"), *lines[:_NUM_LINES]]
    return Group(*parts)


def lost(shown: RenderableType, message: str) -> RenderableType:
    """The last picture, under a line that says why there is no newer one."""
    return Group(Text(message, style="bold red"), shown)


def _head(url: str, picture: Json) -> Text:
    now = picture["now"]
    ready = f"{now['macs_ready']} of {now['macs']} replicas ready" if now["macs"] else "no replica answers"
    wait = now["predicted_wait_s"]
    newcomer = "unknown" if wait is None else _seconds(wait)
    waiting = f"{now['waiting']} wait, a newcomer {newcomer}" if now["waiting"] else "nobody waits"
    return Text.assemble((f"{url}: ", "bold"), f"{ready}; {waiting}")


def _figures(picture: Json) -> Text:
    now, hour = picture["now"], picture["hour"]
    cached = hour["cached_tokens"] / hour["prompt_tokens"] if hour["prompt_tokens"] else None
    parts = (
        f"{now['tokens_per_s']:.1f} tok/s",
        f"{now['running']} of {now['slots']} slots",
        f"last hour: first token {_seconds(hour['ttft_s']['p50'])}, p95 {_seconds(hour['ttft_s']['p95'])}",
        f"between tokens {_seconds(hour['gap_s']['p50'])}, p95 {_seconds(hour['gap_s']['p95'])}",
        f"cached {'-' if cached is None else f'{cached:.0%}'}",
        f"{hour['failed']} of {hour['calls']} calls failed",
    )
    return Text(" · ".join(parts), style="dim")


def _mac(mac: Json) -> list[RenderableType]:
    state = "draining" if mac["draining"] else "ready" if mac["ready"] else mac["state"]
    if not mac["answers"]:
        state = f"silent for {_seconds(mac['silent_s'])}"
    style = "green" if state == "ready" else "yellow" if mac["answers"] else "red"
    waits = ", ".join(f"{number} for {_REASONS.get(name, name)}" for name, number in mac["waiting_on"].items())
    head = Text.assemble(
        (mac["host"], "bold"),
        f" {mac['model']}  ",
        (state, style),
        f"  {mac['tokens_per_s']:.1f} tok/s  waiting: {waits or 'nobody'}",
    )
    slots = Columns([_slot(place, slot) for place, slot in enumerate(mac["slots"])], width=_SLOT_WIDTH, padding=(0, 1))
    lines: list[RenderableType] = [head, Padding(slots, (0, 0, 0, 2))]
    if mac["memory"]:
        lines.append(Padding(_memory(mac["memory"]), (0, 0, 0, 2)))
    return lines


def _slot(place: int, slot: Json | None) -> Text:
    if slot is None:
        return Text(f"{place:>2} free", style="dim")
    who = slot["user"] or "somebody"
    match slot["phase"]:
        case "prefill":
            share = min(1.0, slot["num_computed_tokens"] / max(1, slot["num_prompt_tokens"]))
            return Text(f"{place:>2} {who} reads {share:.0%} of {slot['num_prompt_tokens']}", style="yellow")
        case "waiting":
            reason = _REASONS.get(slot["waits_for"], slot["waits_for"])
            return Text(f"{place:>2} {who} waits for {reason}", style="magenta")
    return Text(f"{place:>2} {who} has written {slot['num_output_tokens']}", style="cyan")


def _memory(memory: Json) -> Text:
    sizes: dict[str, float] = {}
    for part in memory["segments"]:
        sizes[part["kind"]] = sizes.get(part["kind"], 0.0) + part["bytes"]
    names = {
        "foreign": "other programs",
        "permanent": "model",
        "request": "conversations",
        "cached": "cached prompts",
        "headroom": "headroom",
        "free": "free",
    }
    parts = [f"{name} {sizes[kind] / _GIB:.1f}" for kind, name in names.items() if kind in sizes]
    guard = memory["guard_stage"]
    held = f"; the memory guard is {guard}" if guard not in (None, "calm") else ""
    return Text(f"memory, GiB of {memory['machine_bytes'] / _GIB:.0f}: {', '.join(parts)}{held}", style="dim")


def _waiting(waiting: Sequence[Json]) -> list[RenderableType]:
    if not waiting:
        return []
    table = Table(box=None, padding=(0, 2, 0, 0), title="Waiting", title_justify="left", title_style="bold")
    for name in ("who", "waits for", "since", "tokens", "Mac"):
        table.add_column(name, justify="right" if name in ("since", "tokens") else "left", style="dim")
    for it in waiting[: 2 * _NUM_LINES]:
        reason = _REASONS.get(it["waits_for"], it["waits_for"])
        table.add_row(it["user"] or "somebody", reason, _seconds(it["age_s"]), f"{it['num_tokens']}", it["host"])
    left_out = len(waiting) - 2 * _NUM_LINES
    return [Text(), table, *([Text(f"and {left_out} more", style="dim")] if left_out > 0 else [])]


def _scaling(decisions: Sequence[Json]) -> list[Text]:
    return [Text(f"{it['model']}: {it['reason']}", style="dim") for it in decisions]


def _failures(failures: Sequence[Json]) -> list[Text]:
    return [Text(_failure(it), style="red") for it in failures]


def _failure(it: Json) -> str:
    where = f" on {it['host']}" if it["host"] else ""
    return f"{it['code']}: {it['key_name'] or 'somebody'}{where}"


def _seconds(value_s: float | None) -> str:
    if value_s is None:
        return "-"
    if value_s < 1:
        return f"{value_s * 1000:.0f} ms"
    return f"{value_s:.1f} s" if value_s < 10 else f"{value_s:.0f} s"
