"""Which detokenizer gets a text."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from baton.core.errors import BatonError, Unavailable
from baton.core.request.request_state import leaves
from baton.router.workers.broadcast import Broadcast
from baton.router.workers.detokenizer_session import DetokenizerSession
from baton.router.workers.pools import Pool
from baton.router.workers.worker import Worker

LEAVES_S = 1.0
"""How long one that said that it leaves is not asked again: it may be the only one until the router
has heard the same from its report."""


async def pick_detokenizer(
    pool: Pool[DetokenizerSession],
    changed: Broadcast,
    tokenizer_digest: str,
    *,
    passed_over: Collection[str],
    lost: BatonError | None,
    wait_timeout_s: float,
) -> Worker[DetokenizerSession]:
    """The one with the fewest texts of this router, of those that are not passed over if there are
    any; waits until there is one. lost: how the last one was. Raises Unavailable."""
    loop = asyncio.get_running_loop()
    give_up = loop.time() + wait_timeout_s
    spare_until = loop.time() + (LEAVES_S if leaves(lost) else 0.0)
    while True:
        usable = [
            worker
            for worker in pool.usable(loop.time())
            if tokenizer_digest in ("", worker.model.tokenizer_digest)
            or not worker.model.tokenizer_digest
        ]
        fresh = [w for w in usable if w.identity.instance_id not in passed_over]
        now = loop.time()
        if fresh or (usable and now >= spare_until):
            return min(fresh or usable, key=lambda worker: worker.client.num_texts)
        left = (spare_until if usable else give_up) - now
        if left <= 0:
            raise Unavailable("No detokenizer is ready.", retry_after_s=1.0)
        await changed.wait(left)
