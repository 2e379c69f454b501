"""`baton chaos run`: what its verdicts, schedules and proxies are made of."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_loadtest.chaos.streams.fleet import WORKER_ROLES, hits
from baton_loadtest.chaos.streams.kills import victims
from baton_loadtest.chaos.streams.load import (
    KINDS,
    Answer,
    caller,
    differences,
    is_shifted,
    streams,
)
from baton_loadtest.chaos.streams.network import Edge, Proxy
from baton_loadtest.chaos.streams.routers import Cause, causes
from baton_loadtest.chaos.streams.tiers import DAMAGES, damage, fill, small_file_system
from baton_loadtest.chaos.world import Broken
from batonlm.cli.main import main
from batonlm.cli.ports import HOST, free_ports
from batonlm.v1 import inference_pb2
from tests.e2e.relay import until_it_comes_about

SLOWEST_S = 900
"""Of a short run on a machine that has much else to do; on a quiet one it is seconds."""


def test_a_seed_repeats_streams_and_kills() -> None:
    def said(seed: int) -> list[bytes]:
        return [w.request.SerializeToString(deterministic=True) for w in streams(seed, 20)]

    assert said(3) == said(3) != said(4)
    assert {wanted.kind for wanted in streams(3, 20)} == set(KINDS)
    assert list(islice(victims(3), 40)) == list(islice(victims(3), 40))
    assert list(islice(victims(3), 40)) != list(islice(victims(4), 40))


def test_of_every_four_kills_one_is_of_each_role() -> None:
    names = victims(1)
    for _ in range(10):
        assert {name.rpartition("-")[0] for name in islice(names, 4)} == set(WORKER_ROLES)


def answer(text: str = "ab", ids: tuple[int, ...] = (1, 2), reason: int = 2) -> Answer:
    made = Answer([0.0])
    made.take(
        inference_pb2.GenerationEvent(
            delta=inference_pb2.ChoiceDelta(
                text=text,
                token_ids=ids,
                finish_reason=reason,  # type: ignore[arg-type]
                logprobs=[
                    inference_pb2.TextLogprobs(token=inference_pb2.TextLogprob(token_id=i))
                    for i in ids
                ],
            )
        ),
        1.0,
    )
    usage = inference_pb2.RequestFinished(prompt_tokens=1, completion_tokens=len(ids))
    made.take(inference_pb2.GenerationEvent(finished=usage), 4.0)
    return made


def test_every_part_of_an_answer_is_compared() -> None:
    assert differences(answer(), answer()) == set()
    assert differences(answer("aB"), answer()) == {"text"}
    assert differences(answer(reason=1), answer()) == {"ends"}
    assert differences(answer(ids=(1, 3)), answer()) == {"tokens", "log-probabilities"}
    assert differences(answer(ids=(1,)), answer()) >= {"tokens", "ends"}
    assert differences(Answer([0.0]), answer()) >= {"tokens", "text", "ends"}


def test_silence_counts_from_a_time_on() -> None:
    assert (answer().silence(0.0), answer().silence(4.0)) == (3.0, 0.0)


@given(st.lists(st.integers(0, 3), max_size=12), st.data())
def test_a_run_left_out_or_told_twice_is_told_from_other_tokens(
    ids: list[int], data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, len(ids)))
    last = data.draw(st.integers(first, len(ids)))
    assert is_shifted(ids[:first] + ids[last:], ids) == (last > first)
    assert is_shifted(ids[:last] + ids[first:], ids) == (last > first)
    assert not is_shifted([9, *ids], [8, *ids])


def test_losses_are_read_from_the_log(tmp_path: Path) -> None:
    def line(request: str, **more: str) -> str:
        return json.dumps({"time": "2026-01-02T03:04:05.678Z", "request_id": request, **more})

    log = tmp_path / "log"
    lines = [
        "no JSON",
        line("a", lost_at="decode", reason="UNAVAILABLE"),
        line("a", lost_at="detokenizer", reason="UNAVAILABLE"),
        line("b", lost_at="decode", reason="OVERLOADED"),
        line("c"),
    ]
    log.write_text("\n".join(lines))
    found = hits(log)
    assert {name: hit.roles for name, hit in found.items()} == {"a": {"decode", "detokenizer"}}


def test_the_longest_silence_has_a_cause(tmp_path: Path) -> None:
    log = tmp_path / "log"
    now = datetime.now(UTC)
    to_clock = time.time() - time.monotonic()

    def stream(request: str, *events: float, lost: tuple[float, ...]) -> Answer:
        base = now.timestamp() - to_clock
        made = Answer([base + at for at in events], request, later_ids=[f"{request}-2"])
        made.losses = [base + at for at in lost]
        return made

    def line(at: float, request: str, **more: str) -> str:
        when = (now + timedelta(seconds=at)).isoformat()
        return json.dumps({"time": when, "request_id": request, **more})

    lines = [
        line(2.0, "again-2", adoption="none"),
        line(2.0, "adopted-2", adoption="adopted"),
        line(2.0, "worker", lost_at="decode", reason="UNAVAILABLE"),
        line(5.0, "adopted-2", lost_at="decode", reason="UNAVAILABLE"),
        line(2.0, "often-2", adoption="failed"),
    ]
    log.write_text("\n".join(lines))
    answers = [
        stream("again", 0.0, 1.0, 4.0, 4.5, lost=(1.2,)),
        stream("adopted", 0.0, 1.0, 3.0, 4.0, 5.5, lost=(1.2,)),
        stream("worker", 0.0, 1.0, 3.5, lost=(1.2,)),
        stream("often", 0.0, 1.0, 7.0, lost=(1.2, 3.0)),
        stream("undisturbed", 0.0, 9.0, lost=()),
    ]
    found = {cause: [round(gap, 3) for gap in gaps] for cause, gaps in causes(log, answers).items()}
    assert found == {
        Cause.OFTEN: [6.0],
        Cause.AGAIN: [3.0],
        Cause.WORKER: [2.5],
        Cause.NOTHING: [2.0],
    }


@asynccontextmanager
async def echo_behind_a_proxy(edge: Edge) -> AsyncIterator[int]:
    """The port of a proxy before a server that sends back what it gets."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(echo, HOST, 0)
    target = f"{HOST}:{server.sockets[0].getsockname()[1]}"
    (port,) = free_ports(1)
    proxy = Proxy(f"{HOST}:{port}", target, lambda _: edge)
    await proxy.start()
    try:
        yield port
    finally:
        await proxy.close()
        server.close()
        await server.wait_closed()


@pytest.mark.parametrize("direction", ["there", "back"])
async def test_what_is_cut_comes_when_it_is_whole_again(direction: str) -> None:
    edge = Edge()
    way = edge.there if direction == "there" else edge.back
    async with echo_behind_a_proxy(edge) as port:
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(b"one")
        assert await reader.readexactly(3) == b"one"
        way.cut()
        writer.write(b"two")
        writer.write_eof()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await reader.readexactly(1)
        assert not reader.at_eof()
        way.heal()
        assert await reader.read(100) == b"two"
        assert await reader.read(100) == b""
        writer.close()
    assert (edge.there.num_bytes, edge.back.num_bytes) == (6, 6)


async def test_a_slow_link_loses_nothing() -> None:
    edge = Edge()
    edge.there.delay_s, edge.back.bytes_per_s = 0.01, 1e7
    said = os.urandom(300_000)
    async with echo_behind_a_proxy(edge) as port:
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(said)
        writer.write_eof()
        assert await reader.read() == said
        writer.close()


@pytest.mark.parametrize("address", ["127.0.0.1", "::ffff:127.0.0.1"])
async def test_a_caller_is_found_by_its_connection(address: str) -> None:
    found: list[str] = []
    done = asyncio.Event()

    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ours, theirs = writer.get_extra_info("sockname")[1], writer.get_extra_info("peername")[1]
        found.append(caller(theirs, ours, {1: "another", os.getpid(): "this one"}))
        found.append(caller(theirs, ours, {1: "another"}))
        writer.close()
        done.set()

    server = await asyncio.start_server(meet, HOST, 0)
    _, writer = await asyncio.open_connection(address, server.sockets[0].getsockname()[1])
    await done.wait()
    writer.close()
    server.close()
    await server.wait_closed()
    assert found == ["this one", ""]


def run(folder: Path, schedule: str, *words: str) -> dict[str, float]:
    """A schedule's figures by name, all goals met but those that a slow machine may miss."""
    file = folder / "found.json"
    flags = ("--schedule", schedule, "--json", str(file), "--logs", str(folder))
    main(["chaos", "run", *flags, *words])
    said = json.loads(file.read_text())
    assert not [r for r in said["results"] if r["met"] is False and r["unit"] != "s"]
    return {result["name"]: result["value"] for result in said["results"]}


@pytest.mark.chaos
@pytest.mark.timeout(SLOWEST_S)
def test_kills(tmp_path: Path) -> None:
    def kills_hit_streams() -> bool:
        found = run(tmp_path, "kills", "--streams", "40")
        assert found["equal tokens"] == 40
        every = all(found[f"kills of a {role} worker"] >= 1 for role in WORKER_ROLES)
        return every and found["streams that lost a worker"] > 0

    until_it_comes_about(kills_hit_streams, "streams that lose workers of every role")


@pytest.mark.chaos
@pytest.mark.timeout(SLOWEST_S)
def test_routers_die_among_others(tmp_path: Path) -> None:
    def streams_lost_their_router() -> bool:
        found = run(tmp_path, "routers", "--streams", "16", "--rounds", "1")
        assert found["equal tokens"] == found["refused when another tenant shows their ids"] == 16
        return found["streams that lost their router"] > 0

    until_it_comes_about(streams_lost_their_router, "streams of a router that is killed")


@pytest.mark.chaos
@pytest.mark.timeout(SLOWEST_S)
def test_a_partition(tmp_path: Path) -> None:
    found = run(tmp_path, "partitions", "--streams", "16", "--cuts", "1", "--hold", "3")
    assert found["pairs of processes cut"] == 1


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_file_is_another_one(tmp_path: Path, kind: str) -> None:
    file, other = tmp_path / "one", tmp_path / "other"
    file.write_bytes(bytes(1000))
    other.write_bytes(b"x" * 1000)
    damage(file, kind, other, random.Random(1))
    assert file.read_bytes() != bytes(1000)
    assert file.is_symlink() == (kind == "link") and other.read_bytes() == b"x" * 1000


def test_a_small_file_system_fills_up_and_goes() -> None:
    try:
        with small_file_system(1) as path:
            fill(path / "filler")
            assert 0 < (path / "filler").stat().st_size <= 1 << 20
            with pytest.raises(OSError):
                (path / "more").write_bytes(bytes(1 << 16))
    except Broken:
        pytest.skip("no file system can be mounted here")
    assert not path.exists()


@pytest.mark.chaos
@pytest.mark.timeout(SLOWEST_S)
def test_stored_kv_is_harmed(tmp_path: Path) -> None:
    found = run(tmp_path, "tiers", "--streams", "100", "--rounds", "1", "--hold", "2")
    assert found["requests that failed"] == 0


@pytest.mark.chaos
@pytest.mark.timeout(SLOWEST_S)
def test_a_rolling_restart(tmp_path: Path) -> None:
    words = ("--streams", "16", "--hold", "0", "--rounds", "1", "--roles", "prefill")
    found = run(tmp_path, "rolling", *words)
    assert found["restarts of a prefill process"] == 2
    assert found["pools scaled down to one and up again"] == 1
    assert found["requests that failed"] == 0
