"""Tokens that come after their request's deadline are not looked at; their text is forgotten."""

from __future__ import annotations

from batonlm.core.errors import DeadlineExceeded
from batonlm.detokenizer.text import DetokenizeOptions, OpenTexts
from tests.services.detokenizer.drawn_ids import encoded, vocabulary
from tests.services.tokenizer.made_tokenizers import made

FAMILY = "byte_level"


def test_a_late_text_fails_and_its_neighbour_goes_on() -> None:
    ids = encoded(made(FAMILY), "hello there")
    texts = OpenTexts(vocabulary(FAMILY), 8)
    texts.open(1, DetokenizeOptions(), (), deadline=10.0)
    texts.open(2, DetokenizeOptions(), ())
    for text_id in (1, 2):
        texts.append(text_id, 0, ids[:1], now=9.9)
        texts.append(text_id, 1, ids[1:], last=True, now=10.0)
    late, other = sorted(texts.take(1000), key=lambda news: news.text_id)
    assert isinstance(late.error, DeadlineExceeded)
    assert other.news is not None and other.news.end
    assert not texts and not texts.has_news
