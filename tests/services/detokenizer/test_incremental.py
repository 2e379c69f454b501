"""What streamed text is like, and where it differs from batch decoding on purpose."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from batonlm.core.errors import InvalidArgument
from batonlm.detokenizer.text import IncrementalText
from batonlm.detokenizer.vocabulary import Vocabulary
from tests.services.detokenizer.drawn_ids import encoded, vocabulary
from tests.services.tokenizer.made_tokenizers import (
    BYTE_FALLBACK_FAMILIES,
    FAMILIES,
    TEXTS,
    id_of,
    made,
)


def stream(family: str, ids: list[int], skip: bool = True, tail: tuple[int, ...] = ()) -> list[str]:
    """The pieces of text, the last one being what was flushed."""
    text = IncrementalText(vocabulary(family), skip_special_tokens=skip, prompt_tail_ids=tail)
    return [*(text.push(token_id) for token_id in ids), text.finish()]


@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
def test_only_whole_characters_are_sent(family: str, data: st.DataObject) -> None:
    text = data.draw(st.one_of(st.sampled_from(TEXTS), st.text(max_size=30)))
    ids = encoded(made(family), text)
    expected = made(family).decode(ids)
    if "�" in expected:
        return
    assert all("�" not in piece for piece in stream(family, ids))


@pytest.mark.parametrize("family", ["byte_level", *BYTE_FALLBACK_FAMILIES])
def test_a_dangling_character_is_flushed_as_batch_decoding_does(family: str) -> None:
    ids = encoded(made(family), "a🐧")
    pieces = stream(family, ids[:-1])
    assert "".join(pieces) == made(family).decode(ids[:-1])
    assert pieces[-1].startswith("�") and "�" not in "".join(pieces[:-1])


@pytest.mark.parametrize("family", BYTE_FALLBACK_FAMILIES)
def test_broken_byte_runs_keep_their_valid_characters(family: str) -> None:
    tokenizer = made(family)
    ids = [id_of(tokenizer, f"<0x{byte:02X}>") for byte in "鮨".encode() + b"\xff\xe9\xae"]
    assert tokenizer.decode(ids) == "�" * 6
    assert "".join(stream(family, ids)) == "鮨���"


@pytest.mark.parametrize(
    ("family", "word", "without_tail"),
    [
        ("byte_level", " fox", " fox"),
        ("byte_fallback", "fox", "fox"),
        ("gemma_like", " fox", " fox"),
        ("unigram", "fox", "fox"),
        ("wordpiece", "fox", "fox"),
        ("wordlevel", "fox", "fox"),
    ],
)
def test_leading_space(family: str, word: str, without_tail: str) -> None:
    tokenizer = made(family)
    prompt, ids = encoded(tokenizer, "The quick brown"), encoded(tokenizer, word)
    assert "".join(stream(family, ids)) == without_tail == tokenizer.decode(ids)
    assert "".join(stream(family, ids, tail=tuple(prompt[-4:]))) == " fox"


def test_a_character_may_begin_in_the_prompt() -> None:
    ids = encoded(made("byte_level"), "🐧")
    assert "".join(stream("byte_level", ids[1:], tail=tuple(ids[:1]))) == "🐧"


def test_each_tokens_own_bytes_make_the_text() -> None:
    for family in FAMILIES:
        ids = encoded(made(family), TEXTS[0])
        tail = encoded(made(family), TEXTS[0])[-1]
        own = b"".join(vocabulary(family).middle(token_id) for token_id in ids)
        assert own.decode() == "".join(stream(family, ids, skip=False, tail=(tail,)))


@pytest.mark.parametrize("first", [0x20, 0x41])
def test_a_text_may_begin_with_a_byte_token(first: int) -> None:
    tokenizer = made("byte_fallback")
    ids = [id_of(tokenizer, f"<0x{first:02X}>"), *encoded(tokenizer, "fox")]
    assert "".join(stream("byte_fallback", ids)) == tokenizer.decode(ids)


@pytest.mark.deep
@pytest.mark.parametrize("family", ["byte_level", "byte_fallback", "unigram"])
@pytest.mark.parametrize("unit", ["a", " ", "\0", "e\u0301\u0302\u0303", "👩‍👩‍👧", "\n", "<|", "�"])
def test_monotonous_text(family: str, unit: str) -> None:
    ids = encoded(made(family), unit * (65536 // len(unit.encode())))
    assert "".join(stream(family, ids)) == made(family).decode(ids)


def test_a_decoder_that_looks_ahead_is_refused() -> None:
    vocab = {"a</w>": 0, "b</w>": 1, "c": 2}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.decoder = decoders.BPEDecoder()
    with pytest.raises(InvalidArgument) as raised:
        Vocabulary(tokenizer)
    assert raised.value.field == "model"


def test_named_special_tokens_are_kept() -> None:
    """What reads an answer needs them; all others are skipped as ever."""
    tokenizer = made("byte_level")
    ids = [id_of(tokenizer, "<|user|>"), *encoded(tokenizer, "hi"), id_of(tokenizer, "</s>")]
    text = IncrementalText(
        vocabulary("byte_level"), kept_special_tokens=("<|user|>", "there is no such token")
    )
    assert "".join(text.push(token_id) for token_id in ids) == "<|user|>hi"
