"""UTF-8-safe text of one choice, token by token. Knows nothing of stop strings or of the wire.

The rule: the text of output ids is what `Tokenizer.decode(tail + ids)` adds to `decode(tail)`,
where `tail` is the end of the prompt. With a tail the output continues the prompt, so a leading
space stays (" Paris"); without one the first token loses it as in batch decoding ("Paris").
Special tokens, when skipped, count as absent: the first token that is kept is the first one.

A character is sent when its last byte is here. Bytes that can be no character become U+FFFD, at
most three of them wait. One difference from batch decoding is deliberate: byte-fallback decoding
turns a whole run of byte tokens into U+FFFD when any part of the run is broken, its valid
characters too; here these were sent already, and stay.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Protocol


class Spelling(Protocol):
    """What a vocabulary tells about token ids; `baton.detokenizer.vocabulary` is the real one."""

    @property
    def replaces_each_byte(self) -> bool: ...

    def is_special(self, token_id: int) -> bool: ...

    def ids_of(self, texts: Iterable[str]) -> frozenset[int]: ...

    def knows(self, token_id: int) -> bool: ...

    def first(self, token_id: int) -> bytes: ...

    def middle(self, token_id: int) -> bytes: ...


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error("baton.replace_each_byte", _replace_each_byte)


class IncrementalText:
    """Turns tokens into whole characters. The result does not depend on how tokens are grouped."""

    def __init__(
        self,
        spelling: Spelling,
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
        """The characters that this token completes."""
        special = self._skip_special_tokens and self._spelling.is_special(token_id)
        if special and token_id not in self._kept:
            return ""
        if self._begun:
            return self._decoder.decode(self._spelling.middle(token_id))
        if not self._spelling.knows(token_id):
            return ""
        self._begun = True
        return self._decoder.decode(self._spelling.first(token_id))

    @property
    def pending(self) -> bool:
        """Whether bytes of an unfinished character wait."""
        return bool(self._decoder.getstate()[0])

    def finish(self) -> str:
        """What the waiting bytes become when no token follows."""
        return self._decoder.decode(b"", final=True)
