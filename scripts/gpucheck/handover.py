"""Prefill here, decode in a second process: KV crosses over NIXL through staging memory.

Both processes have the same random weights. This one computes a prompt, and as a reference decodes
it, too; then it packs the prompt's KV chunk by chunk, the other one reads each chunk, unpacks it,
and at the end decodes from the first token on. Same kernels on the same device at the same batch
give the same tokens, so any that differs is an error of the transfer.
"""

from __future__ import annotations

import random
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch

from baton_loadtest.report import Result, at_most, compared
from batonlm.core.handover.leaf_hash import points_of
from batonlm.core.kvcache.block_pool import Extents, blocks_for
from batonlm.core.scheduler.plan import StagingMemory
from batonlm.engine.config import MIB
from batonlm.engine.kv.staging import DeviceStaging
from batonlm.engine.runner import TorchRunner
from batonlm.transfer.nixl import NixlTransport
from batonlm.transfer.staging import HostMemory, ReadState, StagingPool
from batonlm.transfer.ucx import KvNetwork, choose
from batonlm.v1 import handover_pb2 as pb
from gpucheck.check import Check, Skip
from gpucheck.driving import Batch, generate
from gpucheck.driving import run as drive
from gpucheck.figures import LLAMA_1B, agreement
from gpucheck.link import link_name
from gpucheck.neighbour import Neighbour, answer, neighbour, questions
from gpucheck.speed import BLOCK, Sizes, model, sizes

GOAL = 0.8
"""Of what NIXL moves between two processes by itself."""
DEADLINE_S = 20.0
"""Of one read."""
_SEED = 11
_POINTS = points_of(bytes(16))


@dataclass(frozen=True, slots=True)
class Setting:
    """What both processes have in common."""

    sizes: Sizes
    new_tokens: int
    num_buffers: int
    buffer_bytes: int

    @property
    def table(self) -> Extents:
        return ((0, blocks_for(self.sizes.context, BLOCK)),)


def setting(check: Check) -> Setting:
    if not check.on_gpu:
        return Setting(sizes(check), 4, 2, 8192)
    return Setting(replace(sizes(check), shape=LLAMA_1B, prompt=8192), 32, 4, 32 * MIB)


@dataclass(frozen=True, slots=True)
class Side:
    """One process's part: an engine and its staging memory."""

    runner: TorchRunner
    ring: StagingPool
    transport: NixlTransport
    instance_id: str


@contextmanager
def opened(check: Check, common: Setting) -> Iterator[Side]:
    torch.manual_seed(_SEED)
    s = common.sizes
    size = common.num_buffers * common.buffer_bytes
    with model(check, s, sequences=1, longest=s.context) as runner, ExitStack() as ends:
        memory: StagingMemory
        if check.part == "device":
            memory = DeviceStaging(torch.device(check.device), size)
        else:
            memory = HostMemory(size)
        ring = StagingPool(common.num_buffers, common.buffer_bytes, memory)
        ends.callback(ring.close)
        if isinstance(memory, HostMemory):
            ends.callback(runner.share(memory.fd, memory.address, size))
        instance_id = secrets.token_hex(16)
        transport = NixlTransport(ring, instance_id, choose(KvNetwork.TRUSTED))
        ends.callback(transport.close)
        yield Side(runner, ring, transport, instance_id)


def run(check: Check) -> Iterator[Result]:
    """The part names the kind of staging memory."""
    if find_spec("nixl") is None:
        raise Skip("NIXL is not installed; gpucheck/strip_nixl.py makes a small copy to carry")
    common = setting(check)
    with opened(check, common) as prefill, neighbour(__name__, check.device, check.part) as other:
        other.listen()
        met = other.ask(
            peer=prefill.instance_id,
            metadata=prefill.transport.metadata().hex(),
            ring=prefill.ring.describe().SerializeToString().hex(),
        )
        assert met["met"]
        s = common.sizes
        numbers = random.Random(4)
        prompt = [numbers.randrange(s.shape.vocab) for _ in range(s.prompt)]
        (wanted,) = generate(prefill.runner, [prompt], common.new_tokens, s.chunk)
        yield from _moved(check, common, prefill, other)
        tokens = other.ask(decode=wanted[0], position=s.prompt)["tokens"]
        alike, of = agreement([tokens], [wanted])
        yield compared(f"tokens after a hand-over, {check.part}", alike, "tokens", of, 1.0)


def _moved(check: Check, common: Setting, prefill: Side, other: Neighbour) -> Iterator[Result]:
    """Hands the prompt's KV over twice: the first time opens connections."""
    each = common.buffer_bytes // prefill.runner.layout.bytes_per_position
    size = common.sizes.prompt * prefill.runner.layout.bytes_per_position
    wrong = 0
    for _ in range(2):
        pack_s = read_s = hash_s = unpack_s = 0.0
        for index, first in enumerate(range(0, common.sizes.prompt, each)):
            count = min(each, common.sizes.prompt - first)
            buffer = index % common.num_buffers
            payload = count * prefill.runner.layout.bytes_per_position
            began = time.perf_counter()
            view = prefill.ring.view(buffer)[:payload]
            prefill.runner.pack(common.table, first, count, view)
            packed = time.perf_counter()
            hashes = prefill.ring.memory.leaf_hashes(view, _POINTS)
            pack_s, hash_s = pack_s + packed - began, hash_s + time.perf_counter() - packed
            spent = other.ask(first=first, count=count, buffer=buffer)
            read_s += spent["read_s"]
            unpack_s += spent["unpack_s"]
            wrong += spent["hashes"] != hashes.hex()
    part = check.part
    yield check.speed(f"hand-over, {part}: read", size / read_s, "B/s", link_name(part), GOAL)
    yield Result(f"hand-over, {part}: pack", size / pack_s, "B/s")
    yield Result(f"hand-over, {part}: digest", size / hash_s, "B/s")
    yield Result(f"hand-over, {part}: unpack", size / unpack_s, "B/s")
    yield at_most(f"KV chunks with another digest, {part}", wrong, "", 0)
    slowest = max(pack_s, read_s, hash_s, unpack_s)
    yield Result(f"hand-over, {part}: bound of its slowest part", size / slowest, "B/s")


def main() -> None:
    """The process that decodes."""
    check = Check(device=sys.argv[1], part=sys.argv[2])
    common = setting(check)
    with opened(check, common) as decode:
        answer(ready=True)
        peer = ""
        for question in questions():
            if "peer" in question:
                peer = question["peer"]
                ring = pb.StagingPoolDescription.FromString(bytes.fromhex(question["ring"]))
                decode.transport.add_peer(peer, bytes.fromhex(question["metadata"]), ring)
                answer(met=True)
            elif "decode" in question:
                answer(tokens=_decoded(decode, common, question["decode"], question["position"]))
            else:
                answer(**_collected(decode, common, peer, **question))


def _collected(
    decode: Side, common: Setting, peer: str, first: int, count: int, buffer: int
) -> dict[str, Any]:
    """Reads one chunk from a peer's buffer into the same one of ours, and unpacks it."""
    size = count * decode.runner.layout.bytes_per_position
    began = time.perf_counter()
    handle = decode.transport.post(peer, buffer, buffer, size)
    while (state := decode.transport.poll(handle)) is ReadState.RUNNING:
        if time.perf_counter() - began > DEADLINE_S:
            raise TimeoutError("a read was not done in time")
    if state is not ReadState.DONE:
        raise RuntimeError("a read failed")
    decode.transport.release(handle)
    arrived = time.perf_counter()
    payload = decode.ring.view(buffer)[:size]
    decode.runner.unpack(common.table, first, count, payload)
    unpacked = time.perf_counter()
    hashes = decode.ring.memory.leaf_hashes(payload, _POINTS)
    return {"read_s": arrived - began, "unpack_s": unpacked - arrived, "hashes": hashes.hex()}


def _decoded(decode: Side, common: Setting, token: int, position: int) -> list[int]:
    """The first token, and those that follow it."""
    batch = Batch([position], common.table[0][1], known={0: token})
    made = drive(decode.runner, common.new_tokens - 1, batch.decode)
    return [token, *(step[0] for step in made)]


if __name__ == "__main__":
    main()
