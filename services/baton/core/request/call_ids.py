"""Ids of calls of tools: the same wherever and whenever the same request is run."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_PREFIX = "call_"


class CallIds:
    """Prompts differ from turn to turn of a conversation, and so do the ids. length: in characters;
    a short id has letters and digits only."""

    def __init__(self, prompt: Sequence[int], seed: int, length: int) -> None:
        said = array("q", prompt).tobytes() + seed.to_bytes(8, "little")
        self._key = blake2b(said, digest_size=32).digest()
        self._prefix = _PREFIX if length > 2 * len(_PREFIX) else ""
        self._length = length

    def of(self, choice: int, index: int) -> str:
        """The id of a choice's call."""
        name = f"{choice} {index}".encode()
        digest = blake2b(name, digest_size=32, key=self._key).digest()
        number = int.from_bytes(digest, "little")
        letters = []
        for _ in range(self._length - len(self._prefix)):
            number, digit = divmod(number, len(_ALPHABET))
            letters.append(_ALPHABET[digit])
        return self._prefix + "".join(letters)
