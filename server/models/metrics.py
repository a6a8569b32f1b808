"""The metrics of several models on one page: the server's own, and each loaded model's with the label `model`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric


def merged(own: CollectorRegistry, models: Mapping[str, CollectorRegistry]) -> bytes:
    """The page in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(Merged(own, models))
    return generate_latest(registry)


class Merged:
    """A collector."""

    def __init__(self, own: CollectorRegistry, models: Mapping[str, CollectorRegistry]) -> None:
        self._own, self._models = own, models

    def collect(self) -> Iterable[Metric]:
        """Each family once, with the samples of all registries."""
        families = {family.name: family for family in self._own.collect()}
        for model, registry in self._models.items():
            for family in registry.collect():
                labelled = [sample._replace(labels={**sample.labels, "model": model}) for sample in family.samples]
                families.setdefault(family.name, Metric(family.name, family.documentation, family.type)).samples += labelled
        return families.values()
