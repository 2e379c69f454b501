"""Token ids as models emit them, drawn by hypothesis."""

from __future__ import annotations

from functools import cache

from hypothesis import strategies as st
from tokenizers import Tokenizer

from baton.detokenizer.vocabulary import Vocabulary
from tests.services.tokenizer.made_tokenizers import BYTE_FALLBACK_FAMILIES, TEXTS, made


@cache
def vocabulary(family: str) -> Vocabulary:
    return Vocabulary(made(family))


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
