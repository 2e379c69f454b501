"""SMG's own gateway, unmodified, with a whole Baton as its one engine.

What it says is what Baton says itself: answers are greedy.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from batonlm.cli.main import main
from batonlm.cli.ports import free_ports
from tests.clients.conftest import INSTALL_S, install
from tests.e2e.relay import Relay, eventually, until_it_comes_about

pytestmark = [pytest.mark.clients, pytest.mark.timeout(900)]

START_S = 120
LIMIT_S = 60
MESSAGES = [{"role": "user", "content": "Who are you?"}]
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["big", "small"]}},
    "required": ["kind"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Fronted:
    """A Baton and, in front of it, a gateway."""

    relay: Relay
    gateway: str

    def chat(self, base: str, **more: Any) -> dict[str, Any]:
        body = {"model": "baton-tiny", "messages": MESSAGES, "temperature": 0, **more}
        answer = httpx.post(f"{base}/v1/chat/completions", json=body, timeout=LIMIT_S)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def same(self, **more: Any) -> dict[str, Any]:
        """The gateway's answer, which has to be Baton's own in all that both tell."""
        own, through = self.chat(self.relay.http, **more), self.chat(self.gateway, **more)
        for here, there in zip(own["choices"], through["choices"], strict=True):
            assert here["message"]["content"] == there["message"]["content"]
            assert here["finish_reason"] == there["finish_reason"]
        for count in ("prompt_tokens", "completion_tokens"):
            assert own["usage"][count] == through["usage"][count]
        return through


@pytest.fixture(scope="module")
def smg(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, in an environment of its own."""
    folder = tmp_path_factory.mktemp("smg")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=INSTALL_S)
    pip = (folder / "bin" / "pip", "install", "-q", "--disable-pip-version-check")
    install(*pip, "smg>=1.13,<2")
    return folder / "bin" / "smg"


@pytest.fixture(scope="module")
def fronted(smg: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fronted]:
    relay = Relay(tmp_path_factory.mktemp("fronted"), "--vllm-engine")
    port, metrics = free_ports(2)
    log = tmp_path_factory.mktemp("gateway") / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [
                str(smg), "launch", "--host", "127.0.0.1", "--port", str(port),
                "--worker-urls", f"grpc://{relay.description['grpc']}",
                "--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics),
            ],
            stdin=subprocess.DEVNULL, stdout=out, stderr=out,
        )  # fmt: skip
        try:
            made = Fronted(relay, f"http://127.0.0.1:{port}")
            _wait(made, process, log)
            yield made
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            relay.close()


def _wait(fronted: Fronted, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until it answers: by then it has the tokenizer."""
    deadline = time.monotonic() + START_S
    body = {"model": "baton-tiny", "messages": MESSAGES, "max_tokens": 1}
    while True:
        try:
            answer = httpx.post(
                f"{fronted.gateway}/v1/chat/completions", json=body, timeout=LIMIT_S
            )
            if answer.status_code == 200:
                return
        except httpx.TransportError:
            pass
        alive = process.poll() is None and time.monotonic() < deadline
        assert alive, log.read_text(errors="replace")[-4000:]
        time.sleep(0.2)


def test_it_knows_what_it_has(fronted: Fronted) -> None:
    models = httpx.get(f"{fronted.gateway}/v1/models", timeout=LIMIT_S).json()["data"]
    assert [model["id"] for model in models] == ["baton-tiny"]
    (worker,) = httpx.get(f"{fronted.gateway}/workers", timeout=LIMIT_S).json()["workers"]
    assert (worker["runtime_type"], worker["connection_mode"]) == ("vllm", "grpc")
    assert worker["is_healthy"]
    assert worker["models"][0]["context_length"] == 2048


def test_answers(fronted: Fronted) -> None:
    fronted.same(max_tokens=12)
    fronted.same(max_tokens=100)
    fronted.same(max_tokens=40, n=3)
    stopped = fronted.same(max_tokens=60, stop=[" Llama"])
    assert stopped["choices"][0]["matched_stop"] == " Llama"


def test_a_stream(fronted: Fronted) -> None:
    body = {
        "model": "baton-tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 30, "n": 2,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    texts = {0: "", 1: ""}
    finished: dict[int, str] = {}
    usage: dict[str, int] = {}
    with httpx.stream(
        "POST", f"{fronted.gateway}/v1/chat/completions", json=body, timeout=LIMIT_S
    ) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    texts[choice["index"]] += choice["delta"].get("content") or ""
                    finished[choice["index"]] = choice["finish_reason"]
    own = fronted.chat(fronted.relay.http, max_tokens=30)
    assert texts == dict.fromkeys(texts, own["choices"][0]["message"]["content"])
    assert finished == {0: "length", 1: "length"}
    assert usage["completion_tokens"] == 60


def test_log_probabilities(fronted: Fronted) -> None:
    asked = {"max_tokens": 3, "logprobs": True, "top_logprobs": 2}
    own, through = (
        fronted.chat(base, **asked)["choices"][0]["logprobs"]["content"]
        for base in (fronted.relay.http, fronted.gateway)
    )
    for here, there in zip(own, through, strict=True):
        assert here["token"] == there["token"]
        assert here["logprob"] == pytest.approx(there["logprob"], rel=1e-4)
        assert [top["token"] for top in here["top_logprobs"]] == [
            top["token"] for top in there["top_logprobs"]
        ]


def test_forms_and_tools(fronted: Fronted) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
    through = fronted.same(max_tokens=60, response_format=form)
    assert json.loads(through["choices"][0]["message"]["content"])["kind"] in ("big", "small")
    tool = {"type": "function", "function": {"name": "note", "parameters": SCHEMA}}
    named = {"type": "function", "function": {"name": "note"}}
    called = fronted.chat(fronted.gateway, max_tokens=100, tools=[tool], tool_choice=named)
    (call,) = called["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["kind"] in ("big", "small")


def test_a_cached_prefix_is_told(fronted: Fronted) -> None:
    messages = [{"role": "user", "content": "one two three " * 120}]
    for _ in range(2):
        answer = fronted.chat(fronted.gateway, messages=messages, max_tokens=2)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 256


def test_the_routers_benchmark_measures_it_too(smg: Path, tmp_path: Path) -> None:
    out = tmp_path / "router.json"
    sizes = ["--requests", "5", "--streams", "8", "--seconds", "1"]
    assert main(["bench", "router", *sizes, "--smg", str(smg), "--json", str(out)]) == 0
    values = {each["name"]: each["value"] for each in json.loads(out.read_text())["results"]}
    assert values["CPU a token, 64 streams x 40 tokens/s, SSE, SMG: tokens an event"] >= 1
    assert values["added to the time to first token, SSE, SMG, p50"] > 0


def test_a_request_that_does_not_fit_is_the_clients_error(fronted: Fronted) -> None:
    body = {"model": "baton-tiny", "messages": MESSAGES, "max_tokens": 5000}
    answer = httpx.post(f"{fronted.gateway}/v1/chat/completions", json=body, timeout=LIMIT_S)
    assert answer.status_code == 400
    assert "2048" in answer.json()["error"]["message"]


def test_a_client_that_hangs_up_frees_its_tokens(fronted: Fronted) -> None:
    body = {
        "model": "baton-tiny", "messages": MESSAGES, "max_tokens": 1900, "stream": True,
        "ignore_eos": True,
    }  # fmt: skip
    router = fronted.relay.processes("router")[0]

    def running() -> float:
        return fronted.relay.metric(router, "baton_requests_open")

    def cancelled() -> float:
        return fronted.relay.metric(router, "baton_requests_total", outcome="cancelled")

    def hung_up() -> bool:
        before = cancelled()
        with httpx.stream(
            "POST", f"{fronted.gateway}/v1/chat/completions", json=body, timeout=LIMIT_S
        ) as answer:
            next(answer.iter_lines())
        eventually(lambda: running() == 0, 30, "the request has ended")
        return cancelled() > before

    until_it_comes_about(hung_up, "a client hangs up before its answer ends")
