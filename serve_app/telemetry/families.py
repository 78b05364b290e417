"""Metrics as they travel from a replica to the ingress that is asked for them, and as Prometheus reads them.

Owns: the plain form of a metric family, joining those of many replicas, and the text. Must not know: what is measured.
Each process has a registry of its own; whoever is scraped asks the others, so one address tells of the whole fleet.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Sample:
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
        replace(family, samples=tuple(replace(sample, labels=more + sample.labels) for sample in family.samples))
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


def exposition(families: Sequence[Family], accept: str = "") -> tuple[bytes, str]:
    """Prometheus' text, and its content type, in the format that ``accept`` (the HTTP header) asks for."""
    encoder, content_type = choose_encoder(accept)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(families))
    return encoder(registry), content_type


class _Collector:
    def __init__(self, families: Sequence[Family]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        for family in self._families:
            metric = Metric(family.name, family.text, family.kind)
            for sample in family.samples:
                metric.add_sample(sample.name, dict(sample.labels), sample.value)
            yield metric
