"""Clients that would rather speak HTTP/2, as they come: Java's own and curl."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.edge.conftest import SecureEdge
from tests.edge.edge import EdgeProcess
from tests.edge.proxies import needed
from tests.edge.wire import PATH, completion_of, prompt

pytestmark = pytest.mark.edge

JAVA = Path(__file__).parent / "clients" / "Client.java"
TIMES = 10
RUN_S = 120


def output(*command: str) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=RUN_S, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def text_of(events: str) -> str:
    """What a stream says that has its end."""
    *documents, last = [
        event for event in events.replace("data: ", "\n").split("\n") if event.strip()
    ]
    assert last.strip() == "[DONE]"
    return "".join(json.loads(each)["choices"][0]["text"] for each in documents)


def test_java(edge: EdgeProcess) -> None:
    """Ten of ten, over new connections and over one, whole and streamed."""
    said = output(needed("java"), str(JAVA), edge.address, str(TIMES)).splitlines()
    assert len(said) == 4 * TIMES
    for place, line in enumerate(said):
        status, _, way, body = line.split(" ", 3)
        assert status == "200", line
        text = json.loads(body)["choices"][0]["text"] if way == "whole" else text_of(body)
        assert text == completion_of(f"text {place // 4}")
    assert len(edge.asked()) == 4 * TIMES


WAYS = {
    "upgrade": ("--http2",),
    "prior-knowledge": ("--http2-prior-knowledge",),
    "http1": ("--http1.1",),
    "http1.0": ("--http1.0",),
    "expect": ("--http1.1", "-H", "Expect: 100-continue"),
    "chunked": ("--http1.1", "-H", "Transfer-Encoding: chunked"),
}


def curl(url: str, text: str, *options: str, **more: object) -> tuple[str, str]:
    """The answer's body, and its status with its version."""
    ask = ("-d", prompt(text, **more).decode(), "-H", "Content-Type: application/json")
    written = ("-w", "\n%{http_code} %{http_version}", "--max-time", "60", "--noproxy", "*")
    body, _, about = output(needed("curl"), "-sS", *written, *ask, *options, url).rpartition("\n")
    return body, about


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_curl(edge: EdgeProcess, options: tuple[str, ...]) -> None:
    url = f"http://{edge.address}{PATH.decode()}"
    body, about = curl(url, "small", *options)
    assert json.loads(body)["choices"][0]["text"] == completion_of("small")
    assert about.startswith("200 ")
    if "--http2-prior-knowledge" in options:
        assert about == "200 2"
    body, about = curl(url, "streamed", *options, stream=True)
    assert (text_of(body), about[:4]) == (completion_of("streamed"), "200 ")
    # Too long for the model, and larger than any first window.
    body, about = curl(url, "x" * (1 << 16), *options)
    assert json.loads(body)["error"]["code"] and about.startswith("400 ")


def test_curl_over_tls(secure: SecureEdge) -> None:
    url = f"https://{secure.process.address}{PATH.decode()}"
    for options, version in ((("-k",), "2"), (("-k", "--http1.1"), "1.1")):
        body, about = curl(url, "secret", *options)
        assert about == f"200 {version}"
        assert json.loads(body)["choices"][0]["text"] == completion_of("secret")
