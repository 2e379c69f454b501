"""Workers behind a Kubernetes service, watched with the `kubernetes` client on a thread.

The client is an optional part of the installation (`baton[k8s]`) and imported only here. All it is
used for is to reach the API: addresses, certificates, tokens and their renewal. The router's
service account needs get, list and watch on endpointslices, and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from baton.core.errors import InvalidArgument
from baton.router.workers.endpoint_slices import MAX_ENDPOINTS, Endpoint, Json, endpoints
from baton.router.workers.slice_watch import ApiFailed, SliceApi, SliceWatch

log = logging.getLogger(__name__)

STOP_S = 2.0
"""What the thread gets to end before it is left behind; it ends with the process then."""

_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class KubernetesApi:
    """A way to the API, shared by all watches. slices: the client's DiscoveryV1Api. namespace: the
    router's own.
    """

    def __init__(self, slices: Any, namespace: str) -> None:
        self._slices = slices
        self.namespace = namespace

    @classmethod
    def open(cls, config_file: str, field: str) -> KubernetesApi:
        """From a kubeconfig file; without one from the pod's service account, else from the usual
        kubeconfig. Blocks for a second. Raises InvalidArgument, naming the field or the option
        `kubernetes_config`.
        """
        try:
            from kubernetes import client, config
        except ImportError:
            raise InvalidArgument(
                "k8s:/// needs the Kubernetes client: pip install 'baton[k8s]'", field=field
            ) from None
        made = client.Configuration()
        try:
            namespace = cls._configure(config, made, config_file)
        except (config.ConfigException, OSError, ValueError, TypeError, KeyError):
            raise InvalidArgument(
                "must name a kubeconfig file: this is no pod with a service account, "
                "and no usable kubeconfig was found",
                field="kubernetes_config",
            ) from None
        return cls(client.DiscoveryV1Api(client.ApiClient(made)), namespace)

    @staticmethod
    def _configure(config: Any, made: Any, config_file: str) -> str:
        """Fills in how the API is reached. Returns the namespace."""
        if not config_file:
            try:
                config.load_incluster_config(client_configuration=made)
                return _NAMESPACE.read_text().strip()
            except (config.ConfigException, OSError):
                pass
        config.load_kube_config(config_file or None, client_configuration=made)
        _, context = config.list_kube_config_contexts(config_file or None)
        return str(context["context"].get("namespace") or "default")

    def get(self, namespace: str, query: dict[str, Any], timeout_s: tuple[float, float]) -> Any:
        """See SliceApi."""
        import urllib3
        from kubernetes.client import ApiException

        try:
            answer = self._slices.list_namespaced_endpoint_slice(
                namespace, **query, _preload_content=False, _request_timeout=timeout_s
            )
        except ApiException as error:
            raise ApiFailed(int(error.status or 0), f"{error.status} {error.reason}") from error
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise ApiFailed(0, type(error).__name__) from error
        if answer.status != 200:
            answer.close()
            raise ApiFailed(answer.status, f"{answer.status} {answer.reason}")
        return answer


class KubernetesSource:
    """One service. wanted: which of its endpoints are told."""

    def __init__(
        self,
        api: SliceApi,
        namespace: str,
        service: str,
        port: str,
        wanted: Callable[[Endpoint], bool],
    ) -> None:
        self._api, self._namespace, self._service = api, namespace, service
        self._port, self._wanted = port, wanted

    async def watch(self) -> AsyncIterator[frozenset[str]]:
        loop = asyncio.get_running_loop()
        newest: asyncio.Queue[list[Json]] = asyncio.Queue(1)

        def keep(slices: list[Json]) -> None:
            if newest.full():
                newest.get_nowait()
            newest.put_nowait(slices)

        def tell(slices: list[Json]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(keep, slices)

        following = SliceWatch(self._api, self._namespace, self._service, tell)
        name = f"watch {self._namespace}/{self._service}"
        thread = threading.Thread(target=following.run, name=name, daemon=True)
        thread.start()
        known: frozenset[str] | None = None
        try:
            while True:
                found = self._addresses(await newest.get())
                if found != known:
                    known = found
                    yield found
        finally:
            following.stop()
            await asyncio.to_thread(thread.join, STOP_S)

    def look_again(self) -> None:
        """The watch tells by itself."""

    def _addresses(self, slices: list[Json]) -> frozenset[str]:
        found = endpoints(slices, self._port)
        if slices and not found:
            log.warning("service %s: no endpoint has port %s", self._service, self._port)
        if len(found) == MAX_ENDPOINTS:
            log.warning("service %s: only %d endpoints are used", self._service, MAX_ENDPOINTS)
        return frozenset(each.address for each in found if self._wanted(each))


def runs(endpoint: Endpoint) -> bool:
    """Of a worker: whether to look for it there. What it can do it says itself."""
    return not endpoint.terminating


def answers(endpoint: Endpoint) -> bool:
    """Of a router, which is not asked."""
    return endpoint.ready and not endpoint.terminating
