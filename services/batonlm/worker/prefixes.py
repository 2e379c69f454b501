"""PrefixExchange: gives prefixes of this worker's cache to other workers, and collects theirs.

A prefix moves by the hand-over that moves whole inputs. Comes in: what a receiver asks for on a
Collect stream, and the worker that a router names for an attempt. Goes out: KV that is pinned while
it is on offer, and KV in this worker's cache before the attempt is queued. The attempt then finds
it there as if it had been computed here, and the rest is computed, whatever became of the transfer.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field

from batonlm.core.errors import BatonError, NotFound, Unavailable
from batonlm.core.kvcache.prefix import Prefix
from batonlm.core.request.attempt import Attempt
from batonlm.core.request.model import WorkerIdentity
from batonlm.core.scheduler.loop import EngineLoop
from batonlm.core.scheduler.plan import KvPayload, ModelRunner
from batonlm.core.scheduler.prefixes import PrefixBlocks
from batonlm.engine.thread import EngineThread
from batonlm.rpc import metrics
from batonlm.transfer.receiver import KvReceiver
from batonlm.transfer.sender import PREFIX_S, KvSender, PendingTransfer
from batonlm.transfer.stream import NO_NAMES, Names
from batonlm.v1.types_pb2 import PrefixCollected

COLLECTS = metrics.counter(metrics.PREFIX_COLLECTS)
COLLECTED = metrics.counter(metrics.PREFIX_TOKENS)


LEAST_S = 3.0
"""Seconds that a collection may take, however fast its prefix is computed: for two workers that
meet, and for the silence that shows that a sender is dead."""


@dataclass(slots=True, eq=False)
class _Collection:
    """One that runs."""

    prefix: Prefix
    sender: str
    """The instance id of the worker that gives it."""
    over: asyncio.Event = field(default_factory=asyncio.Event)
    came: bool = False
    """Whether it is over and all that the sender had is here."""

    def shares_half_of(self, prefix: Prefix) -> bool:
        """Whether at least the first half of a prefix is collected."""
        ours, half = self.prefix, len(prefix.token_ids) // 2
        same = (ours.cache_salt, ours.adapter) == (prefix.cache_salt, prefix.adapter)
        return same and ours.token_ids[:half] == prefix.token_ids[:half]


class PrefixExchange:
    """Lives on the event loop. What is pinned belongs to the tasks of this object, and to the calls
    of `collect`; each gives it up at its end."""

    def __init__(self, engine: EngineThread, sender: KvSender, receiver: KvReceiver) -> None:
        self._engine = engine
        self._receiver = receiver
        self._tasks: set[asyncio.Task[None]] = set()
        self._offers: set[PendingTransfer] = set()
        self._collections: list[_Collection] = []
        self._closing = False
        sender.serve_prefix = self._serve

    @property
    def offers_some(self) -> bool:
        """Whether blocks may be pinned for another worker."""
        return bool(self._tasks)

    @property
    def holdings(self) -> dict[str, int]:
        return {"prefix_offers": len(self._tasks)}

    async def collect(
        self, attempt: Attempt, sender: WorkerIdentity, about: Names = NO_NAMES
    ) -> PrefixCollected:
        """Collects the beginning of an attempt's input into the prefix cache, as far as that worker
        has it and it comes. While much of it is collected for another attempt, waits for that.

        Returns what came, when it has ended in whatever way: at most after as long as computing all
        of it takes here, but not before LEAST_S and not after PREFIX_S. May be cancelled. What is
        posted to the engine afterwards finds the KV that came.
        """
        began = time.monotonic()
        # The last position is always computed, for its logits.
        ids = attempt.token_ids[:-1]
        if not ids or attempt.prompt_logprobs is not None:
            return PrefixCollected(outcome="incompatible")
        prefix = Prefix(ids, attempt.cache_salt, attempt.adapter)
        limit_s = min(PREFIX_S, max(LEAST_S, self._engine.speed.prefill_s(0, len(ids))))
        collected = PrefixCollected(outcome="cached")
        if not await self._came_for_another(prefix, sender, limit_s):
            collection = _Collection(prefix, sender.instance_id)
            self._collections.append(collection)
            try:
                left_s = max(0.0, began + limit_s - time.monotonic())
                collected = await self._collect(prefix, sender, left_s, about)
                collection.came = collected.outcome in ("completed", "cached")
            finally:
                self._collections.remove(collection)
                collection.over.set()
        COLLECTS.labels(collected.outcome).inc()
        collected.wait_us = round((time.monotonic() - began) * 1e6)
        return collected

    async def _came_for_another(
        self, prefix: Prefix, sender: WorkerIdentity, limit_s: float
    ) -> bool:
        """Waits for a collection of much of a prefix, if one runs, but not longer than limit_s.
        Returns whether it brought all that there is."""
        running = [one for one in self._collections if one.shares_half_of(prefix)]
        if not running:
            return False
        first = running[0]
        with suppress(TimeoutError):
            await asyncio.wait_for(first.over.wait(), limit_s)
        return first.came and (first.prefix, first.sender) == (prefix, sender.instance_id)

    async def _collect(
        self, prefix: Prefix, sender: WorkerIdentity, deadline_s: float, about: Names
    ) -> PrefixCollected:
        taken: list[PrefixBlocks] = []
        arrived = received_bytes = 0

        async def reserve(num_positions: int) -> int | None:
            def take(loop: EngineLoop) -> None:
                expected = prefix._replace(token_ids=prefix.token_ids[:num_positions])
                blocks = loop.scheduler.expect_prefix(expected, time.monotonic())
                taken.extend([blocks] if blocks is not None else [])

            await self._engine.call(take)
            return taken[0].cached if taken else None

        async def unpack(first_position: int, count: int, payload: KvPayload) -> None:
            nonlocal arrived, received_bytes

            def copy(runner: ModelRunner) -> None:
                place = runner.layout.place(
                    first_position, taken[0].num_positions, runner.block_size
                )
                runner.unpack(taken[0].extents, place, count, payload)

            await self._engine.copy(copy)
            arrived = first_position + count
            received_bytes += payload.nbytes

        def release(loop: EngineLoop) -> None:
            # Also what was taken for a call of `reserve` that was cancelled.
            for blocks in taken:
                loop.scheduler.release_prefix(blocks, arrived)

        try:
            ended = await self._receiver.collect_prefix(
                prefix, sender, reserve, unpack, deadline_s=deadline_s, about=about
            )
        finally:
            with suppress(Unavailable):
                self._engine.post(release)
        num_tokens = max(0, arrived - taken[0].cached) if taken else 0
        COLLECTED.labels(sender.role).inc(num_tokens)
        return PrefixCollected(
            num_tokens=num_tokens, received_bytes=received_bytes, outcome=ended.label
        )

    async def close(self) -> None:
        """Ends what is on offer, and returns when nothing is pinned for it any more."""
        self._closing = True
        for offer in list(self._offers):
            offer.fail(Unavailable("this worker is leaving"))
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _serve(self, offer: PendingTransfer, prefix: Prefix) -> None:
        """Another worker asks for a prefix."""
        if self._closing:
            offer.fail(Unavailable("this worker is leaving"))
            return
        self._offers.add(offer)
        task = asyncio.create_task(self._give(offer, prefix))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _give(self, offer: PendingTransfer, prefix: Prefix) -> None:
        """Keeps what there is of a prefix pinned until its transfer has ended. Never cancelled:
        otherwise what the engine's thread pins might have no owner."""
        blocks: PrefixBlocks | None = None

        async def pack(first_position: int, count: int, out: KvPayload) -> None:
            assert blocks is not None
            extents, size = blocks.extents, blocks.num_positions

            def copy(runner: ModelRunner) -> None:
                place = runner.layout.place(first_position, size, runner.block_size)
                runner.pack(extents, place, count, out)

            await self._engine.copy(copy)

        try:
            blocks = await self._engine.call(lambda loop: loop.scheduler.offer_prefix(prefix))
            if blocks is None:
                offer.fail(NotFound("this worker's cache does not have that prefix (any more)"))
            else:
                offer.give_prefix(blocks.num_positions, pack)
        except BatonError as error:
            offer.fail(error)
        await offer.wait()
        self._offers.discard(offer)
        if blocks is not None:
            pinned = blocks
            with suppress(Unavailable):
                self._engine.post(lambda loop: loop.scheduler.release_prefix(pinned))
