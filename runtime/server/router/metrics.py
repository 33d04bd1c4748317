"""Prometheus metrics of a server for several models: those of the router, and of each loaded model with a label."""

import asyncio
from collections.abc import Callable, Iterable, Mapping

import httpx2
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from mycli.runtime.device.system import resident
from mycli.runtime.server.router.pool import ModelPool, Slot

_PREFIX = "mycli:"
_SECONDS = 5.0  # to wait for the metrics of one process
_STATES = ("unloaded", "loading", "loaded", "unloading", "failed")
_OF_MODELS: Mapping[str, tuple[type[Gauge | Counter], str, Callable[[Slot], float]]] = {
    "model_memory_bytes": (Gauge, "Estimated memory of a model when it is loaded.", lambda slot: slot.model.nbytes),
    "model_requests_active": (Gauge, "Requests in the process of a model.", lambda slot: slot.active),
    "model_requests_waiting": (Gauge, "Requests that wait until a model is loaded.", lambda slot: len(slot.waiters)),
    "model_load_seconds": (Gauge, "Duration of the last load of a model.", lambda slot: slot.load_seconds),
    "model_loads": (Counter, "Loads of a model.", lambda slot: slot.loads),
    "model_evictions": (
        Counter,
        "Times a model was unloaded to make room for another one.",
        lambda slot: slot.evictions,
    ),
    "model_process_ends": (Counter, "Times the process of a model ended by itself.", lambda slot: slot.deaths),
}


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterable[Metric]:
        return self._families


async def router_metrics(pool: ModelPool) -> bytes:
    """Return all metrics in Prometheus' text format."""
    # Parsed and merged, not concatenated: a family may occur only once in Prometheus' text format.
    loaded = [slot for slot in pool.slots.values() if slot.state == "loaded"]
    texts = await asyncio.gather(*map(_fetch, loaded))
    families = {family.name: family for family in _router_families(pool)}
    for slot, text in zip(loaded, texts, strict=True):
        for family in text_string_to_metric_families(text):
            known = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                labels = {"model": slot.model.name, **sample.labels}
                known.samples.append(sample._replace(labels=labels))
    registry = CollectorRegistry()
    registry.register(_Families(families.values()))
    return generate_latest(registry)


async def _fetch(slot: Slot) -> str:
    process = slot.process
    if process is None:
        return ""
    try:
        answer = await process.client.get("/metrics", timeout=_SECONDS)
    except (httpx2.TransportError, RuntimeError):  # it has ended meanwhile; its client is closed
        return ""
    return answer.text if answer.status_code == 200 else ""


def _router_families(pool: ModelPool) -> Iterable[Metric]:
    slots = pool.slots.values()
    state = Gauge(_PREFIX + "model_state", "1 for the state of a model.", labels=["model", "state"])
    for slot in slots:
        for name in _STATES:
            state.add_metric([slot.model.name, name], float(slot.shown_state == name))
    yield state
    for name, (kind, text, value) in _OF_MODELS.items():
        family = kind(_PREFIX + name, text, labels=["model"])
        for slot in slots:
            family.add_metric([slot.model.name], float(value(slot)))
        yield family
    rooms = Gauge(_PREFIX + "memory_limit_bytes", "Memory that models may use.", labels=["place"])
    for place, nbytes in pool.rooms.items():
        rooms.add_metric([place], float(nbytes))
    yield rooms
    yield Gauge(_PREFIX + "router_resident_bytes", "Resident memory of the router process.", value=float(resident()))
