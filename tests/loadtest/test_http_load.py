"""Against a real server in a process of its own, which keeps what its latencies really were."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from baton_loadtest.bench.known_server import KnownServer, Latencies, known
from baton_loadtest.drive import (
    ANSWERED,
    LONGEST_EVENT,
    REFUSED,
    Events,
    HttpLoadClient,
    LoadLimits,
    OpenLoop,
    Run,
    TokenIds,
)
from baton_loadtest.load.scenario import Arrivals, Drawn, Kind, fixed
from batonlm.cli.access import Access
from batonlm.core.errors import InvalidArgument


@asynccontextmanager
async def serving(**every: int) -> AsyncIterator[KnownServer]:
    async with known(replace(Latencies(first_s=0.02, between_s=0.005), **every)) as server:
        yield server


async def asked(address: str, rate: float = 100, turns: int = 1, seconds: float = 1.0) -> Run:
    source = Drawn(Arrivals(Kind.CONSTANT, rate, seconds), fixed(20, 4), turns=turns)

    client = HttpLoadClient(Access(address), "")
    try:
        runner = OpenLoop(client, TokenIds(0, 64, 1899), LoadLimits(request_s=30.0))
        return await runner.run(source.workload(0))
    finally:
        await client.close()


@pytest.mark.deep
async def test_what_is_told_is_what_was() -> None:
    """A client cannot see a token before it was written, nor a request arrive before it left: so
    each of its times is at least the server's, and both have one for each request."""
    async with serving() as server:
        run = await asked(server.address)
        records = await server.records()
    assert len(run.samples) == len(records) == 100
    assert all(one.end == ANSWERED and one.tokens == 4 for one in run.samples)
    for theirs, ours in zip(
        sorted(record.first_s for record in records),
        sorted(one.first_s - one.left_s for one in run.samples),
        strict=True,
    ):
        assert theirs <= ours
    for theirs, ours in zip(
        sorted(record.whole_s for record in records),
        sorted(one.ended_s - one.left_s for one in run.samples),
        strict=True,
    ):
        assert theirs <= ours
    assert all(len(one.gaps_s) == len(record.gaps_s) == 3
               for one, record in zip(run.samples, records, strict=True))  # fmt: skip
    assert all(one.due_s <= one.left_s <= one.first_s <= one.ended_s for one in run.samples)


@pytest.mark.deep
async def test_every_end_has_its_name() -> None:
    async with serving(refuse_every=5, fail_every=7, cut_every=9, close_every=4) as server:
        run = await asked(server.address)
        records = await server.records()
    ends = [one.end for one in run.samples]
    # The number of a request is that of its arrival at the server.
    refused = sum(n % 5 == 0 for n in range(1, 101))
    failed = sum(n % 7 == 0 and n % 5 != 0 for n in range(1, 101))
    assert ends.count(REFUSED) == refused
    assert ends.count("status 500") == failed
    assert ends.count("connection lost") == sum(
        n % 9 == 0 and n % 5 != 0 and n % 7 != 0 for n in range(1, 101)
    )
    assert ends.count(ANSWERED) == len(records)


@pytest.mark.deep
async def test_the_answer_is_part_of_the_next_turn() -> None:
    async with serving() as server:
        run = await asked(server.address, rate=5, turns=3)
        assert len(await server.records()) == 15
    assert sorted(one.prompt_tokens for one in run.samples) == [20] * 5 + [44] * 5 + [68] * 5


async def test_nobody_listens() -> None:
    assert {one.end for one in (await asked("127.0.0.1:1", rate=5)).samples} == {"no connection"}


async def test_an_end_without_done_is_no_answer() -> None:
    """As a proxy may end a stream whose server was killed: the body is whole, the answer is not."""
    event = b'data: {"choices": [{"text": "", "token_ids": [5]}]}\n\n'

    async def end_early(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(event), event))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(end_early, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        client = HttpLoadClient(Access(f"{host}:{port}"), "")
        heard: list[int] = []
        end = await client.ask(client.prepare((1,), 2), lambda ids, number: heard.extend(ids))
        await client.close()
    assert (end, heard) == ("ended early", [5])


def test_an_address_that_is_none() -> None:
    with pytest.raises(InvalidArgument) as caught:
        HttpLoadClient(Access("nowhere"), "")
    assert caught.value.field == "http"


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_events_are_read_however_they_are_cut(size: int) -> None:
    heard: list[tuple[tuple[int, ...], int]] = []
    events = Events(lambda ids, count: heard.append((tuple(ids), count)))
    stream = (
        b": hello\n\n"
        b'data: {"choices": [{"text": "", "token_ids": [5, 6]}], "id": "x"}\n\n'
        b'data: {"choices": [{"text": "", "token_ids": []}]}\r\n\r\n'
        b'data: {"choices": [{"text": "abc"}]}\n\n'
        b'data: {"choices": [], "usage": {"completion_tokens": 3}}\n\ndata: [DONE]\n\n'
    )
    for at in range(0, len(stream), size):
        events.feed(stream[at : at + size])
    assert heard == [((5, 6), 2), ((), 1)]
    assert events.done and not events.failed


@pytest.mark.parametrize("data", [b'{"error": {"message": "no"}}', b"{", b'{"choices": 5}'])
def test_an_event_that_is_none(data: bytes) -> None:
    events = Events(lambda ids, count: None)
    events.feed(b"data: " + data + b"\n\n")
    assert events.failed and not events.done


def test_an_event_without_end_is_not_kept() -> None:
    events = Events(lambda ids, count: None)
    events.feed(b"x" * (LONGEST_EVENT + 1))
    assert events.failed and not events.unread
