"""Senders that are killed or frozen, as real processes: no wrong KV, no hanging, no lost buffer."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from batonlm.core.errors import HandoverFailed
from batonlm.core.request.model import WorkerIdentity
from batonlm.transfer.peers import SenderConnection
from batonlm.transfer.receiver import KvReceiver, TransferRequest
from batonlm.transfer.transports import Staging
from tests.kv.rig import BUFFER_BYTES, LAYOUT, TOKENS, Pool, expected, identity, until
from tests.kv.sender_process import LIVENESS

NUM_BUFFERS = 4


class World:
    """A receiver here, a sender in a process of its own."""

    def __init__(self, receiver: KvReceiver, me: WorkerIdentity, staging: Staging) -> None:
        self.receiver, self.me, self.staging = receiver, me, staging

    async def start(self, transport: str) -> None:
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "tests.kv.sender_process", transport),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        told = await self.answer()
        self.sender = WorkerIdentity("prefill", told["instance_id"], told["address"])

    async def answer(self) -> dict[str, Any]:
        assert self.process.stdout
        line = await self.process.stdout.readline()
        assert line, "the sender ended"
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def ask(self, **command: object) -> dict[str, Any]:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        return await self.answer()

    async def offer(self, num_positions: int, finished: int) -> TransferRequest:
        handover_id = secrets.token_bytes(16)
        await self.ask(
            offer=handover_id.hex(),
            receiver=self.me.instance_id,
            num_positions=num_positions,
            finished=finished,
            tokens=finished == num_positions,
        )
        return TransferRequest(handover_id, self.sender, num_positions, 60)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    async def stop(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.communicate()


@asynccontextmanager
async def world(transport: str) -> AsyncIterator[World]:
    me = identity("decode")
    staging = await Staging.open(
        me.instance_id, transport=transport, num_buffers=NUM_BUFFERS, buffer_bytes=BUFFER_BYTES
    )
    channels: list[grpc.aio.Channel] = []

    def connect(peer: WorkerIdentity) -> SenderConnection:
        channels.append(grpc.aio.insecure_channel(peer.address))
        return SenderConnection(channels[-1])

    receiver = KvReceiver(me, LAYOUT, staging, connect, liveness=LIVENESS)
    here = World(receiver, me, staging)
    await here.start(transport)
    try:
        yield here
    finally:
        await here.stop()
        await receiver.close()
        for channel in channels:
            await channel.close()
        await staging.close()


async def has(pool: Pool, positions: int) -> None:
    """Waits until so many positions were unpacked."""
    await until(lambda: len(pool.kv) == positions)


@pytest.mark.parametrize("transport", [pytest.param("loopback", marks=pytest.mark.deep), "nixl"])
async def test_a_killed_sender_fails_the_hand_over_and_its_successor_serves(transport: str) -> None:
    async with world(transport) as here:
        ticket, pool = await here.offer(100, finished=60), Pool()
        collecting = asyncio.create_task(here.receiver.collect(ticket, pool.reserve, pool.unpack))
        await until(lambda: len(pool.kv) == 60)
        here.signal(signal.SIGKILL)
        with pytest.raises(HandoverFailed):
            await collecting
        assert pool.kv == expected(ticket.handover_id, 60)
        assert here.staging.ring.num_free == NUM_BUFFERS

        await here.stop()
        await here.start(transport)
        ticket, pool = await here.offer(100, finished=100), Pool()
        collected = await here.receiver.collect(ticket, pool.reserve, pool.unpack)
        assert pool.kv == expected(ticket.handover_id, 100)
        assert collected.tokens == TOKENS


@pytest.mark.deep
async def test_a_frozen_sender_fails_the_hand_over_and_both_sides_recover() -> None:
    async with world("loopback") as here:
        ticket, pool = await here.offer(100, finished=60), Pool()
        collecting = asyncio.create_task(here.receiver.collect(ticket, pool.reserve, pool.unpack))
        await until(lambda: len(pool.kv) == 60)
        here.signal(signal.SIGSTOP)
        with pytest.raises(HandoverFailed, match="silent"):
            await collecting
        assert here.staging.ring.num_free == NUM_BUFFERS
        here.signal(signal.SIGCONT)
        async with asyncio.timeout(120):
            while await here.ask(state=True) != {"free": NUM_BUFFERS, "offers": 0}:  # noqa: ASYNC110
                await asyncio.sleep(0.05)

        ticket, pool = await here.offer(30, finished=30), Pool()
        await here.receiver.collect(ticket, pool.reserve, pool.unpack)
        assert pool.kv == expected(ticket.handover_id, 30)


@pytest.mark.deep
async def test_a_sender_that_falls_silent_again_and_again_costs_no_sockets() -> None:
    """Its ring stays connected: UCX keeps the sockets of a connection that is made anew."""

    def sockets(process: object) -> int:
        return len(os.listdir(f"/proc/{process}/fd"))

    async def hand_over(here: World) -> None:
        ticket, pool = await here.offer(30, finished=30), Pool()
        await here.receiver.collect(ticket, pool.reserve, pool.unpack)
        assert pool.kv == expected(ticket.handover_id, 30)

    async with world("nixl") as here:
        await hand_over(here)
        ours, theirs = sockets("self"), sockets(here.process.pid)
        for _ in range(2):
            ticket, pool = await here.offer(100, finished=60), Pool()
            collecting = asyncio.create_task(
                here.receiver.collect(ticket, pool.reserve, pool.unpack)
            )
            await has(pool, 60)
            here.signal(signal.SIGSTOP)
            with pytest.raises(HandoverFailed, match="silent"):
                await collecting
            here.signal(signal.SIGCONT)
            await hand_over(here)
            # One that is no leak may close a moment later. Fewer are there where something that
            # earlier tests left to this process closes meanwhile.
            await until(lambda: sockets("self") <= ours and sockets(here.process.pid) <= theirs)


@pytest.mark.deep
@pytest.mark.parametrize("filter_reason", ["continues", "dies"])
async def test_a_read_from_a_frozen_process_waits_orphaned(filter_reason: str) -> None:
    """Over TCP, where a frozen process answers no read. Its late bytes hit its own buffer only."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tests.kv.frozen_sender", filter_reason),
        stdout=subprocess.PIPE,
        env={**os.environ, "UCX_TLS": "tcp,self"},
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0
    seen = json.loads(output)
    # While it is frozen: a read that outlasted its time would wait for it for ever.
    assert not seen["in_time"]
    assert seen["orphaned"] == 1
    assert seen["canaries"], "bytes landed outside the buffer"
    assert seen["free"] == NUM_BUFFERS
    assert seen["peer_alive"] == seen["landed_late"] == (filter_reason == "continues")
