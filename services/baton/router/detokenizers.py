"""Which detokenizer gets a text; knows nothing of what becomes of it there."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from baton.core.errors import Unavailable
from baton.router.detokenizer_session import DetokenizerSession
from baton.router.notice import Notice
from baton.router.pools import Pool
from baton.router.worker import Worker


async def pick_detokenizer(
    pool: Pool[DetokenizerSession],
    changed: Notice,
    tokenizer_digest: str,
    *,
    passed_over: Collection[str],
    wait_timeout_s: float,
) -> Worker[DetokenizerSession]:
    """The one with the fewest texts of this router, of those that are not passed over if there are
    any; waits until there is one. Raises Unavailable."""
    loop = asyncio.get_running_loop()
    give_up = loop.time() + wait_timeout_s
    while True:
        usable = [
            worker
            for worker in pool.usable(loop.time())
            if tokenizer_digest in ("", worker.model.tokenizer_digest)
            or not worker.model.tokenizer_digest
        ]
        fresh = [w for w in usable if w.identity.incarnation not in passed_over]
        if usable:
            return min(fresh or usable, key=lambda worker: worker.client.num_texts)
        left = give_up - loop.time()
        if left <= 0:
            raise Unavailable("No detokenizer is ready.", retry_after_s=1.0)
        await changed.wait(left)
