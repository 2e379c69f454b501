"""Makes the discovery that an operator asked for; starts nothing."""

from __future__ import annotations

import asyncio

from baton.router.config import RouterConfig
from baton.router.workers.discovery import Discovery, Source, StaticSource
from baton.router.workers.discovery_dns import DnsSource
from baton.router.workers.discovery_k8s import KubernetesApi, KubernetesSource, answers, runs
from baton.router.workers.targets import DnsTarget, ListTarget, ServiceTarget, Target, parse

OPTIONS = {
    "tokenizer": "tokenizers",
    "prefill": "prefills",
    "decode": "decodes",
    "detokenizer": "detokenizers",
    "router": "routers",
}
"""Role to the option that says where its processes are."""


async def discovery_of(config: RouterConfig) -> Discovery:
    """Raises InvalidArgument when Kubernetes is asked for and there is no way to it."""
    targets = {role: parse(getattr(config, field), field) for role, field in OPTIONS.items()}
    api = None
    for role, target in targets.items():
        if isinstance(target, ServiceTarget) and api is None:
            api = await asyncio.to_thread(
                KubernetesApi.open, config.kubernetes_config, OPTIONS[role]
            )
    return Discovery({role: _source(role, target, config, api) for role, target in targets.items()})


def _source(role: str, target: Target, config: RouterConfig, api: KubernetesApi | None) -> Source:
    match target:
        case ListTarget(addresses):
            return StaticSource(addresses)
        case DnsTarget(name, port):
            return DnsSource(name, port, every_s=config.dns_interval_s)
        case ServiceTarget(service, namespace, port):
            assert api is not None
            wanted = answers if role == "router" else runs
            return KubernetesSource(api, namespace or api.namespace, service, port, wanted)
