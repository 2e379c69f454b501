"""What the planner asks of the cluster's API, with the `kubernetes` client (`batonlm[k8s]`).

Each call has a deadline. Failures are raised as Unavailable, without what the server said.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from baton_loadtest.autoscale.metrics_api import FrontProxy
from batonlm.core.errors import InvalidArgument, Unavailable, install
from batonlm.router.workers.discovery_k8s import answers, endpoints

CALL_S = 10.0
METRICS_PORT = "9090"
LEASE_S = 30
"""A leader that has not renewed its lease for so long is taken to be gone."""
_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class Cluster:
    """One release in its namespace."""

    def __init__(self, release: str, identity: str) -> None:
        """release: what names of its objects begin with. identity: of this process, for the lease.
        Raises InvalidArgument outside of a cluster without a kubeconfig."""
        try:
            import kubernetes
        except ImportError:
            raise InvalidArgument(f"needs the Kubernetes client: {install('k8s')}") from None
        # Its parts are typed, but not as what the API answers.
        client: Any = kubernetes.client
        config: Any = kubernetes.config
        made = client.Configuration()
        try:
            config.load_incluster_config(client_configuration=made)
            self.namespace = _NAMESPACE.read_text().strip()
        except (config.ConfigException, OSError):
            try:
                config.load_kube_config(client_configuration=made)
                _, context = config.list_kube_config_contexts()
            except config.ConfigException:
                raise InvalidArgument(
                    "needs a cluster: this is no pod, and there is no usable kubeconfig"
                ) from None
            self.namespace = str(context["context"].get("namespace") or "default")
        self._release, self._identity = release, identity
        # The client refuses lists that are null, which a Service without pods has.
        made.client_side_validation = False
        api = self._api = client.ApiClient(made)
        self._client = client
        self._core, self._apps = client.CoreV1Api(api), client.AppsV1Api(api)
        self._slices, self._leases = client.DiscoveryV1Api(api), client.CoordinationV1Api(api)
        self._scalers = client.AutoscalingV2Api(api)

    def routers(self) -> list[str]:
        """Returns host:port of the metrics of every ready router. Raises Unavailable."""
        selector = f"kubernetes.io/service-name={self._release}-router"
        with _asked("endpointslices"):
            answer = self._slices.list_namespaced_endpoint_slice(
                self.namespace,
                label_selector=selector,
                _request_timeout=CALL_S,
            )
            slices = self._api.sanitize_for_serialization(answer)["items"]
        return [each.address for each in endpoints(slices, METRICS_PORT) if answers(each)]

    def front_proxy(self) -> FrontProxy:
        """Returns whom the API server's proxy may be. Raises Unavailable."""
        with _asked("the API server's front proxy"):
            found = self._core.read_namespaced_config_map(
                "extension-apiserver-authentication", "kube-system", _request_timeout=CALL_S
            ).data
            names = json.loads(found.get("requestheader-allowed-names") or "[]")
            return FrontProxy(found["requestheader-client-ca-file"], names)

    def size(self, role: str) -> int:
        """Returns how many pods a pool is told to have. Raises Unavailable."""
        with _asked(f"the size of {role}"):
            scale = self._apps.read_namespaced_deployment_scale(
                f"{self._release}-{role}", self.namespace, _request_timeout=CALL_S
            )
            return int(scale.spec.replicas or 0)

    def resize(self, role: str, before: int, after: int, why: str) -> bool:
        """Tells a pool to have another size, and says why in an Event; False when it has not the
        size `before` any more. Raises Unavailable."""
        name = f"{self._release}-{role}"
        with _asked(f"another size of {role}"):
            scale = self._apps.read_namespaced_deployment_scale(
                name, self.namespace, _request_timeout=CALL_S
            )
            if int(scale.spec.replicas or 0) != before:
                return False
            # With the version that was read: whoever was quicker wins.
            scale.spec.replicas = after
            try:
                self._apps.replace_namespaced_deployment_scale(
                    name, self.namespace, scale, _request_timeout=CALL_S
                )
            except self._client.ApiException as error:
                if error.status == 409:
                    return False
                raise
        self.note(role, "Scaled", why)
        return True

    def note(self, role: str, reason: str, text: str) -> None:
        """Leaves an Event at a pool's Deployment. Raises Unavailable."""
        name, now = f"{self._release}-{role}", datetime.now(UTC)
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
            "firstTimestamp": now.isoformat(timespec="seconds"),
            "lastTimestamp": now.isoformat(timespec="seconds"),
            "count": 1,
        }
        with _asked("an event"):
            self._core.create_namespaced_event(self.namespace, event, _request_timeout=CALL_S)

    def autoscaled(self) -> dict[str, str]:
        """Returns the name of the HPA by the Deployment that it scales; KEDA makes HPAs, too.
        Raises Unavailable."""
        with _asked("autoscalers"):
            found = self._scalers.list_namespaced_horizontal_pod_autoscaler(
                self.namespace, _request_timeout=CALL_S
            )
            return {
                one.spec.scale_target_ref.name: one.metadata.name
                for one in found.items
                if one.spec.scale_target_ref.kind == "Deployment"
            }

    def leads(self) -> bool:
        """Takes or renews the lease; whether this process has it now. Raises Unavailable."""
        name, now = f"{self._release}-planner", datetime.now(UTC)
        with _asked("the lease"):
            try:
                lease = self._leases.read_namespaced_lease(
                    name, self.namespace, _request_timeout=CALL_S
                )
            except self._client.ApiException as error:
                if error.status != 404:
                    raise
                spec = self._client.V1LeaseSpec(
                    holder_identity=self._identity,
                    lease_duration_seconds=LEASE_S,
                    renew_time=now,
                    acquire_time=now,
                )
                metadata = self._client.V1ObjectMeta(name=name)
                body = self._client.V1Lease(metadata=metadata, spec=spec)
                return self._won(
                    lambda: self._leases.create_namespaced_lease(
                        self.namespace, body, _request_timeout=CALL_S
                    )
                )
            spec = lease.spec
            mine = spec.holder_identity == self._identity
            fresh = spec.renew_time and now - spec.renew_time < timedelta(seconds=LEASE_S)
            if not mine and spec.holder_identity and fresh:
                return False
            if not mine:
                spec.holder_identity, spec.acquire_time = self._identity, now
                spec.lease_transitions = (spec.lease_transitions or 0) + 1
            spec.renew_time = now
            return self._won(
                lambda: self._leases.replace_namespaced_lease(
                    name, self.namespace, lease, _request_timeout=CALL_S
                )
            )

    def _won(self, write: Any) -> bool:
        try:
            write()
        except self._client.ApiException as error:
            if error.status == 409:
                return False
            raise
        return True


@contextmanager
def _asked(what: str) -> Iterator[None]:
    """Turns every failure of a call into Unavailable."""
    import urllib3
    from kubernetes.client import ApiException

    try:
        yield
    except ApiException as error:
        raise Unavailable(f"The cluster's API answers {error.status} about {what}.") from error
    except (urllib3.exceptions.HTTPError, OSError, ValueError, KeyError, TypeError) as error:
        raise Unavailable(f"The cluster's API cannot be asked about {what}.") from error
