"""Has a tokenizer do something, another one when it fails; knows nothing of what follows."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from baton.core.candidates import tie_break
from baton.core.errors import BatonError, Unavailable
from baton.core.losses import VERDICTS, Verdict
from baton.core.model import ModelDescription, WorkerIdentity
from baton.core.retry_budget import RetryBudget
from baton.core.trace_context import UNTRACED, TraceContext
from baton.router.notice import Notice
from baton.router.pools import Pool
from baton.router.tokenizer_client import TokenizerClient
from baton.router.worker import Worker
from baton.rpc.logs import named

log = logging.getLogger(__name__)

PAUSE_S = 0.1

T = TypeVar("T")


async def ask(
    pool: Pool[TokenizerClient],
    changed: Notice,
    request_id: str,
    model: ModelDescription,
    budget: RetryBudget,
    work: Callable[[TokenizerClient, float], Awaitable[T]],
    *,
    deadline: float,
    max_attempts: int,
    wait_timeout_s: float,
    on_served: Callable[[WorkerIdentity], None] | None = None,
    trace: TraceContext = UNTRACED,
) -> T:
    """What `work`, called with a tokenizer of the model and the seconds that are left, returns.

    deadline: on the running loop's clock. on_served: told which worker did it.
    trace: what this is a part of. Raises BatonError; a
    fault of the input is not tried again.
    """
    loop = asyncio.get_running_loop()
    passed_over: set[str] = set()
    failures = 0
    while True:
        worker = await _pick(pool, changed, request_id, model, passed_over, wait_timeout_s)
        try:
            with worker.place(1):
                done = await work(worker.client, deadline - loop.time())
            worker.gained()
            if on_served is not None:
                on_served(worker.identity)
            return done
        except BatonError as error:
            worker.blamed(error)
            verdict = VERDICTS[error.reason]
            failures += verdict is Verdict.ELSEWHERE
            if verdict is Verdict.FATAL or failures >= max_attempts:
                raise
            if verdict is Verdict.ELSEWHERE and not budget.take(loop.time()):
                raise
            lost = {"lost_at": "tokenizer", "reason": error.reason.name}
            about = {**named(request_id, trace.trace_id), **lost}
            log.info("a tokenizer failed: %s", error.message, extra=about)
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
                fresh,
                key=lambda worker: (
                    worker.placed_sequences,
                    tie_break(request_id, worker.identity),
                ),
            )
        left = give_up - loop.time()
        if left <= 0:
            raise Unavailable("No tokenizer is ready.", retry_after_s=1.0)
        await changed.wait(left)
