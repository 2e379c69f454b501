"""The texts of one request: each choice's tokens go to a detokenizer and come back as deltas.

`Texts` keeps them at one detokenizer and moves them to another when it is lost. `ChoiceText` is a
cursor over the token log of a choice on each side. `spell` fetches the bytes of single tokens.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from baton.core.errors import BatonError, Internal
from baton.core.request.attempt import Logprobs, PositionGap, TokenLog
from baton.core.request.request import Delta, TextLogprob, TokenLogprobs
from baton.core.request.request_state import VERDICTS, FailureAction
from baton.router.request.admission import RequestContext, RouterServices
from baton.router.workers.detokenizer_session import DetokenizerSession
from baton.router.workers.fleet import Worker, pick_detokenizer
from baton.rpc.convert import token_ids_to_bytes
from baton.rpc.logs import named
from baton.v1.detokenizer_pb2 import AppendTokens, OpenText, TextDelta

MAX_DELTA_TOKENS = 128
MAX_DELTA_CHARACTERS = 1 << 14
"""Of one delta. A slow reader's next one would else be as large as all that it has missed, and with
log-probabilities larger than any message."""

PROMPT_TAIL = 8
"""Prompt tokens that a detokenizer sees: more than any tokenizer's text depends on."""


@dataclass(frozen=True, slots=True)
class TextOptions:
    """What all choices of a request have in common."""

    stop_strings: tuple[str, ...]
    include_stop_string: bool
    skip_special_tokens: bool
    kept_special_tokens: tuple[str, ...]
    """Those that stay in the text all the same."""
    prompt_tail_ids: tuple[int, ...]
    min_tokens: int
    shown_stop_token_ids: frozenset[int]
    """Stop tokens the client named; only those are reported to it."""
    traceparent: str = ""


class ChoiceText:
    """See the module. The three callables are told at once and must not wait."""

    def __init__(
        self,
        log: TokenLog,
        options: TextOptions,
        *,
        on_stop: Callable[[int, int, str], None],
        on_progress: Callable[[int], None],
        on_lost: Callable[[BatonError], None],
    ) -> None:
        self.log = log
        self.ended = False
        """The detokenizer has said all of it."""
        self.num_tokens = 0
        """Tokens whose text came back in full."""
        self.searched_tokens = 0
        """Tokens within which no stop string ends."""
        self.finished = False
        """The last delta was taken."""
        self._options = options
        self._on_stop = on_stop
        self._on_progress = on_progress
        self._tell_lost = on_lost
        self._asked = 0
        self._end_asked = False
        self._delivered_bytes = 0
        self._unsent = ""
        self._told = 0
        self._spelled: dict[int, bytes] = {}
        self._spelling: list[int] = []
        self._spell_from = 0
        """Tokens before this position have had their bytes asked for: a reader that is far behind
        must not make every step look at all that it has missed."""

    def open_text(self, text: OpenText) -> None:
        """With all tokens that may lie behind the delivered text. A stop token is no part of the
        text: it is appended as the last token, never opened with.
        """
        self._asked = min(self._asked, len(self.log) - (self.log.stop_token_id is not None))
        self._end_asked = False
        self._spelling.clear()
        self._spell_from = self._told
        options = self._options
        text.token_ids = token_ids_to_bytes(self.log.token_ids(0, self._asked))
        text.delivered_bytes = self._delivered_bytes
        text.stop_strings.extend(options.stop_strings)
        text.include_stop_string = options.include_stop_string
        text.skip_special_tokens = options.skip_special_tokens
        text.kept_special_tokens.extend(options.kept_special_tokens)
        text.prompt_tail_ids = token_ids_to_bytes(options.prompt_tail_ids)
        text.min_tokens = options.min_tokens
        text.traceparent = options.traceparent

    def append_tokens(self, add: Callable[[], AppendTokens]) -> None:
        log, start = self.log, self._asked
        token_ids = log.token_ids(start)
        spell = self._unspelled() if log.has_logprobs else ()
        last = log.ended and not self._end_asked
        if not token_ids and not spell and not last:
            return
        self._asked = len(log)
        self._end_asked = log.ended
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
                self._tell_lost(Internal("The detokenizer stopped where there is no token."))
                return
        elif delta.end and not self.log.ended:
            self._tell_lost(Internal("The detokenizer ended a text that goes on."))
            return
        if stopped or delta.end:
            self.ended = True
            self.num_tokens = len(self.log)
        self._on_progress(self.log.choice)

    def on_lost(self, error: BatonError) -> None:
        if not self.ended:
            self._tell_lost(error)

    def take_delta(self) -> Delta | None:
        """What the client does not have yet, as one delta, or None when there is nothing. There may
        be more: of one that fell far behind, text and tokens come in pieces.
        """
        # Asked at every turn of a stream, and mostly there is nothing.
        if self.finished or not (self._unsent or self.ended or self.num_tokens > self._told):
            return None
        told, upto = self._told, self._tellable(self._told + MAX_DELTA_TOKENS)
        logprobs = self._logprobs(told, upto) if self.log.has_logprobs else ()
        text, self._unsent = _cut(self._unsent)
        self.finished = self.ended and upto == len(self.log) and not self._unsent
        self._told = upto
        token_ids = self.log.token_ids(told, upto)
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
            stop_token_id=(
                stop_token_id if stop_token_id in self._options.shown_stop_token_ids else None
            ),
        )

    def _tellable(self, limit: int) -> int:
        """Tokens the client may see: their text is out, and their log-probabilities have texts."""
        limit = min(limit, self.num_tokens)
        if self.ended or not self.log.has_logprobs:
            return limit
        entries = self.log.logprobs(self._told, limit)
        for offset, entry in enumerate(entries):
            position = self._told + offset
            needed = _tokens_of(self.log.token_ids(position, position + 1)[0], entry)
            if any(token_id not in self._spelled for token_id in needed):
                return position
        return limit

    def _unspelled(self) -> tuple[int, ...]:
        """Tokens whose own bytes are wanted, not known and not asked for: each only once."""
        start, self._spell_from = max(self._told, self._spell_from), len(self.log)
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


log = logging.getLogger(__name__)

PAUSE_S = 0.05
"""Before a lost text is opened again: a worker that fails at once must not be asked in a loop."""


class Texts:
    """All texts of one request. progressed: set when there is something for the client."""

    def __init__(
        self,
        services: RouterServices,
        context: RequestContext,
        logs: Sequence[TokenLog],
        options: TextOptions,
        tokenizer_digest: str,
        *,
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
        self._services = services
        self._context = context
        self._tokenizer_digest = tokenizer_digest
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
                self._services.fleet.detokenizers,
                self._services.fleet.changed,
                self._tokenizer_digest,
                passed_over=self._passed_over,
                lost=self._lost,
                wait_timeout_s=self._services.config.wait_timeout_s,
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
                text_id = self._ids[text.log.choice] = session.open(text, self._context.deadline)
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
        worker.failure(self._lost)
        self.moves += 1
        verdict = VERDICTS[self._lost.reason]
        self._fruitless_attempts += verdict is FailureAction.ELSEWHERE
        if (
            verdict is FailureAction.FATAL
            or self._fruitless_attempts >= self._services.config.max_attempts
        ):
            raise self._lost
        lost = {"lost_at": "detokenizer", "reason": self._lost.reason.name}
        trace_id = self._context.stages.trace.context.trace_id
        about = {**named(self._context.request_id, trace_id), **lost}
        log.info("its texts were lost: %s", self._lost.message, extra=about)
        await asyncio.sleep(PAUSE_S)

    def _progress(self, choice: int) -> None:
        self._fruitless_attempts = 0
        if self._worker is not None and not self._proved:
            self._proved = True
            self._worker.success()
            self._context.stages.served_by(self._worker.identity)
        if self.choices[choice].ended:
            self._woken.set()
        self._on_progress(choice)

    def _lose(self, error: BatonError) -> None:
        self._lost = error
        self._woken.set()


AT_ONCE = 1024
"""Tokens asked for in one message: other texts of the session do not wait for all of them."""


async def spell(
    services: RouterServices, token_ids: Iterable[int], tokenizer_digest: str, deadline: float
) -> dict[int, bytes]:
    """The bytes of each token. deadline: on the running loop's clock. Raises BatonError."""
    wanted = sorted(set(token_ids))
    passed_over: set[str] = set()
    lost: BatonError | None = None
    failures = 0
    while True:
        worker = await pick_detokenizer(
            services.fleet.detokenizers,
            services.fleet.changed,
            tokenizer_digest,
            passed_over=passed_over,
            lost=lost,
            wait_timeout_s=services.config.wait_timeout_s,
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
                worker.failure(error)
                passed_over.add(worker.identity.instance_id)
                failures += 1
                fatal = VERDICTS[error.reason] is FailureAction.FATAL
                if fatal or failures >= services.config.max_attempts:
                    raise
                await asyncio.sleep(PAUSE_S)
            else:
                worker.success()
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

    def open_text(self, text: OpenText) -> None:
        pass

    def append_tokens(self, add: Callable[[], AppendTokens]) -> None:
        if self._asked:
            return
        while self._left and len(self._asked) < AT_ONCE:
            self._asked.append(self._left.popleft())
        tokens = add()
        tokens.spell_token_ids = token_ids_to_bytes(self._asked)
        tokens.last = not self._left

    def on_delta(self, delta: TextDelta) -> None:
        if len(delta.spelled_texts) > len(self._asked):
            self.on_lost(Internal("The detokenizer spelled what was not asked for."))
            return
        for spelled in delta.spelled_texts:
            self.spelled[self._asked.popleft()] = spelled
        if delta.end and (self._asked or self._left):
            self.on_lost(Internal("The detokenizer did not spell all that was asked for."))
        elif delta.end and not self.done.done():
            self.done.set_result(None)
        elif not self._asked and self._left:
            self.on_told()

    def on_lost(self, error: BatonError) -> None:
        if not self.done.done():
            self.done.set_exception(error)
