"""All open texts of one session, and what of them is not sent yet.

News of a text gathers here until the writer takes it: one entry a text, however many tokens came.
What a peer can make us keep is bounded: the number of texts by `max_texts`, what is not sent by
whoever looks at `unsent_bytes`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from baton.core.errors import BatonError, Cancelled, DeadlineExceeded, InvalidArgument, Overloaded
from baton.detokenizer.text import ChoiceText, News, TextOptions
from baton.detokenizer.vocabulary import Vocabulary
from baton.rpc import tracing
from baton.rpc.tracing import NO_SPAN, Span, error_type

_TOKEN_BYTES = 4
"""What a token's text is taken to weigh before it is sent."""
_ERROR_BYTES = 256


@dataclass(frozen=True, slots=True)
class TextNews:
    """News of one text, with the bytes of single tokens; or the error that ended it."""

    text_id: int
    news: News | None = None
    token_texts: Sequence[bytes] = ()
    spelled_texts: Sequence[bytes] = ()
    error: BatonError | None = None


@dataclass(slots=True)
class _Open:
    text: ChoiceText
    with_token_texts: bool
    deadline: float
    span: Span
    token_texts: list[bytes] = field(default_factory=list)
    spelled_texts: list[bytes] = field(default_factory=list)
    unsent_bytes: int = 0


class OpenTexts:
    """Operations on ids that are not open have no effect: the text ended, failed or was closed."""

    def __init__(self, vocabulary: Vocabulary, max_texts: int) -> None:
        self._vocabulary = vocabulary
        self._max_texts = max_texts
        self._open: dict[int, _Open] = {}
        self._changed: dict[int, None] = {}
        """Open texts with news, in the order it came."""
        self._failed: dict[int, BatonError] = {}
        self._unsent_bytes = 0

    def __len__(self) -> int:
        return len(self._open)

    @property
    def unsent_bytes(self) -> int:
        """What waits for `take`, about."""
        return self._unsent_bytes + _ERROR_BYTES * len(self._failed)

    @property
    def has_news(self) -> bool:
        return bool(self._changed or self._failed)

    def open(
        self,
        text_id: int,
        options: TextOptions,
        token_ids: Sequence[int],
        *,
        with_token_texts: bool = False,
        deadline: float = math.inf,
        span: Span = NO_SPAN,
    ) -> None:
        """Begins a text; token_ids are its tokens so far. deadline: of the clock of `append`. span:
        ends with the text."""
        try:
            if text_id in self._open:
                raise InvalidArgument("is open already", field="text_id")
            if len(self._open) >= self._max_texts:
                raise Overloaded("the detokenizer has too many open texts")
            text = ChoiceText(self._vocabulary, options)
            text.append(0, token_ids)
        except BatonError as error:
            span.end(error_type(error))
            self.fail(text_id, error)
            return
        self._open[text_id] = _Open(text, with_token_texts, deadline, span)
        self._note(text_id, _TOKEN_BYTES * len(token_ids))

    def append(
        self,
        text_id: int,
        position: int,
        token_ids: Sequence[int],
        *,
        spell: Iterable[int] = (),
        last: bool = False,
        last_is_stop_token: bool = False,
        now: float = 0.0,
    ) -> None:
        """More tokens of a text, and tokens to spell one by one. Too late, they end the text."""
        entry = self._open.get(text_id)
        if entry is None:
            return
        if now >= entry.deadline:
            self.fail(text_id, DeadlineExceeded("the request ran out of time in the detokenizer"))
            return
        before = entry.text.count
        try:
            entry.text.append(position, token_ids, last=last, last_is_stop_token=last_is_stop_token)
        except BatonError as error:
            self.fail(text_id, error)
            return
        made = _TOKEN_BYTES * len(token_ids)
        if entry.with_token_texts:
            taken = token_ids[: entry.text.count - before]
            made += self._spell(taken, entry.token_texts)
        made += self._spell(spell, entry.spelled_texts)
        self._note(text_id, made)

    def close(self, text_id: int) -> None:
        """Forgets a text; no news of it is taken any more."""
        self._forget(text_id, Cancelled("closed"))

    def end(self) -> None:
        """Forgets all texts."""
        for text_id in list(self._open):
            self.close(text_id)

    def _forget(self, text_id: int, error: BatonError | None) -> None:
        entry = self._open.pop(text_id, None)
        if entry is not None:
            self._unsent_bytes -= entry.unsent_bytes
            if entry.span.recording:
                entry.span.tell({tracing.TEXT_TOKENS: entry.text.count})
            entry.span.end(error_type(error))
        self._changed.pop(text_id, None)
        self._failed.pop(text_id, None)

    def fail(self, text_id: int, error: BatonError) -> None:
        """Ends a text, if it is open, and tells why."""
        self._forget(text_id, error)
        self._failed[text_id] = error

    def take(self, max_characters: int) -> list[TextNews]:
        """Errors, and up to about max_characters of text. Empty when there is no news."""
        taken = [TextNews(text_id, error=error) for text_id, error in self._failed.items()]
        self._failed.clear()
        while self._changed and max_characters > 0:
            text_id = next(iter(self._changed))
            del self._changed[text_id]
            entry = self._open[text_id]
            news = entry.text.take(max_characters)
            taken.append(TextNews(text_id, news, entry.token_texts, entry.spelled_texts))
            max_characters -= max(1, len(news.text))
            entry.token_texts, entry.spelled_texts = [], []
            if news.end:
                self._forget(text_id, None)
            elif entry.text.has_news:
                self._changed[text_id] = None
            else:
                self._unsent_bytes -= entry.unsent_bytes
                entry.unsent_bytes = 0
        return taken

    def _spell(self, token_ids: Iterable[int], into: list[bytes]) -> int:
        texts = [self._vocabulary.middle(token_id) for token_id in token_ids]
        into += texts
        return sum(map(len, texts))

    def _note(self, text_id: int, made_bytes: int) -> None:
        entry = self._open[text_id]
        entry.unsent_bytes += made_bytes
        self._unsent_bytes += made_bytes
        if entry.text.has_news or entry.token_texts or entry.spelled_texts:
            self._changed.setdefault(text_id)
