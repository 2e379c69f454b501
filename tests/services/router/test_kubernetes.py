"""Discovery against a real API server, with no more rights than it says it needs."""

from __future__ import annotations

import asyncio
import base64
import importlib
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batonlm.router.workers.discovery_k8s import KubernetesSource, answers, api_of, runs
from tests.services.router.kubernetes_api import slice_of
from tests.services.router.test_discovery import watching

pytestmark = [
    pytest.mark.k8s,
    pytest.mark.skipif(not os.environ.get("KUBECONFIG"), reason="needs KUBECONFIG"),
]

RULE = {
    "apiGroups": ["discovery.k8s.io"],
    "resources": ["endpointslices"],
    "verbs": ["get", "list", "watch"],
}


class Cluster:
    """A namespace of its own, seen by an administrator; `config`: by the router's account."""

    def __init__(self, namespace: str, folder: Path) -> None:
        kubernetes: Any = importlib.import_module("kubernetes")
        client, config = kubernetes.client, kubernetes.config
        config.load_kube_config(os.environ["KUBECONFIG"])
        self.namespace = namespace
        self.slices = client.DiscoveryV1Api()
        self._core = client.CoreV1Api()
        rbac = client.RbacAuthorizationV1Api()
        self._core.create_namespace({"metadata": {"name": namespace}})
        self._core.create_namespaced_service_account(namespace, {"metadata": {"name": "router"}})
        rbac.create_namespaced_role(namespace, {"metadata": {"name": "router"}, "rules": [RULE]})
        subject = {"kind": "ServiceAccount", "name": "router", "namespace": namespace}
        role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "router"}
        binding: Any = {"metadata": {"name": "router"}, "subjects": [subject], "roleRef": role}
        rbac.create_namespaced_role_binding(namespace, binding)
        token = self._core.create_namespaced_service_account_token(
            "router", namespace, {"spec": {}}
        )
        self.config = folder / "kubeconfig"
        self.config.write_text(json.dumps(self._config(client, token.status.token)))

    def _config(self, client: Any, token: str) -> dict[str, Any]:
        used = client.Configuration.get_default_copy()
        authority = base64.b64encode(Path(used.ssl_ca_cert).read_bytes()).decode()
        cluster = {"server": used.host, "certificate-authority-data": authority}
        context = {"cluster": "c", "user": "u", "namespace": self.namespace}
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "clusters": [{"name": "c", "cluster": cluster}],
            "users": [{"name": "u", "user": {"token": token}}],
            "contexts": [{"name": "here", "context": context}],
        }

    def create(self, entry: Any) -> None:
        self.slices.create_namespaced_endpoint_slice(self.namespace, entry)

    def replace(self, entry: Any) -> None:
        name = entry["metadata"]["name"]
        self.slices.replace_namespaced_endpoint_slice(name, self.namespace, entry)

    def delete(self, name: str) -> None:
        self.slices.delete_namespaced_endpoint_slice(name, self.namespace)

    def close(self) -> None:
        self._core.delete_namespace(self.namespace)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(f"baton-{secrets.token_hex(4)}", tmp_path)
    try:
        yield made
    finally:
        made.close()


def pod(address: str, **conditions: bool) -> Any:
    return {"addresses": [address], "conditions": conditions}


async def test_what_a_real_server_tells(cluster: Cluster) -> None:
    api = api_of("decodes", str(cluster.config))
    assert api.namespace == cluster.namespace
    cluster.create(slice_of("a", pod("10.1.0.1", ready=True), pod("10.1.0.2", ready=False)))
    followed = KubernetesSource(api, api.namespace, "decode", "grpc", runs)
    counted = KubernetesSource(api, api.namespace, "decode", "grpc", answers)
    async with watching(followed) as told, watching(counted) as ready:
        assert await anext(told) == {"10.1.0.1:7000", "10.1.0.2:7000"}
        assert await anext(ready) == {"10.1.0.1:7000"}
        await asyncio.to_thread(cluster.create, slice_of("b", pod("10.1.0.3", ready=True)))
        assert await anext(told) == {"10.1.0.1:7000", "10.1.0.2:7000", "10.1.0.3:7000"}
        leaving = pod("10.1.0.1", ready=False, serving=True, terminating=True)
        await asyncio.to_thread(cluster.replace, slice_of("a", leaving))
        assert await anext(told) == {"10.1.0.3:7000"}
        await asyncio.to_thread(cluster.delete, "b")
        assert await anext(told) == set()


def test_the_account_may_do_nothing_else(cluster: Cluster) -> None:
    kubernetes: Any = importlib.import_module("kubernetes")
    client, config = kubernetes.client, kubernetes.config
    made = client.Configuration()
    config.load_kube_config(str(cluster.config), client_configuration=made)
    reach = client.ApiClient(made)
    with pytest.raises(client.ApiException) as refused:
        client.CoreV1Api(reach).list_namespaced_pod(cluster.namespace)
    assert refused.value.status == 403
