"""`/metrics`: the whole fleet's figures at one address.

Owns: gathering them from every process that has some, and the labels that say whose they are. Must not know: Ray, what
is measured. Whoever scrapes one machine has all of them; who scrapes several has everything several times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from serve_app.autoscaling.journal import ScalingHistory
from serve_app.ingress.fleet import Fleet, IngressFamilies
from serve_app.ingress.observing import IngressWatch
from serve_app.telemetry.families import Family, counter, exposition, gauge, joined, labelled
from serve_app.telemetry.observer import ReplicaFamilies

_NODE_ID_CHARACTERS = 6


async def metrics_text(fleet: Fleet, watch: IngressWatch) -> bytes:
    """Return Prometheus' text. Replicas that do not answer are missing from it."""
    replicas = await fleet.families()
    ingresses = await fleet.ingress_families() or [IngressFamilies("", "", tuple(watch.families()))]
    families = [
        *_of_replicas(replicas),
        *_of_ingresses(ingresses),
        *_of_fleet([model.name for model in fleet.models], replicas, await fleet.scaling()),
    ]
    return exposition(joined(families))


def _of_replicas(replicas: Sequence[ReplicaFamilies]) -> list[Family]:
    """``engine`` is vLLM's label for one of several engines; here it is the machine's name."""
    names = _names([(answer.replica.host, answer.replica.node_id) for answer in replicas])
    return [
        family
        for answer, name in zip(replicas, names, strict=True)
        for family in labelled(answer.families, model_name=answer.model, engine=name)
    ]


def _of_ingresses(ingresses: Sequence[IngressFamilies]) -> list[Family]:
    names = _names([(answer.host, answer.node_id) for answer in ingresses])
    return [
        family
        for answer, name in zip(ingresses, names, strict=True)
        for family in labelled(answer.families, ingress=name)
    ]


def _of_fleet(
    models: Sequence[str], replicas: Sequence[ReplicaFamilies], scaling: Mapping[str, ScalingHistory]
) -> list[Family]:
    num_answering = Counter(answer.model for answer in replicas)
    decisions = [
        ({"model_name": model, "direction": direction}, number)
        for model, history in scaling.items()
        for direction, number in (("up", history.num_up), ("down", history.num_down))
    ]
    wanted = [({"model_name": m}, h.newest[-1].num_after) for m, h in scaling.items() if h.newest]
    answering = [({"model_name": model}, num_answering[model]) for model in models]
    return [
        gauge("metalslots_replicas", "Replicas that answer.", *answering),
        gauge("metalslots_replicas_wanted", "Replicas that the autoscaler wants.", *wanted),
        counter("metalslots_autoscaling_decisions", "Changes of their wanted number.", *decisions),
    ]


def _names(machines: Sequence[tuple[str, str]]) -> list[str]:
    """A name for each machine: its own, with the beginning of its node's id where two have the same."""
    hosts = Counter(host for host, _ in machines)
    return [host if hosts[host] == 1 else f"{host}-{node_id[:_NODE_ID_CHARACTERS]}" for host, node_id in machines]
