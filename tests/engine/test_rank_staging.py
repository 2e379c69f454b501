"""Staging buffers in the GPUs of a worker's ranks, over a driver whose GPUs' memory is the host's.

All else is real: ranks and gloo, what they map and hash, NIXL, hand-overs. Ranks are threads here;
another process opens the memory in a test of its own.
"""

from __future__ import annotations

import asyncio
import ctypes
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from batonlm.core.errors import HandoverFailed, Unavailable
from batonlm.core.handover.leaf_hash import points_of
from batonlm.core.kvcache.block_pool import BlockPool
from batonlm.core.scheduler.loop import EngineLoop
from batonlm.core.scheduler.plan import KvPayload, ModelRunner, StagingMemory
from batonlm.core.scheduler.policy import SchedulerPolicy
from batonlm.core.scheduler.scheduler import Scheduler
from batonlm.engine import cuda
from batonlm.engine.config import EngineConfig
from batonlm.engine.cuda import CudaMemory
from batonlm.engine.ranks.runner import RankedRunner
from batonlm.engine.ranks.shared import GpuMemory, SharedPlace
from batonlm.engine.ranks.staging import RanksStaging
from batonlm.engine.runner import TorchRunner
from batonlm.engine.thread import EngineThread
from batonlm.transfer import nixl
from batonlm.transfer.leaf_hash import leaf_hashes
from batonlm.transfer.receiver import TransferRequest
from batonlm.transfer.staging import NO_FAULTS, Faults, StagingPool, place_of
from batonlm.transfer.stats import HandoverStats
from batonlm.transfer.ucx import KvNetwork, choose
from batonlm.worker.options import WorkerOptions
from batonlm.worker.staging import open_staging
from tests.engine.devices import reason_against_interpreter
from tests.engine.driving import fill, packed, random_prompts
from tests.engine.local_ranks import LocalRanks
from tests.engine.nvml import build_driver
from tests.engine.tiny_models import VOCAB
from tests.kv.rig import TOKENS, identity, rig

pytestmark = pytest.mark.skipif(
    bool(reason_against_interpreter()), reason=reason_against_interpreter()
)
needs_nixl = pytest.mark.skipif(not nixl.available(), reason="NIXL is not installed")

BUFFER, SMALL = 1 << 16, 1 << 14
POINTS = points_of(bytes(range(16)))
HERE, THERE = ((0, 3),), ((7, 3),)
LENGTH = 40


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ctypes.CDLL]:
    """In place of NVIDIA's. All that was taken of it is given back."""
    with pytest.MonkeyPatch.context() as patch:
        path = build_driver(tmp_path_factory.mktemp("driver"))
        patch.setattr(cuda, "LIBRARY", str(path))
        patch.setattr(RanksStaging, "kind", "DRAM")
        library = ctypes.CDLL(str(path))
        yield library
        assert retained(library) == 0


def retained(library: ctypes.CDLL) -> int:
    return ctypes.c_int.in_dll(library, "retained").value


@pytest.fixture(scope="module")
def ranked(
    driver: ctypes.CDLL, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., RankedRunner]]:
    """A runner of llama over so many ranks; the same one for the same degree."""
    known: dict[tuple[Path, int, int], RankedRunner] = {}
    with ExitStack() as ends:

        def open_ranks(folder: Path, tensor: int, stages: int = 1) -> RankedRunner:
            key = folder, tensor, stages
            if key not in known:
                config = EngineConfig(str(folder), num_blocks=64, threads=1)
                made = known[key] = RankedRunner.open(LocalRanks(tensor, stages), config)
                made.on_device = True
                ends.callback(made.close)
            return known[key]

        yield open_ranks


def memory_of(runner: ModelRunner, num_buffers: int, buffer_bytes: int = BUFFER) -> StagingMemory:
    memory = runner.staging_memory(num_buffers, buffer_bytes)
    assert memory is not None
    return memory


@pytest.mark.parametrize(
    ("tensor", "stages", "num_buffers"), [pytest.param(2, 1, 5, marks=pytest.mark.deep), (2, 2, 3)]
)
def test_ranks_pack_into_buffers_of_each_others_gpus(
    tensor: int,
    stages: int,
    num_buffers: int,
    saved: Callable[[str], Path],
    ranked: Callable[..., RankedRunner],
    driver: ctypes.CDLL,
) -> None:
    """And nothing else is touched; buffers are dealt out; what they hold is hashed where it is."""
    runner, before = ranked(saved("llama"), tensor, stages), retained(driver)
    (prompt,) = random_prompts((LENGTH,), VOCAB)
    fill(runner, prompt, HERE)
    wanted = bytes(packed(runner, HERE, 5, 30))
    pool = StagingPool(num_buffers, BUFFER, memory_of(runner, num_buffers))
    memory, told = pool.memory, pool.describe()
    regions = min(tensor * stages, num_buffers)
    assert [region.device_id for region in memory.regions] == list(range(regions))
    assert sum(region.num_bytes for region in memory.regions) == num_buffers * BUFFER
    try:
        for number in range(num_buffers):
            assert memory.read(pool.view(number)) == bytes(BUFFER)
        for number in range(num_buffers):
            part = pool.view(number)[128 : 128 + len(wanted)]
            runner.pack(HERE, 5, 30, part)
            whole = memory.read(pool.view(number))
            assert whole == bytes(128) + wanted + bytes(BUFFER - 128 - len(wanted))
            assert memory.leaf_hashes(part, POINTS) == leaf_hashes(memoryview(wanted), POINTS)
            address, device = place_of(told, number)
            assert ctypes.string_at(address, BUFFER) == whole
            assert device == number % regions
            runner.unpack(THERE, 5, 30, part)
            assert packed(runner, THERE, 5, 30) == wanted
            memory.write(part, bytes(len(wanted)))
            assert memory.read(pool.view(number)) == bytes(BUFFER)
    finally:
        pool.close()
    assert retained(driver) == before


@pytest.mark.deep
def test_hashes_and_copies_take_turns(
    saved: Callable[[str], Path], ranked: Callable[..., RankedRunner]
) -> None:
    """Of several threads, as a sender's are; each gets its own answer."""
    runner = ranked(saved("llama"), 2)
    (prompt,) = random_prompts((LENGTH,), VOCAB, seed=5)
    fill(runner, prompt, HERE)
    pool = StagingPool(8, BUFFER, memory_of(runner, 8))
    spans = [(first, LENGTH - 2 * first) for first in range(8)]
    wanted = [bytes(packed(runner, HERE, *span)) for span in spans]

    def move(number: int) -> bytes:
        part = pool.view(number)[128 : 128 + len(wanted[number])]
        runner.pack(HERE, *spans[number], part)
        return pool.memory.leaf_hashes(part, POINTS)

    try:
        with ThreadPoolExecutor(8) as threads:
            found = list(threads.map(move, range(8)))
        assert found == [leaf_hashes(memoryview(payload), POINTS) for payload in wanted]
    finally:
        pool.close()


@pytest.mark.deep
def test_memory_is_freed_when_the_ranks_have_ended_already(
    saved: Callable[[str], Path], driver: ctypes.CDLL
) -> None:
    config = EngineConfig(str(saved("llama")), num_blocks=64, threads=1)
    runner, before = RankedRunner.open(LocalRanks(2), config), retained(driver)
    runner.on_device = True
    memory = memory_of(runner, 4)
    mapped = retained(driver)
    runner.close()
    memory.close()
    memory.close()
    # What ranks had mapped goes with their processes, which are threads here.
    assert mapped - retained(driver) == 2
    ctypes.c_int.in_dll(driver, "retained").value = before


def test_buffers_of_several_devices_are_taken_in_turn(
    saved: Callable[[str], Path], ranked: Callable[..., RankedRunner]
) -> None:
    runner = ranked(saved("llama"), 2)
    pool = StagingPool(4, BUFFER, memory_of(runner, 4))
    try:
        found = []
        for _ in range(6):
            buffer = pool.take("peer")
            assert buffer is not None
            found.append(place_of(pool.describe(), buffer.index)[1])
            buffer.release()
        assert found in ([0, 1] * 3, [1, 0] * 3)
    finally:
        pool.close()


class Damage(Faults):
    """Changes a byte of the first KV chunk that is sealed once it is armed."""

    armed = False

    def __init__(self, memory: StagingMemory | None) -> None:
        self._memory = memory

    async def at(self, point: str, kv_chunk: KvPayload | None = None) -> None:
        if self.armed and point == "sender.sealed":
            assert self._memory is not None and kv_chunk is not None
            self.armed = False
            byte = kv_chunk[500:501]
            (found,) = self._memory.read(byte)
            self._memory.write(byte, bytes([found ^ 1]))


async def hand_over(
    sender: ModelRunner,
    receiver: ModelRunner,
    senders: StagingMemory | None,
    receivers: StagingMemory | None,
    *,
    damaged: bool = False,
) -> None:
    """KV of HERE becomes KV of THERE, in several KV chunks."""
    faults = Damage(senders)
    async with rig(
        "nixl",
        num_buffers=4,
        sender_layout=sender.layout,
        receiver_layout=receiver.layout,
        sender_buffer_bytes=SMALL,
        receiver_buffer_bytes=SMALL,
        sender_memory=senders,
        receiver_memory=receivers,
        sender_faults=faults,
    ) as world:

        async def pack(first: int, number: int, out: KvPayload) -> None:
            await asyncio.to_thread(sender.pack, HERE, first, number, out)

        async def unpack(first: int, number: int, payload: KvPayload) -> None:
            await asyncio.to_thread(receiver.unpack, THERE, first, number, payload)

        async def reserve() -> int:
            return 0

        await world.receiver.meet(world.sender.identity)
        faults.armed = damaged
        handover_id, me = secrets.token_bytes(16), world.collecting_as.instance_id
        offer = world.sender.offer(handover_id, me, LENGTH, pack, deadline_s=60.0)
        offer.announce()
        offer.advance(LENGTH)
        offer.tokens(TOKENS)
        request = TransferRequest(handover_id, world.sender.identity, LENGTH)
        await world.receiver.collect(request, reserve, unpack)
        assert world.receiver.stats.kv_chunks > 1


@needs_nixl
@pytest.mark.parametrize(
    ("senders", "receivers"),
    [((2, 1), (2, 2)), pytest.param((2, 2), (1, 1), marks=pytest.mark.deep)],
    ids=str,
)
async def test_kv_is_handed_over_between_unequal_degrees(
    senders: tuple[int, int],
    receivers: tuple[int, int],
    saved: Callable[[str], Path],
    ranked: Callable[..., RankedRunner],
) -> None:
    """(1, 1) is a worker of one rank, whose buffers are in the host."""
    folder = saved("llama")
    sender = ranked(folder, *senders)
    receiver: ModelRunner
    if receivers == (1, 1):
        receiver = TorchRunner.load(EngineConfig(str(folder), num_blocks=64))
    else:
        receiver = ranked(folder, *receivers)
    (prompt,) = random_prompts((LENGTH,), VOCAB, seed=3)
    fill(sender, prompt, HERE)
    here = memory_of(sender, 4, SMALL)
    there = receiver.staging_memory(4, SMALL)
    await hand_over(sender, receiver, here, there)
    assert packed(receiver, THERE, 0, LENGTH) == packed(sender, HERE, 0, LENGTH)


@needs_nixl
async def test_damage_in_a_gpu_is_found_before_it_is_unpacked(
    saved: Callable[[str], Path], ranked: Callable[..., RankedRunner]
) -> None:
    sender = receiver = ranked(saved("llama"), 2, 1)
    before = packed(receiver, THERE, 0, LENGTH)
    (prompt,) = random_prompts((LENGTH,), VOCAB, seed=4)
    fill(sender, prompt, HERE)
    here, there = memory_of(sender, 4, SMALL), None
    with pytest.raises(HandoverFailed, match="what was announced"):
        await hand_over(sender, receiver, here, there, damaged=True)
    # What was sealed apart from it may have come before, and cleared what follows it in its block.
    whole, after = packed(sender, HERE, 0, LENGTH), packed(receiver, THERE, 0, LENGTH)
    assert all(found in (0, *known) for found, *known in zip(after, before, whole, strict=True))
    assert after != whole


@needs_nixl
@pytest.mark.deep
async def test_a_worker_proves_every_gpu_before_it_serves(
    saved: Callable[[str], Path],
    ranked: Callable[..., RankedRunner],
    driver: ctypes.CDLL,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And goes over the host where one of them gives back other bytes than it got."""
    runner = ranked(saved("llama"), 2, 2)
    assert await opened_in_host(runner) is False
    seen: list[int] = []
    read = RanksStaging.leaf_hashes

    def noted(memory: RanksStaging, part: KvPayload, points: object) -> bytes:
        found = read(memory, part, points)  # type: ignore[arg-type]
        assert isinstance(part, SharedPlace) and isinstance(part.file, GpuMemory)
        seen.append(part.file.rank)
        return found[::-1] if part.file.rank == 3 else found

    monkeypatch.setattr(RanksStaging, "leaf_hashes", noted)
    before = retained(driver)
    assert await opened_in_host(runner) is True
    assert set(seen) == {0, 1, 2, 3} and retained(driver) == before


async def opened_in_host(runner: RankedRunner) -> bool:
    """Where open_staging puts a worker's buffers."""
    policy = SchedulerPolicy(max_sequences=4, token_budget=64, prefill_budget=32)
    pool = BlockPool(runner.num_blocks, runner.block_size)
    engine = EngineThread(
        lambda: EngineLoop(Lent(runner), Scheduler(pool, policy, runner.model)), lambda events: None
    )
    await engine.start()
    options = WorkerOptions(model="m", staging_mib=256)
    try:
        async with AsyncExitStack() as ends:
            staging, _ = await open_staging(
                options, choose(KvNetwork.LOCAL), engine, runner, identity("prefill"),
                HandoverStats(), ends, probe_interval_s=10.0, faults=NO_FAULTS,
            )  # fmt: skip
            return staging.ring.memory.in_host
    finally:
        await engine.stop()


class Lent:
    """A runner that whoever closes it does not close."""

    def __init__(self, runner: RankedRunner) -> None:
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def close(self) -> None:
        pass


def test_a_gpu_without_room_leaves_nothing_behind(
    saved: Callable[[str], Path], ranked: Callable[..., RankedRunner], driver: ctypes.CDLL
) -> None:
    runner, before = ranked(saved("llama"), 2), retained(driver)
    with pytest.raises(Unavailable, match="no 2147483648 bytes"):
        runner.staging_memory(2, 1 << 31)
    assert retained(driver) == before


def test_a_gpu_out_of_reach_leaves_nothing_behind(
    saved: Callable[[str], Path],
    ranked: Callable[..., RankedRunner],
    driver: ctypes.CDLL,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the ranks go on: nothing that they were sent stays unanswered."""
    runner, before = ranked(saved("llama"), 2), retained(driver)
    handle = CudaMemory.handle

    def other(memory: CudaMemory) -> bytes:
        return bytes(cuda.HANDLE_BYTES) if memory.device else handle(memory)

    monkeypatch.setattr(CudaMemory, "handle", other)
    with pytest.raises(Unavailable, match=r"rank \d cannot reach rank 1's GPU"):
        runner.staging_memory(4, BUFFER)
    assert retained(driver) == before
    monkeypatch.undo()
    (prompt,) = random_prompts((LENGTH,), VOCAB)
    fill(runner, prompt, HERE)
    assert any(packed(runner, HERE, 0, LENGTH))


def test_ranks_without_gpus_or_whole_words_have_none(
    saved: Callable[[str], Path],
    ranked: Callable[..., RankedRunner],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = ranked(saved("llama"), 2)
    monkeypatch.setattr(runner, "on_device", False)
    assert runner.staging_memory(4, BUFFER) is None
    monkeypatch.undo()
    half = replace(runner.layout, dtype="float16", num_layers=1, num_kv_heads=1, key_size=17)
    monkeypatch.setattr(runner, "layout", half)
    assert half.bytes_per_position % 4
    assert runner.staging_memory(4, BUFFER) is None, "the device hashes whole words"


@pytest.mark.deep
def test_memory_is_zero_and_another_process_opens_it(driver: ctypes.CDLL) -> None:
    memory = CudaMemory(1, 4096)
    try:
        assert memory.read(0, 4096) == bytes(4096)
        code = f"""
import torch
from batonlm.engine import cuda
from batonlm.engine.kv.staging import tensor_at
cuda.LIBRARY = {cuda.LIBRARY!r}
opened = cuda.OpenedMemory(0, bytes.fromhex("{memory.handle().hex()}"))
there = tensor_at(opened.address, 4096, torch.device("cpu"))
there[100:104] = torch.tensor([1, 2, 3, 4], dtype=torch.uint8)
del there
opened.close()
"""
        subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
        assert memory.read(98, 8) == bytes([0, 0, 1, 2, 3, 4, 0, 0])
    finally:
        memory.close()
        memory.close()


def test_no_driver_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "LIBRARY", "libnone.so.9")
    with pytest.raises(Unavailable, match="no NVIDIA driver"):
        CudaMemory(0, 4096)
