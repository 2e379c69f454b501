"""Asks a Kubernetes API for plain JSON, from a pod or from a laptop; judges nothing.

The client is an optional part of the installation (`baton[k8s]`) and imported only when it is used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from baton.core.errors import InvalidArgument, Unavailable

TIMEOUT_S = (3.0, 10.0)
"""To connect, and to be answered."""

_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")

Json = dict[str, Any]


class Answer(NamedTuple):
    """status: as HTTP has it."""

    status: int
    body: Json

    @property
    def items(self) -> list[Json]:
        return list(self.body.get("items") or ())


class Api:
    """A way to the API. namespace: the pod's own, or the kubeconfig's. in_pod: whether this runs in
    the cluster, with a service account."""

    def __init__(self, client: Any, namespace: str, *, in_pod: bool) -> None:
        self._client = client
        self.namespace = namespace
        self.in_pod = in_pod

    @classmethod
    def open(cls, kubeconfig: str = "") -> Api:
        """From a kubeconfig file; without one from the pod's service account, else from the usual
        kubeconfig. Raises InvalidArgument, and Unavailable where the client is not installed."""
        try:
            from kubernetes import client, config
        except ImportError:
            raise Unavailable("the Kubernetes client is not installed") from None
        made = client.Configuration()
        made.retries = False
        try:
            namespace, in_pod = cls._configure(config, made, kubeconfig)
        except (config.ConfigException, OSError, ValueError, TypeError, KeyError):
            raise InvalidArgument(
                "must name a kubeconfig file: this is no pod with a service account, and no usable "
                "kubeconfig was found",
                field="kubeconfig",
            ) from None
        return cls(client.ApiClient(made), namespace, in_pod=in_pod)

    @staticmethod
    def _configure(config: Any, made: Any, kubeconfig: str) -> tuple[str, bool]:
        """Fills in how the API is reached. Returns the namespace, and whether this is a pod."""
        if not kubeconfig:
            try:
                config.load_incluster_config(client_configuration=made)
                return _NAMESPACE.read_text().strip(), True
            except (config.ConfigException, OSError):
                pass
        config.load_kube_config(kubeconfig or None, client_configuration=made)
        _, context = config.list_kube_config_contexts(kubeconfig or None)
        return str(context["context"].get("namespace") or "default"), False

    def get(self, path: str, **query: str) -> Answer:
        """Raises Unavailable when nobody answers; a refusal is an answer."""
        return self._ask("GET", path, query, None)

    def post(self, path: str, body: Json) -> Answer:
        """As `get`."""
        return self._ask("POST", path, {}, body)

    def close(self) -> None:
        self._client.rest_client.pool_manager.clear()

    def _ask(self, method: str, path: str, query: Mapping[str, str], body: Json | None) -> Answer:
        import urllib3

        headers = {"Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        call = self._client.param_serialize(
            method,
            path,
            query_params=list(query.items()),
            header_params=headers,
            body=body,
            auth_settings=["BearerToken"],
        )
        try:
            answer = self._client.call_api(*call, _request_timeout=TIMEOUT_S)
            answer.read()
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise Unavailable(f"nobody answers: {type(error).__name__}") from error
        try:
            found = json.loads(answer.data)
        except ValueError:
            found = {}
        return Answer(int(answer.status), found if isinstance(found, dict) else {})
