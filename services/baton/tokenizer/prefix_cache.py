"""Remembers the ids of conversations, for when they come again with more behind. Renders nothing.

A text is cut only where encoding both parts is the same as encoding the whole: behind a token that
the tokenizer takes out of the text before anything else. Such a token divides what stands before it
from what follows, so that with S the last one,

    ids(before S after) = ids(before S) + ids(S after) without its first id

The second part begins with S again because some tokenizers treat the very start of a text
differently. This holds for added tokens that are matched in the text as it is (`normalized` off),
as they stand (no `lstrip`, `rstrip`, `single_word`, no space at their ends), and that no other such
token can overlap or contain; then every place where their text occurs is one.

Kept are ids by a digest over the tenant's salt and the text before the cut, never the text itself.
One tenant's hits tell another nothing, as with the KV cache, which is keyed by the same salt.
"""

from __future__ import annotations

import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from itertools import islice

from tokenizers import Tokenizer

from baton.rpc.metrics import CACHE_LOOKUPS, counter

Encode = Callable[[Sequence[str]], "Sequence[array[int]]"]
"""Texts to ids, each by itself, with nothing added around them."""

MIN_CHARACTERS = 1024
"""A shorter text is encoded sooner than found."""
MAX_CUTS = 4096
"""A text with more is no conversation."""
LOOKED_UP = 64
"""Cuts that are looked up, the last ones of a text. A conversation grows by a few at a time."""
ENTRY_BYTES = 256
"""What an entry takes besides its ids."""


class PrefixCache:
    """At most max_bytes of ids. May be used on several threads."""

    def __init__(self, tokenizer: Tokenizer, max_bytes: int) -> None:
        self._tokens = cut_tokens(tokenizer)
        self._pattern = re.compile("|".join(map(re.escape, self._tokens)) or r"(?!)")
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, array[int]] = OrderedDict()
        """The first to be forgotten first."""
        self.num_bytes = 0

    def encode(self, text: str, salt: bytes, encode: Encode) -> array[int] | None:
        """The ids of the whole text, as `encode` has them; None if it is nothing for the cache.

        salt: of whoever asks.
        """
        cuts = self._cuts(text)
        if not cuts:
            return None
        digests = _digests(text, salt, cuts)
        place, known = self._longest(digests)
        counter(CACHE_LOOKUPS).labels("miss" if place < 0 else "hit").inc()
        starts = [cuts[place][0] if place >= 0 else 0, cuts[-1][0]]
        if place == len(cuts) - 1:
            rest = encode([text[starts[1] :]])[0]
        else:
            middle, rest = encode([text[starts[0] : cuts[-1][1]], text[starts[1] :]])
            if place >= 0 and middle[0] != self._id_at(text, cuts[place]):
                return None
            known = known + (middle[1:] if place >= 0 else middle)
        # Never the case, but for rules of a tokenizer that nobody here has heard of.
        if rest[0] != self._id_at(text, cuts[-1]):
            return None
        self._keep(digests[-1], known, grown_from=digests[place] if place >= 0 else b"")
        return known + rest[1:]

    def _cuts(self, text: str) -> list[tuple[int, int]]:
        """Where the last cut tokens begin and end; none if the text is not worth it."""
        if len(text) < MIN_CHARACTERS or not self._max_bytes:
            return []
        cuts = [match.span() for match in islice(self._pattern.finditer(text), MAX_CUTS + 1)]
        if not cuts or len(cuts) > MAX_CUTS or cuts[-1][1] < MIN_CHARACTERS:
            return []
        return cuts[-LOOKED_UP:]

    def _id_at(self, text: str, cut: tuple[int, int]) -> int:
        return self._tokens[text[slice(*cut)]]

    def _longest(self, digests: Sequence[bytes]) -> tuple[int, array[int]]:
        """Which one is known, the last such, and its ids; -1 and none if none is."""
        with self._lock:
            for place in reversed(range(len(digests))):
                ids = self._known.get(digests[place])
                if ids is not None:
                    self._known.move_to_end(digests[place])
                    return place, ids
        return -1, array("i")

    def _keep(self, digest: bytes, ids: array[int], *, grown_from: bytes) -> None:
        size = _size(ids)
        with self._lock:
            if digest in self._known or size > self._max_bytes:
                return
            if grown_from in self._known:  # only a branch of the conversation would ask for it
                self._known.move_to_end(grown_from, last=False)
            self._known[digest] = ids
            self.num_bytes += size
            while self.num_bytes > self._max_bytes:
                _, forgotten = self._known.popitem(last=False)
                self.num_bytes -= _size(forgotten)


def cut_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Ids by text of the added tokens behind which a text may be cut."""
    added = {
        token_id: token
        for token_id, token in tokenizer.get_added_tokens_decoder().items()
        if not token.normalized and token.content
    }
    texts = [token.content for token in added.values()]
    together = "\0".join(texts)
    heads = {head for text in texts for head in _heads(text)}
    tails = {tail for text in texts for tail in _tails(text)}
    return {
        token.content: token_id
        for token_id, token in added.items()
        if not (token.lstrip or token.rstrip or token.single_word)
        and token.content == token.content.strip()
        and "\0" not in token.content
        and together.count(token.content) == 1
        and heads.isdisjoint(_tails(token.content))
        and tails.isdisjoint(_heads(token.content))
    }


def _heads(text: str) -> Iterable[str]:
    return (text[:end] for end in range(1, len(text)))


def _tails(text: str) -> Iterable[str]:
    return (text[start:] for start in range(1, len(text)))


def _digests(text: str, salt: bytes, cuts: Sequence[tuple[int, int]]) -> list[bytes]:
    """Of the text before the end of each cut."""
    hasher = blake2b(len(salt).to_bytes(8, "little") + salt, digest_size=32)
    digests, done = [], 0
    for _, end in cuts:
        hasher.update(text[done:end].encode())
        digests.append(hasher.digest())
        done = end
    return digests


def _size(ids: array[int]) -> int:
    return ENTRY_BYTES + ids.itemsize * len(ids)
