"""Any bytes sent to the HTTP port get a client error or a valid answer, on every route."""

from __future__ import annotations

import json
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from starlette.routing import Route

from batonlm.router.api.http.anthropic import CountTokensBody, MessagesBody
from batonlm.router.api.http.ollama import OllamaBody, OllamaChatBody, OllamaGenerateBody
from batonlm.router.api.http.openai_responses import ResponsesBody
from batonlm.router.api.http.schema import ChatBody, CompletionBody, GenerationBody
from batonlm.rpc.address import split
from tests.fuzz import oracle
from tests.fuzz.http_bodies import bodies
from tests.fuzz.http_requests import Answer, Sent, exchange, requests
from tests.fuzz.runs import fuzz
from tests.fuzz.target import Target
from tests.services.router_http.scripted import ANYONE, Scripted, http_app

INPUTS = 500
SLOW_INPUTS = 20_000
VALID = 200
BASES = (GenerationBody, CountTokensBody, OllamaBody)


def paths() -> tuple[str, ...]:
    """Every route of the application, with something in place of its parameters."""
    app = http_app(Scripted(), CollectorRegistry(), ANYONE)
    found = [route.path for route in app.routes if isinstance(route, Route)]
    assert "/v1/chat/completions" in found
    return tuple(
        path.replace("{model:path}", "baton-tiny").replace("{", "").replace("}", "")
        for path in found
    )


def kinds(
    kind: type[GenerationBody | CountTokensBody | OllamaBody] = GenerationBody,
) -> Iterator[type[msgspec.Struct]]:
    for one in kind.__subclasses__():
        yield one
        yield from kinds(one)


@pytest.mark.deep
def test_the_http_port(target: Target) -> None:
    _fuzz(target, INPUTS, fixed=True)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_http_port_at_length(real_target: Target) -> None:
    _fuzz(real_target, SLOW_INPUTS, fixed=False)


def test_every_kind_of_body_is_known() -> None:
    assert set(kinds()) == {ChatBody, CompletionBody}
    assert set(kinds(CountTokensBody)) == {MessagesBody}
    assert set(kinds(OllamaBody)) == {OllamaChatBody, OllamaGenerateBody}


def _fuzz(target: Target, count: int, *, fixed: bool) -> None:
    address = split(target.relay.http.removeprefix("http://"), "http")
    inputs = requests(
        paths(),
        st.one_of([bodies(kind) for base in BASES for kind in kinds(base)])
        | bodies(ResponsesBody)
        | st.binary(max_size=30),
    )

    def one(sent: Sent) -> None:
        answers = exchange(address, sent)
        assert answers or not sent.whole, "cut without an answer"
        for answer in answers:
            check(answer)

    fuzz(inputs, count, one, fixed=fixed)
    target.check()


def check(answer: Answer) -> None:
    assert answer.status in (100, VALID) or 400 <= answer.status < 500, answer
    for name, value in answer.headers:
        oracle.check_text(f"{name}: {value}")
    if answer.status >= 400 and answer.body:
        body = json.loads(answer.body)
        error = body.get("error", body)  # Connect's errors are not within another object.
        # Those of Ollama are a text.
        text = error if isinstance(error, str) else error["message"]
        assert text
        oracle.check_text(text)
