"""Workers as real processes, and who can reach their memory: nobody who was not declared."""

from __future__ import annotations

import asyncio
import dataclasses
import ipaddress
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from batonlm.core.errors import Incompatible, InvalidArgument
from batonlm.rpc.address import is_loopback
from batonlm.rpc.convert import identity_to_proto, layout_to_proto
from batonlm.testing.fake_runner import FakeRunner
from batonlm.transfer.kv_chunk import DIGESTS, POLY, XXH3
from batonlm.transfer.peers import SenderConnection
from batonlm.transfer.ucx import KvNetwork, Ucx, choose
from batonlm.v1 import handover_pb2 as pb
from batonlm.worker.options import WorkerOptions
from batonlm.worker.process import network_of, ucx_of
from tests.kv.listeners import listeners
from tests.kv.rig import LAYOUT, Pool, Rig, identity, rig
from tests.services.worker.pair import PATIENCE_S
from tests.services.worker.processes import Process, worker


async def refused(folder: Path, *flags: str) -> str:
    """What a worker that must not start says."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "batonlm.prefill", "--model", str(folder)),
        *flags,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(PATIENCE_S):
        said, complained = await process.communicate()
    assert process.returncode == 2 and not said
    return complained.decode()


async def meeting_with(sender: Process) -> pb.MeetResponse:
    layout = FakeRunner(num_blocks=4, block_size=16, name="x", tokenizer_digest="").layout
    request = pb.MeetRequest(
        receiver=identity_to_proto(identity("decode")),
        layout=layout_to_proto(layout),
        transports=("nixl", "loopback"),
        digests=DIGESTS,
        sender_instance_id=sender.identity.instance_id,
    )
    return await SenderConnection(sender.channel).meet(request)


def beyond_loopback(process: Process) -> list[str]:
    places = listeners(process.process.pid)
    assert places, "its gRPC port at least"
    return [host for host, _ in places if not ipaddress.ip_address(host).is_loopback]


@pytest.mark.deep
async def test_a_worker_of_one_machine_opens_no_way_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ports, of gRPC and of metrics, on loopback; UCX with nothing said listens on all."""
    monkeypatch.delenv("UCX_TLS", raising=False)
    async with worker("batonlm.prefill", tmp_path, "--transport", "nixl") as prefill:
        meeting = await meeting_with(prefill)
        assert (meeting.transport, meeting.kv_network, meeting.digest) == ("nixl", "local", XXH3)
        assert tuple(meeting.ucx_transports) == Ucx().transports
        told = (prefill.identity.address, prefill.metrics)
        ports = [("127.0.0.1", int(address.rpartition(":")[2])) for address in told]
        assert sorted(listeners(prefill.process.pid)) == sorted(ports)


@pytest.mark.deep
async def test_tcp_that_nobody_declared_ends_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    said = await refused(tmp_path)
    assert said.startswith("error: UCX_TLS: tcp,self can be reached from other machines")
    assert "--kv-network" in said and "Traceback" not in said
    monkeypatch.delenv("UCX_TLS")
    said = await refused(tmp_path, "--ucx-transports", "rc,sm")
    assert said.startswith("error: ucx_transports: rc,sm can be reached")


@pytest.mark.deep
async def test_tcp_that_is_declared_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    flags = ("--transport", "nixl", "--kv-network", "isolated", "--ucx-devices", "lo")
    async with worker("batonlm.prefill", tmp_path, *flags) as prefill:
        meeting = await meeting_with(prefill)
        assert (meeting.kv_network, meeting.digest) == ("isolated", POLY)
        assert list(meeting.ucx_transports) == ["tcp", "self"]
        # UCX listens on the device it was given, and there only.
        assert beyond_loopback(prefill) == []
        assert len(listeners(prefill.process.pid)) > 2


async def test_a_worker_that_others_reach_must_say_what_network_it_is_on(tmp_path: Path) -> None:
    reached = ("--listen", "0.0.0.0:0", "--advertise", "10.0.0.1:7000", "--allow-anonymous")
    said = await refused(tmp_path, *reached)
    assert said.startswith("error: kv_network: must be declared")


@pytest.mark.parametrize(
    ("listen", "advertise", "allowed"),
    [
        ("127.0.0.1:0", "", True),
        ("[::1]:0", "", True),
        ("localhost:0", "", True),
        ("127.0.0.1:0", "worker-1.example:80", False),
        ("0.0.0.0:0", "127.0.0.1:1", False),
        ("10.1.2.3:0", "", False),
        ("[::]:0", "[2001:db8::1]:1", False),
    ],
)
def test_undeclared_is_for_loopback(listen: str, advertise: str, allowed: bool) -> None:
    options = WorkerOptions(model="m", listen=listen, advertise=advertise, allow_anonymous=True)
    if allowed:
        assert ucx_of(options).network is KvNetwork.LOCAL
        return
    with pytest.raises(InvalidArgument) as refusal:
        ucx_of(options)
    assert refusal.value.field == "kv_network"
    without = dataclasses.replace(options, transport="loopback")
    assert ucx_of(without) == Ucx()


@pytest.mark.parametrize("declared", ["local", "isolated", "trusted"])
def test_a_declared_network_is_what_was_declared(declared: str) -> None:
    assert network_of(declared, ["10.0.0.1"]) is KvNetwork(declared)


def test_names_are_beyond_loopback_but_one() -> None:
    assert is_loopback("localhost") and is_loopback("127.9.9.9")
    assert not is_loopback("localhost.example") and not is_loopback("")


def meet_request(world: Rig, digests: Sequence[str]) -> pb.MeetRequest:
    return pb.MeetRequest(
        receiver=identity_to_proto(world.collecting_as),
        layout=layout_to_proto(LAYOUT),
        transports=["loopback"],
        sender_instance_id=world.sender.identity.instance_id,
        digests=digests,
    )


async def test_a_weak_seal_is_refused_where_the_network_is_not_trusted() -> None:
    async with rig(sender_ucx=choose(KvNetwork.ISOLATED)) as world:
        # A build that names none has xxh3-128 only.
        for digests in ((), (XXH3,)):
            with pytest.raises(Incompatible, match="digest: xxh3-128 against poly61"):
                world.sender.meet(meet_request(world, digests))


@pytest.mark.parametrize("stricter", ["sender", "receiver"])
async def test_a_pair_seals_as_the_stricter_network_wants(stricter: str) -> None:
    isolated, local = choose(KvNetwork.ISOLATED), choose(KvNetwork.LOCAL)
    first = stricter == "sender"
    async with rig(
        sender_ucx=isolated if first else local, receiver_ucx=local if first else isolated
    ) as world:
        met = world.sender.meet(meet_request(world, world.receiver.staging.digests))
        assert met.digest == POLY
        offer = world.offer(20)
        world.compute(offer)
        pool = Pool()
        await world.collect(offer, pool)
        assert len(pool.kv) == 20
