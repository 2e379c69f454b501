"""`baton explain` against routers that know a request, do not, or are not there."""

from __future__ import annotations

import asyncio
import json
from io import StringIO
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry
from rich.console import Console

from batonlm.cli.access import Access
from batonlm.cli.explain import everyone, show
from batonlm.cli.http_client import HttpClient
from batonlm.cli.main import main
from batonlm.core.errors import Unavailable
from batonlm.core.observe.request_record import ChoiceEnd, PrefixRecord, RequestRecord
from batonlm.core.observe.stages import Stage
from batonlm.core.request.attempt import Phase
from batonlm.core.request.model import WorkerIdentity
from batonlm.core.request.request import FinishReason
from batonlm.core.routing.routing import Candidate, Cost, FilterReason
from batonlm.router.api.http.answer_schema import Explained
from batonlm.router.api.http.explain import explained
from batonlm.router.api.http.server import HttpServer, serve_http
from tests.core.test_request_history import attempt, over, record
from tests.services.router_http.scripted import ANYONE, Scripted, http_app

PREFILL = WorkerIdentity("prefill", "p" * 32, "10.0.0.1:5")
DECODE = WorkerIdentity("decode", "d" * 32, "10.0.0.2:5")
COST = Cost(0.5, 0.1, 0.4, 0.0, 0.0, 0.0, 1.0, 90)


def disturbed() -> RequestRecord:
    """Prefilled apart, lost by its decode worker, finished by another."""
    told = record("abc")
    told.model, told.prompt_tokens = "m", 90
    first = attempt(0)
    first.prefill, first.decode = PREFILL, DECODE
    first.prefill_queue_s, first.prefill_s, first.prefill_cached_tokens = 0.01, 0.2, 64
    first.kv_bytes, first.kv_s, first.kv_wait_s = 3 << 20, 0.3, 0.1
    first.restored, first.restore_s = {"host": 128, "disk": 64}, 0.012
    first.prefix = PrefixRecord(DECODE, 600, "busy", 512, "completed", 0.03)
    first.candidates = (
        Candidate(DECODE, FilterReason.PICKED, COST),
        Candidate(PREFILL, FilterReason.NOT_SERVING, None, "starting"),
    )
    first.lost(Phase.DECODE, Unavailable("It is gone.\x1b[2J"), 1.0)
    first.ended(1.1, well=False)
    told.add(first)
    told.add(attempt(1))
    assert told.clock is not None
    told.clock.enter(Stage.PREFILL, 1.2)
    told.clock.enter(Stage.DECODE, 1.5)
    over(told)
    told.choices = (ChoiceEnd(7, FinishReason.STOP, saved_steps=4),)
    return told


def drawn(told: RequestRecord, *, whole: bool = True) -> str:
    words = msgspec.json.encode(explained(told, 9.0, whole=whole))
    out = StringIO()
    console = Console(file=out, highlight=False, soft_wrap=True, width=120)
    show(msgspec.json.decode(words, type=Explained), console)
    return out.getvalue()


def test_the_picture_says_what_happened() -> None:
    said = drawn(disturbed())
    for part in (
        "abc  text of m: finished after 2000.0 ms",
        "prompt 90 tokens, 2 of them cached; output 7 (stop), 4 of them from drafts",
        "decode             1500.0 ms",
        "attempt 0 failed",
        "pppppppp 10.0.0.1:5  queued 10.0 ms, computed 200.0 ms, 64 tokens cached",
        "prefix    128 tokens from host, 64 tokens from disk in 12.0 ms; "
        "dddddddd 10.0.0.2:5 (busy)  512 of 600 tokens collected in 30.0 ms: completed",
        "3.00 MiB, complete 300.0 ms after the start",
        "picked  cost 500.0 ms = queue 100.0 ms, compute 400.0 ms",
        "not serving (starting)",
        "lost decode at 1000.0 ms: unavailable: It is gone.",
        "attempt 1 running",
    ):
        assert part in said, (part, said)
    assert "\x1b" not in said


def test_a_tenants_picture_has_its_own_times_and_no_workers_places() -> None:
    said = drawn(disturbed(), whole=False)
    for part in (
        "abc  text of m: finished after 2000.0 ms",
        "decode             1500.0 ms",
        "attempt 0 failed",
        "prefix    128 tokens from host, 64 tokens from disk in 12.0 ms; dddddddd  512 of 600",
        "prefill   pppppppp  queued 10.0 ms, computed 200.0 ms, 64 tokens cached",
        "lost decode at 1000.0 ms: unavailable: An operator's key shows more.",
    ):
        assert part in said, (part, said)
    for part in ("10.0.0.", "cost", "picked", "not serving", "predicted", "It is gone"):
        assert part not in said, (part, said)


def test_a_request_without_workers_yet() -> None:
    said = drawn(record("r"))
    assert "running (tokenize)" in said and "why" not in said


@pytest.fixture
async def knowing() -> Any:
    frontend = Scripted(record=disturbed())
    servers = [
        await serve_http(http_app(found, CollectorRegistry(), ANYONE), "127.0.0.1:0")
        for found in (Scripted(), frontend)
    ]
    yield servers
    for server in servers:
        await server.close()


async def explain(*words: str) -> int:
    return await asyncio.to_thread(main, ["explain", *words])


async def test_each_router_is_asked_until_one_knows(
    knowing: list[HttpServer], capsys: pytest.CaptureFixture[str]
) -> None:
    where = ",".join(server.address for server in knowing)
    assert await explain("cmpl-abc", "--http", where, "--json") == 0
    assert json.loads(capsys.readouterr().out)["id"] == "abc"
    assert await explain("abc", "--http", where) == 0
    assert "attempt 0 failed" in capsys.readouterr().out


async def test_nobody_knows(knowing: list[HttpServer], capsys: pytest.CaptureFixture[str]) -> None:
    where = ",".join(server.address for server in knowing)
    assert await explain("never", "--http", where) == 1
    assert "2 routers remember no such request" in capsys.readouterr().err
    assert await explain("a/../b", "--http", where) == 1
    assert "no such request" in capsys.readouterr().err


async def test_who_does_not_answer_might_know(
    knowing: list[HttpServer], capsys: pytest.CaptureFixture[str]
) -> None:
    gone = knowing.pop()
    await gone.close()
    assert await explain("abc", "--http", f"{gone.address},{knowing[0].address}") == 1
    assert f"nobody answers on {gone.address}" in capsys.readouterr().err


async def test_getting_and_posting_share_connections(knowing: list[HttpServer]) -> None:
    client = HttpClient(Access(knowing[0].address))
    for _ in range(3):
        assert (await client.get("/v1/models", 10.0)).status == 200
        assert (await client.post("/v1/completions", b'{"prompt": "a"}', 10.0)).status == 200
    assert knowing[0].num_connections == 1
    await client.close()


def test_what_is_no_id_and_no_address(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "a\nb", "--http", "127.0.0.1:1"]) == 1
    assert "(ID)" in capsys.readouterr().err
    assert main(["explain", "a", "--http", "nonsense"]) == 1
    assert "(http)" in capsys.readouterr().err


def test_every_address_of_a_name_is_asked_but_a_certificate_is_for_the_name() -> None:
    assert [one.address for one in everyone(Access("127.0.0.1:8000"))] == ["127.0.0.1:8000"]
    assert [one.address for one in everyone(Access("[::1]:8000"))] == ["[::1]:8000"]
    assert [one.address for one in everyone(Access("localhost:1", b""))] == ["localhost:1"]
    assert [one.address for one in everyone(Access("no.such.invalid:1"))] == ["no.such.invalid:1"]
