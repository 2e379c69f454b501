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


class PrefixExchange:
    """Lives on the event loop. What is pinned belongs to the tasks of this object, and to the calls
    of `collect`; each gives it up at its end."""

    def __init__(self, engine: EngineThread, sender: KvSender, receiver: KvReceiver) -> None:
        self._engine = engine
        self._receiver = receiver
        self._tasks: set[asyncio.Task[None]] = set()
        self._offers: set[PendingTransfer] = set()
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
        has it and it comes.

        Returns what came, when it has ended in whatever way, after PREFIX_S at most and a moment.
        May be cancelled. What is posted to the engine afterwards finds the KV that came.
        """
        began = time.monotonic()
        # The last position is always computed, for its logits.
        size = len(attempt.token_ids) - 1
        taken: list[PrefixBlocks] = []
        arrived = received_bytes = 0

        def prefix_of(num_positions: int) -> Prefix:
            ids = attempt.token_ids[:num_positions]
            return Prefix(ids, attempt.cache_salt, attempt.adapter)

        async def reserve(num_positions: int) -> int | None:
            def take(loop: EngineLoop) -> None:
                blocks = loop.scheduler.expect_prefix(prefix_of(num_positions), time.monotonic())
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

        if size < 1 or attempt.prompt_logprobs is not None:
            return PrefixCollected(outcome="incompatible")
        try:
            ended = await self._receiver.collect_prefix(
                prefix_of(size), sender, reserve, unpack, deadline_s=PREFIX_S, about=about
            )
        finally:
            with suppress(Unavailable):
                self._engine.post(release)
        num_tokens = max(0, arrived - taken[0].cached) if taken else 0
        COLLECTS.labels(ended.label).inc()
        COLLECTED.labels(sender.role).inc(num_tokens)
        return PrefixCollected(
            num_tokens=num_tokens,
            received_bytes=received_bytes,
            wait_us=round((time.monotonic() - began) * 1e6),
            outcome=ended.label,
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
        task = asyncio.create_task(self._give(offer, prefix))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _give(self, offer: PendingTransfer, prefix: Prefix) -> None:
        """Keeps what there is of a prefix pinned until its transfer has ended. Never cancelled:
        otherwise what the engine's thread pins might have no owner."""
        blocks: PrefixBlocks | None = None
        self._offers.add(offer)

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
