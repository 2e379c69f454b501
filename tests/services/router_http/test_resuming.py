"""Streams with ids of events: one router begins them, another goes on after any event."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from batonlm.core.admission.tenants import Tenant
from batonlm.core.errors import Unavailable
from batonlm.router.api.http.access import HttpAccess
from batonlm.router.api.http.server import HttpServer, serve_http
from tests.services.router_http.scripted import ANYONE, Scripted, http_app, whole_answer

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
HELLO: Any = [{"role": "user", "content": "hello"}]
PROMPT = "<user>hello"
CREATED = re.compile(r'"created":[0-9]+')
BODIES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": HELLO}),
    (CHAT, {"messages": HELLO, "n": 2, "stream_options": {"include_usage": True}}),
    (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 1, "return_token_ids": True}),
    (COMPLETION, {"prompt": "héllo", "n": 2, "max_tokens": 9, "logprobs": 1}),
    (COMPLETION, {"prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": 30}),
    (
        COMPLETION,
        {"prompt": "abc", "stop": "cb", "return_token_ids": True}
        | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
]


class Named:
    """Takes a key for the name of its tenant."""

    def authenticate(self, authorization: Any) -> Tenant:
        return Tenant(name=authorization[0].removeprefix("Bearer "))

    async def run(self) -> None:
        return


@pytest.fixture
def second() -> Scripted:
    """Another router, which cuts the same text into other pieces."""
    return Scripted(together=3)


@pytest.fixture
async def other(second: Scripted) -> AsyncIterator[httpx.AsyncClient]:
    async with AsyncExitStack() as closing:
        server = await serve_http(http_app(second, CollectorRegistry(), ANYONE), "127.0.0.1:0")
        closing.push_async_callback(server.close)
        client = httpx.AsyncClient(
            base_url=f"http://{server.address}", timeout=120, trust_env=False
        )
        yield await closing.enter_async_context(client)
        assert second.open_streams == 0


async def stream(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], **headers: str
) -> list[tuple[str, str]]:
    """Each event's id and data."""
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    response = await client.post(path, json={**body, "stream": True}, headers=sent)
    assert response.status_code == 200, response.text
    found = []
    for event in response.text.split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in event.split("\n"))
        found.append((fields.get("id", ""), fields["data"]))
    return found


def gathered(data: list[str]) -> Any:
    """What a client makes of chunks: all that is to be the same whatever the pieces were."""
    choices: dict[int, dict[str, Any]] = {}
    rest: list[Any] = []
    for each in data:
        if each == "[DONE]":
            rest.append(each)
            continue
        chunk = json.loads(each)
        if not chunk["choices"]:
            rest.append(chunk)
            continue
        rest.append({name: chunk[name] for name in ("id", "created", "model", "object")})
        (new,) = chunk["choices"]
        seen = choices.setdefault(new["index"], {"text": "", "lists": {}, "roles": 0})
        delta = new.get("delta", {})
        seen["text"] += new.get("text", "") + (delta.get("content") or "")
        seen["roles"] += "role" in delta
        seen["prompt"] = seen.get("prompt", 0) + ("prompt_token_ids" in new)
        for name in ("finish_reason", "stop_reason"):
            seen[name] = new.get(name) or seen.get(name)
        lists = {"token_ids": new.get("token_ids", []), **(new["logprobs"] or {})}
        for name, values in lists.items():
            seen["lists"].setdefault(name, []).extend(values or [])
    return choices, [each for place, each in enumerate(rest) if each not in rest[:place]]


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_another_router_goes_on_after_any_event(
    http: httpx.AsyncClient, other: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    whole = await stream(http, path, body, x_baton_resume="1")
    assert whole[-1] == ("", "[DONE]") and all(event_id for event_id, _ in whole[:-1])
    assert len({event_id for event_id, _ in whole}) == len(whole)
    data = [each for _, each in whole]
    for count in range(1, len(whole)):
        rest = await stream(other, path, body, last_event_id=whole[count - 1][0])
        assert gathered(data[:count] + [each for _, each in rest]) == gathered(data)
        # It breaks off once more, and the one that began goes on.
        again = await stream(http, path, body, last_event_id=rest[0][0]) if rest[0][0] else rest[1:]
        assert gathered(data[:count] + [rest[0][1]] + [each for _, each in again]) == gathered(data)


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_the_same_pieces_are_the_same_bytes(
    http: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    whole = await stream(http, path, body, x_baton_resume="true")
    for count in range(1, len(whole)):
        rest = await stream(http, path, body, last_event_id=whole[count - 1][0])
        assert whole[:count] + rest == whole


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_a_stream_that_nobody_wants_to_resume_is_as_ever(
    http: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    plain = await stream(http, path, body)
    numbered = await stream(http, path, body, x_baton_resume="1")
    assert not any(event_id for event_id, _ in plain)
    same_id = [each.replace(f"-{1:08x}", f"-{2:032x}") for _, each in plain]
    assert CREATED.sub("", "".join(same_id)) == CREATED.sub("", "".join(d for _, d in numbered))


async def test_headers_of_a_stream_that_goes_on(
    http: httpx.AsyncClient, frontend: Scripted
) -> None:
    path, body = BODIES[0]
    (last, _), *_ = await stream(http, path, body, x_baton_resume="1")
    stream_id = last.partition(".")[0]
    response = await http.post(path, json={**body, "stream": True}, headers={"last-event-id": last})
    assert response.headers["x-request-id"] == stream_id == f"{1:032x}"
    assert response.headers["x-baton-request-id"] == f"{2:032x}"
    first, second = frontend.seen
    assert first.resumable and first.resumes is None
    assert second.resumable and second.resumes is not None
    assert second.resumes.stream_id == stream_id


async def test_a_failure_has_no_id(http: httpx.AsyncClient, frontend: Scripted) -> None:
    frontend.failure = Unavailable("no worker is ready")
    path, body = BODIES[1]
    *_, (last, _), (none, failure) = await stream(http, path, body, x_baton_resume="1")
    assert last and not none and json.loads(failure)["error"]["retryable"]
    frontend.failure = None
    rest = await stream(http, path, body, last_event_id=last)
    assert rest[-1] == ("", "[DONE]")


@pytest.mark.parametrize(
    ("headers", "body", "names"),
    [
        ({"last-event-id": "7"}, {"prompt": "a"}, "Last-Event-ID"),
        ({"last-event-id": ""}, {"prompt": "a"}, "Last-Event-ID"),
        ({"last-event-id": "é".encode("latin-1")}, {"prompt": "a"}, "Last-Event-ID"),
        ({"last-event-id": "7"}, {"prompt": "a", "stream": False}, "Last-Event-ID"),
        ({"last-event-id": "7"}, {"prompt": ["a", "b"]}, "Last-Event-ID"),
        ({"x-baton-resume": "1"}, {"prompt": ["a", "b"]}, "x-baton-resume"),
    ],
)
async def test_what_is_wrong_is_named(
    http: httpx.AsyncClient,
    frontend: Scripted,
    headers: dict[str, Any],
    body: dict[str, Any],
    names: str,
) -> None:
    response = await http.post(COMPLETION, json={"stream": True, **body}, headers=headers)
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["param"] == names and error["message"].startswith(names)
    assert not frontend.seen and frontend.faults


async def test_another_request_is_found_out(http: httpx.AsyncClient) -> None:
    whole = await stream(http, COMPLETION, {"prompt": "abc", "n": 2}, x_baton_resume="1")
    last = whole[len(whole) // 2][0]
    rest = await stream(http, COMPLETION, {"prompt": "other", "n": 2}, last_event_id=last)
    error = json.loads(rest[-1][1])["error"]
    assert error["param"] == "Last-Event-ID" and not error["retryable"]
    assert len(rest) == 1, "nothing of another answer is sent"
    fewer = await http.post(
        COMPLETION, json={"prompt": "abc", "stream": True}, headers={"last-event-id": last}
    )
    assert fewer.status_code == 400 and fewer.json()["error"]["param"] == "Last-Event-ID"


async def test_an_id_is_of_no_use_to_another_tenant(frontend: Scripted) -> None:
    """With another tenant's id there is nothing. Nor would there be with one that he makes of it:
    only his own body is run, with his own tenant."""
    app = http_app(frontend, CollectorRegistry(), HttpAccess(Named()))
    server: HttpServer = await serve_http(app, "127.0.0.1:0")
    try:
        base = f"http://{server.address}"
        async with httpx.AsyncClient(base_url=base, timeout=120, trust_env=False) as client:
            path, body = BODIES[0]
            owner, thief = "Bearer a", "Bearer b"
            whole = await stream(client, path, body, x_baton_resume="1", authorization=owner)
            last = whole[2][0]
            sent = {"last-event-id": last, "authorization": thief}
            refused = await client.post(path, json={**body, "stream": True}, headers=sent)
            error = refused.json()["error"]
            assert refused.status_code == 400 and error["param"] == "Last-Event-ID"
            assert [request.tenant.name for request in frontend.seen] == ["a"]
            rest = await stream(client, path, body, last_event_id=last, authorization=owner)
            assert whole[:3] + rest == whole
    finally:
        await server.close()


async def test_without_a_stream_there_is_nothing_to_resume(http: httpx.AsyncClient) -> None:
    body = {"prompt": "abc"}
    plain = await http.post(COMPLETION, json=body)
    asked = await http.post(COMPLETION, json=body, headers={"x-baton-resume": "1"})
    assert plain.json()["choices"] == asked.json()["choices"]


async def test_the_program_of_the_docs(server: HttpServer, frontend: Scripted) -> None:
    page = (Path(__file__).parents[3] / "docs" / "http.md").read_text()
    program = page.partition("## A stream outlives its router")[2]
    program = program.partition("```python\n")[2].partition("```")[0]
    program = program.replace("http://127.0.0.1:8000", f"http://{server.address}")
    frontend.failure = Unavailable("no worker is ready")
    known: dict[str, Any] = {"messages": HELLO}

    def run() -> None:
        exec(program, known)  # noqa: S102 (it is ours)

    running = asyncio.create_task(asyncio.to_thread(run))
    await asyncio.wait_for(frontend.closed.wait(), 120)
    frontend.failure = None
    await asyncio.wait_for(running, 120)
    begun, *_, last = frontend.seen
    assert begun.resumes is None and last.resumes is not None
    assert known["text"] == whole_answer(PROMPT, 0)
