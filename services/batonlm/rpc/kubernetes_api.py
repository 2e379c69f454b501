"""The Kubernetes API over HTTP: the one of this pod's cluster, or that of a kubeconfig.

In a pod this takes the standard library only. A kubeconfig is read by the `kubernetes` client, an
optional part of the installation (`batonlm[k8s]`), because of its plugins, proxies and renewals.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import ssl
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlencode

from batonlm.rpc.address import join

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where the kubelet keeps a pod's token, its namespace and the API server's CA."""

PART_BYTES = 1 << 16


class NoAnswer(Exception):
    """The API server could not be reached, or its answer broke off. The text names the kind of
    failure."""


class Answer(Protocol):
    """An answer whose body is not read yet."""

    status: int
    reason: str

    def parts(self) -> Iterator[bytes]:
        """Yields the body as it arrives. Raises NoAnswer when it breaks off."""

    def stop(self) -> None:
        """Makes `parts` end soon. Thread-safe."""

    def close(self) -> None:
        """Ends the connection."""


class KubernetesApi(Protocol):
    """Access to the API of one cluster, from any thread."""

    namespace: str
    """Of the pod, or of the kubeconfig."""
    in_pod: bool

    def request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        timeout_s: tuple[float, float],
        body: Mapping[str, Any] | None = None,
    ) -> Answer:
        """timeout_s: to connect, and between two parts of the answer. An HTTP error is an answer.
        Raises NoAnswer."""


def open_api(kubeconfig: str = "") -> KubernetesApi:
    """Without a kubeconfig file that of this pod, else of the variable KUBECONFIG, else the user's.
    Raises ImportError without the client that reads a kubeconfig, and ValueError where none is
    usable."""
    host = os.environ.get("KUBERNETES_SERVICE_HOST", "")
    if host and not kubeconfig and (ACCOUNT / "token").exists():
        return PodApi(host, int(os.environ.get("KUBERNETES_SERVICE_PORT", "443")), ACCOUNT)
    return ConfiguredApi(kubeconfig)


class PodApi:
    """The API by this pod's service account."""

    in_pod = True

    def __init__(self, host: str, port: int, account: Path) -> None:
        """Raises ValueError for an account without a usable CA or namespace."""
        self._host, self._port, self._account = host, port, account
        try:
            self._trust()
            self.namespace = (account / "namespace").read_text().strip()
        except OSError as error:
            raise ValueError(f"no usable service account: {type(error).__name__}") from None

    def request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        timeout_s: tuple[float, float],
        body: Mapping[str, Any] | None = None,
    ) -> Answer:
        # The kubelet renews both, so they are read each time.
        try:
            context, token = self._trust(), (self._account / "token").read_text().strip()
        except OSError as error:
            raise NoAnswer(type(error).__name__) from error
        connection = http.client.HTTPSConnection(
            self._host, self._port, timeout=timeout_s[0], context=context
        )
        try:
            headers = {
                "Accept": "application/json",
                "Authorization": f"Bearer {token}",
                "Connection": "close",
                "Host": join(self._host, self._port),
            }
            if body is not None:
                headers["Content-Type"] = "application/json"
            connection.connect()
            sock: socket.socket = connection.sock
            sock.settimeout(timeout_s[1])
            whole = f"{path}?{urlencode(query)}" if query else path
            connection.request(method, whole, None if body is None else json.dumps(body), headers)
            return _PodAnswer(connection, sock, connection.getresponse())
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise NoAnswer(type(error).__name__) from error

    def _trust(self) -> ssl.SSLContext:
        """Returns a context that trusts the CA of the account now. Raises OSError."""
        return ssl.create_default_context(cafile=str(self._account / "ca.crt"))


class _PodAnswer:
    def __init__(
        self,
        connection: http.client.HTTPSConnection,
        sock: socket.socket,
        response: http.client.HTTPResponse,
    ) -> None:
        self._connection, self._sock, self._response = connection, sock, response
        self.status, self.reason = response.status, response.reason

    def parts(self) -> Iterator[bytes]:
        try:
            while part := self._response.read1(PART_BYTES):
                yield part
            if self._response.length:
                raise NoAnswer("IncompleteRead")
        # A socket that another thread shuts down can also look like a value that is not there.
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise NoAnswer(type(error).__name__) from error

    def stop(self) -> None:
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._response.close()
        self._connection.close()


class ConfiguredApi:
    """The API of a kubeconfig, by the `kubernetes` client."""

    in_pod = False

    def __init__(self, kubeconfig: str) -> None:
        """kubeconfig: a file, or "" for the default one. Raises ImportError and ValueError."""
        import kubernetes

        # Its parts are typed, but not as they are called.
        client: Any = kubernetes.client
        config: Any = kubernetes.config
        made = client.Configuration()
        made.retries = False
        try:
            config.load_kube_config(kubeconfig or None, client_configuration=made)
            _, context = config.list_kube_config_contexts(kubeconfig or None)
            self.namespace = str(context["context"].get("namespace") or "default")
        except (config.ConfigException, OSError, ValueError, TypeError, KeyError) as error:
            raise ValueError(f"no usable kubeconfig: {type(error).__name__}") from None
        self._client = client.ApiClient(made)

    def request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        timeout_s: tuple[float, float],
        body: Mapping[str, Any] | None = None,
    ) -> Answer:
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
            answer = self._client.call_api(*call, _request_timeout=timeout_s)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise NoAnswer(type(error).__name__) from error
        return _ConfiguredAnswer(answer.response)


class _ConfiguredAnswer:
    def __init__(self, response: Any) -> None:
        """response: urllib3's."""
        self._response = response
        self.status, self.reason = int(response.status), str(response.reason)

    def parts(self) -> Iterator[bytes]:
        import urllib3

        try:
            yield from self._response.stream(PART_BYTES)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise NoAnswer(type(error).__name__) from error

    def stop(self) -> None:
        with suppress(Exception):
            self._response.shutdown()

    def close(self) -> None:
        self._response.close()
