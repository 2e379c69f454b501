"""Asks a detokenizer for the bytes of single tokens, by another one when it is lost."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from baton.core.errors import BatonError, Internal
from baton.core.request.request_state import VERDICTS, FailureAction
from baton.router.request.texts import PAUSE_S
from baton.router.workers.detokenizer_session import TextNews, TextOpening, TextTokens
from baton.router.workers.detokenizers import pick_detokenizer
from baton.router.workers.fleet import Fleet

AT_ONCE = 1024
"""Tokens asked for in one message: other texts of the session do not wait for all of them."""

_OPENING = TextOpening((), 0, (), False, False, (), (), 0)


@dataclass(frozen=True, slots=True)
class Speller:
    """max_attempts, wait_timeout_s: see RouterConfig."""

    fleet: Fleet
    max_attempts: int
    wait_timeout_s: float

    async def spell(
        self, token_ids: Iterable[int], tokenizer_digest: str, deadline: float
    ) -> dict[int, bytes]:
        """Each token's own bytes. deadline: on the running loop's clock. Raises BatonError."""
        wanted = sorted(set(token_ids))
        passed_over: set[str] = set()
        lost: BatonError | None = None
        failures = 0
        while True:
            worker = await pick_detokenizer(
                self.fleet.detokenizers,
                self.fleet.changed,
                tokenizer_digest,
                passed_over=passed_over,
                lost=lost,
                wait_timeout_s=self.wait_timeout_s,
            )
            words = _Words(wanted)
            with worker.place(1):
                text_id = worker.client.open(words, deadline)
                words.on_told = lambda: worker.client.touch(text_id)  # noqa: B023
                worker.client.touch(text_id)
                try:
                    await words.done
                except BatonError as error:
                    lost = error
                    worker.blamed(error)
                    passed_over.add(worker.identity.instance_id)
                    failures += 1
                    fatal = VERDICTS[error.reason] is FailureAction.FATAL
                    if fatal or failures >= self.max_attempts:
                        raise
                    await asyncio.sleep(PAUSE_S)
                else:
                    worker.gained()
                    return words.spelled
                finally:
                    worker.client.close(text_id)


class _Words:
    """A text without tokens of its own, as the session sees it. done: when all is spelled. on_told:
    called when there is more to ask for."""

    def __init__(self, wanted: list[int]) -> None:
        self.spelled: dict[int, bytes] = {}
        self.on_told: Callable[[], object] = lambda: None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._left = deque(wanted)
        self._asked: deque[int] = deque()

    def opening(self) -> TextOpening:
        return _OPENING

    def take_tokens(self) -> TextTokens | None:
        if self._asked:
            return None
        while self._left and len(self._asked) < AT_ONCE:
            self._asked.append(self._left.popleft())
        return TextTokens(0, (), tuple(self._asked), not self._left, False)

    def on_news(self, news: TextNews) -> None:
        if len(news.spelled) > len(self._asked):
            self.on_lost(Internal("The detokenizer spelled what was not asked for."))
            return
        for spelled in news.spelled:
            self.spelled[self._asked.popleft()] = spelled
        if news.end and (self._asked or self._left):
            self.on_lost(Internal("The detokenizer did not spell all that was asked for."))
        elif news.end and not self.done.done():
            self.done.set_result(None)
        elif not self._asked and self._left:
            self.on_told()

    def on_lost(self, error: BatonError) -> None:
        if not self.done.done():
            self.done.set_exception(error)
