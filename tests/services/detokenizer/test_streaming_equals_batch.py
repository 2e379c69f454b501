"""Streamed text equals batch decoding of the same ids, however they come, and after any loss.

The rule, from `Tokenizer.decode` alone: the text is what the ids add to the prompt's end, up to the
first stop string that is completed in it. The default tests try it on a few thousand cases, the
slow ones on 100 000.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batonlm.detokenizer.text import DetokenizeOptions, StreamedText
from tests.services.detokenizer.drawn_ids import (
    BUNDLED,
    any_token_ids,
    encoded,
    tokenizer_of,
    vocabulary,
)
from tests.services.tokenizer.made_tokenizers import FAMILIES, ODD_FAMILIES, TEXTS

ALL_FAMILIES = (*FAMILIES, *ODD_FAMILIES, BUNDLED)
CASES = 100_000
EVERYTHING = 1 << 30


def cut_at_stops(text: str, stops: tuple[str, ...]) -> str:
    """Up to the stop string whose end comes first, the longest of several that end there."""
    ends = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    if not ends:
        return text
    end, length = min(ends)
    return text[: end + length]


class Case(NamedTuple):
    """One text. stops: where in it they stand and how long they are, and others. edges: where it is
    cut into pieces. dies_at: after which piece the detokenizer is lost.
    """

    tail: tuple[int, ...]
    skip_special_tokens: bool
    ids: list[int]
    stops_inside: list[tuple[int, int]]
    other_stops: list[str]
    edges: list[int]
    dies_at: int


@cache
def cases(family: str) -> st.SearchStrategy[Case]:
    tails = [tuple(encoded(tokenizer_of(family), text)[-5:]) for text in TEXTS]
    return st.builds(
        Case,
        st.sampled_from([(), *tails]),
        st.booleans(),
        any_token_ids(family),
        st.lists(st.tuples(st.integers(0, 40), st.integers(1, 5)), max_size=2),
        st.lists(st.text(alphabet="ae \n\u0301\ufffd👩", min_size=1, max_size=3), max_size=1),
        st.lists(st.integers(0, 30), max_size=4),
        st.integers(0, 6),
    )


def check(family: str, case: Case) -> None:
    tokenizer, skip = tokenizer_of(family), case.skip_special_tokens
    before = tokenizer.decode(list(case.tail), skip_special_tokens=skip)
    # What the prompt's end lacks is another test's matter.
    tail = () if "\ufffd" in before else case.tail
    before = before if tail else ""
    whole = tokenizer.decode([*tail, *case.ids], skip_special_tokens=skip)
    assert whole.startswith(before)
    added = whole[len(before) :]
    inside = (added[place : place + size] for place, size in case.stops_inside)
    stops = tuple(filter(None, (*inside, *case.other_stops)))

    def opened(delivered_bytes: int) -> StreamedText:
        options = DetokenizeOptions(
            stops,
            skip_special_tokens=skip,
            prompt_tail_ids=tail,
            delivered_bytes=delivered_bytes,
        )
        return StreamedText(vocabulary(family), options)

    count = len(case.ids)
    edges = sorted({0, count, *(edge % (count + 1) for edge in case.edges)})
    text, sent = opened(0), ""
    for number, (start, end) in enumerate(pairwise(edges)):
        text.append(start, case.ids[start:end])
        news = text.take(EVERYTHING)
        sent += news.text
        if news.end:
            break
        if number == case.dies_at:
            text = opened(len(sent.encode()))
            text.append(0, case.ids[:end])
    else:
        text.append(count, [], last=True)
        sent += text.take(EVERYTHING).text
    assert sent == cut_at_stops(added, stops)


@pytest.mark.deep
@pytest.mark.parametrize("family", ALL_FAMILIES)
@given(data=st.data())
@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
def test_a_few_thousand_cases(family: str, data: st.DataObject) -> None:
    check(family, data.draw(cases(family)))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("family", ALL_FAMILIES)
@given(data=st.data())
@settings(max_examples=CASES // len(ALL_FAMILIES), suppress_health_check=[HealthCheck.too_slow])
def test_a_hundred_thousand_cases(family: str, data: st.DataObject) -> None:
    check(family, data.draw(cases(family)))
