"""A process can be looked at from before it has loaded anything until after it has drained."""

from __future__ import annotations

import asyncio
from urllib.request import urlopen

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from batonlm.cli.ports import free_ports
from batonlm.rpc.address import PortInUse
from batonlm.rpc.server import Probes, ProcessServer
from tests.rpc.echo import NAME, Echo

Status = health_pb2.HealthCheckResponse
LOOPBACK = "127.0.0.1:0"


async def told(channel: grpc.aio.Channel, *names: str) -> list[bool]:
    stub = health_pb2_grpc.HealthStub(channel)
    answers = [await stub.Check(health_pb2.HealthCheckRequest(service=name)) for name in names]
    return [answer.status == Status.SERVING for answer in answers]


def scrape(address: str) -> bytes:
    with urlopen(f"http://{address}/metrics", timeout=120) as answer:
        return bytes(answer.read())


async def test_alive_then_started_then_ready_and_started_for_good() -> None:
    probes = Probes(health_listen=LOOPBACK)
    await probes.open()
    server = ProcessServer(listen=LOOPBACK, services=[Echo().service()], probes=probes)
    async with grpc.aio.insecure_channel(probes.health_address) as channel:
        names = ("", "startup", NAME)
        assert await told(channel, *names) == [True, False, False]
        assert await told(channel, "test.Other") == [False], "it may be one of them"
        listed = await health_pb2_grpc.HealthStub(channel).List(health_pb2.HealthListRequest())
        assert sorted(listed.statuses) == ["", "startup"]
        await server.start()
        assert await told(channel, *names) == [True, True, False]
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await told(channel, "test.Other")
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
        server.set_serving(True)
        assert await told(channel, *names) == [True, True, True]
        server.leave()
        assert await told(channel, *names) == [True, True, False]
    await server.stop(0)


async def test_who_waits_for_the_start_is_told() -> None:
    async with (
        Probes(health_listen=LOOPBACK) as probes,
        grpc.aio.insecure_channel(probes.health_address) as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="startup"))
        assert (await watch.read()).status == Status.NOT_SERVING
        probes.health.set_started([NAME])
        assert (await watch.read()).status == Status.SERVING


async def test_nothing_stays_bound_when_health_cannot_be_answered() -> None:
    async with Probes(health_listen=LOOPBACK) as first:
        metrics = f"127.0.0.1:{free_ports(1)[0]}"
        second = Probes(health_listen=first.health_address, metrics_listen=metrics)
        with pytest.raises(PortInUse) as refused:
            await second.open()
        assert refused.value.field == "health_listen"
        async with Probes(metrics_listen=metrics) as third:
            assert third.metrics_address == metrics


async def test_metrics_are_read_before_the_process_serves() -> None:
    async with Probes(metrics_listen=LOOPBACK) as probes:
        answer = await asyncio.to_thread(scrape, probes.metrics_address)
        assert b"process_start_time_seconds" in answer
    assert probes.metrics_address == ""
