"""Token ids as models emit them, drawn by hypothesis."""

from __future__ import annotations

from functools import cache

from hypothesis import strategies as st
from tokenizers import Tokenizer

from batonlm.cli.layout import resolve_model
from batonlm.detokenizer.vocabulary import Vocabulary
from tests.services.tokenizer.made_tokenizers import (
    BYTE_FALLBACK_FAMILIES,
    BYTE_TOKENS,
    TEXTS,
    id_of,
    made,
)

BUNDLED = "bundled"
"""The bundled model's tokenizer, as a family of its own."""


@cache
def tokenizer_of(family: str) -> Tokenizer:
    if family != BUNDLED:
        return made(family)
    return Tokenizer.from_file(str(resolve_model("")[0] / "tokenizer.json"))


@cache
def vocabulary(family: str) -> Vocabulary:
    return Vocabulary(tokenizer_of(family))


def encoded(tokenizer: Tokenizer, text: str, special: bool = False) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=special).ids)


@st.composite
def token_ids(draw: st.DrawFn, family: str) -> list[int]:
    """Encoded texts and, but for byte-fallback families, any ids at all.

    A broken run of byte tokens is where batch decoding and streaming differ on purpose.
    """
    tokenizer = made(family)
    known = st.sampled_from(TEXTS).map(lambda text: encoded(tokenizer, text[:15]))
    unknown = st.text(max_size=12).map(lambda text: encoded(tokenizer, text, special=True))
    pieces = [known, unknown]
    if family not in BYTE_FALLBACK_FAMILIES:
        size = vocabulary(family).size
        pieces.append(st.lists(st.integers(0, size + 2), max_size=8))
    return [i for piece in draw(st.lists(st.one_of(pieces), max_size=4)) for i in piece]


@cache
def _plain_ids(family: str) -> list[int]:
    """All ids but those of byte tokens, and some that do not exist."""
    tokenizer = tokenizer_of(family)
    bytes_ = {tokenizer.token_to_id(name) for name in BYTE_TOKENS}
    return [i for i in range(vocabulary(family).size + 3) if i not in bytes_]


@cache
def any_token_ids(family: str) -> st.SearchStrategy[list[int]]:
    """Whatever a model could emit: encoded texts, cut short, and ids at random.

    With byte fallback, bytes that are no character stand in runs of their own: batch decoding then
    gives up the whole run, its valid characters too, and those a stream has sent already.
    """
    tokenizer = tokenizer_of(family)
    special = [t.content for t in tokenizer.get_added_tokens_decoder().values()]
    marks = ["e\u0301\u0302", "\u200d👩", "🏳️‍🌈", "\u0600ا", "\ufffd", " \n", "\0", " "]
    words = st.one_of(
        st.text(max_size=5), st.sampled_from([*marks, *special, *(text[:24] for text in TEXTS)])
    )
    text = st.lists(words, max_size=2).map(lambda some: encoded(tokenizer, "".join(some)))
    pieces = [text, st.lists(st.sampled_from(_plain_ids(family)), max_size=5)]
    if family in BYTE_FALLBACK_FAMILIES:
        letter = id_of(tokenizer, "e")

        def spelled(data: bytes) -> list[int]:
            return [id_of(tokenizer, f"<0x{byte:02X}>") for byte in data]

        broken = st.binary(min_size=1, max_size=4).filter(_has_no_character)
        pieces.append(st.text(max_size=3).map(lambda valid: spelled(valid.encode())))
        pieces.append(broken.map(lambda data: [letter, *spelled(data), letter]))
    else:
        # A character may lack bytes at either end.
        pieces.append(text.map(lambda ids: ids[1:-1]))
    return st.lists(st.one_of(pieces), max_size=3).map(
        lambda some: [i for ids in some for i in ids]
    )


def _has_no_character(data: bytes) -> bool:
    return not data.decode(errors="ignore")
