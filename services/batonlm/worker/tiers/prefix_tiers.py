"""PrefixTiers: units of the prefix cache move to other tiers before they are evicted, and back
before an attempt that begins with them is queued.

Writing is behind everything else: units are copied beside steps, nothing is pinned for that, and
what a tier is too slow for is dropped. Reading ends like collecting a prefix from another worker:
what comes is verified, put into free blocks and published, and the rest is computed. So no tier can
make an answer wrong or a request fail; one that cannot be read or written rests for a while.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import mmap
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import islice, takewhile
from pathlib import Path

from batonlm.core.errors import BatonError, InvalidArgument, Unavailable, install
from batonlm.core.handover.table import KvChunkRange
from batonlm.core.kvcache.block_pool import CachedUnit
from batonlm.core.kvcache.cache_events import TIERS, CacheLog, Change, OnChange
from batonlm.core.kvcache.prefix import UNIT_TOKENS, Prefix, UnitName, unit_names
from batonlm.core.request.attempt import Attempt
from batonlm.core.request.model import KvLayout
from batonlm.core.routing.load import NOMINAL_TIERS, WorkerSpeed
from batonlm.core.scheduler.loop import EngineLoop
from batonlm.core.scheduler.plan import ModelRunner
from batonlm.core.scheduler.prefixes import PrefixBlocks
from batonlm.engine.config import MIB
from batonlm.engine.thread import EngineThread
from batonlm.registry.sources import in_object_store
from batonlm.rpc import metrics
from batonlm.rpc.logs import named
from batonlm.transfer.kv_chunk import DIGEST_BYTES, HEADER_BYTES, Sealer, layout_fingerprint
from batonlm.transfer.staging import HostMemory
from batonlm.v1.types_pb2 import PrefixRestored
from batonlm.worker.hardware import processor
from batonlm.worker.options import WorkerOptions
from batonlm.worker.tiers.places import FolderTier, MemoryTier, Tier
from batonlm.worker.tiers.store import StoreTier

log = logging.getLogger(__name__)

RESTORED = metrics.counter(metrics.RESTORED_TOKENS)
READS = metrics.counter(metrics.TIER_READS)
WRITES = metrics.counter(metrics.TIER_WRITES)

SPILL_EVERY_S = 0.05
"""At most so often the engine is asked for what will be evicted."""
SPILL_UNITS = 8
"""Copied at once: so much memory is taken for copies."""

QUEUE_BYTES, LEAST_QUEUED = 64 << 20, 4
"""Of units that wait to be written to one tier, or so many; the next ones are dropped."""

RESTORE_S = 10.0
"""What did not come by then is computed."""
LEAST_READ_S = 0.5
"""A tier that takes longer for one unit, and twice as long as computing all of them is predicted to
take, has failed."""
MAX_RESTORES = 4
"""Attempts whose prefixes are read at once."""
READ_AHEAD = 8
"""Units of one prefix that are read at once."""
COPY_BYTES = 4 << 20
"""Of units that are copied into the pool together, or one unit: a runner that cannot copy beside
steps computes none meanwhile."""

REST_S, LONGEST_REST_S = 5.0, 60.0
"""For which a tier is left alone that could not be read or written: twice as long each time until
it can be."""

FLUSH_S = 10.0
"""For which a worker that leaves writes what is in its prefix cache to tiers that last."""

FORGET_S = 60.0
"""After which the speed of a tier that was not read is not known any more."""


def fingerprint(options: WorkerOptions, layout: KvLayout) -> str:
    """Names what computes bit-equal KV: equal only where two workers' KV is exchangeable. options:
    without open choices."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = ""
    values = (
        *(layout_fingerprint(layout).hex(), version("batonlm"), torch, options.block_size),
        *(options.exact, options.device, options.dtype, options.kv_cache_dtype, options.quantize),
        *(options.decoder, options.tensor_parallel, options.pipeline_parallel),
        processor(options.device),
    )
    text = "|".join(map(str, values))
    return hashlib.blake2b(text.encode(), digest_size=16, person=b"baton tiers").hexdigest()


async def open_tiers(
    options: WorkerOptions,
    engine: EngineThread,
    runner: ModelRunner,
    speed: Callable[[], WorkerSpeed],
    cache: CacheLog,
) -> PrefixTiers | None:
    """The tiers that a worker's options name, None without any. options: without open choices.
    cache: of the prefix cache.

    Raises InvalidArgument for a folder that cannot be used.
    """
    if runner.layout.state_positions:
        # The KV of a prefix is worth nothing without the state behind it.
        return None
    kind = fingerprint(options, runner.layout)
    units = SealedUnits(runner.layout, runner.block_size, kind)
    tiers: list[Tier] = []
    changes: dict[str, deque[Change]] = {name: deque() for name in TIERS}
    if options.prefix_host_mib:
        room = options.prefix_host_mib * MIB
        tiers.append(MemoryTier(room, changes["host"].append))
    if options.prefix_disk_mib:
        folder = options.kv_folder
        room = options.prefix_disk_mib * MIB
        try:
            disk = await asyncio.to_thread(
                partial(FolderTier, report=changes["disk"].append),
                *("disk", folder, kind, room, units.num_bytes),
            )
        except OSError as error:
            raise InvalidArgument(
                f"{folder} cannot be used: {error.strerror}", field="prefix_disk_folder"
            ) from error
        disk.start()
        tiers.append(disk)
    if options.prefix_store:
        report = changes["store"].append
        store = await asyncio.to_thread(_store, options, kind, units.num_bytes, report)
        store.start()
        tiers.append(store)
    if not tiers:
        units.close()
        return None
    return PrefixTiers(
        engine,
        units,
        tiers,
        {tier.name: CacheLog(changes[tier.name]) for tier in tiers},
        cache,
        runner.model.tokenizer_digest,
        least_tokens=options.prefix_restore_tokens,
        speed=speed,
    )


def _store(
    options: WorkerOptions, kind: str, unit_bytes: int, report: OnChange
) -> StoreTier | FolderTier:
    place, room = options.prefix_store, options.prefix_store_gib << 30
    try:
        if in_object_store(place):
            return StoreTier("store", place, kind, room, unit_bytes, report=report)
        folder = Path(place).expanduser()
        return FolderTier("store", folder, kind, room, unit_bytes, remote=True, report=report)
    except ModuleNotFoundError:
        raise InvalidArgument(f"needs obstore: {install('s3')}", field="prefix_store") from None
    except OSError as error:
        raise InvalidArgument(
            f"{place} cannot be used: {error.strerror}", field="prefix_store"
        ) from error


class SealedUnits:
    """Units as they lie in tiers: a KV chunk of the wire whose hand-over is the unit itself.

    Its id is the unit's hash, keyed by the fingerprint; its giver is the unit before. So what was
    cut off, changed, meant for other workers or put under another name does not verify.
    """

    def __init__(self, layout: KvLayout, block_size: int, fingerprint: str) -> None:
        self.layout, self.block_size = layout, block_size
        self.num_bytes = HEADER_BYTES + UNIT_TOKENS * layout.bytes_per_position
        self._fingerprint = bytes.fromhex(fingerprint)
        self._memory = HostMemory(mmap.PAGESIZE)

    def pack(self, runner: ModelRunner, unit: CachedUnit) -> memoryview:
        """A copy of a unit, block by block, not sealed yet."""
        out = memoryview(bytearray(self.num_bytes))
        for start, payload in self._blocks(out):
            runner.pack(unit.extents, start, self.block_size, payload)
        return out

    def unpack(
        self, runner: ModelRunner, blocks: PrefixBlocks, name: UnitName, sealed: memoryview
    ) -> None:
        """Copies what is not cached of a unit into blocks that were reserved for it."""
        for start, payload in self._blocks(sealed):
            position = name.first_position + start
            if position >= blocks.cached:
                runner.unpack(blocks.extents, position, self.block_size, payload)

    def seal(self, name: UnitName, out: memoryview) -> None:
        sealer, chunk = self._sealer(name)
        sealer.seal(sealer.header(chunk), out)

    def mismatch(self, name: UnitName, sealed: memoryview) -> str:
        """What is wrong with what lies in a tier under a name; "" when nothing: torn, foreign (it
        is another unit, or another kind of worker's) or corrupt."""
        if len(sealed) != self.num_bytes:
            return "torn"
        sealer, chunk = self._sealer(name)
        header = sealer.header(chunk)
        header.digest = bytes(sealed[HEADER_BYTES - DIGEST_BYTES : HEADER_BYTES])
        return {"": "", "header": "foreign", "digest": "corrupt"}[sealer.mismatch(header, sealed)]

    def close(self) -> None:
        self._memory.close()

    def _blocks(self, sealed: memoryview) -> list[tuple[int, memoryview]]:
        """The payload of each block, with its first position within the unit."""
        size = self.block_size * self.layout.bytes_per_position
        return [
            (start, sealed[HEADER_BYTES + i * size : HEADER_BYTES + (i + 1) * size])
            for i, start in enumerate(range(0, UNIT_TOKENS, self.block_size))
        ]

    def _sealer(self, name: UnitName) -> tuple[Sealer, KvChunkRange]:
        unit = hashlib.blake2b(name.unit, key=self._fingerprint, digest_size=16).digest()
        sealer = Sealer(unit, name.parent.hex(), self.layout, self._memory)
        index = name.first_position // UNIT_TOKENS
        return sealer, KvChunkRange(index, name.first_position, UNIT_TOKENS)


class _Place:
    """A tier with what waits to be written to it, how fast it is, and whether it rests."""

    def __init__(self, tier: Tier, unit_bytes: int) -> None:
        self.tier = tier
        self._most_waiting = max(LEAST_QUEUED, QUEUE_BYTES // unit_bytes)
        self._waiting: deque[tuple[UnitName, memoryview]] = deque()
        self._changed = asyncio.Condition()
        self._rests_until = self._read_at = self._rest_s = 0.0
        self._byte_s = 0.0
        self._writing = asyncio.create_task(self._write())

    @property
    def rests(self) -> bool:
        return time.monotonic() < self._rests_until

    @property
    def bytes_per_s(self) -> float:
        """As measured; 0 when nothing was read for FORGET_S."""
        forgotten = time.monotonic() - self._read_at > FORGET_S
        return 0.0 if forgotten or not self._byte_s else 1.0 / self._byte_s

    def read_s(self, num_bytes: int) -> float:
        """Seconds that so many bytes are predicted to take."""
        return num_bytes / (self.bytes_per_s or NOMINAL_TIERS[self.tier.name])

    def took(self, num_bytes: int, seconds: float) -> None:
        """So many bytes came in so many seconds."""
        byte_s = seconds / num_bytes
        self._byte_s = 0.7 * self._byte_s + 0.3 * byte_s if self._byte_s else byte_s
        self._read_at = time.monotonic()
        self._rest_s = 0.0

    def rest(self, error: OSError) -> None:
        if self.rests:
            return
        self._rest_s = min(LONGEST_REST_S, 2 * self._rest_s or REST_S)
        self._rests_until = time.monotonic() + self._rest_s
        why = str(error) or "it takes too long"
        log.warning("KV tier %s rests for %g s: %s", self.tier.name, self._rest_s, why)

    async def keep(self, name: UnitName, sealed: memoryview, *, wait: bool = False) -> None:
        """Writes a unit behind. Dropped when too much waits already, unless the caller waits."""
        if self.rests or (len(self._waiting) >= self._most_waiting and not wait):
            WRITES.labels(self.tier.name, "dropped").inc()
            return
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._waiting) < self._most_waiting)
            self._waiting.append((name, sealed))
            self._changed.notify_all()

    async def written(self) -> None:
        """Returns when nothing waits any more."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._waiting)

    async def locate(self, names: Sequence[UnitName], wait_s: float) -> int:
        """See `Tier.locate`; 0 while it rests."""
        if self.rests or not names:
            return 0
        try:
            async with asyncio.timeout(wait_s):
                return await self.tier.locate(names)
        except OSError as error:
            self.rest(error)
            return 0

    async def read(self, name: UnitName, wait_s: float) -> memoryview | None:
        """See `Tier.read`. Counts what fails."""
        try:
            async with asyncio.timeout(wait_s):
                sealed = await self.tier.read(name)
        except OSError as error:
            self.rest(error)
            READS.labels(self.tier.name, "failed").inc()
            return None
        if sealed is None:
            READS.labels(self.tier.name, "gone").inc()
        return sealed

    async def refuse(self, name: UnitName, reason: str) -> None:
        """What was read does not verify: it is deleted."""
        READS.labels(self.tier.name, reason).inc()
        log.warning("a unit in KV tier %s is %s, and is deleted", self.tier.name, reason)
        try:
            await self.tier.delete(name)
        except OSError as error:
            self.rest(error)

    async def close(self) -> None:
        self._writing.cancel()
        await asyncio.wait({self._writing})
        await self.tier.close()

    async def _write(self) -> None:
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: bool(self._waiting))
                name, sealed = self._waiting[0]
            outcome = "written"
            try:
                if self.rests:
                    outcome = "dropped"
                else:
                    await self.tier.write(name, sealed)
                    self._rest_s = 0.0
            except OSError as error:
                outcome = "failed"
                self.rest(error)
            WRITES.labels(self.tier.name, outcome).inc()
            async with self._changed:
                self._waiting.popleft()
                self._changed.notify_all()


class PrefixTiers:
    """Lives on the event loop. Blocks that are reserved for what comes belong to the calls of
    `restore`; each gives them up at its end."""

    def __init__(
        self,
        engine: EngineThread,
        units: SealedUnits,
        tiers: Sequence[Tier],
        logs: Mapping[str, CacheLog],
        cache: CacheLog,
        tokenizer_digest: str,
        *,
        least_tokens: int,
        speed: Callable[[], WorkerSpeed],
    ) -> None:
        """tiers: the fastest first. logs: of what their indices report. cache: of the prefix
        cache, a step behind it at most. least_tokens: see the
        option prefix_restore_tokens. speed: of this worker, as it is measured now."""
        self._engine, self._units = engine, units
        self.logs, self._cache = logs, cache
        self._places = [_Place(tier, units.num_bytes) for tier in tiers]
        self._tokenizer_digest = tokenizer_digest
        self._least_tokens, self._speed = least_tokens, speed
        self._restores = asyncio.Semaphore(MAX_RESTORES)
        self._stepped = asyncio.Event()
        self._spilling = asyncio.create_task(self._spill_behind())
        metrics.gauge(
            metrics.TIER_BYTES, lambda: {(tier.name,): tier.index.num_bytes for tier in tiers}
        )

    def with_rates(self, speed: WorkerSpeed) -> WorkerSpeed:
        """A worker's speed with that of its tiers."""
        rates = {place.tier.name: place.bytes_per_s for place in self._places}
        return replace(
            speed,
            host_bytes_per_s=rates.get("host", 0.0),
            disk_bytes_per_s=rates.get("disk", 0.0),
            store_bytes_per_s=rates.get("store", 0.0),
        )

    def stepped(self) -> None:
        """The prefix cache may have changed."""
        self._stepped.set()

    async def restore(self, attempt: Attempt) -> PrefixRestored | None:
        """Brings the beginning of an attempt's input back into the prefix cache, as far as tiers
        have it and that is predicted to be quicker than computing it.

        Returns what came, after RESTORE_S and a moment at most; None where no tier can have any of
        it. May be cancelled. What is posted to the engine afterwards finds what came.
        """
        began = time.monotonic()
        # The last position is always computed, for its logits.
        size = (len(attempt.token_ids) - 1) // UNIT_TOKENS * UNIT_TOKENS
        if size <= 0 or attempt.prompt_logprobs is not None:
            return None
        whole = Prefix(attempt.token_ids[:size], attempt.cache_salt, attempt.adapter)
        names = unit_names(whole, self._tokenizer_digest)
        if not any(
            place.tier.remote or name.unit in place.tier.index
            for place in self._places
            for name in names
        ):
            return None
        restored = PrefixRestored()
        taken: list[PrefixBlocks] = []
        arrived = 0
        wait_s, speed = RESTORE_S, self._speed()
        if speed.prefills:
            wait_s = min(wait_s, max(LEAST_READ_S, 2 * speed.prefill_s(0, size)))
        try:
            async with asyncio.timeout(RESTORE_S), self._restores:
                # By the log: the engine answers only between two steps.
                first = self._cache.num_leading(name.unit for name in names)
                cached = first * UNIT_TOKENS
                places = await self._worthwhile(names[first:], cached, wait_s)
                names = names[first : first + len(places)]
                end = (first + len(places)) * UNIT_TOKENS
                prefix = whole._replace(token_ids=whole.token_ids[:end])

                def take(loop: EngineLoop) -> None:
                    blocks = loop.scheduler.expect_prefix(prefix, time.monotonic())
                    taken.extend([blocks] if blocks is not None else [])

                if places:
                    await self._engine.call(take)
                # What was cached and was evicted meanwhile is computed, with all behind it.
                if taken and taken[0].cached >= cached:
                    arrived = taken[0].cached
                    async for end, tier in self._unpacked(names, places, taken[0], wait_s):
                        restored.num_tokens[tier] += end - arrived
                        RESTORED.labels(tier).inc(end - arrived)
                        arrived = end
        except TimeoutError:
            about = named(attempt.request_id)
            log.warning("a prefix did not come from its tiers in %g s", RESTORE_S, extra=about)
        except BatonError:
            # The engine stops, or too much is queued for it.
            about = named(attempt.request_id)
            log.debug("a prefix could not be restored", exc_info=True, extra=about)
        finally:

            def release(loop: EngineLoop) -> None:
                # Also what was taken for a call that was cancelled.
                for blocks in taken:
                    loop.scheduler.release_prefix(blocks, arrived)

            with suppress(Unavailable):
                self._engine.post(release)
        restored.wait_us = round((time.monotonic() - began) * 1e6)
        return restored

    async def close(self) -> None:
        """Stops copying, and then writes what is in the prefix cache to the tiers that last, for
        FLUSH_S at most. The engine still runs, and nothing else does."""
        self._spilling.cancel()
        await asyncio.wait({self._spilling})
        try:
            async with asyncio.timeout(FLUSH_S):
                lasting = [place for place in self._places if place.tier.lasts]
                while lasting and await self._spill(lasting, everything=True):
                    pass
                for place in lasting:
                    await place.written()
        except TimeoutError:
            log.warning("not all of the prefix cache was written in %g s", FLUSH_S)
        except BatonError:
            log.debug("the prefix cache could not be written", exc_info=True)
        for place in self._places:
            await place.close()
        self._units.close()

    async def _worthwhile(
        self, names: Sequence[UnitName], first: int, wait_s: float
    ) -> list[_Place]:
        """Where each of the units is, as many of the first ones as are worth reading. first: the
        position behind what is cached."""
        found: list[_Place] = []
        more = True
        while more:
            more = False
            for place in self._places:
                left = names[len(found) :]
                # Whether it is there takes a while to ask; not if it would be of no use.
                if place.tier.remote and left and self._is_slower(place, left):
                    continue
                if count := await place.locate(left, wait_s):
                    found += [place] * count
                    more = True
                    break
        if self._least_tokens > 0:
            return found if len(found) * UNIT_TOKENS >= self._least_tokens else []
        speed, num_bytes = self._speed(), self._units.num_bytes
        if not speed.prefills:
            return found
        # What is far away may cost more than it saves, and what is before it may still be worth it.
        for slowest in reversed(self._places):
            seconds = sum(place.read_s(num_bytes) for place in found)
            end = names[0].first_position + len(found) * UNIT_TOKENS if found else first
            if seconds <= speed.prefill_s(first, max(first, end)):
                break
            cut = next((i for i, place in enumerate(found) if place is slowest), len(found))
            found = found[:cut]
        return found

    def _is_slower(self, place: _Place, names: Sequence[UnitName]) -> bool:
        """Whether reading all of these units is predicted to take longer than computing them."""
        speed = self._speed()
        if self._least_tokens > 0 or not speed.prefills:
            return False
        first = names[0].first_position
        compute_s = speed.prefill_s(first, first + len(names) * UNIT_TOKENS)
        return place.read_s(len(names) * self._units.num_bytes) > compute_s

    async def _unpacked(
        self,
        names: Sequence[UnitName],
        places: Sequence[_Place],
        blocks: PrefixBlocks,
        wait_s: float,
    ) -> AsyncIterator[tuple[int, str]]:
        """Copies units into the reserved blocks, in order, up to the first one that does not come.
        Yields the position behind each, and its tier's name."""
        wanted = [
            (name, place)
            for name, place in zip(names, places, strict=True)
            if name.first_position + UNIT_TOKENS > blocks.cached
        ]
        began, done = time.monotonic(), 0
        most = max(1, COPY_BYTES // self._units.num_bytes)
        reads: deque[asyncio.Task[memoryview | None]] = deque()
        try:
            while done < len(wanted):
                while len(reads) < READ_AHEAD and done + len(reads) < len(wanted):
                    name, place = wanted[done + len(reads)]
                    reads.append(asyncio.create_task(place.read(name, wait_s)))
                await asyncio.wait({reads[0]})
                ready = takewhile(lambda read: read.done(), reads)
                came = [read.result() for read in islice(ready, most)]
                units: list[tuple[UnitName, memoryview]] = []
                for (name, _), sealed in zip(wanted[done:], came, strict=False):
                    if sealed is None:
                        break
                    units.append((name, sealed))
                copied, wrong = await self._copy_in(units, blocks)
                for name, place in wanted[done : done + copied]:
                    reads.popleft()
                    place.tier.index.use(name.unit)
                    READS.labels(place.tier.name, "hit").inc()
                    yield name.first_position + UNIT_TOKENS, place.tier.name
                done += copied
                if wrong:
                    name, place = wanted[done]
                    await place.refuse(name, wrong)
                if copied < len(came):
                    break
        finally:
            for read in reads:
                read.cancel()
            await asyncio.gather(*reads, return_exceptions=True)
            if done:
                slowest = max(wanted[:done], key=lambda each: self._places.index(each[1]))[1]
                slowest.took(done * self._units.num_bytes, time.monotonic() - began)

    async def _copy_in(
        self, units: Sequence[tuple[UnitName, memoryview]], blocks: PrefixBlocks
    ) -> tuple[int, str]:
        """Returns how many units were copied, from the first one on, and what is wrong with the
        next one, or ""."""
        copied, wrong = 0, ""

        def copy(runner: ModelRunner) -> None:
            nonlocal copied, wrong
            for name, sealed in units:
                if wrong := self._units.mismatch(name, sealed):
                    return
                self._units.unpack(runner, blocks, name, sealed)
                copied += 1

        if units:
            await self._engine.copy(copy)
        return copied, wrong

    async def _spill_behind(self) -> None:
        while True:
            await self._stepped.wait()
            self._stepped.clear()
            try:
                while await self._spill(self._places):
                    pass
            except BatonError:
                # The engine stops, or too much is queued for it.
                log.debug("units could not be copied", exc_info=True)
            await asyncio.sleep(SPILL_EVERY_S)

    async def _spill(self, places: Sequence[_Place], *, everything: bool = False) -> int:
        """Copies some units to tiers. Returns how many were due."""
        units = await self._engine.call(
            lambda loop: loop.scheduler.spill(SPILL_UNITS, everything=everything)
        )
        copies: list[tuple[CachedUnit, memoryview]] = []
        for unit in units:
            lacking = False
            for place in places:
                place.tier.index.use(unit.name.unit)
                lacking |= unit.name.unit not in place.tier.index
            if lacking:
                copies.append((unit, await self._copy_out(unit)))
        intact = await self._engine.call(lambda loop: [unit.intact for unit, _ in copies])
        for (unit, sealed), whole in zip(copies, intact, strict=True):
            if not whole:
                continue
            for place in places:
                if unit.name.unit not in place.tier.index:
                    await place.keep(unit.name, sealed.toreadonly(), wait=everything)
        return len(units)

    async def _copy_out(self, unit: CachedUnit) -> memoryview:
        made: list[memoryview] = []

        def copy(runner: ModelRunner) -> None:
            made.append(self._units.pack(runner, unit))
            self._units.seal(unit.name, made[0])

        await self._engine.copy(copy)
        return made[0]
