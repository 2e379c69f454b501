"""Prefill and decode as real processes: the whole path, leaving in order, and dying."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import grpc
import pytest

from batonlm.core.errors import HandoverFailed, Incompatible
from batonlm.core.kvcache.prefix import prefix_hashes
from batonlm.core.routing.load import WorkerSpeed
from batonlm.rpc.model_folder import tokenizer_digest
from batonlm.rpc.worker import load_from_proto
from batonlm.v1 import prefill_pb2, worker_pb2
from batonlm.v1.decode_pb2_grpc import DecodeStub
from batonlm.v1.prefill_pb2_grpc import PrefillStub
from batonlm.v1.worker_pb2_grpc import WorkerStub
from tests import leaks
from tests.core.cache_replica import CacheReplica, hashes
from tests.services.worker.pair import PATIENCE_S, attempt, keys_of, new_id, reference, until
from tests.services.worker.processes import LOOPBACK, Process, metrics_of, run_on, worker
from tests.services.worker.router_end import RouterEnd

STAGES = {
    "sender": ("open_wait", "grant_wait"),
    "receiver": ("meet", "announce_wait", "reserve", "last_chunk"),
}
KV_CHUNK_STAGES = {
    "sender": ("buffer_wait", "pack", "seal", "confirm_wait"),
    "receiver": ("buffer_wait", "read", "verify", "unpack"),
}


async def test_the_whole_path_and_both_leave_in_order(tmp_path: Path) -> None:
    one, long = attempt(n=2), attempt("long", seed=2, max_tokens=400)
    async with (
        worker("batonlm.prefill", tmp_path) as prefill,
        worker("batonlm.decode", tmp_path) as decode,
    ):
        end = RouterEnd(DecodeStub(decode.channel), decode.identity, prefill.identity)
        await end.connect()
        handover_id = new_id()
        await end.start(one, handover_id)
        await run_on(prefill, decode, one, handover_id)
        assert await end.ended(one) == reference(one)
        assert end.started[one.key].received_bytes == 16 * 600
        (running,) = keys_of(long)
        # Too far ahead of what is confirmed it waits, so it cannot end before it is looked at.
        await end.start(long, max_unconfirmed=50)
        await until(lambda: bool(end.tokens[running]))
        read = await asyncio.to_thread(metrics_of, decode.metrics)
        check_aliases(read, tmp_path.name)
        assert read['baton_kv_source_total{source="handover"}'] == 1
        assert read["baton_step_seconds_count"] > 11
        assert read['baton_stage_seconds_count{stage="kv_wait"}'] == 1
        await prefill.idle()
        check_handover_metrics(read, await asyncio.to_thread(metrics_of, prefill.metrics))
        decode.process.send_signal(signal.SIGTERM)
        prefill.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_S):
            while running not in end.ends:
                await end.confirm(running, len(end.tokens[running]))
                await asyncio.sleep(0.005)
        assert await end.ended(long) == reference(long)
        # An open session is given time to end.
        await end.break_off()
        assert [await decode.exit_code(), await prefill.exit_code()] == [0, 0]


def check_aliases(read: dict[str, float], model: str) -> None:
    """While one sequence runs."""
    label = f'{{model_name="{model}"}}'
    told = {name: value for name, value in read.items() if name.startswith("vllm:")}
    (config,) = (name for name in told if name.startswith("vllm:cache_config_info"))
    blocks = read['baton_blocks{state="free"}'] + read['baton_blocks{state="used"}']
    assert config.endswith(
        f'{{block_size="16",model_name="{model}",num_gpu_blocks="{blocks:.0f}"}}'
    )
    usage = told.pop(f"vllm:kv_cache_usage_perc{label}")
    assert 0 < usage < 0.5
    assert told == {
        config: 1,
        f"vllm:num_requests_running{label}": 1,
        f"vllm:num_requests_waiting{label}": 0,
    }


def check_handover_metrics(decode: dict[str, float], prefill: dict[str, float]) -> None:
    """Of one hand-over, with its meeting and its probe."""
    kv_chunks = decode['baton_parcels_total{side="receiver"}']
    assert prefill['baton_parcels_total{side="sender"}'] == kv_chunks > 0
    for read, side in ((decode, "receiver"), (prefill, "sender")):
        assert read[f'baton_handover_bytes_total{{side="{side}"}}'] == 16 * 600
        assert read[f'baton_handovers_total{{outcome="completed",side="{side}"}}'] == 1
        assert read[f'baton_slots{{ring="{side}",state="orphaned"}}'] == 0
        assert read['baton_probes_total{outcome="ok",path="self"}'] >= 2
        assert read['baton_parcels_refused_total{kind="digest"}'] == 0
        assert read["baton_transfer_errors_total"] == 0
        for stage in (*STAGES[side], *KV_CHUNK_STAGES[side]):
            labels = f'side="{side}",stage="{stage}"'
            number = 1 if stage in STAGES[side] else kv_chunks
            assert read[f"baton_handover_stage_seconds_count{{{labels}}}"] == number, stage
            assert read[f'baton_handover_stage_seconds_bucket{{le="60.0",{labels}}}'] == number
            assert read[f"baton_handover_stage_seconds_sum{{{labels}}}"] > 0
    assert decode["baton_peers_met_total"] == 1
    assert decode['baton_probes_total{outcome="ok",path="peer"}'] == 1


@pytest.mark.deep
async def test_both_tell_what_their_caches_hold_and_how_fast_they_are(tmp_path: Path) -> None:
    """In the tokenizer's own words, so that a router can compare; by their own measurements."""
    one = attempt(n=2)
    assert len(one.token_ids) // 64 * 64 % 48 == 0, "the last unit ends with a whole block"
    prompt = set(hashes(prefix_hashes(one.token_ids, one.cache_salt, tokenizer_digest(tmp_path))))
    async with (
        worker("batonlm.prefill", tmp_path, "--block-size", "48", "--step-tokens", "96") as prefill,
        worker("batonlm.decode", tmp_path) as decode,
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
        given, got = [await asyncio.wait_for(speed_of(w), PATIENCE_S) for w in late]
        assert given.prefills and given.prefill_step_tokens == 96
        assert got.decodes and got.handover_s > 0 and got.link_bytes_per_s > 0
        await end.break_off()


async def speed_of(watching: Any) -> WorkerSpeed:
    """As the next load tells it."""
    while True:
        message = await watching.read()
        if message.HasField("load"):
            return load_from_proto(message.load).speed


async def told_of(watching: Any, wanted: set[bytes]) -> None:
    """Returns when a watcher knows that all these units are cached."""
    replica = CacheReplica()
    while not wanted <= replica.units:
        message = await watching.read()
        if message.HasField("cache"):
            assert replica.apply(message.cache)


@pytest.mark.deep
async def test_prefill_freezes_and_dies(tmp_path: Path) -> None:
    """Decode says that the hand-over failed, and serves on."""
    met, one = attempt("met"), attempt(n=2, seed=2)
    async with (
        worker("batonlm.decode", tmp_path) as decode,
        worker("batonlm.prefill", tmp_path) as prefill,
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


@pytest.mark.deep
async def test_two_that_do_not_fit_say_so_on_both_sides(tmp_path: Path) -> None:
    """With what differs; and decode can still compute the prompt itself."""
    one, again = attempt(), attempt(number=1)
    module, pipe = "tests.services.worker.other_decode", asyncio.subprocess.PIPE
    warnings = ("--log-level", "warning", *LOOPBACK)
    async with (
        worker("batonlm.prefill", tmp_path, *warnings, stderr=pipe) as prefill,
        worker(module, tmp_path, *warnings, stderr=pipe) as decode,
    ):
        end = RouterEnd(DecodeStub(decode.channel), decode.identity, prefill.identity)
        await end.connect()
        handover_id = new_id()
        await end.start(one, handover_id)
        run = asyncio.ensure_future(run_on(prefill, decode, one, handover_id))
        error = await end.failed(one)
        assert isinstance(error, Incompatible)
        names = [f"{w.identity.role} {w.identity.instance_id[:8]}" for w in (prefill, decode)]
        digest = re.search(r"model_digest: (\w+) against another; dtype", error.message)
        assert digest and error.message == (
            f"KV does not fit between {names[0]} and {names[1]}: "
            f"model_digest: {digest[1]} against another; dtype: float32 against bfloat16; "
            "key_size: 2 against 4; value_size: 2 against 4"
        )
        await PrefillStub(prefill.channel).Cancel(
            prefill_pb2.CancelRequest(request_id=one.request_id, attempt=one.attempt)
        )
        await asyncio.gather(run, return_exceptions=True)
        end.failures.clear()
        await end.start(again)
        assert await end.ended(again) == reference(again)
        await end.break_off()
        for leaving in (prefill, decode):
            leaving.process.terminate()
            _, logged = await leaving.process.communicate()
            assert error.message.encode() in logged


def holds_only(process: Process, wanted: dict[str, float]) -> None:
    """Waits until a process says so."""
    told = leaks.RunningWorker(process.process.pid, f"http://{process.metrics}/metrics")
    deadline = time.monotonic() + PATIENCE_S
    while (held := leaks.held(told.read())) != wanted:
        assert time.monotonic() < deadline, held
        time.sleep(0.02)


@pytest.mark.deep
async def test_a_buffer_that_leaks_is_found(tmp_path: Path) -> None:
    """So that the check after every other test is known to see one."""
    one = attempt()
    async with worker("batonlm.prefill", tmp_path, *LOOPBACK) as prefill:
        with pytest.raises(AssertionError, match=r"still holds \{'buffers': 1.0\}"):
            async with worker(
                "tests.services.worker.leaking_decode", tmp_path, *LOOPBACK
            ) as decode:
                end = RouterEnd(DecodeStub(decode.channel), decode.identity, prefill.identity)
                await end.connect()
                handover_id = new_id()
                await end.start(one, handover_id)
                await run_on(prefill, decode, one, handover_id)
                assert await end.ended(one) == reference(one)
                await end.break_off()
                # The session goes by itself.
                await asyncio.to_thread(holds_only, decode, {"buffers": 1.0})
                await decode.idle(0.5)


@pytest.mark.deep
async def test_an_engine_that_breaks_ends_the_process(tmp_path: Path) -> None:
    async with worker("tests.services.worker.breaking_decode", tmp_path, *LOOPBACK) as decode:
        end = RouterEnd(DecodeStub(decode.channel), decode.identity, decode.identity)
        await end.connect()
        await end.start(attempt(size=20))
        assert await decode.exit_code() == 1
        await end.break_off()


async def test_peers_must_be_told_an_address_they_can_connect_to(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "batonlm.decode", "--model", str(tmp_path)),
        *("--listen", "0.0.0.0:0", "--allow-anonymous"),
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(PATIENCE_S):
        _, told = await process.communicate()
    assert process.returncode == 2 and b"advertise" in told
