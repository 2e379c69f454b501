"""What the planner asks of the cluster's API (`rpc/kubernetes_api.py`).

Each call has a deadline. Failures are raised as Unavailable, without what the server said.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from baton_loadtest.autoscale.metrics_api import FrontProxy
from batonlm.core.errors import InvalidArgument, Unavailable, install
from batonlm.router.workers.discovery_k8s import answers, endpoints
from batonlm.rpc.kubernetes_api import KubernetesApi, NoAnswer, open_api

CALL_S = 10.0
"""To connect, and between two parts of an answer."""
METRICS_PORT = "9090"
LEASE_S = 30
"""A leader that has not renewed its lease for so long is taken to be gone."""
CONFLICT, NOT_FOUND = 409, 404

Json = dict[str, Any]


class Cluster:
    """One release in its namespace."""

    def __init__(self, release: str, identity: str) -> None:
        """release: what names of its objects begin with. identity: of this process, for the lease.
        Raises InvalidArgument outside of a cluster without a kubeconfig."""
        try:
            self._api: KubernetesApi = open_api()
        except ImportError:
            raise InvalidArgument(f"needs the Kubernetes client: {install('k8s')}") from None
        except ValueError:
            raise InvalidArgument(
                "needs a cluster: this is no pod, and there is no usable kubeconfig"
            ) from None
        self.namespace = self._api.namespace
        self._release, self._identity = release, identity

    def routers(self) -> list[str]:
        """Returns host:port of the metrics of every ready router. Raises Unavailable."""
        _, found = self._ask(
            "endpointslices",
            "GET",
            self._path("discovery.k8s.io/v1", "endpointslices"),
            query={"labelSelector": f"kubernetes.io/service-name={self._release}-router"},
        )
        slices = found.get("items") or ()
        return [each.address for each in endpoints(slices, METRICS_PORT) if answers(each)]

    def front_proxy(self) -> FrontProxy:
        """Returns whom the API server's proxy may be. Raises Unavailable."""
        what = "the API server's front proxy"
        path = "/api/v1/namespaces/kube-system/configmaps/extension-apiserver-authentication"
        _, found = self._ask(what, "GET", path)
        try:
            data = found["data"]
            names = json.loads(data.get("requestheader-allowed-names") or "[]")
            return FrontProxy(data["requestheader-client-ca-file"], names)
        except (ValueError, KeyError, TypeError) as error:
            raise _unusable(what) from error

    def size(self, pool: str) -> int:
        """Returns how many pods a pool is told to have. Raises Unavailable."""
        _, scale = self._ask(f"the size of {pool}", "GET", self._scale(pool))
        return _replicas(scale, pool)

    def resize(self, pool: str, before: int, after: int, why: str) -> bool:
        """Tells a pool to have another size, and says why in an Event; False when it has not the
        size `before` any more. Raises Unavailable."""
        what, path = f"another size of {pool}", self._scale(pool)
        _, scale = self._ask(what, "GET", path)
        if _replicas(scale, pool) != before:
            return False
        # With the version that was read: whoever was quicker wins.
        scale["spec"] = {"replicas": after}
        status, _ = self._ask(what, "PUT", path, body=scale, may=(CONFLICT,))
        if status == CONFLICT:
            return False
        self.note(pool, "Scaled", why)
        return True

    def note(self, pool: str, reason: str, text: str) -> None:
        """Leaves an Event at a pool's Deployment. Raises Unavailable."""
        name, now = f"{self._release}-{pool}", datetime.now(UTC).isoformat(timespec="seconds")
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": f"{name}-", "namespace": self.namespace},
            "involvedObject": {
                "apiVersion": "apps/v1",
                "kind": "Deployment",
                "name": name,
                "namespace": self.namespace,
            },
            "type": "Normal",
            "reason": reason,
            "message": text[:1000],
            "source": {"component": "baton-planner"},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        self._ask("an event", "POST", self._path("v1", "events"), body=event)

    def autoscaled(self) -> dict[str, str]:
        """Returns the name of the HPA by the Deployment that it scales; KEDA makes HPAs, too.
        Raises Unavailable."""
        _, found = self._ask(
            "autoscalers", "GET", self._path("autoscaling/v2", "horizontalpodautoscalers")
        )
        scaled = {}
        for one in found.get("items") or ():
            target = one["spec"]["scaleTargetRef"]
            if target["kind"] == "Deployment":
                scaled[str(target["name"])] = str(one["metadata"]["name"])
        return scaled

    def leads(self) -> bool:
        """Takes or renews the lease; whether this process has it now. Raises Unavailable."""
        name, now = f"{self._release}-planner", datetime.now(UTC)
        leases = self._path("coordination.k8s.io/v1", "leases")
        status, lease = self._ask("the lease", "GET", f"{leases}/{name}", may=(NOT_FOUND,))
        stamp = now.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        if status == NOT_FOUND:
            made = {
                "apiVersion": "coordination.k8s.io/v1",
                "kind": "Lease",
                "metadata": {"name": name},
                "spec": {
                    "holderIdentity": self._identity,
                    "leaseDurationSeconds": LEASE_S,
                    "renewTime": stamp,
                    "acquireTime": stamp,
                },
            }
            status, _ = self._ask("the lease", "POST", leases, body=made, may=(CONFLICT,))
            return status != CONFLICT
        spec = lease.setdefault("spec", {})
        holder, renewed = spec.get("holderIdentity"), spec.get("renewTime")
        if holder != self._identity:
            if holder and _is_fresh(renewed, now):
                return False
            spec["holderIdentity"], spec["acquireTime"] = self._identity, stamp
            spec["leaseTransitions"] = (spec.get("leaseTransitions") or 0) + 1
        spec["renewTime"] = stamp
        status, _ = self._ask("the lease", "PUT", f"{leases}/{name}", body=lease, may=(CONFLICT,))
        return status != CONFLICT

    def _path(self, group: str, kind: str) -> str:
        root = "/api" if group == "v1" else "/apis"
        return f"{root}/{group}/namespaces/{self.namespace}/{kind}"

    def _scale(self, pool: str) -> str:
        return f"{self._path('apps/v1', 'deployments')}/{self._release}-{pool}/scale"

    def _ask(
        self,
        what: str,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        may: Collection[int] = (),
    ) -> tuple[int, Json]:
        """Returns the status and the body. may: refusals that are answers. Raises Unavailable."""
        try:
            answer = self._api.request(method, path, query or {}, (CALL_S, CALL_S), body)
            try:
                text = b"".join(answer.parts())
            finally:
                answer.close()
        except NoAnswer as error:
            raise _unusable(what) from error
        if answer.status >= 300 and answer.status not in may:
            raise Unavailable(f"The cluster's API answers {answer.status} about {what}.")
        try:
            found = json.loads(text)
        except ValueError as error:
            raise _unusable(what) from error
        if not isinstance(found, dict):
            raise _unusable(what)
        return answer.status, found


def _unusable(what: str) -> Unavailable:
    return Unavailable(f"The cluster's API cannot be asked about {what}.")


def _replicas(scale: Json, pool: str) -> int:
    spec = scale.get("spec")
    if not isinstance(spec, dict):
        raise _unusable(f"the size of {pool}")
    # The API leaves out a size of 0.
    return int(spec.get("replicas") or 0)


def _is_fresh(renewed: object, now: datetime) -> bool:
    try:
        return now - datetime.fromisoformat(str(renewed)) < timedelta(seconds=LEASE_S)
    except (ValueError, TypeError):
        return False
