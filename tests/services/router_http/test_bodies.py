"""Bodies are received as far as there is room for them, by tenants' shares; and what is wrong with
a request counts. The application is called as a server calls it, without sockets."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from starlette.routing import Route

from batonlm.core.admission.admission import Admission, AdmissionLimits, FleetState
from batonlm.core.admission.fair_queue import DrainRate, FairQueue
from batonlm.core.admission.tenants import ANYONE, Tenant
from batonlm.router.api.access import OpenAuthenticator
from batonlm.router.api.http import body as bodies
from batonlm.router.api.http.access import HttpAccess
from batonlm.router.api.http.app import HttpApp
from batonlm.rpc.address import AllowedHosts
from tests.services.router_http.scripted import Scripted, http_app

KIB = 1 << 10
MOST = 256 * KIB


class NamedAuthenticator:
    """Everybody is whom they say they are."""

    def authenticate(self, authorization: Sequence[str]) -> Tenant:
        name, _, rate = "".join(authorization).partition(" ")
        return Tenant(name, requests_per_minute=int(rate) if rate else None) if name else ANYONE

    async def run(self) -> None:
        return


@dataclass
class Client:
    """One request. parts: of the body, each sent when it is asked for; `stays`: the client then
    sends nothing more, and stays. num_read: parts that were asked for. began: its answer has begun
    to come; taking: and is taken.
    """

    who: str = "a"
    path: str = "/v1/completions"
    parts: list[bytes] = field(default_factory=lambda: [b'{"prompt":"hi"}'])
    headers: dict[str, str] = field(default_factory=dict)
    address: str = "10.0.0.1"
    stays: bool = False
    leaves: bool = False
    declared: bool = True
    num_read: int = 0
    status: int = 0
    answer: bytes = b""
    told: dict[bytes, bytes] = field(default_factory=dict)
    began: asyncio.Event = field(default_factory=asyncio.Event)
    taking: asyncio.Event = field(default_factory=asyncio.Event)

    async def ask(self, app: HttpApp) -> int:
        self.taking.set()
        await app(self.scope(), self.receive, self.send)
        return self.status

    def scope(self) -> dict[str, Any]:
        headers = {"content-type": "application/json", **self.headers}
        if self.who:
            headers["authorization"] = self.who
        if self.declared:
            headers.setdefault("content-length", str(sum(map(len, self.parts))))
        return {
            "type": "http",
            "method": "POST",
            "path": self.path,
            "query_string": b"",
            "client": (self.address, 5000),
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        }

    async def receive(self) -> dict[str, Any]:
        if self.num_read < len(self.parts):
            self.num_read += 1
            more = self.num_read < len(self.parts) or self.stays or self.leaves
            body = self.parts[self.num_read - 1]
            return {"type": "http.request", "body": body, "more_body": more}
        if self.leaves:
            return {"type": "http.disconnect"}
        await asyncio.get_running_loop().create_future()
        raise AssertionError("nothing comes here")

    async def send(self, message: Any) -> None:
        self.began.set()
        await self.taking.wait()
        if message["type"] == "http.response.start":
            self.status, self.told = message["status"], dict(message["headers"])
        self.answer += message.get("body", b"")


@dataclass
class World:
    frontend: Scripted
    app: HttpApp

    @property
    def held(self) -> int:
        return self.frontend.admission.input_bytes.total


@pytest.fixture
def world() -> World:
    limits = AdmissionLimits(10_000, 0, 10.0, max_input_bytes=MOST)
    queue: FairQueue[Any] = FairQueue(max_tokens=1 << 20, max_entries=1024)
    frontend = Scripted(admission=Admission(limits, queue, DrainRate(), lambda: 0.0))
    authenticator = HttpAccess(NamedAuthenticator())
    return World(frontend, http_app(frontend, CollectorRegistry(), authenticator))


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def sending(world: World, count: int, **what: Any) -> list[asyncio.Task[int]]:
    """Requests of 16 KiB whose bodies do not end."""
    what = {"headers": {"content-length": str(16 * KIB)}, "parts": [b" "], "stays": True, **what}
    tasks = [asyncio.create_task(Client(**what).ask(world.app)) for _ in range(count)]
    await settled()
    return tasks


async def end(tasks: list[asyncio.Task[int]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_bodies_that_come_have_room_before_they_are_read(world: World) -> None:
    flood = await sending(world, 8)
    assert world.held == MOST // 2
    refused = Client(parts=[b"x" * KIB] * 8)
    assert await refused.ask(world.app) == 429
    assert int(refused.told[b"retry-after"]) >= 1
    assert json.loads(refused.answer)["error"]["code"] == "overloaded"
    assert refused.num_read == 8, "it was taken, so that the answer arrives, and not kept"
    assert world.held == MOST // 2
    for size in (1, 2 * KIB):
        polite = Client("b", parts=[b'{"prompt":"%s"}' % (b"x" * size)])
        assert await polite.ask(world.app) == 200
    await end(flood)
    assert world.held == 0
    assert await Client().ask(world.app) == 200


@pytest.mark.parametrize(("path", "status"), [("/nowhere", 404), ("/v1/models", 405)])
async def test_a_body_that_no_route_takes_is_read_too(world: World, path: str, status: int) -> None:
    """Else the connection is reset, and the answer with it."""
    astray = Client(path=path, parts=[b"x" * KIB] * 8)
    assert await astray.ask(world.app) == status
    assert astray.num_read == 8
    assert world.held == 0


async def test_who_awaits_an_invitation_is_refused_without_one(world: World) -> None:
    flood = await sending(world, 8)
    refused = Client(headers={"expect": "100-continue"})
    assert await refused.ask(world.app) == 429
    assert refused.num_read == 0
    await end(flood)


async def test_a_body_without_a_length_takes_room_as_it_comes(world: World) -> None:
    part = b" " * (4 * KIB)
    flood = await sending(world, 4, headers={}, parts=[part] * 7, declared=False)
    assert world.held == 4 * 7 * len(part)
    refused = Client(parts=[part] * 10, declared=False)
    assert await refused.ask(world.app) == 429
    assert refused.num_read == 10
    assert world.held == 4 * 7 * len(part)
    assert await Client("b", declared=False).ask(world.app) == 200
    await end(flood)
    assert world.held == 0


async def test_callers_without_keys_share_by_their_addresses(world: World) -> None:
    flood = await sending(world, 8, who="", address="10.0.0.1")
    assert await Client("", address="10.0.0.1").ask(world.app) == 429
    assert await Client("", address="10.0.0.2").ask(world.app) == 200
    flood += await sending(world, 8, who="", address="2001:db8::1")
    assert await Client("", address="2001:db8::ffff").ask(world.app) == 429
    assert await Client("", address="::ffff:10.0.0.3").ask(world.app) == 200
    await end(flood)


ENDS = {
    "answered": Client(),
    "answered in several parts": Client(parts=[b'{"prompt":', b'["a","b","c"]}']),
    "not json": Client(parts=[b"{"]),
    "not valid": Client(parts=[b'{"prompt":""}']),
    "another type": Client(headers={"content-type": "text/plain"}),
    "too large": Client(headers={"content-length": str(2 << 20)}),
    "too large, and it did not say": Client(parts=[b" " * (1 << 20), b" "], declared=False),
    "gone": Client(leaves=True),
    "tokenized": Client(path="/tokenize", parts=[b'{"prompt":"hi","return_token_strs":true}']),
    "detokenized": Client(path="/detokenize", parts=[b'{"tokens":[97]}']),
    "nothing to tokenize": Client(path="/tokenize", parts=[b"{}"]),
}


@pytest.mark.parametrize("name", ENDS)
async def test_room_is_given_back_however_it_ends(world: World, name: str) -> None:
    one = ENDS[name]
    one.num_read, one.began, one.taking = 0, asyncio.Event(), asyncio.Event()
    await one.ask(world.app)
    assert world.held == 0
    well = name.startswith(("answered", "tokenized", "detokenized"))
    assert (one.status == 200) is well
    assert world.frontend.faults == ([] if well else ["a"])


async def test_nothing_is_kept_of_one_who_leaves_while_its_host_is_refused(world: World) -> None:
    access = HttpAccess(OpenAuthenticator(), hosts=AllowedHosts("127.0.0.1:80"))
    app = http_app(world.frontend, CollectorRegistry(), access)
    client = Client("", headers={"host": "evil.example"}, leaves=True)
    await client.ask(app)
    assert client.num_read == 1 and not client.status
    gone = weakref.ref(client)
    del client
    gc.collect()
    assert gone() is None


async def test_the_room_of_a_body_is_given_back_when_its_prompt_is_encoded(world: World) -> None:
    """And not when its answer ends."""
    world.frontend.hold = True
    one = asyncio.create_task(Client(parts=[b'{"prompt":["a","b"],"stream":true}']).ask(world.app))
    await world.frontend.started.wait()
    await settled()
    assert world.held == 0
    await end([one])


async def test_an_answer_that_is_larger_than_its_request_is_held_until_it_has_left(
    world: World,
) -> None:
    text = "x" * (8 * KIB)
    one = Client(path="/tokenize", parts=[json.dumps({"prompt": text}).encode()])
    asked = asyncio.create_task(world.app(one.scope(), one.receive, one.send))
    await settled()
    await one.began.wait()
    assert world.held > 3 * len(text)
    assert one.answer == b"", "its client takes nothing yet"
    one.taking.set()
    await asked
    assert json.loads(one.answer)["tokens"] == [ord("x")] * len(text)
    assert world.held == 0


async def test_an_answer_that_there_is_no_room_for_is_refused(world: World) -> None:
    asked = {"prompt": "x" * (24 * KIB), "return_token_strs": True}
    one = Client(path="/tokenize", parts=[json.dumps(asked).encode()])
    assert await one.ask(world.app) == 429
    assert world.held == 0


async def test_every_route_that_takes_a_body_counts_requests(world: World) -> None:
    paths = {
        route.path
        for route in world.app.routes
        if isinstance(route, Route)
        and "POST" in (route.methods or ())
        # The others take bodies of other types, or are refused to all but operators.
        and not route.path.startswith("/baton.v1.")
        and not route.path.endswith("_lora_adapter")
    }
    assert {"/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"} <= paths
    for path in paths:
        tenant = Tenant(path, requests_per_minute=6)
        world.frontend.admission.fault(tenant, FleetState(), 0.0)
        one = Client(f"{path} 6", path)
        assert await one.ask(world.app) == 429, path


async def test_refused_bodies_are_taken_no_faster_than_all_together_may_be(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    flood = await sending(world, 8)
    waited: list[float] = []
    sleep = asyncio.sleep

    async def noted(seconds: float) -> None:
        waited.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", noted)
    size, clock = 64 * KIB, asyncio.get_running_loop().time
    began = clock()
    for _ in range(4):
        assert await Client(parts=[b"x" * size] * 16).ask(world.app) == 429
    # Time that passed meanwhile is time in which bytes may be taken.
    elapsed_s = clock() - began
    longest_s = (4 * 16 * size - bodies.AT_ONCE_BYTES) / bodies.DISCARDED_BYTES_PER_S
    assert longest_s - elapsed_s <= max(waited, default=0.0) <= longest_s + 1e-6
    monkeypatch.undo()
    await end(flood)
