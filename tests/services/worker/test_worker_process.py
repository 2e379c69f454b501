"""Prefill and decode as real processes: the whole path, leaving in order, and dying."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import grpc
import pytest

from baton.core.attempt import Attempt
from baton.core.errors import HandoverFailed
from baton.core.model import WorkerIdentity
from baton.core.prefix import prefix_hashes
from baton.rpc.convert import attempt_to_proto, identity_from_proto
from baton.rpc.digest import tokenizer_digest
from baton.v1 import prefill_pb2, worker_pb2
from baton.v1.decode_pb2_grpc import DecodeStub
from baton.v1.prefill_pb2_grpc import PrefillStub
from baton.v1.worker_pb2_grpc import WorkerStub
from tests.core.cache_replica import CacheReplica, hashes
from tests.services.worker.pair import PATIENCE_S, attempt, keys_of, new_id, reference, until
from tests.services.worker.router_end import RouterEnd


@dataclass
class Process:
    """A worker that serves."""

    process: asyncio.subprocess.Process
    channel: grpc.aio.Channel
    identity: WorkerIdentity

    async def exit_code(self) -> int:
        async with asyncio.timeout(PATIENCE_S):
            return await self.process.wait()


@asynccontextmanager
async def worker(module: str, folder: Path, *flags: str) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, "--model", str(folder), "--runner", "fake"),
        *("--listen", "127.0.0.1:0", "--log-level", "error", *flags),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            address = json.loads(await process.stdout.readline())["listen"]
        async with grpc.aio.insecure_channel(address) as channel:
            watch = WorkerStub(channel).Watch(worker_pb2.WatchRequest())
            first: Any = await watch.read()
            watch.cancel()
            identity = identity_from_proto(first.description.identity)
            assert identity.address == address
            yield Process(process, channel, identity)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def run_on(prefill: Process, decode: Process, one: Attempt, handover_id: bytes) -> Any:
    return PrefillStub(prefill.channel).Run(
        prefill_pb2.RunRequest(
            attempt=attempt_to_proto(one),
            handover_id=handover_id,
            decode_incarnation=decode.identity.incarnation,
        )
    )


def metrics_of(address: str) -> dict[str, float]:
    with urlopen(f"http://{address}/metrics", timeout=PATIENCE_S) as answer:
        lines = answer.read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


async def test_the_whole_path_and_both_leave_in_order(tmp_path: Path, unused_port: int) -> None:
    one, long = attempt(n=2), attempt("long", seed=2, max_tokens=400)
    metrics = f"127.0.0.1:{unused_port}"
    async with (
        worker("baton.prefill", tmp_path) as prefill,
        worker("baton.decode", tmp_path, "--metrics-listen", metrics) as decode,
    ):
        end = RouterEnd(DecodeStub(decode.channel), decode.identity, prefill.identity)
        await end.connect()
        handover_id = new_id()
        await end.start(one, handover_id)
        await run_on(prefill, decode, one, handover_id)
        assert await end.ended(one) == reference(one)
        assert end.started[one.key].received_bytes == 16 * 600
        await end.start(long)
        await until(lambda: bool(end.tokens[keys_of(long)[0]]))
        read = await asyncio.to_thread(metrics_of, metrics)
        assert read['baton_kv_source_total{source="handover"}'] == 1
        assert read["baton_step_seconds_count"] > 11
        assert read['baton_stage_seconds_count{stage="kv_wait"}'] == 1
        decode.process.send_signal(signal.SIGTERM)
        prefill.process.send_signal(signal.SIGTERM)
        assert await end.ended(long) == reference(long)
        assert [await decode.exit_code(), await prefill.exit_code()] == [0, 0]
        await end.break_off()


async def test_both_tell_what_their_caches_hold(tmp_path: Path) -> None:
    """In the tokenizer's own words, so that a router can compare."""
    one = attempt(n=2)
    assert len(one.token_ids) // 64 * 64 % 48 == 0, "the last unit ends with a whole block"
    prompt = set(hashes(prefix_hashes(one.token_ids, one.cache_salt, tokenizer_digest(tmp_path))))
    async with (
        worker("baton.prefill", tmp_path, "--block-size", "48") as prefill,
        worker("baton.decode", tmp_path) as decode,
    ):
        end = RouterEnd(DecodeStub(decode.channel), decode.identity, prefill.identity)
        await end.connect()
        early = [WorkerStub(p.channel).Watch(worker_pb2.WatchRequest()) for p in (prefill, decode)]
        handover_id = new_id()
        await end.start(one, handover_id)
        await run_on(prefill, decode, one, handover_id)
        assert await end.ended(one) == reference(one)
        late = [WorkerStub(p.channel).Watch(worker_pb2.WatchRequest()) for p in (prefill, decode)]
        for watching in (*early, *late):
            await asyncio.wait_for(told_of(watching, prompt), PATIENCE_S)
        await end.break_off()


async def told_of(watching: Any, wanted: set[bytes]) -> None:
    """Returns when a watcher knows that all these units are cached."""
    replica = CacheReplica()
    while not wanted <= replica.units:
        message = await watching.read()
        if message.HasField("cache"):
            assert replica.apply(message.cache)


async def test_prefill_freezes_and_dies(tmp_path: Path) -> None:
    """Decode says that the hand-over failed, and serves on."""
    met, one = attempt("met"), attempt(n=2, seed=2)
    async with (
        worker("baton.decode", tmp_path) as decode,
        worker("baton.prefill", tmp_path) as prefill,
    ):
        end = RouterEnd(DecodeStub(decode.channel), decode.identity, prefill.identity)
        await end.connect()
        handover_id = new_id()
        await end.start(met, handover_id)
        await run_on(prefill, decode, met, handover_id)
        assert await end.ended(met) == reference(met)
        prefill.process.send_signal(signal.SIGSTOP)
        handover_id = new_id()
        await end.start(one, handover_id)
        run = asyncio.ensure_future(run_on(prefill, decode, one, handover_id))
        prefill.process.kill()
        assert isinstance(await end.failed(one), HandoverFailed)
        with pytest.raises(grpc.aio.AioRpcError):
            await run
        end.failures.clear()
        again = attempt(n=2, seed=2, number=1)
        await end.start(again)
        assert await end.ended(again) == reference(again)
        await end.break_off()


async def test_an_engine_that_breaks_ends_the_process(tmp_path: Path) -> None:
    async with worker("tests.services.worker.breaking_decode", tmp_path) as decode:
        end = RouterEnd(DecodeStub(decode.channel), decode.identity, decode.identity)
        await end.connect()
        await end.start(attempt(size=20))
        assert await decode.exit_code() == 1
        await end.break_off()


async def test_peers_must_be_told_an_address_they_can_connect_to(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "baton.decode", "--model", str(tmp_path), "--runner", "fake"),
        *("--listen", "0.0.0.0:0"),
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(PATIENCE_S):
        _, told = await process.communicate()
    assert process.returncode == 2 and b"advertise" in told
