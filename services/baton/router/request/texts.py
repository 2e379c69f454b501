"""Keeps the texts of one request at a detokenizer, and moves them to another when it is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from baton.core.errors import BatonError
from baton.core.request.request_state import VERDICTS, FailureAction
from baton.core.request.token_log import TokenLog
from baton.router.observe.stage_timer import StageTimer
from baton.router.request.choice_text import ChoiceText, TextOptions
from baton.router.workers.broadcast import Broadcast
from baton.router.workers.detokenizer_session import DetokenizerSession
from baton.router.workers.detokenizers import pick_detokenizer
from baton.router.workers.pools import Pool
from baton.router.workers.worker import Worker
from baton.rpc.logs import named

log = logging.getLogger(__name__)

PAUSE_S = 0.05
"""Before a lost text is opened again: a worker that fails at once must not be asked in a loop."""


class Texts:
    """All texts of one request. progressed: set when there is something for the client."""

    def __init__(
        self,
        pool: Pool[DetokenizerSession],
        changed: Broadcast,
        logs: Sequence[TokenLog],
        options: TextOptions,
        *,
        deadline: float,
        request_id: str,
        tokenizer_digest: str,
        max_fruitless_attempts: int,
        wait_timeout_s: float,
        stages: StageTimer,
        on_stop: Callable[[int, int, str], None],
        on_progress: Callable[[int], None],
    ) -> None:
        self.choices = tuple(
            ChoiceText(
                log, options, on_stop=on_stop, on_progress=self._progress, on_lost=self._lose
            )
            for log in logs
        )
        self.moves = 0
        """How often the texts went to another detokenizer."""
        self._pool = pool
        self._changed = changed
        self._deadline = deadline
        self._request_id = request_id
        self._tokenizer_digest = tokenizer_digest
        self._max_fruitless_attempts = max_fruitless_attempts
        self._wait_timeout_s = wait_timeout_s
        self._stages = stages
        self._on_progress = on_progress
        self._fruitless_attempts = 0
        self._lost: BatonError | None = None
        self._woken = asyncio.Event()
        self._worker: Worker[DetokenizerSession] | None = None
        """Where the texts are; None when it has to be told nothing."""
        self._proved = False
        """Whether it has said anything of them."""
        self._ids: dict[int, int] = {}
        self._passed_over: set[str] = set()
        """Instance ids that lost or refused these texts; used again when there are no others."""

    def touch(self, choice: int) -> None:
        """The choice's log has more tokens, or ended."""
        text_id = self._ids.get(choice)
        if self._worker is not None and text_id is not None:
            self._worker.client.touch(text_id)

    async def keep(self) -> None:
        """Returns when all texts have ended. Raises BatonError when they cannot be had."""
        while not self._ended:
            worker = await pick_detokenizer(
                self._pool,
                self._changed,
                self._tokenizer_digest,
                passed_over=self._passed_over,
                lost=self._lost,
                wait_timeout_s=self._wait_timeout_s,
            )
            open_texts = [text for text in self.choices if not text.ended]
            with worker.place(len(open_texts)):
                await self._keep_at(worker, open_texts)
            if not self._ended:
                self._passed_over.add(worker.identity.instance_id)
                await self._judge(worker)

    async def _keep_at(
        self, worker: Worker[DetokenizerSession], open_texts: Sequence[ChoiceText]
    ) -> None:
        """Returns when these texts have ended or are lost."""
        self._woken.clear()
        self._lost = None
        self._proved = False
        self._worker = worker
        session = worker.client
        try:
            for text in open_texts:
                text_id = self._ids[text.log.choice] = session.open(text, self._deadline)
                if len(text.log) or text.log.ended:
                    session.touch(text_id)
            while not self._ended and self._lost is None:
                self._woken.clear()
                await self._woken.wait()
        finally:
            self._worker = None
            for text_id in self._ids.values():
                session.close(text_id)
            self._ids.clear()

    @property
    def _ended(self) -> bool:
        return all(text.ended for text in self.choices)

    async def _judge(self, worker: Worker[DetokenizerSession]) -> None:
        """Whether to try once more after a loss."""
        assert self._lost is not None
        worker.blamed(self._lost)
        self.moves += 1
        verdict = VERDICTS[self._lost.reason]
        self._fruitless_attempts += verdict is FailureAction.ELSEWHERE
        if (
            verdict is FailureAction.FATAL
            or self._fruitless_attempts >= self._max_fruitless_attempts
        ):
            raise self._lost
        lost = {"lost_at": "detokenizer", "reason": self._lost.reason.name}
        about = {**named(self._request_id, self._stages.trace.context.trace_id), **lost}
        log.info("its texts were lost: %s", self._lost.message, extra=about)
        await asyncio.sleep(PAUSE_S)

    def _progress(self, choice: int) -> None:
        self._fruitless_attempts = 0
        if self._worker is not None and not self._proved:
            self._proved = True
            self._worker.gained()
            self._stages.served_by(self._worker.identity)
        if self.choices[choice].ended:
            self._woken.set()
        self._on_progress(choice)

    def _lose(self, error: BatonError) -> None:
        self._lost = error
        self._woken.set()
