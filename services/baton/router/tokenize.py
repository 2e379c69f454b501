"""Has a prompt encoded, by another tokenizer when one fails; knows nothing of what follows."""

from __future__ import annotations

import asyncio
import logging
from hashlib import blake2b

from baton.core.errors import BatonError, Unavailable
from baton.core.losses import VERDICTS, Verdict
from baton.core.model import ModelDescription
from baton.core.request import Request
from baton.core.retry_budget import RetryBudget
from baton.router.notice import Notice
from baton.router.pools import Pool
from baton.router.tokenizer_client import Encoded, TokenizerClient
from baton.router.worker import Worker

log = logging.getLogger(__name__)

PAUSE_S = 0.1


async def encode(
    pool: Pool[TokenizerClient],
    changed: Notice,
    request: Request,
    request_id: str,
    model: ModelDescription,
    budget: RetryBudget,
    *,
    deadline: float,
    max_attempts: int,
    wait_timeout_s: float,
) -> Encoded:
    """deadline: on the running loop's clock.

    Raises BatonError; a fault of the prompt is not tried again.
    """
    loop = asyncio.get_running_loop()
    passed_over: set[str] = set()
    failures = 0
    while True:
        worker = await _pick(pool, changed, request_id, model, passed_over, wait_timeout_s)
        try:
            with worker.place(1):
                encoded = await worker.client.encode(
                    request.prompt, request.cache_salt, request_id, deadline - loop.time()
                )
            worker.gained()
            return encoded
        except BatonError as error:
            worker.blamed(error)
            verdict = VERDICTS[error.reason]
            failures += verdict is Verdict.ELSEWHERE
            if verdict is Verdict.FATAL or failures >= max_attempts:
                raise
            if verdict is Verdict.ELSEWHERE and not budget.take(loop.time()):
                raise
            lost = {"lost_at": "tokenizer", "reason": error.reason.name}
            log.info("encoding failed: %s", error.message, extra={"request_id": request_id, **lost})
            passed_over.add(worker.identity.incarnation)
            if verdict is Verdict.LATER:
                await asyncio.sleep(error.retry_after_s or PAUSE_S)


async def _pick(
    pool: Pool[TokenizerClient],
    changed: Notice,
    request_id: str,
    model: ModelDescription,
    passed_over: set[str],
    wait_timeout_s: float,
) -> Worker[TokenizerClient]:
    """The tokenizer with the fewest running calls of this router; waits until there is one."""
    loop = asyncio.get_running_loop()
    give_up = loop.time() + wait_timeout_s
    while True:
        fitting = [
            worker
            for worker in pool.usable(loop.time())
            if not worker.model.tokenizer_digest
            or model.tokenizer_digest in ("", worker.model.tokenizer_digest)
        ]
        fresh = [w for w in fitting if w.identity.incarnation not in passed_over] or fitting
        if fresh:
            return min(
                fresh, key=lambda worker: (worker.placed_sequences, _tie(request_id, worker))
            )
        left = give_up - loop.time()
        if left <= 0:
            raise Unavailable("No tokenizer is ready.", retry_after_s=1.0)
        await changed.wait(left)


def _tie(request_id: str, worker: Worker[TokenizerClient]) -> bytes:
    text = f"{request_id} {worker.identity.incarnation}"
    return blake2b(text.encode(), digest_size=8).digest()
