"""The text of one choice: what is asked of a detokenizer, what came back, what the client has.

A cursor over the token log on each side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.core.errors import BatonError, Internal
from baton.core.request.attempt import Logprobs
from baton.core.request.request import Delta, TextLogprob, TokenLogprobs
from baton.core.request.token_log import PositionGap, TokenLog
from baton.router.workers.detokenizer_session import TextNews, TextOpening, TextTokens

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

    def opening(self) -> TextOpening:
        """All tokens that may lie behind the delivered text. A stop token is no part of the text:
        it is appended as the last token, never opened with.
        """
        self._asked = min(self._asked, len(self.log) - (self.log.stop_token_id is not None))
        self._end_asked = False
        self._spelling.clear()
        self._spell_from = self._told
        return TextOpening(
            token_ids=self.log.token_ids(0, self._asked),
            delivered_bytes=self._delivered_bytes,
            stop_strings=self._options.stop_strings,
            include_stop_string=self._options.include_stop_string,
            skip_special_tokens=self._options.skip_special_tokens,
            kept_special_tokens=self._options.kept_special_tokens,
            prompt_tail_ids=self._options.prompt_tail_ids,
            min_tokens=self._options.min_tokens,
            traceparent=self._options.traceparent,
        )

    def take_tokens(self) -> TextTokens | None:
        log, start = self.log, self._asked
        token_ids = log.token_ids(start)
        spell = self._unspelled() if log.has_logprobs else ()
        last = log.ended and not self._end_asked
        if not token_ids and not spell and not last:
            return None
        self._asked = len(log)
        self._end_asked = log.ended
        self._spelling += spell
        return TextTokens(start, token_ids, spell, last, last and log.stop_token_id is not None)

    def on_news(self, news: TextNews) -> None:
        if self.ended:
            return
        text = news.text
        self._unsent += text
        self._delivered_bytes += len(text) if text.isascii() else len(text.encode())
        for spelled in news.spelled:
            if self._spelling:
                self._spelled[self._spelling.pop(0)] = spelled
        self.num_tokens = max(self.num_tokens, min(news.num_tokens, len(self.log)))
        self.searched_tokens = max(self.searched_tokens, news.searched_tokens)
        if news.stop is not None:
            stop_string, position = news.stop
            try:
                self._on_stop(self.log.choice, position, stop_string)
            except PositionGap:
                self._tell_lost(Internal("The detokenizer stopped where there is no token."))
                return
        elif news.end and not self.log.ended:
            self._tell_lost(Internal("The detokenizer ended a text that goes on."))
            return
        if news.stop is not None or news.end:
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
