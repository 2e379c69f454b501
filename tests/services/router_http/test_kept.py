"""Streams that are kept: by their ids, and by an idempotency key."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from batonlm.core.admission.tenants import Tenant
from batonlm.core.errors import Overloaded, Unavailable
from batonlm.core.request.request import Accepted, Delta, Event, Request, TextPrompt
from batonlm.router.api.http.access import HttpAccess
from batonlm.router.api.http.server import HttpServer, serve_http
from batonlm.router.request import kept as kept_streams
from batonlm.router.request.kept import ENTRY_BYTES
from batonlm.router.request.pipeline import EventStream
from tests.services.router_http.scripted import Scripted, http_app, whole_answer
from tests.services.router_http.test_resuming import (
    BODIES,
    COMPLETION,
    Named,
    gathered,
    stream,
)

ALWAYS_S = 3600.0
"""Nothing that these tests keep is forgotten by its age."""
BODY = {"prompt": "abc", "max_tokens": 9}


@pytest.fixture(autouse=True)
def keep(frontend: Scripted) -> None:
    frontend.keep(kept_s=ALWAYS_S)


async def send(
    http: httpx.AsyncClient, key: str, body: dict[str, Any] = BODY, **headers: str
) -> httpx.Response:
    return await http.post(COMPLETION, json=body, headers={"idempotency-key": key, **headers})


def events_of(text: str) -> list[tuple[str, str]]:
    found = []
    for event in text.split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in event.split("\n"))
        found.append((fields.get("id", ""), fields["data"]))
    return found


async def get(http: httpx.AsyncClient, stream_id: str, last: str = "") -> list[tuple[str, str]]:
    headers = {"last-event-id": last} if last else {}
    response = await http.get(f"/v1/streams/{stream_id}", headers=headers)
    assert response.status_code == 200, response.text
    return events_of(response.text)


@pytest.mark.parametrize("streams", [False, True])
async def test_the_same_key_runs_once(
    http: httpx.AsyncClient, frontend: Scripted, *, streams: bool
) -> None:
    frontend.hold = True
    body = BODY | {"stream": streams, "prompt": ["abc", "d"]}
    first = asyncio.create_task(send(http, "k", body))
    await frontend.started.wait()
    second = asyncio.create_task(send(http, '"k"', body))
    frontend.release.set()
    one, other = await first, await second
    assert len(frontend.seen) == 2, "one of each prompt"
    assert one.status_code == other.status_code == 200
    if streams:
        told = [gathered([data for _, data in events_of(each.text)]) for each in (one, other)]
        assert told[0][0] == told[1][0]
    else:
        assert one.json()["choices"] == other.json()["choices"]
    for name in ("x-request-id", "x-baton-request-id", "x-baton-seed"):
        assert one.headers[name] == other.headers[name]
    assert one.headers["x-request-id"] != one.headers["x-baton-request-id"]


async def test_an_answer_can_be_streamed_where_it_was_not(
    http: httpx.AsyncClient, frontend: Scripted
) -> None:
    whole = (await send(http, "k")).json()["choices"][0]["text"]
    later = await send(http, "k", BODY | {"stream": True}, **{"x-baton-resume": "1"})
    choices, _ = gathered([data for _, data in events_of(later.text)])
    assert choices[0]["text"] == whole
    assert len(frontend.seen) == 1


async def test_another_request_under_a_key_is_refused(
    http: httpx.AsyncClient, frontend: Scripted
) -> None:
    await send(http, "k")
    refused = await send(http, "k", BODY | {"max_tokens": 8})
    assert refused.status_code == 422
    assert refused.json()["error"]["code"] == "idempotency_key_reused"
    assert refused.json()["error"]["message"].startswith("Idempotency-Key was")
    assert (await send(http, "other", BODY | {"max_tokens": 8})).status_code == 200
    assert len(frontend.seen) == 2


@pytest.mark.parametrize("key", ["", '""', "k" * 256, "é".encode("latin-1")])
async def test_a_key_has_a_form(http: httpx.AsyncClient, frontend: Scripted, key: str) -> None:
    response = await send(http, key)
    assert response.status_code == 400 and not frontend.seen
    assert response.json()["error"]["param"] == "Idempotency-Key"


async def test_a_failure_is_not_kept(http: httpx.AsyncClient, frontend: Scripted) -> None:
    frontend.failure = Unavailable("no worker is ready")
    assert (await send(http, "k")).status_code == 503
    frontend.failure, frontend.refusal = None, Overloaded("full")
    assert (await send(http, "k")).status_code == 429
    frontend.refusal = None
    assert (await send(http, "k")).status_code == 200
    assert len(frontend.seen) == 3


async def test_the_client_comes_back(http: httpx.AsyncClient, frontend: Scripted) -> None:
    """Its connection breaks while the request runs."""
    frontend.hold = True
    headers = {"x-baton-resume": "1"}
    lines: list[str] = []
    async with http.stream(
        "POST", COMPLETION, json=BODY | {"stream": True}, headers=headers
    ) as response:
        async for line in response.aiter_lines():
            lines.append(line)
            if not line:
                break
    known = events_of("\n".join([*lines, ""]))
    ((last_id, _),) = known
    stream_id = last_id.partition(".")[0]
    reading = asyncio.create_task(get(http, stream_id, last_id))
    frontend.release.set()
    rest = await reading
    whole = await get(http, f"cmpl-{stream_id}")
    assert known + rest == whole and whole[-1][1] == "[DONE]"
    assert len(frontend.seen) == 1


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_the_rest_is_there_for_a_while(
    http: httpx.AsyncClient, frontend: Scripted, path: str, body: dict[str, Any]
) -> None:
    whole = await stream(http, path, body, x_baton_resume="1")
    stream_id = whole[0][0].partition(".")[0]
    assert await get(http, stream_id) == whole
    for count in range(1, len(whole)):
        last = whole[count - 1][0]
        assert whole[:count] + await get(http, stream_id, last) == whole
        # The request itself is answered by what is kept, too.
        assert whole[:count] + await stream(http, path, body, last_event_id=last) == whole
    assert len(frontend.seen) == 1


async def test_another_body_runs(http: httpx.AsyncClient, frontend: Scripted) -> None:
    whole = await stream(http, COMPLETION, {"prompt": "abc"}, x_baton_resume="1")
    rest = await stream(http, COMPLETION, {"prompt": "other"}, last_event_id=whole[2][0])
    assert json.loads(rest[-1][1])["error"]["param"] == "Last-Event-ID"
    assert len(frontend.seen) == 2


@pytest.mark.parametrize("streams", [False, True])
async def test_what_has_a_key_can_be_read_by_its_id(
    http: httpx.AsyncClient, frontend: Scripted, *, streams: bool
) -> None:
    frontend.hold = True
    running = asyncio.create_task(send(http, "k", BODY | {"stream": streams}))
    await frontend.started.wait()
    reading = asyncio.create_task(get(http, frontend.seen[0].keyed_stream_id))
    frontend.release.set()
    begun, whole = await running, await reading
    stream_id = begun.headers["x-request-id"]
    assert whole == await get(http, stream_id)
    choices, _ = gathered([data for _, data in whole])
    if streams:
        assert choices == gathered([data for _, data in events_of(begun.text)])[0]
    else:
        assert choices[0]["text"] == begun.json()["choices"][0]["text"]
    for count in range(1, len(whole) - 1):
        assert whole[:count] + await get(http, stream_id, whole[count - 1][0]) == whole
    assert len(frontend.seen) == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETION, {"prompt": ["abc", "d"], "max_tokens": 9}),
        ("/v1/messages", {"max_tokens": 9, "messages": [{"role": "user", "content": "ab"}]}),
        ("/api/generate", {"prompt": "ab", "stream": False}),
    ],
)
async def test_without_ids_of_events_it_is_read_from_its_beginning(
    http: httpx.AsyncClient, frontend: Scripted, path: str, body: dict[str, Any]
) -> None:
    """In the form of its route."""
    key = {"idempotency-key": "k"}
    begun = await http.post(path, json=body, headers=key)
    url = f"/v1/streams/{begun.headers['x-request-id']}"
    shown = await http.get(url)
    streamed = await http.post(path, json=body | {"stream": True}, headers=key)
    assert shown.status_code == 200
    # Two prompts' parts have no order among each other, and some answers say when they were made.
    parts = [
        sorted(re.sub(r'"created(_at)?":[^,]*', "", each.text).splitlines())
        for each in (shown, streamed)
    ]
    assert parts[0] == parts[1]
    num_run = len(frontend.seen)
    last = f"{begun.headers['x-request-id']}.00000000.1"
    refused = await http.get(url, headers={"last-event-id": last})
    assert refused.status_code == 400
    assert len(frontend.seen) == num_run == (2 if path == COMPLETION else 1)


async def test_what_cannot_be_streamed_says_so(http: httpx.AsyncClient) -> None:
    begun = await send(http, "k", BODY | {"prompt_logprobs": 1})
    assert begun.status_code == 200
    shown = await http.get(f"/v1/streams/{begun.headers['x-request-id']}")
    assert (shown.status_code, shown.json()["error"]["param"]) == (400, "prompt_logprobs")


async def test_what_is_not_here_says_what_to_do(
    http: httpx.AsyncClient, frontend: Scripted
) -> None:
    plain = await http.post(COMPLETION, json=BODY | {"stream": True})
    for stream_id in ("0" * 32, plain.headers["x-request-id"]):
        missing = await http.get(f"/v1/streams/{stream_id}")
        assert missing.status_code == 404
        assert "Last-Event-ID" in missing.json()["error"]["message"]


async def test_it_is_the_tenants_own(frontend: Scripted) -> None:
    app = http_app(frontend, CollectorRegistry(), HttpAccess(Named()))
    server: HttpServer = await serve_http(app, "127.0.0.1:0")
    try:
        base = f"http://{server.address}"
        async with httpx.AsyncClient(base_url=base, timeout=120, trust_env=False) as client:
            owner: dict[str, Any] = {"authorization": "Bearer a"}
            thief: dict[str, Any] = {"authorization": "Bearer b"}
            whole = await stream(client, COMPLETION, BODY, x_baton_resume="1", **owner)
            last = whole[1][0]
            url = f"/v1/streams/{last.partition('.')[0]}"
            assert (await client.get(url, headers=thief)).status_code == 404
            found = await client.get(url, headers=owner | {"last-event-id": last})
            assert whole[:2] + events_of(found.text) == whole
            another = await stream(client, COMPLETION, BODY, x_baton_resume="1", **owner)
            wrong = await client.get(url, headers=owner | {"last-event-id": another[1][0]})
            assert wrong.status_code == 400
            one = await send(client, "k", **owner)
            other = await send(client, "k", BODY | {"max_tokens": 8}, **thief)
            assert one.status_code == other.status_code == 200
    finally:
        await server.close()


async def test_a_tenant_keeps_so_many(http: httpx.AsyncClient, frontend: Scripted) -> None:
    frontend.keep(kept_s=ALWAYS_S, most_of_tenant=1)
    ended = await stream(http, COMPLETION, BODY, x_baton_resume="1")
    frontend.hold = True
    running = asyncio.create_task(send(http, "k"))
    await until_seen(frontend, 2)
    assert (await http.get(f"/v1/streams/{ended[0][0].partition('.')[0]}")).status_code == 404
    assert (await send(http, "other")).status_code == 429
    frontend.release.set()
    # A stream is run without being kept.
    rest = await stream(http, COMPLETION, BODY, last_event_id=ended[2][0])
    assert ended[:3] + rest == ended
    assert (await running).status_code == 200
    assert (await send(http, "other")).status_code == 200


async def test_those_that_begin_at_once_are_counted(frontend: Scripted) -> None:
    """None has an id before it has workers."""
    frontend.keep(kept_s=ALWAYS_S, most_of_tenant=2)
    frontend.hold = True
    request = Request(TextPrompt("abc"), max_tokens=9, resumable=True)
    kept = frontend.kept
    streams = await asyncio.gather(*(kept.open(request) for _ in range(5)))
    ids = [accepted_id(await anext(opened)) for opened in streams]
    assert sum(kept.find(request.tenant, each) is not None for each in ids) == 2
    # One that is not kept ends with its reader.
    for opened in streams:
        await opened.aclose()
    assert frontend.open_streams == 2
    frontend.release.set()
    await asyncio.wait(frontend.tasks, timeout=120)


def accepted_id(event: Event) -> str:
    assert isinstance(event, Accepted)
    return event.request_id


async def test_a_router_that_leaves_waits_for_no_reader(frontend: Scripted) -> None:
    frontend.hold = True
    kept = frontend.kept
    request = Request(TextPrompt("abc"), max_tokens=9, resumable=True)
    left, read = [await kept.open(request) for _ in range(2)]
    assert accepted_id(await anext(left)) != accepted_id(await anext(read))
    await left.aclose()
    assert frontend.open_streams == 2, "its client may come back"
    kept.drain()
    await asyncio.wait_for(frontend.closed.wait(), 120)
    assert frontend.open_streams == 1, "the other one is read"
    await read.aclose()
    assert frontend.open_streams == 0 and not frontend.tasks


async def test_what_is_too_long_is_not_kept(http: httpx.AsyncClient, frontend: Scripted) -> None:
    frontend.keep(kept_s=ALWAYS_S, most_entries=0)
    frontend.hold = True
    running = asyncio.create_task(send(http, "k"))
    await frontend.started.wait()
    again = await send(http, "k")
    assert again.status_code == 409
    assert again.json()["error"]["code"] == "idempotency_key_in_use"
    frontend.release.set()
    assert (await running).status_code == 200
    async with asyncio.timeout(120):
        # The first call ends a moment after its client has its answer.
        while (later := await send(http, "k")).status_code == 409:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
    assert later.status_code == 200, "it does not run any more"


async def test_prompts_take_room_too(http: httpx.AsyncClient, frontend: Scripted) -> None:
    frontend.keep(kept_s=ALWAYS_S, most_entries=4000 // ENTRY_BYTES + 5)
    urls = []
    for letter in "ab":
        body = {"prompt": letter * 4000, "max_tokens": 1}
        whole = await stream(http, COMPLETION, body, x_baton_resume="1")
        urls.append(f"/v1/streams/{whole[0][0].partition('.')[0]}")
        assert (await http.get(urls[-1])).status_code == 200
    assert (await http.get(urls[0])).status_code == 404


def of_tenant(name: str, **fields: Any) -> Request:
    request = Request(TextPrompt("abc"), max_tokens=30, resumable=True, tenant=Tenant(name))
    return replace(request, **fields)


async def read(opened: EventStream) -> str:
    """The text of what is left of a stream."""
    return "".join([event.text async for event in opened if isinstance(event, Delta)])


async def test_who_holds_most_loses_something_first(frontend: Scripted) -> None:
    """One tenant does not push out what others have."""
    frontend.keep(kept_s=ALWAYS_S, most_entries=4 * len(whole_answer("abc", 0).encode()))
    found: dict[str, list[str]] = {"small": [], "large": []}
    for name in ("small", "large", "large", "large", "large"):
        opened = await frontend.kept.open(of_tenant(name))
        found[name].append(accepted_id(await anext(opened)))
        assert await read(opened)
        await opened.aclose()
    here = {
        name: [frontend.kept.find(Tenant(name), each) is not None for each in ids]
        for name, ids in found.items()
    }
    assert here == {"small": [True], "large": [False, True, True, True]}
    frontend.kept.close()


async def test_a_stream_has_so_many_readers(frontend: Scripted) -> None:
    frontend.keep(kept_s=ALWAYS_S, most_readers=3, most_readers_of_tenant=4)
    frontend.hold = True
    kept = frontend.kept
    keyed = [of_tenant("a", keyed_stream_id=f"{each:032}") for each in range(3)]
    opened = [await kept.open(keyed[0]) for _ in range(3)]
    with pytest.raises(Overloaded, match="this stream"):
        await kept.open(keyed[0])
    opened.append(await kept.open(keyed[1]))
    with pytest.raises(Overloaded, match="streams that are kept"):
        await kept.open(keyed[1])
    # Who begins a stream is no further reader, and others have bounds of their own.
    opened.append(await kept.open(keyed[2]))
    opened.append(await kept.open(of_tenant("b", keyed_stream_id="1" * 32)))
    await opened.pop(0).aclose()
    await opened.pop(0).aclose()
    opened.append(await kept.open(keyed[0]))
    frontend.release.set()
    for each in opened:
        assert await read(each) == whole_answer("abc", 0)
        await each.aclose()
    kept.close()


async def test_a_slow_reader_is_not_let_down_while_there_is_room(frontend: Scripted) -> None:
    frontend.keep(kept_s=0.01)
    kept = frontend.kept
    opened = await kept.open(of_tenant("a"))
    stream_id = accepted_id(await anext(opened))
    await asyncio.wait(frontend.tasks, timeout=120)
    await asyncio.sleep(0.05)
    assert await read(opened) == whole_answer("abc", 0), "long after its end"
    await opened.aclose()
    async with asyncio.timeout(120):
        while kept.find(Tenant("a"), stream_id):  # noqa: ASYNC110 (a timer)
            await asyncio.sleep(0.002)


async def test_who_reads_what_is_not_kept_too_slowly_is_told(
    frontend: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_streams, "MAX_BEHIND", 5)
    frontend.keep(kept_s=ALWAYS_S, most_entries=6)
    slow = await frontend.kept.open(of_tenant("a"))
    await asyncio.wait(frontend.tasks, timeout=120)
    with pytest.raises(Overloaded, match="too slowly"):
        await read(slow)
    await slow.aclose()


async def test_a_run_that_is_not_kept_waits_for_its_readers(
    frontend: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_streams, "MAX_BEHIND", 3)
    frontend.keep(kept_s=ALWAYS_S, most_entries=0)
    opened = await frontend.kept.open(of_tenant("a"))
    done, _ = await asyncio.wait(frontend.tasks, timeout=0.2)
    assert not done and frontend.open_streams == 1
    assert await read(opened) == whole_answer("abc", 0)
    await opened.aclose()
    assert frontend.open_streams == 0


async def test_a_client_that_does_not_come_back_says_so(
    http: httpx.AsyncClient, frontend: Scripted
) -> None:
    frontend.hold = True
    first = asyncio.create_task(send(http, "k"))
    await frontend.started.wait()
    stream_id = frontend.seen[0].keyed_stream_id
    second = asyncio.create_task(get(http, stream_id))
    kept = frontend.kept.find(frontend.seen[0].tenant, stream_id)
    assert kept is not None
    async with asyncio.timeout(120):
        while len(kept.readers) < 2:  # noqa: ASYNC110 (a request)
            await asyncio.sleep(0.002)
    left = await http.delete(f"/v1/streams/cmpl-{stream_id}")
    assert (left.status_code, left.content) == (204, b"")
    first.cancel()
    async with asyncio.timeout(120):
        while len(kept.readers) > 1:  # noqa: ASYNC110 (a request)
            await asyncio.sleep(0.002)
    assert frontend.open_streams == 1, "it is still read"
    second.cancel()
    await asyncio.wait_for(frontend.closed.wait(), 120)
    assert frontend.open_streams == 0
    frontend.release.set()
    whole = await stream(http, COMPLETION, BODY, x_baton_resume="1")
    url = f"/v1/streams/{whole[0][0].partition('.')[0]}"
    assert (await http.get(url)).status_code == 200
    assert (await http.delete(url)).status_code == 204
    assert (await http.get(url)).status_code == 404
    refused = await http.put(url)
    assert set(refused.headers["allow"].split(", ")) == {"DELETE", "GET", "HEAD"}
    assert (await http.delete(url)).status_code == 204


@pytest.mark.parametrize("kept_s", [0.0, 0.01])
async def test_what_nobody_reads_ends(
    http: httpx.AsyncClient, frontend: Scripted, kept_s: float
) -> None:
    frontend.keep(kept_s=kept_s)
    frontend.hold = True
    leaving = asyncio.create_task(send(http, "k"))
    await frontend.started.wait()
    leaving.cancel()
    await asyncio.wait_for(frontend.closed.wait(), 120)
    assert frontend.open_streams == 0


async def until_seen(frontend: Scripted, count: int) -> None:
    async with asyncio.timeout(120):
        while len(frontend.seen) < count:  # noqa: ASYNC110 (it changes elsewhere)
            await asyncio.sleep(0.002)


PAGE = Path(__file__).parents[3] / "docs" / "http.md"


def program(section: str, server: HttpServer) -> str:
    """The Python program of a section of the docs."""
    text = PAGE.read_text().partition(f"\n## {section}\n")[2].partition("```python\n")[2]
    return text.partition("```")[0].replace("http://127.0.0.1:8000", f"http://{server.address}")


async def run(program: str, **known: Any) -> dict[str, Any]:
    await asyncio.to_thread(exec, program, known)
    return known


async def test_the_programs_of_the_docs(
    http: httpx.AsyncClient, server: HttpServer, frontend: Scripted
) -> None:
    path, body = BODIES[0]
    whole = await stream(http, path, body, x_baton_resume="1")
    first = whole[1][0]
    found = await run(
        program("What is still here", server), stream_id=first.partition(".")[0], event_id=first
    )
    assert found["text"] == whole_answer("<user>hello", 0)[1:]
    assert len(frontend.seen) == 1
    frontend.failure = Unavailable("no worker is ready")
    frontend.closed.clear()
    asking = asyncio.create_task(run(program("Idempotency-Key", server), **body))
    await asyncio.wait_for(frontend.closed.wait(), 120)
    frontend.failure = None
    answer = (await asking)["answer"]
    assert answer.choices[0].message.content == whole_answer("<user>hello", 0)
    assert len({request.keyed_stream_id for request in frontend.seen[1:]}) == 1
