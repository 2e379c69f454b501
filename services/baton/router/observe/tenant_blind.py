"""A registry as strangers may see it: which tenants there are is none of their business."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


class TenantBlind(Collector):
    """All metrics of a registry but those with a tenant's name."""

    def __init__(self, registry: Collector) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Metric]:
        return (metric for metric in self._registry.collect() if not metric.name.startswith(PREFIX))


PREFIX = "baton_tenant_"
