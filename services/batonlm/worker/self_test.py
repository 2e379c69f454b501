"""KvSelfTest, which tests whether this worker can move KV: at start, and again while it is idle."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from collections.abc import Callable

from batonlm.core.errors import BatonError, Unavailable
from batonlm.core.handover.leaf_hash import LEAF_BYTES, points_of
from batonlm.core.handover.table import HANDOVER_ID_BYTES, KvChunkRange
from batonlm.core.request.model import SCALED, KvLayout, WorkerIdentity
from batonlm.core.routing.failures import SteadyVerdict
from batonlm.core.routing.load import WorkerState
from batonlm.core.scheduler.plan import KvPayload, ModelRunner
from batonlm.engine.thread import EngineThread
from batonlm.transfer.kv_chunk import HEADER_BYTES, Pack, Sealer, Unpack, probe_positions
from batonlm.transfer.receiver import READ_S
from batonlm.transfer.staging import StagingBuffer, TransportError
from batonlm.transfer.stats import HandoverStats
from batonlm.transfer.stream import outlast, to_end
from batonlm.transfer.transports import Staging

log = logging.getLogger(__name__)

AGAIN_S = 1.0
_FIRST_BLOCK = ((0, 1),)


class KvSelfTest:
    """Probes this worker's transports by moving a KV chunk to itself. Runs on the event loop.

    A worker whose first probe fails does not start. Later, two failed probes in a row make it not
    ready, and two good ones in a row make it ready again, probed once a second in between. Probes
    run one at a time, and only while the worker has no attempt.
    """

    def __init__(
        self,
        engine: EngineThread,
        runner: ModelRunner,
        staging: Staging,
        identity: WorkerIdentity,
        stats: HandoverStats,
        every_s: float,
    ) -> None:
        """every_s: seconds between two probes while the worker is ready."""
        self._engine, self._staging, self._identity = engine, staging, identity
        self._layout, self._stats, self._every_s = runner.layout, stats, every_s
        self._positions = min(
            runner.block_size, probe_positions(staging.ring.buffer_bytes, runner.layout)
        )
        self._pattern = _pattern(self._positions, runner.layout)
        self._verdict = SteadyVerdict()
        self._watching: asyncio.Task[None] | None = None
        self.probing = False

    @property
    def fit(self) -> bool:
        return self._verdict.good

    def limit(self, state: WorkerState) -> WorkerState:
        """The worker's state, given the service's: STARTING in place of SERVING while probes
        fail."""
        serving = state is WorkerState.SERVING
        return state if self.fit or not serving else WorkerState.STARTING

    async def prove(self) -> None:
        """Moves KV from the engine's memory to itself over every transport, before serving.

        It uses the pool's first block, which has no owner yet. Raises Unavailable when no transport
        works, or when one fails that the options name.
        """
        # The first copies and the first digest on a GPU compile their kernels, which takes seconds
        # and is no part of a probe's time.
        scratch = memoryview(bytearray(len(self._pattern)))
        await self._pack(0, self._positions, scratch)
        ring = self._staging.ring
        for number in range(0 if ring.memory.in_host else len(ring.memory.regions)):
            # Each device's own.
            part, points = ring.view(number)[:LEAF_BYTES], points_of(bytes(HANDOVER_ID_BYTES))
            await asyncio.to_thread(ring.memory.leaf_hashes, part, points)
        for name in self._staging.names:
            try:
                await self._probe(name, through_engine=True)
            except Unavailable as error:
                await self._staging.give_up(name, error.message)

    def watch(self, idle: Callable[[], bool], report: Callable[[bool], None]) -> None:
        """Starts periodic probes. idle: whether the worker has no attempt. report: called when
        `fit` changes."""
        self._watching = asyncio.create_task(self._watch(idle, report))

    def stop(self) -> None:
        """Stops periodic probes."""
        if self._watching is not None:
            self._watching.cancel()

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await outlast([self._watching])

    async def _watch(self, idle: Callable[[], bool], report: Callable[[bool], None]) -> None:
        while True:
            await asyncio.sleep(self._every_s if self.fit else min(AGAIN_S, self._every_s))
            if not idle():
                continue
            why = await self._look()
            if self._verdict.observe(not why):
                log.warning("the way for KV works again" if self.fit else f"not ready: {why}")
                report(self.fit)

    async def _look(self) -> str:
        """Probes every transport; returns what does not work, or ""."""
        try:
            for name in self._staging.names:
                await self._probe(name, through_engine=False)
        except Unavailable as error:
            return error.message
        except Exception:
            log.exception("the worker's probe of itself failed for a fault of its own")
            return "the probe itself failed"
        return ""

    async def _probe(self, name: str, *, through_engine: bool) -> None:
        pack, unpack = (self._pack, self._unpack) if through_engine else (self._write, self._check)
        good = False
        self.probing = True
        try:
            await probe_self(
                self._staging, name, self._identity, self._layout, self._positions, pack, unpack
            )
            good = True
        finally:
            self.probing = False
            self._stats.probes["self", "ok" if good else "failed"] += 1

    async def _write(self, first_position: int, count: int, out: KvPayload) -> None:
        self._staging.ring.memory.write(out, self._pattern)

    async def _check(self, first_position: int, count: int, payload: KvPayload) -> None:
        self._compare(self._staging.ring.memory.read(payload))

    def _compare(self, found: bytes) -> None:
        if found != self._pattern:
            raise Unavailable("other KV came out than went in")

    async def _pack(self, first_position: int, count: int, out: KvPayload) -> None:
        await self._engine.call_to_end(
            lambda loop: loop.runner.unpack(_FIRST_BLOCK, 0, count, memoryview(self._pattern))
        )
        await self._engine.call_to_end(lambda loop: loop.runner.pack(_FIRST_BLOCK, 0, count, out))

    async def _unpack(self, first_position: int, count: int, payload: KvPayload) -> None:
        await self._engine.call_to_end(
            lambda loop: loop.runner.unpack(_FIRST_BLOCK, 0, count, payload)
        )
        back = memoryview(bytearray(payload.nbytes))
        await self._engine.call_to_end(lambda loop: loop.runner.pack(_FIRST_BLOCK, 0, count, back))
        self._compare(bytes(back))


def _pattern(count: int, layout: KvLayout) -> bytes:
    """A payload of numbers between 0.0001 and 50 that every type of KV keeps as they are."""
    drawn = hashlib.shake_128(b"baton self-probe").digest(count * layout.bytes_per_position)
    # Scaled rows are the same bytes after a conversion if a code is above half of the largest.
    common, free = (0x78, 3) if layout.dtype in SCALED else (0x38, 7)
    return bytes(common | byte & free for byte in drawn)


async def probe_self(
    staging: Staging,
    name: str,
    me: WorkerIdentity,
    layout: KvLayout,
    num_positions: int,
    pack: Pack,
    unpack: Unpack,
) -> None:
    """Moves one KV chunk within this worker's staging pool, as if between two workers.

    Packs, seals, reads over the transport `name`, verifies and unpacks num_positions: all that can
    be tested without a peer. A pool in several devices has it read into and out of each of them.

    pack and unpack raise BatonError for a fault that they find. Raises Unavailable with what does
    not work.
    """
    ring, reader = staging.ring, staging.readers[name]
    secret, digest = secrets.token_bytes(HANDOVER_ID_BYTES), staging.digests[0]
    sealer = Sealer(secret, me.instance_id, layout, ring.memory, digest)
    header = sealer.header(KvChunkRange(0, 0, num_positions))
    size = HEADER_BYTES + header.payload_bytes
    buffers: list[StagingBuffer] = []
    try:
        async with asyncio.timeout(READ_S):
            source = await ring.wait(me.instance_id)
            buffers.append(source)
            await to_end(pack(0, num_positions, source.view[HEADER_BYTES:size]))
            await asyncio.to_thread(sealer.seal, header, source.view)
            # Buffers of several devices come in turn.
            for _ in ring.memory.regions:
                landing = await ring.wait(me.instance_id, landing=True)
                buffers.append(landing)
                await reader.add_peer(me.instance_id, reader.metadata, ring.describe())
                try:
                    await reader.read(me.instance_id, source.index, landing, size, READ_S)
                finally:
                    await reader.remove_peer(me.instance_id)
                if wrong := await asyncio.to_thread(sealer.mismatch, header, landing.view):
                    raise Unavailable(f"its {wrong} did not arrive as it was sent")
                await to_end(unpack(0, num_positions, landing.view[HEADER_BYTES:size]))
                buffers.remove(source)
                source.release()
                source = landing
    except TimeoutError:
        raise Unavailable("a KV chunk to ourselves takes too long") from None
    except TransportError as error:
        raise Unavailable(f"a KV chunk to ourselves was not read: {error}") from None
    except BatonError as error:
        raise Unavailable(f"a KV chunk to ourselves came to nothing: {error.message}") from None
    finally:
        for buffer in buffers:
            buffer.release()
