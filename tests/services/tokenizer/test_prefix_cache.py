"""Encoding with a cache equals encoding without one, whatever came before, within its memory."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from batonlm.tokenizer.encoder import ENTRY_BYTES, MIN_CHARACTERS, PrefixCache, cut_tokens
from tests.services.tokenizer.made_tokenizers import FAMILIES, ODD_FAMILIES, TEXTS, made

LONG = " ".join(TEXTS) * 3
"""So long that a text behind it is looked up."""


class Counting:
    """Encodes, and counts the characters."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.characters = 0

    def __call__(self, texts: Sequence[str]) -> Sequence[array[int]]:
        self.characters += sum(map(len, texts))
        return [
            array("i", encoding.ids)
            for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        ]


def pieces(family: str) -> st.SearchStrategy[str]:
    """Text, special tokens, and what looks a little like them."""
    special = sorted(t.content for t in made(family).get_added_tokens_decoder().values())
    near = st.sampled_from(["<", "s>", "</", "<|user|", "<s", " ", "\n\n", "▁", "\u0301", ""])
    return st.one_of(
        st.sampled_from(special or [""]), near, st.sampled_from(TEXTS), st.text(max_size=8)
    )


@pytest.mark.deep
@pytest.mark.parametrize("family", (*FAMILIES, *ODD_FAMILIES))
@given(data=st.data())
def test_equals_encoding_the_whole(family: str, data: st.DataObject) -> None:
    """Texts that grow, end differently, or are cut short in the middle of anything."""
    encode = Counting(made(family))
    cache = PrefixCache(made(family), 1 << 20)
    grown = LONG
    for _ in range(data.draw(st.integers(1, 5))):
        kept = data.draw(st.integers(len(grown) // 2, len(grown)) | st.just(len(grown)))
        grown = grown[:kept] + "".join(data.draw(st.lists(pieces(family), max_size=6)))
        found = cache.encode(grown, b"", encode)
        assert found is None or found == encode([grown])[0]


@pytest.mark.parametrize("family", ["byte_level", "byte_fallback", "gemma_like", "unigram"])
def test_a_grown_conversation_costs_what_it_grew(family: str) -> None:
    encode = Counting(made(family))
    cache = PrefixCache(made(family), 1 << 20)
    text = "<s>" + LONG + "</s><s>"
    cache.encode(text, b"", encode)
    before = encode.characters
    grown = text + "answer</s><s>question</s><s>"
    ids = cache.encode(grown, b"", encode)
    assert encode.characters - before < 100
    assert ids == encode([grown])[0]


def test_tenants_share_nothing() -> None:
    encode = Counting(made("byte_level"))
    cache = PrefixCache(made("byte_level"), 1 << 20)
    text = "<s>" + LONG + "<s>"
    costs = []
    for salt in (b"a", b"b", b"", b"a"):
        before = encode.characters
        cache.encode(text, salt, encode)
        costs.append(encode.characters - before)
    assert costs[0] == costs[1] == costs[2] > len(text) > 100 > costs[3]


def test_its_memory_is_bounded_and_the_oldest_goes() -> None:
    encode = Counting(made("byte_level"))
    texts = [f"<s>{number} {LONG}<s>" for number in range(6)]
    size = ENTRY_BYTES + 4 * len(encode([texts[0]])[0])
    cache = PrefixCache(made("byte_level"), 3 * size)
    for text in texts:
        cache.encode(text, b"", encode)
        assert cache.num_bytes <= 3 * size

    def cost(text: str) -> int:
        before = encode.characters
        cache.encode(text, b"", encode)
        return encode.characters - before

    assert cost(texts[5]) < 100
    assert cost(texts[0]) > len(LONG)


@pytest.mark.parametrize("max_bytes", [0, 10])
def test_without_memory_nothing_is_kept(max_bytes: int) -> None:
    encode = Counting(made("byte_level"))
    cache = PrefixCache(made("byte_level"), max_bytes)
    text = "<s>" + LONG + "<s>"
    for _ in range(2):
        assert cache.encode(text, b"", encode) in (None, encode([text])[0])
    assert cache.num_bytes == 0


def tokens(*added: AddedToken) -> set[str]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.add_tokens(list(added))
    return set(cut_tokens(tokenizer))


def test_cuts_are_where_nothing_else_can_be_matched() -> None:
    def plain(text: str) -> AddedToken:
        return AddedToken(text, normalized=False)

    assert tokens(plain("<a>"), plain("<b>")) == {"<a>", "<b>"}
    assert tokens(plain("<a>"), plain("x<a>y")) == {"x<a>y"}
    assert tokens(plain("<a>"), plain("<a>b")) == {"<a>b"}
    assert tokens(plain("<a|"), plain("|b>")) == set()
    assert tokens(plain("aa"), plain("<c>")) == {"<c>"}
    assert tokens(plain(" <a>"), plain("<c>\n")) == set()
    assert tokens(AddedToken("<a>", normalized=True)) == set()
    for rule in ("lstrip", "rstrip", "single_word"):
        assert tokens(AddedToken("<a>", normalized=False, **{rule: True})) == set()


def test_short_texts_are_not_kept() -> None:
    cache = PrefixCache(made("byte_level"), 1 << 20)
    text = "<s>" + "a" * (MIN_CHARACTERS // 2) + "<s>"
    assert cache.encode(text, b"", Counting(made("byte_level"))) is None
    assert cache.num_bytes == 0
