"""The external metric as an API server asks for it: over TLS, by its front proxy alone."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import trustme

from baton_loadtest.autoscale.metrics_api import ROOT, FrontProxy, MetricsApi, MetricsServer
from baton_loadtest.autoscale.readings import Reading

ASKED = f"{ROOT}/namespaces/here/baton_pool_target_workers"
READING = Reading(2, {("m", "prefill"): 6.0, ("m", "decode"): 12.0, ("old", "decode"): 1.0})


@pytest.fixture
def api() -> MetricsApi:
    return MetricsApi("here", "baton-router-metrics")


@pytest.fixture
def cas() -> tuple[trustme.CA, trustme.CA]:
    """That of the server's certificate, and that of the front proxy's."""
    return trustme.CA(), trustme.CA()


@pytest.fixture
def port(api: MetricsApi, cas: tuple[trustme.CA, trustme.CA], tmp_path: Path) -> Iterator[int]:
    cert, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    made = cas[0].issue_cert("localhost")
    made.cert_chain_pems[0].write_to_path(cert)
    made.private_key_pem.write_to_path(key)
    proxy = FrontProxy(cas[1].cert_pem.bytes().decode(), ["front-proxy"])
    server = MetricsServer(("127.0.0.1", 0), str(cert), str(key), proxy, api)
    yield server.port
    server.close()


def ask(
    port: int, server: trustme.CA, path: str, shown: trustme.LeafCert | None = None
) -> tuple[int, dict[str, Any]]:
    context = ssl.create_default_context()
    server.configure_trust(context)
    if shown is not None:
        shown.configure_cert(context)
    connection = http.client.HTTPSConnection("localhost", port, context=context, timeout=60)
    with closing(connection):
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


def test_the_front_proxy_gets_the_number_and_nobody_else(
    api: MetricsApi, port: int, cas: tuple[trustme.CA, trustme.CA]
) -> None:
    api.publish(READING, time.time())
    proxy = cas[1].issue_cert("proxy.example", common_name="front-proxy")
    status, body = ask(port, cas[0], f"{ASKED}?labelSelector=role%3Dprefill", proxy)
    assert status == 200
    (item,) = body["items"]
    assert (item["value"], item["metricLabels"]["model"]) == ("6", "m")
    stranger = cas[1].issue_cert("proxy.example", common_name="somebody")
    assert ask(port, cas[0], ASKED, stranger)[0] == 403
    assert ask(port, cas[0], ASKED)[0] == 403
    # A certificate of another CA ends the handshake.
    with pytest.raises((OSError, http.client.HTTPException)):
        ask(port, cas[0], ASKED, cas[0].issue_cert("x.example", common_name="front-proxy"))
    assert ask(port, cas[0], "/livez")[0] == 200
    assert ask(port, cas[0], ROOT)[1]["groupVersion"] == "external.metrics.k8s.io/v1beta1"


def test_a_silent_peer_holds_up_nobody(
    api: MetricsApi, port: int, cas: tuple[trustme.CA, trustme.CA]
) -> None:
    with socket.create_connection(("127.0.0.1", port)):
        assert ask(port, cas[0], "/livez")[0] == 200


@pytest.mark.parametrize(
    ("selector", "values"),
    [
        ("", ["6", "12", "1"]),
        ("role=decode", ["12", "1"]),
        ("role==decode,service=baton-router-metrics", ["12", "1"]),
        ("role=decode, model=m", ["12"]),
        ("service=other", []),
    ],
)
def test_labels_select(api: MetricsApi, selector: str, values: list[str]) -> None:
    api.publish(READING, 100.0)
    status, body = api.answer(f"{ASKED}?labelSelector={selector}", 101.0)
    assert status == 200 and sorted(item["value"] for item in body["items"]) == sorted(values)
    assert {item["timestamp"] for item in body["items"]} <= {"1970-01-01T00:01:40Z"}


@pytest.mark.parametrize(
    ("path", "status"),
    [
        (f"{ASKED}?labelSelector=role+in+(a)", 400),
        (f"{ROOT}/namespaces/other/baton_pool_target_workers", 404),
        (f"{ROOT}/namespaces/here/cpu", 404),
        (f"{ROOT}/namespaces/here", 404),
        ("/apis", 404),
        (ASKED, 503),
    ],
)
def test_what_is_not_answered(api: MetricsApi, path: str, status: int) -> None:
    assert api.answer(path, 1.0)[0] == status


def test_an_old_number_is_not_told(api: MetricsApi) -> None:
    api.publish(READING, 100.0)
    assert api.answer(ASKED, 160.0)[0] == 200
    assert api.answer(ASKED, 161.0)[0] == 503
