"""One choice's text: stop strings, what is held back, positions, and going on after a move."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonlm.core.errors import InvalidArgument
from batonlm.detokenizer.text import DetokenizeOptions, News, Stop, StreamedText
from tests.services.detokenizer.drawn_ids import encoded, token_ids, vocabulary
from tests.services.tokenizer.made_tokenizers import FAMILIES, id_of, made

ALL = 1 << 30


def batch(family: str, ids: list[int]) -> str:
    return str(made(family).decode(ids))


def run(family: str, options: DetokenizeOptions, ids: list[int], edges: list[int]) -> list[News]:
    """Appends ids cut at `edges`, and takes the news after each."""
    text = StreamedText(vocabulary(family), options)
    cuts = sorted({0, len(ids), *(edge % (len(ids) + 1) for edge in edges)})
    spans = list(pairwise(cuts)) or [(0, 0)]
    news = []
    for start, end in spans:
        text.append(start, ids[start:end], last=end == len(ids))
        news.append(text.take(ALL))
        if news[-1].end:
            break
    return news


def joined(news: list[News]) -> str:
    return "".join(entry.text for entry in news)


@st.composite
def stop_strings(draw: st.DrawFn, text: str) -> tuple[str, ...]:
    """Some that occur in the text, where there is one, and some that perhaps do not."""
    places = st.tuples(st.integers(0, len(text)), st.integers(1, 6))
    inside = places.map(lambda place: text[place[0] : place[0] + place[1]]).filter(bool)
    any_text = st.text(alphabet="abe \n😀", min_size=1, max_size=3)
    one = st.one_of(inside, any_text) if text else any_text
    return tuple(draw(st.lists(one, min_size=1, max_size=3)))


def expected_stop(
    family: str, ids: list[int], stops: tuple[str, ...], min_tokens: int
) -> tuple[str, Stop] | None:
    """By definition, from batch decoding alone: the text up to the first stop string, and where."""
    text = batch(family, ids)
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        # A character belongs to the first token after which it stands whole.
        position = next(
            index
            for index in range(len(ids))
            if len(stable(family, ids[: index + 1], text)) >= end or index == len(ids) - 1
        )
        if found and position >= min_tokens:
            stop = max(found, key=len)
            return text[: end - len(stop)], Stop(stop, position)
    return None


def stable(family: str, ids: list[int], whole: str) -> str:
    """The text of the first ids without what is not finished."""
    text = batch(family, ids)
    while not whole.startswith(text):
        text = text[:-1]
    return text


@pytest.mark.deep
@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data(), edges=st.lists(st.integers(0, 99), max_size=5), min_tokens=st.integers(0, 4))
def test_stop_strings_cut_the_batch_text(
    family: str, data: st.DataObject, edges: list[int], min_tokens: int
) -> None:
    ids = data.draw(token_ids(family))
    text = batch(family, ids)
    if "�" in text:
        return
    stops = data.draw(stop_strings(text))
    expected = expected_stop(family, ids, stops, min_tokens)
    for include in (False, True):
        options = DetokenizeOptions(stops, include_stop_string=include, min_tokens=min_tokens)
        news = run(family, options, ids, edges)
        assert news[-1].end
        if expected is None:
            assert (joined(news), news[-1].stop) == (text, None)
            continue
        before, stop = expected
        assert joined(news) == (before + stop.stop_string if include else before)
        assert news[-1].stop == stop
        assert news[-1].num_tokens == stop.position + 1


@pytest.mark.deep
@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data(), edges=st.lists(st.integers(0, 99), max_size=6))
def test_reopened_anywhere_it_goes_on_with_the_same_bytes(
    family: str, data: st.DataObject, edges: list[int]
) -> None:
    ids = data.draw(token_ids(family))
    stops = data.draw(st.one_of(st.just(()), stop_strings(batch(family, ids))))
    whole = run(family, DetokenizeOptions(stops), ids, [])
    parts = run(family, DetokenizeOptions(stops), ids, edges)
    assert joined(parts) == joined(whole) and parts[-1].stop == whole[-1].stop

    delivered = data.draw(st.integers(0, len(parts)))
    have = joined(parts[:delivered])
    known = data.draw(st.integers(0, len(ids)))
    text = StreamedText(
        vocabulary(family), DetokenizeOptions(stops, delivered_bytes=len(have.encode()))
    )
    text.append(0, ids[:known])
    text.append(text.count, ids[known:], last=True)
    news = text.take(ALL)
    assert have + news.text == joined(whole)
    assert (news.stop, news.end) == (whole[-1].stop, True)


@pytest.mark.deep
@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
def test_counts_only_tokens_whose_text_is_out(family: str, data: st.DataObject) -> None:
    ids = data.draw(token_ids(family))
    stops = data.draw(st.one_of(st.just(()), stop_strings(batch(family, ids))))
    text = StreamedText(vocabulary(family), DetokenizeOptions(stops))
    whole = run(family, DetokenizeOptions(stops), ids, [])
    sent, counted = "", 0
    for position, token_id in enumerate(ids):
        text.append(position, [token_id])
        news = text.take(ALL)
        sent += news.text
        assert counted <= news.num_tokens <= position + 1
        counted = news.num_tokens
        if news.end:
            break
        assert news.searched_tokens == (position + 1 if stops else 0)
        confirmed = stable(family, ids[:counted], batch(family, ids))
        assert sent.startswith(confirmed)
        assert joined(whole).startswith(sent)


def test_long_news_is_taken_in_parts() -> None:
    ids = encoded(made("byte_level"), "one two three")
    text = StreamedText(vocabulary("byte_level"), DetokenizeOptions())
    text.append(0, ids, last=True)
    news: list[News] = []
    while text.has_news and not (news and news[-1].end):
        news.append(text.take(4))
    assert [entry.text for entry in news] == ["one ", "two ", "thre", "e"]
    assert [entry.num_tokens for entry in news] == [0, 0, 0, len(ids)]
    assert [entry.end for entry in news] == [False, False, False, True]


def test_a_stop_token_has_no_text() -> None:
    tokenizer = made("byte_level")
    ids = [*encoded(tokenizer, "word"), id_of(tokenizer, "<tool_call>")]
    text = StreamedText(vocabulary("byte_level"), DetokenizeOptions())
    text.append(0, ids, last=True, last_is_stop_token=True)
    assert text.take(ALL) == News("word", len(ids), 0, end=True)


def test_held_text_comes_when_no_token_follows() -> None:
    ids = encoded(made("byte_level"), "the en")
    text = StreamedText(vocabulary("byte_level"), DetokenizeOptions(stop_strings=(" end",)))
    text.append(0, ids)
    first = text.take(ALL)
    assert first.text == "the" and first.searched_tokens == len(ids) > first.num_tokens
    text.append(len(ids), [], last=True)
    assert text.take(ALL) == News(" en", len(ids), len(ids), end=True)


def test_a_gap_is_a_fault() -> None:
    text = StreamedText(vocabulary("byte_level"), DetokenizeOptions())
    text.append(0, [5, 6])
    for position in (1, 3):
        with pytest.raises(InvalidArgument) as raised:
            text.append(position, [7])
        assert raised.value.field == "position"


def test_delivered_bytes_within_a_character_are_a_fault() -> None:
    text = StreamedText(vocabulary("byte_level"), DetokenizeOptions(delivered_bytes=1))
    with pytest.raises(InvalidArgument) as raised:
        text.append(0, encoded(made("byte_level"), "é"))
    assert raised.value.field == "delivered_bytes"
