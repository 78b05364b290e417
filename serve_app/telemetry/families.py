"""Metrics as they travel from a replica to the ingress that is asked for them, and as Prometheus reads them.

Owns: the plain form of a metric family, joining those of many replicas, and the text. Must not know: what is measured.
Each process has a registry of its own; whoever is scraped asks the others, so one address tells of the whole fleet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from prometheus_client import CollectorRegistry

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Labels = tuple[tuple[str, str], ...]


class Sample(NamedTuple):
    """One number. ``name``: the family's, with an ending where the kind has one."""

    name: str
    labels: Labels
    value: float


@dataclass(frozen=True, slots=True)
class Family:
    """One metric. ``kind``: as Prometheus calls it, "counter", "gauge" or "histogram"."""

    name: str
    kind: str
    text: str
    samples: tuple[Sample, ...]


def gauge(name: str, text: str, *values: tuple[Mapping[str, str], float | None]) -> Family:
    """A gauge with a value for each set of labels; unknown ones are left out."""
    samples = tuple(Sample(name, tuple(labels.items()), float(v)) for labels, v in values if v is not None)
    return Family(name, "gauge", text, samples)


def counter(name: str, text: str, *values: tuple[Mapping[str, str], float]) -> Family:
    """A counter, given without the ending that its samples get."""
    samples = tuple(Sample(f"{name}_total", tuple(labels.items()), float(value)) for labels, value in values)
    return Family(name, "counter", text, samples)


def families_of(registry: CollectorRegistry) -> list[Family]:
    """What a registry holds. Times of creation are left out: restarts are seen without them."""
    return [
        Family(
            metric.name,
            metric.type,
            metric.documentation,
            tuple(
                Sample(sample.name, tuple(sample.labels.items()), sample.value)
                for sample in metric.samples
                if not sample.name.endswith("_created")
            ),
        )
        for metric in registry.collect()
    ]


def labelled(families: Iterable[Family], **labels: str) -> list[Family]:
    """The same with ``labels`` on every sample."""
    more = tuple(labels.items())
    return [
        replace(family, samples=tuple([Sample(name, more + own, value) for name, own, value in family.samples]))
        for family in families
    ]


def joined(families: Iterable[Family]) -> list[Family]:
    """One family for each name, with everybody's samples."""
    by_name: dict[str, list[Family]] = {}
    for family in families:
        by_name.setdefault(family.name, []).append(family)
    return [
        replace(first, samples=tuple(sample for family in (first, *others) for sample in family.samples))
        for first, *others in by_name.values()
    ]


def exposition(families: Iterable[Family]) -> bytes:
    """Prometheus' text format, version 0.0.4."""
    lines: list[str] = []
    for family in families:
        # In this format, other than in what a registry holds, a counter's name has its ending.
        name = f"{family.name}_total" if family.kind == "counter" else family.name
        lines.append(f"# HELP {name} {_escaped(family.text, quotes=False)}\n# TYPE {name} {family.kind}\n")
        lines += [_line(sample) for sample in family.samples]
    return "".join(lines).encode()


def _line(sample: Sample) -> str:
    labels = ",".join([f'{name}="{_escaped(value)}"' for name, value in sample.labels])
    return f"{sample.name}{{{labels}}} {sample.value!r}\n" if labels else f"{sample.name} {sample.value!r}\n"


def _escaped(text: str, *, quotes: bool = True) -> str:
    if "\\" in text or "\n" in text or '"' in text:
        text = text.replace("\\", "\\\\").replace("\n", "\\n")
        return text.replace('"', '\\"') if quotes else text
    return text
