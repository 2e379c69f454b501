"""Reads that nobody can stop use up the ring: the worker says so, drains, and ends for good."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from batonlm.core.errors import HandoverFailed
from batonlm.rpc.lifecycle import EXHAUSTED
from batonlm.transfer import nixl
from batonlm.v1 import worker_pb2
from batonlm.v1.decode_pb2_grpc import DecodeStub
from tests.services.worker.pair import attempt, keys_of, new_id, reference, until
from tests.services.worker.processes import Process, becomes, run_on, worker
from tests.services.worker.router_end import RouterEnd

pytestmark = [
    pytest.mark.deep,
    pytest.mark.skipif(not nixl.available(), reason="no NIXL here"),
]
NIXL = ("--transport", "nixl", "--kv-network", "isolated", "--ucx-devices", "lo")
TCP = {"UCX_TLS": "tcp"}


@dataclass
class Worn:
    """A decode worker with one of two buffers orphaned, and the frozen sender behind it."""

    prefill: Process
    decode: Process
    end: RouterEnd
    stuck: asyncio.Future[object]


async def hand_over(prefill: Process, decode: Process, end: RouterEnd, seed: int) -> None:
    one, handover_id = attempt(f"r{seed}", seed=seed), new_id()
    await end.start(one, handover_id)
    await run_on(prefill, decode, one, handover_id)
    assert await end.ended(one) == reference(one)


@asynccontextmanager
async def exhausted(folder: Path, drain_timeout_s: int) -> AsyncIterator[Worn]:
    """Over TCP: a frozen process answers no read. One buffer of two is more than a quarter."""
    freeze, module = folder / "freeze", "tests.services.worker.freezing_decode"
    flags = (*NIXL, "--staging-mib", "8", "--drain-timeout-s", str(drain_timeout_s))
    async with worker("batonlm.prefill", folder, *NIXL, environment=TCP) as prefill:
        variables = {**TCP, "SENDER": str(prefill.process.pid), "FREEZE": str(freeze)}
        async with worker(module, folder, *flags, environment=variables) as decode:
            end = RouterEnd(DecodeStub(decode.channel), decode.identity, prefill.identity)
            await end.connect()
            await hand_over(prefill, decode, end, seed=1)
            running = attempt("running", seed=2, max_tokens=300)
            await end.start(running)
            await until(lambda: bool(end.tokens[keys_of(running)[0]]))

            freeze.touch()
            stuck, handover_id = attempt("stuck", seed=3), new_id()
            await end.start(stuck, handover_id)
            run = asyncio.ensure_future(run_on(prefill, decode, stuck, handover_id))
            assert isinstance(await end.failed(stuck), HandoverFailed)
            await becomes(decode, False, worker_pb2.WORKER_STATE_DRAINING)
            end.failures.clear()
            assert await end.ended(running) == reference(running)
            yield Worn(prefill, decode, end, run)
            await end.break_off()
            run.cancel()
            await asyncio.gather(run, return_exceptions=True)


async def test_a_ring_orphaned_ends_the_worker_though_its_buffers_come_back(tmp_path: Path) -> None:
    """What runs is finished, and the sender that comes back serves the successor."""
    async with exhausted(tmp_path, drain_timeout_s=60) as world:
        assert world.decode.process.returncode is None, "the read is waited for"
        world.prefill.process.send_signal(signal.SIGCONT)
        assert await world.decode.exit_code() == EXHAUSTED
        async with worker("batonlm.decode", tmp_path, *NIXL, environment=TCP) as successor:
            sender = world.prefill.identity
            end = RouterEnd(DecodeStub(successor.channel), successor.identity, sender)
            await end.connect()
            await hand_over(world.prefill, successor, end, seed=4)
            await end.break_off()


@pytest.mark.chaos
async def test_a_ring_orphaned_ends_the_worker_though_the_sender_stays_frozen(
    tmp_path: Path,
) -> None:
    """With a read in flight, a living transport and its threads: neither hangs nor aborts."""
    async with exhausted(tmp_path, drain_timeout_s=15) as world:
        assert await world.decode.exit_code() == EXHAUSTED
        world.prefill.process.kill()
