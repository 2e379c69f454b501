"""The texts of one request: each choice's tokens go to a detokenizer and come back as deltas.

`ChoiceOutput` is a cursor over the token log of a choice in both directions. `Texts` keeps them at
one detokenizer and moves them to another when it is lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

from batonlm.core.errors import BatonError, Internal
from batonlm.core.request.attempt import Logprobs, PositionGap, TokenLog
from batonlm.core.request.request import Delta, TextLogprob, TokenLogprobs
from batonlm.core.request.request_state import VERDICTS, FailureAction
from batonlm.router.request.admission import RequestContext, RouterServices
from batonlm.router.workers.detokenizer_session import DetokenizerSession, TextSource
from batonlm.router.workers.fleet import Worker, pick_detokenizer
from batonlm.rpc.convert import token_ids_to_bytes
from batonlm.rpc.logs import named
from batonlm.v1.detokenizer_pb2 import AppendTokens, OpenText, TextDelta

log = logging.getLogger(__name__)

PAUSE_S = 0.05
"""Pause in seconds before a lost text is opened again, because a worker may fail each time at once.
"""

MAX_DELTA_TOKENS = 128
MAX_DELTA_CHARACTERS = 1 << 14
"""Most characters of one delta. Otherwise the next delta of a slow reader would be as large as all
that it has missed, and with log-probabilities larger than any message may be."""

PROMPT_TAIL = 8
"""Prompt tokens that a detokenizer gets: more than any tokenizer's text depends on."""


class ChoiceOutput:
    """The output of one choice on its way to the client: its tokens go to a detokenizer, their text
    comes back, and both leave as deltas."""

    def __init__(
        self,
        log: TokenLog,
        opening: OpenText,
        shown_stop_token_ids: Collection[int],
        on_stop: Callable[[int, int, str], None],
    ) -> None:
        """opening: how its text begins at any detokenizer. shown_stop_token_ids: the stop tokens
        that the client named; only those are reported to it. on_stop: called with the choice, the
        position and the string when a stop string is complete; raises PositionGap for a position
        that does not exist."""
        self.choice = log.choice
        self.texts: Texts
        """Set by the Texts that this output belongs to."""
        self.log = log
        self.ended = log.ended
        """Whether all of its text has arrived. A choice that has nothing to generate has none."""
        self.num_tokens = 0
        """Tokens whose text has arrived in full."""
        self.searched_tokens = 0
        """Tokens within which no stop string ends."""
        self.finished = False
        """Whether the last delta was taken."""
        self._opening = opening
        self._shown_stop_token_ids = shown_stop_token_ids
        self._on_stop = on_stop
        self._sent = 0
        """Tokens that were sent to the detokenizer."""
        self._end_sent = False
        self._delivered_bytes = 0
        """UTF-8 bytes of text that the detokenizer has returned."""
        self._unsent = ""
        """Text that no delta has taken yet."""
        self._emitted = 0
        """Tokens that deltas have taken."""
        self._spelled: dict[int, bytes] = {}
        """The bytes of tokens by their id."""
        self._spelling: list[int] = []
        """Tokens whose bytes are requested from the detokenizer, in order."""
        self._spell_from = 0
        """The bytes of tokens before this position have been requested. It keeps each step from
        scanning all that a slow reader has missed."""

    @property
    def begun(self) -> bool:
        """Whether there is anything to send to a detokenizer."""
        return len(self.log) > 0 or self.log.ended

    def open_text(self, text: OpenText) -> None:
        """Fills in all tokens that may belong to the delivered text. A stop token is not part of
        the text: it is always appended as the last token."""
        self._sent = min(self._sent, len(self.log) - (self.log.stop_token_id is not None))
        self._end_sent = False
        self._spelling.clear()
        self._spell_from = self._emitted
        text.MergeFrom(self._opening)
        text.token_ids = token_ids_to_bytes(self.log.token_ids(0, self._sent))
        text.delivered_bytes = self._delivered_bytes

    def append_tokens(self, add: Callable[[], AppendTokens]) -> None:
        log, start = self.log, self._sent
        token_ids = log.token_ids(start)
        spell = self._unspelled() if log.has_logprobs else ()
        last = log.ended and not self._end_sent
        if not token_ids and not spell and not last:
            return
        self._sent = len(log)
        self._end_sent = log.ended
        self._spelling += spell
        tokens = add()
        tokens.position = start
        tokens.token_ids = token_ids_to_bytes(token_ids)
        if spell:
            tokens.spell_token_ids = token_ids_to_bytes(spell)
        if last:
            tokens.last = True
            tokens.last_is_stop_token = log.stop_token_id is not None

    def on_delta(self, delta: TextDelta) -> None:
        if self.ended:
            return
        text = delta.text
        self._unsent += text
        self._delivered_bytes += len(text) if text.isascii() else len(text.encode())
        for spelled in delta.spelled_texts:
            if self._spelling:
                self._spelled[self._spelling.pop(0)] = spelled
        self.num_tokens = max(self.num_tokens, min(delta.num_tokens, len(self.log)))
        self.searched_tokens = max(self.searched_tokens, delta.searched_tokens)
        stopped = delta.HasField("stop")
        if stopped:
            try:
                self._on_stop(self.log.choice, delta.stop.position, delta.stop.stop_string)
            except PositionGap:
                self.texts.lose(Internal("The detokenizer stopped where there is no token."))
                return
        elif delta.end and not self.log.ended:
            self.texts.lose(Internal("The detokenizer ended a text that goes on."))
            return
        if stopped or delta.end:
            self.ended = True
            self.num_tokens = len(self.log)
        self.texts.progressed(self)

    def on_lost(self, error: BatonError) -> None:
        if not self.ended:
            self.texts.lose(error)

    def take_delta(self) -> Delta | None:
        """Returns what is new for the client as one delta, or None when there is nothing. More may
        remain: after a long delay, text and tokens are returned in pieces."""
        # This runs at every turn of a stream, and usually there is nothing.
        if self.finished or not (self._unsent or self.ended or self.num_tokens > self._emitted):
            return None
        start, upto = self._emitted, self._deliverable(self._emitted + MAX_DELTA_TOKENS)
        logprobs = self._logprobs(start, upto) if self.log.has_logprobs else ()
        text, self._unsent = _cut(self._unsent)
        self.finished = self.ended and upto == len(self.log) and not self._unsent
        self._emitted = upto
        token_ids = self.log.token_ids(start, upto)
        if not self.finished:
            return Delta(self.log.choice, text, token_ids, logprobs) if text or token_ids else None
        stop_token_id = self.log.stop_token_id
        return Delta(
            choice=self.log.choice,
            text=text,
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=self.log.finish_reason,
            stop_string=self.log.stop_string,
            stop_token_id=(stop_token_id if stop_token_id in self._shown_stop_token_ids else None),
        )

    def _deliverable(self, limit: int) -> int:
        """Returns the number of tokens that the client may receive: their text is out, and their
        log-probabilities have texts."""
        limit = min(limit, self.num_tokens)
        if self.ended or not self.log.has_logprobs:
            return limit
        entries = self.log.logprobs(self._emitted, limit)
        for offset, entry in enumerate(entries):
            position = self._emitted + offset
            needed = _tokens_of(self.log.token_ids(position, position + 1)[0], entry)
            if any(token_id not in self._spelled for token_id in needed):
                return position
        return limit

    def _unspelled(self) -> tuple[int, ...]:
        """Returns the tokens whose bytes are needed, unknown and not requested, each once."""
        start, self._spell_from = max(self._emitted, self._spell_from), len(self.log)
        entries = self.log.logprobs(start)
        token_ids = self.log.token_ids(start)
        known = self._spelled.keys() | set(self._spelling)
        wanted: dict[int, None] = {}
        for token_id, entry in zip(token_ids, entries, strict=False):
            wanted.update(dict.fromkeys(_tokens_of(token_id, entry)))
        return tuple(token_id for token_id in wanted if token_id not in known)

    def _logprobs(self, start: int, end: int) -> tuple[TokenLogprobs, ...]:
        entries = zip(self.log.token_ids(start, end), self.log.logprobs(start, end), strict=False)
        return tuple(
            TokenLogprobs(
                self._text_logprob(token_id, entry.logprob),
                tuple(self._text_logprob(other, value) for other, value in entry.top),
            )
            for token_id, entry in entries
        )

    def _text_logprob(self, token_id: int, logprob: float) -> TextLogprob:
        return TextLogprob(token_id, self._spelled.get(token_id, b""), logprob)


def _cut(text: str) -> tuple[str, str]:
    return text[:MAX_DELTA_CHARACTERS], text[MAX_DELTA_CHARACTERS:]


def _tokens_of(token_id: int, entry: Logprobs) -> Sequence[int]:
    return (token_id, *(other for other, _ in entry.top))


class KeptText(TextSource, Protocol):
    """A text that a Texts keeps."""

    choice: int
    texts: Texts
    ended: bool

    @property
    def begun(self) -> bool:
        """Whether there is anything to send to a detokenizer."""


class Texts:
    """Keeps the texts of one request at a detokenizer, and moves them to another when it is
    lost."""

    def __init__(
        self,
        services: RouterServices,
        context: RequestContext,
        kept: Sequence[KeptText],
        tokenizer_digest: str,
        on_progress: Callable[[int], None],
    ) -> None:
        """on_progress: called with the choice when more of its text has arrived."""
        for text in kept:
            text.texts = self
        self._kept = kept
        self._services = services
        self._context = context
        self._tokenizer_digest = tokenizer_digest
        self._on_progress = on_progress
        self._fruitless_attempts = 0
        self._lost: BatonError | None = None
        self._woken = asyncio.Event()
        self._worker: Worker[DetokenizerSession] | None = None
        """The detokenizer that has the texts, or None."""
        self._proved = False
        """Whether that worker has returned any text."""
        self._ids: dict[int, int] = {}
        """The session's id of the text of each choice."""
        self._passed_over: set[str] = set()
        """Instance ids that lost or refused these texts; used again only when there are no others.
        """

    def touch(self, choice: int) -> None:
        """There is more to send to the detokenizer for a choice, or its log has ended."""
        text_id = self._ids.get(choice)
        if self._worker is not None and text_id is not None:
            self._worker.client.touch(text_id)

    async def keep(self) -> None:
        """Returns when all texts have ended. Raises BatonError when no detokenizer is available."""
        config, fleet = self._services.config, self._services.fleet
        while running := [text for text in self._kept if not text.ended]:
            worker = await pick_detokenizer(
                fleet.detokenizers,
                fleet.changed,
                self._tokenizer_digest,
                passed_over=self._passed_over,
                lost=self._lost,
                wait_timeout_s=config.wait_timeout_s,
            )
            with worker.place(len(running)):
                lost = await self._keep_at(worker, running)
            if lost is not None:
                self._passed_over.add(worker.identity.instance_id)
                worker.failure(lost)
                action = VERDICTS[lost.reason]
                self._fruitless_attempts += action is FailureAction.ELSEWHERE
                exhausted = self._fruitless_attempts >= config.max_attempts
                if action is FailureAction.FATAL or exhausted:
                    raise lost
                trace_id = self._context.stages.trace.context.trace_id
                about = named(self._context.request_id, trace_id)
                where = {"lost_at": "detokenizer", "reason": lost.reason.name}
                log.info("its texts were lost: %s", lost.message, extra={**about, **where})
                await asyncio.sleep(PAUSE_S)

    async def _keep_at(
        self, worker: Worker[DetokenizerSession], running: Sequence[KeptText]
    ) -> BatonError | None:
        """Returns None when these texts have ended, or the reason why they are lost."""
        self._woken.clear()
        self._lost = None
        self._proved = False
        self._worker = worker
        session = worker.client
        try:
            for text in running:
                text_id = self._ids[text.choice] = session.open(text, self._context.deadline)
                if text.begun:
                    session.touch(text_id)
            while self._lost is None and not all(text.ended for text in running):
                self._woken.clear()
                await self._woken.wait()
            return None if all(text.ended for text in running) else self._lost
        finally:
            self._worker = None
            for text_id in self._ids.values():
                session.close(text_id)
            self._ids.clear()

    def progressed(self, text: KeptText) -> None:
        """More of a text has arrived, or its end."""
        self._fruitless_attempts = 0
        if self._worker is not None and not self._proved:
            self._proved = True
            self._worker.success()
            self._context.stages.served_by(self._worker.identity)
        if text.ended:
            self._woken.set()
        self._on_progress(text.choice)

    def lose(self, error: BatonError) -> None:
        """The detokenizer has lost a text, or violates the protocol."""
        self._lost = error
        self._woken.set()


SPELLED_AT_ONCE = 1024
"""Tokens per message, so that other texts of the session do not wait for all of them."""


class TokenBytes:
    """The bytes of single tokens: a text without tokens of its own."""

    choice = 0
    begun = True

    def __init__(self, token_ids: Iterable[int]) -> None:
        self.texts: Texts
        self.ended = False
        self.spelled: dict[int, bytes] = {}
        """By token id."""
        self._left = deque(sorted(set(token_ids)))
        self._sent: deque[int] = deque()

    def open_text(self, text: OpenText) -> None:
        self._left.extendleft(reversed(self._sent))
        self._sent.clear()

    def append_tokens(self, add: Callable[[], AppendTokens]) -> None:
        if self._sent:
            return
        while self._left and len(self._sent) < SPELLED_AT_ONCE:
            self._sent.append(self._left.popleft())
        tokens = add()
        tokens.spell_token_ids = token_ids_to_bytes(self._sent)
        tokens.last = not self._left

    def on_delta(self, delta: TextDelta) -> None:
        if len(delta.spelled_texts) > len(self._sent):
            self.on_lost(Internal("The detokenizer spelled what was not asked for."))
            return
        for spelled in delta.spelled_texts:
            self.spelled[self._sent.popleft()] = spelled
        if delta.end and (self._sent or self._left):
            self.on_lost(Internal("The detokenizer did not spell all that was asked for."))
            return
        self.ended = delta.end
        self.texts.progressed(self)
        if not self._sent and self._left:
            self.texts.touch(self.choice)

    def on_lost(self, error: BatonError) -> None:
        self.texts.lose(error)
