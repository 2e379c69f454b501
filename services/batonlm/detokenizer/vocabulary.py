"""The bytes that each token id adds to a text.

Every decoder of the `tokenizers` library that language models use is local: a token adds the same
bytes at every position, except the first token of a text, which may lose a leading space
(Metaspace, Strip, WordPiece). So a text is `first(ids[0])` followed by `middle(id)` of the others,
and a UTF-8 decoder over these bytes returns the same as `Tokenizer.decode`. This is checked at load
on sampled ids; a tokenizer that breaks the rule (CTC, BPEDecoder) is refused.

Where the bytes come from:

    ByteLevel        GPT-2's byte alphabet, one character per byte
    ByteFallback     `<0xHH>` is that byte
    anything else    `decode([anchor, id])` without the anchor's own text
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Tokenizer

from batonlm.core.errors import InvalidArgument
from batonlm.rpc.model_folder import special_tokens

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_CHECKED_TEXTS = 64
_CHECKED_LENGTH = 8


class Vocabulary:
    """The bytes of each token id; none for an id without a token, as in `Tokenizer.decode`.

    The constructor raises InvalidArgument (field `model`) when the decoder is not local.
    """

    def __init__(self, tokenizer: Tokenizer, named_special_tokens: frozenset[str] = frozenset()):
        self._tokenizer = tokenizer
        kinds = set(_decoder_kinds(tokenizer))
        self._byte_level = "ByteLevel" in kinds
        self.replaces_each_byte = "ByteFallback" in kinds
        """Whether each invalid byte becomes one U+FFFD, instead of each maximal run."""
        added = tokenizer.get_added_tokens_decoder()
        named = map(tokenizer.token_to_id, named_special_tokens)
        self._special = frozenset(
            [token_id for token_id in named if token_id is not None]
            + [token_id for token_id, token in added.items() if token.special]
        )
        base = tokenizer.get_vocab_size(with_added_tokens=False)
        self.size = max(base, max(added, default=-1) + 1)
        self._middle: list[bytes | None] = [None] * self.size
        self._anchor, self._anchor_text = self._find_anchor()
        self._check_local()

    @classmethod
    def load(cls, folder: Path) -> Vocabulary:
        """Reads a model folder. Raises InvalidArgument naming `model`."""
        try:
            spec = json.loads((folder / "tokenizer.json").read_bytes())
            # Decoding needs no merges, which take much of a large tokenizer's memory.
            if "merges" in spec["model"]:
                spec["model"]["merges"] = []
            tokenizer = Tokenizer.from_str(json.dumps(spec))
        except Exception as error:  # the library raises nothing more exact
            raise InvalidArgument(
                f"{folder} has no readable tokenizer.json ({error})", field="model"
            ) from error
        return cls(tokenizer, frozenset(special_tokens(folder).values()))

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def ids_of(self, texts: Iterable[str]) -> frozenset[int]:
        """The ids of the tokens with these texts; texts that are no token are left out."""
        ids = map(self._tokenizer.token_to_id, texts)
        return frozenset(token_id for token_id in ids if token_id is not None)

    def has(self, token_id: int) -> bool:
        return 0 <= token_id < self.size and self._tokenizer.id_to_token(token_id) is not None

    def middle(self, token_id: int) -> bytes:
        """The bytes that a token adds after the first token of a text."""
        if not 0 <= token_id < self.size:
            return b""
        found = self._middle[token_id]
        if found is None:
            found = self._middle[token_id] = self._spell_middle(token_id)
        return found

    def first(self, token_id: int) -> bytes:
        """The bytes of the first token of a text."""
        raw = self._raw_bytes(token_id)
        # A byte within a multi-byte character has no leading space to strip.
        if raw is not None and (self._byte_level or raw >= b"\x80"):
            return raw
        return self._decode([token_id]).encode()

    def _spell_middle(self, token_id: int) -> bytes:
        raw = self._raw_bytes(token_id)
        if raw is not None:
            return raw
        text = self._decode([self._anchor, token_id])
        return text.removeprefix(self._anchor_text).encode()

    def _raw_bytes(self, token_id: int) -> bytes | None:
        """The token's bytes if its name encodes them, otherwise None."""
        if not (self._byte_level or self.replaces_each_byte):
            return None
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            try:
                return bytes(_BYTE_ALPHABET[character] for character in token)
            except KeyError:
                return str(token).encode()
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes.fromhex(byte[1]) if byte else None

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))

    def _find_anchor(self) -> tuple[int, str]:
        """The id and text of a token of plain letters, to decode in front of another one."""
        for token_id in range(self.size):
            text = self._decode([token_id])
            if text.isascii() and text.isalnum() and token_id not in self._special:
                return token_id, text
        raise InvalidArgument("its tokenizer has no token of plain letters", field="model")

    def _check_local(self) -> None:
        ids = [i for i in range(self.size) if not _BYTE_TOKEN.fullmatch(self._name(i))]
        draw = random.Random(0)
        for _ in range(_CHECKED_TEXTS):
            sample = draw.choices(ids, k=_CHECKED_LENGTH)
            spelled = self.first(sample[0]) + b"".join(map(self.middle, sample[1:]))
            if spelled.decode(errors="replace") != self._decode(sample):
                raise InvalidArgument(
                    "its tokenizer's decoder needs later tokens to spell earlier ones; "
                    "such text cannot be streamed",
                    field="model",
                )

    def _name(self, token_id: int) -> str:
        return self._tokenizer.id_to_token(token_id) or ""


def _decoder_kinds(tokenizer: Tokenizer) -> Iterator[str]:
    """The type names in the decoder's specification, including nested ones."""
    if tokenizer.decoder is None:
        return
    waiting = [json.loads(tokenizer.decoder.__getstate__())]
    while waiting:
        spec = waiting.pop()
        yield spec["type"]
        waiting.extend(spec.get("decoders", ()))


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's bijection of bytes and printable characters: printable Latin-1 maps to itself, the
    other bytes map to U+0100 and following, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }


_BYTE_ALPHABET = _byte_alphabet()
