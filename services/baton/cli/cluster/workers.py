"""What workers of an installed Baton say they are, and how they differ."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import grpc

from baton.cli.findings import Finding, ok, warn
from baton.core.errors import BatonError
from baton.core.handover.fit import difference
from baton.core.routing.load import WorkerDescription
from baton.rpc.channels import Channels
from baton.rpc.tls import Certificates
from baton.rpc.worker import description_from_proto
from baton.v1 import worker_pb2
from baton.v1.worker_pb2_grpc import WorkerStub

ASK_S = 3.0

Told = Mapping[str, WorkerDescription | None]
"""By pod; None: it did not answer."""


class Where(NamedTuple):
    pod: str
    role: str
    address: str


async def ask(
    where: Iterable[Where], certificates: Certificates | None = None, token: str = ""
) -> Told:
    """All at once; takes a few seconds at most."""
    places = list(where)
    channels = Channels(certificates, token=token)
    try:
        found = await asyncio.gather(*(_ask(channels, place) for place in places))
    finally:
        await channels.close()
    return {place.pod: told for place, told in zip(places, found, strict=True)}


def workers(told: Told) -> Finding:
    """Differences are no fault while an upgrade is under way: what does not fit is not paired."""
    if not told:
        return ok("none is there to be asked")
    known = {pod: one for pod, one in told.items() if one is not None}
    silent = sorted(told.keys() - known.keys())
    if not known:
        return warn(
            f"none of {len(told)} can be asked from here",
            "run the doctor as a Job in the cluster; with TLS give it --tls-cert, --tls-key and "
            "--tls-ca",
        )
    differences = [*_models(known), *_pairs(known)]
    if differences:
        return warn(
            "; ".join(differences),
            "they are not paired, and decode prefills by itself: wait for the upgrade to end, or "
            "give all the same image, model and kv_wire_dtype (docs/upgrading.md)",
        )
    if silent:
        return warn(f"the same, but not asked: {', '.join(silent)}", "see whether they are ready")
    return ok(f"all {len(known)} have the same model, tokenizer and wire versions")


async def _ask(channels: Channels, place: Where) -> WorkerDescription | None:
    watch: Any = WorkerStub(channels.get(place.address, place.role)).Watch(
        worker_pb2.WatchRequest()
    )
    try:
        async with asyncio.timeout(ASK_S):
            first = await watch.read()
        return description_from_proto(first.description)
    except (TimeoutError, BatonError, grpc.RpcError, AttributeError):
        return None
    finally:
        watch.cancel()


def _models(known: Mapping[str, WorkerDescription]) -> list[str]:
    """Tokenizers have no model's digest to tell."""
    found = []
    for name in ("digest", "tokenizer_digest"):
        groups: dict[str, list[str]] = defaultdict(list)
        for pod, one in sorted(known.items()):
            if one.model is not None and getattr(one.model, name):
                groups[getattr(one.model, name)].append(pod)
        if len(groups) > 1:
            told = [f"{digest[:12]} on {', '.join(pods)}" for digest, pods in groups.items()]
            found.append(f"{'model' if name == 'digest' else 'tokenizer'} {' against '.join(told)}")
    return found


def _pairs(known: Mapping[str, WorkerDescription]) -> Sequence[str]:
    """How KV layouts differ besides the model, each difference once."""
    found: dict[str, str] = {}
    having = [(pod, one) for pod, one in sorted(known.items()) if one.layout is not None]
    for (pod, one), (other_pod, other) in combinations(having, 2):
        said = difference(one.layout, one.transports, other.layout, other.transports)
        said = "; ".join(p for p in said.split("; ") if p and not p.startswith("model_digest"))
        if said:
            found.setdefault(said, f"{pod} and {other_pod}: {said}")
    return list(found.values())
