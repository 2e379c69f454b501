"""The text of one choice, from its tokens to the part that may be sent.

Tokens become whole characters (`IncrementalText`), stop strings are searched in them
(`StopMatcher`), and text that cannot be part of a stop string is ready (`StreamedText`). All of it
is a function of the token ids in order, so that a text opened again with the same ids continues
with the same bytes.
"""

from __future__ import annotations

import codecs
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from batonlm.core.errors import BatonError, Cancelled, DeadlineExceeded, InvalidArgument, Overloaded
from batonlm.detokenizer.vocabulary import Vocabulary
from batonlm.rpc import tracing
from batonlm.rpc.tracing import NO_SPAN, Span, error_type

MAX_STOP_STRINGS = 64
MAX_CHARACTERS = 8192


@dataclass(frozen=True, slots=True)
class Match:
    """A completed stop string."""

    stop_string: str
    end: int
    """The characters of the fed piece up to the end of the stop string."""


class StopMatcher:
    """Finds stop strings in a text that arrives in pieces.

    The stop string that is *completed* first wins; of several completed by the same character, the
    longest. The result does not depend on how the text is split into pieces.

    For each stop string it tracks the longest suffix of the text that is a prefix of the stop
    string (Knuth, Morris and Pratt, "Fast pattern matching in strings", 1977). The longest of these
    must be held back; the text before it cannot be part of a match.

    The constructor raises InvalidArgument (field `stop_strings`).
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        if len(stop_strings) > MAX_STOP_STRINGS:
            raise InvalidArgument(f"must be at most {MAX_STOP_STRINGS}", field="stop_strings")
        if not all(stop_strings):
            raise InvalidArgument("must not be empty", field="stop_strings")
        if sum(map(len, stop_strings)) > MAX_CHARACTERS:
            raise InvalidArgument(
                f"must have at most {MAX_CHARACTERS} characters together", field="stop_strings"
            )
        self._patterns = [(stop_string, _borders(stop_string)) for stop_string in stop_strings]
        self._begun = [0] * len(stop_strings)
        """For each stop string, how many of its first characters the text ends with."""
        self._first_characters = frozenset(stop_string[0] for stop_string in stop_strings)

    @property
    def held(self) -> int:
        """How many characters at the end of the text may be part of a stop string."""
        return max(self._begun)

    def feed(self, piece: str, *, armed: bool = True) -> Match | None:
        """Searches the next piece. Must not be called after a match.

        armed: False ignores stop strings that end in this piece.
        """
        if not any(self._begun) and self._first_characters.isdisjoint(piece):
            return None
        for index, character in enumerate(piece):
            found = self._step(character)
            if found and armed:
                return Match(found, index + 1)
        return None

    def _step(self, character: str) -> str:
        """The longest stop string that this character completes, or ""."""
        found = ""
        for which, (stop_string, borders) in enumerate(self._patterns):
            begun = self._begun[which]
            while begun and stop_string[begun] != character:
                begun = borders[begun]
            if stop_string[begun] == character:
                begun += 1
            if begun == len(stop_string):
                found = max(found, stop_string, key=len)
                begun = borders[begun]
            self._begun[which] = begun
        return found


def _borders(text: str) -> list[int]:
    """For each prefix of the text, by length: the length of its longest proper prefix that is also
    its suffix."""
    borders = [0, 0]
    for character in text[1:]:
        border = borders[-1]
        while border and text[border] != character:
            border = borders[border]
        borders.append(border + (text[border] == character))
    return borders


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error("baton.replace_each_byte", _replace_each_byte)


class IncrementalText:
    """Converts the tokens of one choice to whole characters, token by token.

    The text of output ids is what `Tokenizer.decode(tail + ids)` adds to `decode(tail)`, where
    `tail` is the end of the prompt. With a tail the output continues the prompt and keeps a leading
    space (" Paris"); without one the first token loses it as in batch decoding ("Paris"). Skipped
    special tokens count as absent.

    A character is returned with its last byte. Invalid bytes become U+FFFD; at most three bytes
    wait. One difference from batch decoding is deliberate: byte-fallback decoding turns a whole run
    of byte tokens into U+FFFD when a part of it is invalid, even its valid characters; here those
    were sent already, and stay.
    """

    def __init__(
        self,
        spelling: Vocabulary,
        *,
        skip_special_tokens: bool = True,
        kept_special_tokens: Iterable[str] = (),
        prompt_tail_ids: Iterable[int] = (),
    ) -> None:
        self._spelling = spelling
        self._skip_special_tokens = skip_special_tokens
        self._kept = spelling.ids_of(kept_special_tokens)
        self._begun = False
        errors = "baton.replace_each_byte" if spelling.replaces_each_byte else "replace"
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors)
        for token_id in prompt_tail_ids:
            self.push(token_id)

    def push(self, token_id: int) -> str:
        """Takes a token; returns the characters that it completes."""
        special = self._skip_special_tokens and self._spelling.is_special(token_id)
        if special and token_id not in self._kept:
            return ""
        if self._begun:
            return self._decoder.decode(self._spelling.middle(token_id))
        if not self._spelling.has(token_id):
            return ""
        self._begun = True
        return self._decoder.decode(self._spelling.first(token_id))

    @property
    def pending(self) -> bool:
        """Whether bytes of an unfinished character wait."""
        return bool(self._decoder.getstate()[0])

    def finish(self) -> str:
        """The text of the waiting bytes when no token follows."""
        return self._decoder.decode(b"", final=True)


@dataclass(frozen=True, slots=True)
class DetokenizeOptions:
    """How a choice's tokens become text."""

    stop_strings: tuple[str, ...] = ()
    include_stop_string: bool = False
    skip_special_tokens: bool = True
    kept_special_tokens: tuple[str, ...] = ()
    """Texts of special tokens that skip_special_tokens does not skip."""
    prompt_tail_ids: tuple[int, ...] = ()
    """The last tokens of the prompt, see IncrementalText."""
    delivered_bytes: int = 0
    """How many UTF-8 bytes at the start of the text are not sent again."""
    min_tokens: int = 0
    """Stop strings completed by one of so many first output tokens are ignored."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The stop string that ended a text."""

    stop_string: str
    position: int
    """The output position of the token that completed it."""


@dataclass(frozen=True, slots=True)
class News:
    """The continuation of a text."""

    text: str
    """What follows the text sent so far."""
    num_tokens: int
    """Output tokens whose text is fully sent or skipped."""
    searched_tokens: int
    """Output tokens in which no stop string ends."""
    stop: Stop | None = None
    end: bool = False
    """Whether the text is complete."""


class StreamedText:
    """The text of one choice while its tokens arrive. The constructor raises InvalidArgument
    (`stop_strings`) for invalid stop strings."""

    def __init__(self, spelling: Vocabulary, options: DetokenizeOptions) -> None:
        self._incremental = IncrementalText(
            spelling,
            skip_special_tokens=options.skip_special_tokens,
            kept_special_tokens=options.kept_special_tokens,
            prompt_tail_ids=options.prompt_tail_ids,
        )
        stops = options.stop_strings
        self._matcher = StopMatcher(stops) if stops else None
        self._include_stop_string = options.include_stop_string
        self._min_tokens = options.min_tokens
        self._delivered_bytes = options.delivered_bytes
        self._count = 0
        self._characters = 0
        self._ends: deque[int] = deque()
        """Where the text of each token ends that is not fully ready, in characters."""
        self._held = ""
        self._ready: list[str] = []
        self._stop: Stop | None = None
        self._ended = False
        self._reported = (0, 0)

    @property
    def count(self) -> int:
        """The number of output tokens so far, up to the stop string."""
        return self._count

    def append(
        self,
        position: int,
        token_ids: Sequence[int],
        *,
        last: bool = False,
        last_is_stop_token: bool = False,
    ) -> None:
        """Takes tokens whose first one is at `position`. Without effect once the text has ended.

        last: no token follows. last_is_stop_token: the last one of token_ids has no text.
        Raises InvalidArgument when the tokens do not follow those so far.
        """
        if self._ended:
            return
        if position != self._count:
            raise InvalidArgument(f"must be {self._count}, not {position}", field="position")
        if last_is_stop_token and not token_ids:
            raise InvalidArgument("must hold the stop token", field="token_ids")
        spoken = len(token_ids) - last_is_stop_token
        for token_id in token_ids[:spoken]:
            self._push(token_id)
            if self._ended:
                return
        if last:
            self._finish()
        if not self._stop:
            self._count = position + len(token_ids)

    @property
    def has_news(self) -> bool:
        return bool(self._ready) or self._ended or self._reported != self._progress()

    def take(self, max_characters: int) -> News:
        """The text that is ready, at most max_characters; the rest stays for the next call."""
        text = "".join(self._ready)
        self._ready.clear()
        if len(text) > max_characters:
            self._ready.append(text[max_characters:])
            return News(text[:max_characters], *self._reported)
        self._reported = self._progress()
        return News(text, *self._reported, stop=self._stop, end=self._ended)

    def _progress(self) -> tuple[int, int]:
        searched = self._count if self._matcher else 0
        return self._count - len(self._ends), searched

    def _push(self, token_id: int) -> None:
        text = self._incremental.push(token_id)
        self._characters += len(text)
        # Waiting bytes become exactly one character more.
        self._ends.append(self._characters + self._incremental.pending)
        self._count += 1
        if text:
            self._add(text)
        while self._ends and self._ends[0] <= self._characters - len(self._held):
            self._ends.popleft()

    def _add(self, text: str) -> None:
        """Adds the characters that the newest token completed."""
        self._held += text
        if self._matcher is None:
            self._release(len(self._held))
            return
        match = self._matcher.feed(text, armed=self._count > self._min_tokens)
        if match:
            self._end_at(match, len(text))
        else:
            self._release(len(self._held) - self._matcher.held)

    def _end_at(self, match: Match, piece_characters: int) -> None:
        end = len(self._held) - piece_characters + match.end
        self._release(end if self._include_stop_string else end - len(match.stop_string))
        self._stop = Stop(match.stop_string, self._count - 1)
        self._end()

    def _finish(self) -> None:
        broken = self._incremental.finish()
        if broken:
            self._characters += len(broken)
            self._add(broken)
        if not self._ended:
            self._release(len(self._held))
            self._end()

    def _end(self) -> None:
        self._held = ""
        self._ends.clear()
        self._ended = True

    def _release(self, num_characters: int) -> None:
        text, self._held = self._held[:num_characters], self._held[num_characters:]
        if self._delivered_bytes:
            text = self._after_delivered(text)
        if text:
            self._ready.append(text)

    def _after_delivered(self, text: str) -> str:
        data = text.encode()
        delivered = min(self._delivered_bytes, len(data))
        self._delivered_bytes -= delivered
        try:
            return data[delivered:].decode()
        except UnicodeDecodeError:
            raise InvalidArgument("ends within a character", field="delivered_bytes") from None


_TOKEN_BYTES = 4
"""The estimated size of a token's text before it is sent."""
_ERROR_BYTES = 256


@dataclass(frozen=True, slots=True)
class TextNews:
    """News of one text, or the error that ended it."""

    text_id: int
    news: News | None = None
    """None with an error."""
    token_texts: Sequence[bytes] = ()
    """The bytes of each new token, if the text was opened with them."""
    spelled_texts: Sequence[bytes] = ()
    """The bytes of each token that `append` was given to spell."""
    error: BatonError | None = None


@dataclass(slots=True)
class _Open:
    text: StreamedText
    with_token_texts: bool
    deadline: float
    span: Span
    token_texts: list[bytes] = field(default_factory=list)
    spelled_texts: list[bytes] = field(default_factory=list)
    unsent_bytes: int = 0


class OpenTexts:
    """All open texts of one session, and their unsent news, one entry per text.

    Operations on ids that are not open have no effect: the text ended, failed or was closed.
    Memory is bounded: the number of texts by `max_texts`, and unsent text by the session, which
    checks `unsent_bytes`.
    """

    def __init__(self, vocabulary: Vocabulary, max_texts: int) -> None:
        self._vocabulary = vocabulary
        self._max_texts = max_texts
        self._open: dict[int, _Open] = {}
        self._changed: dict[int, None] = {}
        """The ids of open texts with news, oldest news first."""
        self._failed: dict[int, BatonError] = {}
        self._unsent_bytes = 0

    def __len__(self) -> int:
        return len(self._open)

    @property
    def unsent_bytes(self) -> int:
        """The estimated size of all that waits for `take`."""
        return self._unsent_bytes + _ERROR_BYTES * len(self._failed)

    @property
    def has_news(self) -> bool:
        return bool(self._changed or self._failed)

    def open(
        self,
        text_id: int,
        options: DetokenizeOptions,
        token_ids: Sequence[int],
        *,
        with_token_texts: bool = False,
        deadline: float = math.inf,
        span: Span = NO_SPAN,
    ) -> None:
        """Opens a text. token_ids: its tokens so far. deadline: on the clock of `append`'s now.
        span: ended with the text."""
        try:
            if text_id in self._open:
                raise InvalidArgument("is open already", field="text_id")
            if len(self._open) >= self._max_texts:
                raise Overloaded("the detokenizer has too many open texts")
            text = StreamedText(self._vocabulary, options)
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
        """Adds tokens to a text. spell: further tokens whose bytes are returned one by one. After
        the deadline, the text ends with DeadlineExceeded."""
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
        """Discards a text and its news."""
        self._forget(text_id, Cancelled("closed"))

    def end(self) -> None:
        """Discards all texts."""
        for text_id in list(self._open):
            self.close(text_id)

    def _forget(self, text_id: int, error: BatonError | None) -> None:
        entry = self._open.pop(text_id, None)
        if entry is not None:
            self._unsent_bytes -= entry.unsent_bytes
            if entry.span.recording:
                entry.span.set_attributes({tracing.TEXT_TOKENS: entry.text.count})
            entry.span.end(error_type(error))
        self._changed.pop(text_id, None)
        self._failed.pop(text_id, None)

    def fail(self, text_id: int, error: BatonError) -> None:
        """Ends a text, if it is open, and queues the error as its news."""
        self._forget(text_id, error)
        self._failed[text_id] = error

    def take(self, max_characters: int) -> list[TextNews]:
        """All errors, and up to about max_characters of text. Empty when there is no news."""
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
