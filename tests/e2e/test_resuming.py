"""A router is lost in mid-stream; its client goes on at another one, and has every part once."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest

from batonlm.client import Client, Retries
from batonlm.v1 import inference_pb2 as pb
from batonlm.v1 import inference_pb2_grpc
from tests.e2e.calls import COUNT, NOTE
from tests.e2e.relay import PATIENCE_S, Answer, Relay, eventually, options, until_it_comes_about

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
PROMPT = list(range(50, 250))
NUM_TOKENS = 256
WHOLE = {"include_usage": True}
TOOLS = [
    {"type": "function", "function": {"name": "count", "parameters": COUNT}},
    {"type": "function", "function": {"name": "note", "parameters": NOTE}},
]
NAMED = {"type": "function", "function": {"name": "count"}}
SAID: Any = [{"role": "user", "content": "Take a note, please."}]
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": (
        COMPLETION,
        {"prompt": PROMPT, "temperature": 0, "logprobs": 2, "return_token_ids": True},
    ),
    "sampled": (COMPLETION, {"prompt": PROMPT, "temperature": 1.0, "n": 2}),
    "chat": (CHAT, {"messages": SAID, "temperature": 1.0, "logprobs": True}),
    "call": (
        CHAT,
        {"messages": SAID, "temperature": 1.0, "tools": TOOLS, "tool_choice": NAMED},
    ),
}
OFTEN = ("sampled", "call")
"""Two choices, and a call of a tool; the others are in the slow tests."""
BROKEN_AFTER = 6
"""Events that are read before the router is killed."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Relay]:
    """Two routers, at ports of the machine's choice."""
    flags = ("--routers", "2", "--http-port", "0", "--grpc-port", "0")
    # So that a router that ends in order cuts streams.
    environment = {"BATON_DRAIN_TIMEOUT_S": "0.5"}
    running = Relay(tmp_path_factory.mktemp("pair"), *flags, environment=environment)
    yield running
    running.close()


def http_of(router: dict[str, Any]) -> str:
    return str(router["metrics"]).removesuffix("/metrics")


def both(pair: Relay) -> list[dict[str, Any]]:
    """The routers, when both answer."""

    def answer() -> bool:
        try:
            found = [httpx.get(f"{http_of(each)}/health") for each in pair.processes("router")]
        except httpx.TransportError:
            return False
        return [each.status_code for each in found] == [200, 200]

    eventually(answer, PATIENCE_S, "both routers serve")
    return pair.processes("router")


def asked(form: str, **more: Any) -> tuple[str, dict[str, Any]]:
    path, body = FORMS[form]
    common = {"model": "baton-tiny", "stream": True, "stream_options": WHOLE}
    longest = {} if form == "call" else {"max_tokens": NUM_TOKENS, "ignore_eos": True}
    return path, {**common, **longest, **body, **more}


def events(response: httpx.Response) -> Iterator[tuple[str, str]]:
    """Id and data of each event that came whole."""
    fields: dict[str, str] = {}
    for line in response.iter_lines():
        if line:
            name, _, fields[name] = line.partition(": ")
            continue
        if "data" in fields:
            yield fields.get("id", ""), fields["data"]
        fields = {}


def read(url: str, body: dict[str, Any], **headers: str) -> list[tuple[str, str]]:
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    with httpx.stream("POST", url, json=body, headers=sent, timeout=PATIENCE_S) as response:
        assert response.status_code == 200, response.read()
        return list(events(response))


class Seen:
    """What a client makes of a stream, whatever pieces it came in."""

    def __init__(self, data: list[str]) -> None:
        assert data[-1] == "[DONE]"
        *chunks, last = map(json.loads, data[:-1])
        assert not last["choices"], data
        self.usage = {name: last["usage"][name] for name in ("prompt_tokens", "completion_tokens")}
        self.reasoning = last["usage"]["completion_tokens_details"]
        self.ids = {(chunk["id"], chunk["created"], chunk["model"]) for chunk in (*chunks, last)}
        self.roles = [0, 0]
        self.choices: dict[int, dict[str, Any]] = {}
        for chunk in chunks:
            (new,) = chunk["choices"]
            self._take(new, self.choices.setdefault(new["index"], {"lists": {}, "text": ""}))

    def _take(self, new: dict[str, Any], seen: dict[str, Any]) -> None:
        assert "end" not in seen
        delta = new.get("delta", {})
        self.roles[new["index"]] += "role" in delta
        seen["text"] += new.get("text", "") + (delta.get("content") or "")
        for call in delta.get("tool_calls", ()):
            made = seen.setdefault("calls", {}).setdefault(call["index"], ["", "", ""])
            made[0] += call.get("id", "")
            made[1] += call["function"].get("name", "")
            made[2] += call["function"]["arguments"]
        for name, values in {**(new["logprobs"] or {}), "ids": new.get("token_ids")}.items():
            seen["lists"].setdefault(name, []).extend(values or ())
        if new["finish_reason"]:
            seen["end"] = new["finish_reason"], new["stop_reason"]


def broken_off(pair: Relay, victim: dict[str, Any], form: str) -> tuple[list[tuple[str, str]], int]:
    """The events that came before the router was killed, and the seed in use."""
    path, body = asked(form)
    came: list[tuple[str, str]] = []
    headers = {"x-baton-resume": "true"}
    url = http_of(victim) + path
    with httpx.stream("POST", url, json=body, headers=headers, timeout=PATIENCE_S) as response:
        assert response.status_code == 200, response.read()
        try:
            for event in events(response):
                came.append(event)
                if len(came) == BROKEN_AFTER:
                    pair.kill(victim)
        except httpx.TransportError:
            pass
    return came, int(response.headers["x-baton-seed"])


@pytest.mark.parametrize(
    "form",
    [form if form in OFTEN else pytest.param(form, marks=pytest.mark.slow) for form in FORMS],
)
def test_another_router_goes_on(pair: Relay, form: str) -> None:
    def broke_off() -> bool:
        victim, other = both(pair)
        came, seed = broken_off(pair, victim, form)
        if came[-1][1] == "[DONE]":
            return False
        path, body = asked(form)
        rest = read(http_of(other) + path, body, last_event_id=came[-1][0])
        data = [each for _, each in came + rest]
        # No second role, no part twice, and not one is missing: it is as if nothing had been.
        joined = Seen(data)
        expected = Seen(
            [each for _, each in read(http_of(other) + path, asked(form, seed=seed)[1])]
        )
        assert joined.choices == expected.choices
        assert (joined.usage, joined.reasoning) == (expected.usage, expected.reasoning)
        assert joined.roles == expected.roles
        assert len(joined.ids) == 1
        if form == "call":
            (call,) = joined.choices[0]["calls"].values()
            assert call[1] == "count" and len(json.loads(call[2])["numbers"]) == 90
        return True

    until_it_comes_about(broke_off, "a router that was killed in mid-stream")


LONG = 700
"""Tokens of a stream that is broken off after hundreds: other routers look for its sequence."""


def counts(pair: Relay) -> tuple[float, float, float]:
    """What decode workers adopted and sampled, and what all workers prefilled."""

    def total(role: str, name: str, **labels: str) -> float:
        return sum(pair.metric(worker, name, **labels) for worker in pair.processes(role))

    prefilled = sum(total(role, "baton_prefill_tokens_total") for role in ("prefill", "decode"))
    adopted = total("decode", "baton_orphans_total", outcome="adopted")
    return adopted, total("decode", "baton_decode_tokens_total"), prefilled


@pytest.mark.parametrize(
    ("n", "end"),
    [(1, signal.SIGKILL), (2, signal.SIGKILL), (2, signal.SIGSTOP), (2, signal.SIGTERM)],
)
def test_nothing_is_computed_twice(pair: Relay, n: int, end: signal.Signals) -> None:
    """The decode worker kept what a router had begun that was killed, hangs, or cuts its streams;
    the other one adopts it."""
    prompt = [*range(60, 300), n]
    body = {
        "model": "baton-tiny",
        "prompt": prompt,
        "n": n,
        "max_tokens": LONG,
        "ignore_eos": True,
        "temperature": 1.0,
        "logprobs": 2,
        "stream": True,
        "stream_options": WHOLE,
    }

    def adopted() -> bool:
        victim, other = both(pair)
        before = counts(pair)
        came: list[tuple[str, str]] = []
        headers, url = {"x-baton-resume": "true"}, http_of(victim) + COMPLETION
        with httpx.stream("POST", url, json=body, headers=headers, timeout=PATIENCE_S) as response:
            seed = int(response.headers["x-baton-seed"])
            try:
                for event in events(response):
                    # The last one may be an error.
                    came += [event] if event[0] else []
                    if len(came) == 200 * n:
                        pair.kill(victim, end)
                        if end is signal.SIGSTOP:
                            break
            except httpx.TransportError:
                pass
        try:
            if came[-1][1] == "[DONE]":
                return False
            rest = read(http_of(other) + COMPLETION, body, last_event_id=came[-1][0])
            taken, sampled, prefilled = (
                now - then for now, then in zip(counts(pair), before, strict=True)
            )
        finally:
            pair.kill(victim, signal.SIGCONT)
        joined = Seen([each for _, each in came + rest])
        if taken != n:
            return False
        assert pair.metric(other, "baton_adoptions_total", outcome="adopted") >= n
        assert sampled <= n * LONG
        assert prefilled <= len(prompt)
        if end is signal.SIGSTOP:
            # It learns that it lost them, and that nobody waits for them.
            idle = lambda: pair.metric(victim, "baton_requests_open") == 0  # noqa: E731
            eventually(idle, PATIENCE_S, "the router that hung has no request")
        whole = read(http_of(other) + COMPLETION, {**body, "seed": seed})
        expected = Seen([each for _, each in whole])
        assert joined.choices == expected.choices
        assert (joined.usage, joined.roles) == (expected.usage, expected.roles)
        return True

    until_it_comes_about(adopted, "a stream that was adopted")


def test_over_grpc(pair: Relay) -> None:
    wanted = options(max_tokens=NUM_TOKENS, temperature=1.0, n=2)
    wanted.event_ids = True

    def broke_off() -> bool:
        victim, other = both(pair)
        request = pb.GenerateRequest(text="Once upon a time", options=wanted)
        answer, last, count = Answer(), "", 0
        with grpc.insecure_channel(victim["grpc"]) as channel:
            stub: Any = inference_pb2_grpc.InferenceStub(channel)
            try:
                for response in stub.Generate(request, timeout=PATIENCE_S):
                    answer.take(response.event)
                    last, count = response.event.id, count + 1
                    if count == BROKEN_AFTER:
                        pair.kill(victim)
            except grpc.RpcError as lost:
                assert lost.code() is grpc.StatusCode.UNAVAILABLE
        if answer.finished is not None:
            return False
        assert answer.accepted is not None
        request.options.last_event_id = last
        with grpc.insecure_channel(other["grpc"]) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            for response in stub.Generate(request, timeout=PATIENCE_S):
                answer.take(response.event)
            plain = pb.GenerateRequest(text="Once upon a time", options=wanted)
            plain.options.sampling.seed = answer.accepted.seed
            expected = Answer()
            for response in stub.Generate(plain, timeout=PATIENCE_S):
                expected.take(response.event)
        assert answer.text == expected.text and answer.token_ids == expected.token_ids
        assert answer.finish == expected.finish
        return True

    until_it_comes_about(broke_off, "a router that was killed in mid-stream")


def test_batons_own_client_goes_on_by_itself(pair: Relay) -> None:
    """At one address, where the router that was killed starts again."""

    def broke_off() -> bool:
        victim, _ = both(pair)
        retries = Retries(most_resumes=60, longest_s=2.0, resume_s=PATIENCE_S)
        with Client(victim["grpc"], retries=retries, timeout_s=PATIENCE_S) as client:
            told: Any = {"max_tokens": NUM_TOKENS, "temperature": 1.0, "ignore_eos": True}
            with client.generate("Once upon a time", **told) as stream:
                for _ in range(BROKEN_AFTER):
                    next(stream)
                pair.kill(victim)
                answer = stream.read()
            again = client.generate("Once upon a time", seed=answer.accepted.seed, **told).read()
            assert answer.choices[0] == again.choices[0]
        return bool(pair.processes("router")[0]["pid"] != victim["pid"])

    until_it_comes_about(broke_off, "a router that was killed in mid-stream")
