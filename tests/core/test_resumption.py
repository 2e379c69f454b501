"""A stream that a second run continues: positions, and what of the second run is left out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonlm.core.errors import InvalidArgument
from batonlm.core.request.first_attempt import SEED_BITS, seed_of
from batonlm.core.request.request import (
    Delta,
    FinishReason,
    Request,
    TextLogprob,
    TextPrompt,
    TokenLogprobs,
    ToolCallDelta,
    join_deltas,
)
from batonlm.core.request.resumption import ChoicePosition, EventIds, StreamPosition

STREAM = "0123456789abcdef" * 2
OWNER = "tenant-a"
NEW = StreamPosition(STREAM, created=1_764_275_432)

TEXTS = st.text(st.characters(codec="utf-8"), max_size=12)


def token(number: int) -> Delta:
    """Of one token, before its text."""
    logprob = TokenLogprobs(TextLogprob(number, b"%d" % number, -number / 7))
    return Delta(0, token_ids=(number,), logprobs=(logprob,))


@st.composite
def whole(draw: st.DrawFn, choice: int = 0) -> list[Delta]:
    """A choice in its smallest pieces, in the order in which a model writes it: reasoning, content,
    calls. Tokens come some time before their characters."""
    characters = [Delta(0, reasoning=c) for c in draw(TEXTS)]
    characters += [Delta(0, text=c) for c in draw(TEXTS)]
    for index in range(draw(st.integers(0, 2))):
        first = ToolCallDelta(index, f"call_{index}", draw(st.sampled_from(("f", "g"))))
        characters.append(Delta(0, tool_calls=(first,)))
        characters += [
            Delta(0, tool_calls=(ToolCallDelta(index, arguments=c),)) for c in draw(TEXTS)
        ]
    pieces = [token(number) for number in range(draw(st.integers(0, 4)))]
    for number, piece in enumerate(characters):
        pieces.append(piece)
        if draw(st.booleans()):
            pieces.append(token(100 + number))
    reason = draw(st.sampled_from(FinishReason))
    end = Delta(0, finish_reason=reason, stop_string="x" if reason is FinishReason.STOP else None)
    return [replace(piece, choice=choice) for piece in (*pieces, end)]


def coalesced(draw: Any, pieces: list[Delta]) -> list[Delta]:
    """The same in other pieces: neighbours are joined."""
    found: list[Delta] = []
    for piece in pieces:
        if found and draw(st.booleans()):
            found[-1] = join_deltas(piece.choice, [found[-1], piece])
        else:
            found.append(piece)
    return found


def tokens_earlier(draw: Any, pieces: list[Delta]) -> list[Delta]:
    """The same, as another machine would have it: how far tokens are ahead is left to chance."""
    tokens = [piece for piece in pieces if piece.token_ids]
    others = [piece for piece in pieces if not piece.token_ids]
    mixed = []
    while tokens or len(others) > 1:
        if tokens and (len(others) == 1 or draw(st.booleans())):
            mixed.append(tokens.pop(0))
        else:
            mixed.append(others.pop(0))
    return mixed + others


@given(st.data())
def test_any_cut_and_any_pieces_make_the_whole(data: st.DataObject) -> None:
    """Two choices, which come in any order, in both runs; the stream breaks off several times."""
    choices = [data.draw(whole(choice)) for choice in range(2)]
    received: list[list[Delta]] = [[], []]
    position = NEW
    for _ in range(data.draw(st.integers(1, 3))):
        again = [coalesced(data.draw, tokens_earlier(data.draw, each)) for each in choices]
        ids = EventIds(position, OWNER, 2)
        while any(again):
            first = [choice for choice in range(2) if again[choice]]
            choice = data.draw(st.sampled_from(first))
            _, new = ids.split(again[choice].pop(0))
            if new != Delta(choice):
                received[choice].append(new)
            position = StreamPosition.parse(ids.reached(), OWNER)
            if data.draw(st.integers(0, 9)) == 0:
                break
    ids = EventIds(position, OWNER, 2)
    for each in choices:
        for piece in each:
            _, new = ids.split(piece)
            received[piece.choice].append(new)
    for choice in range(2):
        expected = join_deltas(choice, choices[choice])
        assert join_deltas(choice, [d for d in received[choice] if d != Delta(choice)]) == expected
    assert EventIds(NEW, OWNER, 2).reached() != ids.reached()


@given(st.data())
def test_what_was_left_out_and_what_was_not_are_the_delta(data: st.DataObject) -> None:
    pieces = data.draw(whole())
    before = coalesced(data.draw, pieces)[: data.draw(st.integers(0, len(pieces)))]
    ids = EventIds(NEW, OWNER, 1)
    for delta in before:
        assert ids.split(delta) == (Delta(0), delta)
    ids = EventIds(StreamPosition.parse(ids.reached(), OWNER), OWNER, 1)
    left_out: list[Delta] = []
    for delta in coalesced(data.draw, pieces):
        left_out.append(ids.split(delta)[0])
    had, expected = join_deltas(0, left_out), join_deltas(0, before)
    for name in ("text", "reasoning", "token_ids", "logprobs", "tool_calls"):
        assert getattr(had, name) == getattr(expected, name)


@given(st.data(), st.text(max_size=4), st.booleans())
def test_positions_are_read_as_they_were_written(
    data: st.DataObject, tenant: str, finished: bool
) -> None:
    tenant = tenant.encode(errors="ignore").decode()
    positions = [ChoicePosition(), ChoicePosition()]
    for choice, position in enumerate(positions):
        for delta in data.draw(whole()):
            positions[choice] = position = position.after(delta)
    known = tuple(positions[: data.draw(st.integers(0, 2))])
    position_of = replace(NEW, choices=known, finished=finished)
    event_id = position_of.event_id(tenant)
    assert StreamPosition.parse(event_id, tenant) == position_of
    assert event_id.isascii() and event_id.isprintable() and " " not in event_id


def test_the_longest_id_is_read() -> None:
    most = ChoicePosition.of([2**32 - 1] * 9)._replace(ended=1)
    position = replace(NEW, choices=(most,) * 16)
    assert StreamPosition.parse(position.event_id(OWNER), OWNER) == position
    with pytest.raises(InvalidArgument):
        StreamPosition.parse(replace(NEW, choices=(most,) * 17).event_id(OWNER), OWNER)


GOOD = replace(NEW, choices=(ChoicePosition(tokens=3),)).event_id(OWNER)


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "7",
        STREAM,
        GOOD + ";",
        GOOD + ",1,2,3,4,5,6,7,8,9",
        GOOD.upper(),
        GOOD.replace(";3", ";-3"),
        GOOD.replace(";3", ";٣"),
        GOOD + "1" * 11,
        " " + GOOD,
        GOOD + "\n",
        GOOD[1:],
    ],
)
def test_what_is_no_id_is_refused(wrong: str) -> None:
    with pytest.raises(InvalidArgument, match="is no id") as refused:
        StreamPosition.parse(wrong, OWNER)
    assert refused.value.field == "last_event_id"


def test_an_id_of_another_tenant_is_refused() -> None:
    assert StreamPosition.parse(GOOD, OWNER)
    with pytest.raises(InvalidArgument, match="another tenant") as refused:
        StreamPosition.parse(GOOD, "tenant-b")
    assert refused.value.field == "last_event_id"


def test_choices_that_there_are_not() -> None:
    with pytest.raises(InvalidArgument, match="something else"):
        EventIds(replace(NEW, choices=(ChoicePosition(),) * 3), OWNER, 2)


def resumed(before: list[Delta], after: list[Delta]) -> list[Delta]:
    ids = EventIds(NEW, OWNER, 1)
    for delta in before:
        ids.split(delta)
    ids = EventIds(StreamPosition.parse(ids.reached(), OWNER), OWNER, 1)
    return [ids.split(delta)[1] for delta in after]


END = Delta(0, finish_reason=FinishReason.LENGTH)


def called(arguments: str, name: str = "f") -> Delta:
    return Delta(0, tool_calls=(ToolCallDelta(0, "call_0", name, arguments),))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([Delta(0, "abc")], [Delta(0, "abd"), Delta(0, "e")]),
        ([Delta(0, "abc")], [Delta(0, "abde")]),
        ([Delta(0, "abc")], [Delta(0, "ab"), END]),
        ([Delta(0, "abc"), END], [Delta(0, "abcd"), END]),
        ([Delta(0, "abc"), END], [Delta(0, "abc"), Delta(0, "d")]),
        ([Delta(0, reasoning="abc")], [Delta(0, reasoning="ab"), Delta(0, "d")]),
        ([Delta(0, "abc")], [Delta(0, "abc", token_ids=(1,)), Delta(0, reasoning="d"), END][1:]),
        ([called("{}")], [called("[]"), END]),
        ([called("{}")], [called("{}", "g"), END]),
        ([called('{"a": 1}')], [called("{}"), called("{}"), END]),
        ([Delta(0, token_ids=(1, 2, 3))], [Delta(0, token_ids=(1, 2)), END]),
        ([Delta(0, token_ids=(1, 2)), END], [Delta(0, token_ids=(1, 2, 3)), END]),
    ],
)
def test_a_run_that_says_something_else_is_found(before: list[Delta], after: list[Delta]) -> None:
    with pytest.raises(InvalidArgument, match="something else") as refused:
        resumed(before, after)
    assert refused.value.field == "last_event_id"


def test_nothing_else_is_sent_before_it_is_found() -> None:
    ids = EventIds(NEW, OWNER, 1)
    ids.split(Delta(0, "abc", token_ids=(1, 2, 3)))
    ids = EventIds(StreamPosition.parse(ids.reached(), OWNER), OWNER, 1)
    assert ids.split(Delta(0, "ab", token_ids=(1, 2)))[1] == Delta(0)
    # Tokens that are ahead are no characters.
    assert ids.split(Delta(0, token_ids=(8, 9)))[1] == Delta(0, token_ids=(9,))
    with pytest.raises(InvalidArgument):
        ids.split(Delta(0, "xyz", token_ids=(10,)))


def test_the_ids_of_the_events_of_one_delta() -> None:
    ids = EventIds(NEW, OWNER, 2)
    ids.split(Delta(1, "a", (5,), finish_reason=FinishReason.STOP))
    assert ids.of_events(1, 0) == []
    text, end = ids.of_events(1, 2)
    assert [end] == ids.of_events(1, 1) == [ids.reached()]
    first, last = (StreamPosition.parse(each, OWNER).choices[1] for each in (text, end))
    assert last.ended and last._replace(ended=0) == first


def test_choices_begin_one_by_one() -> None:
    ids = EventIds(NEW, OWNER, 3)
    begun = [StreamPosition.parse(ids.opened(), OWNER) for _ in range(3)]
    assert [len(position.choices) for position in begun] == [1, 2, 3]
    assert EventIds(begun[1], OWNER, 3).num_opened == 2
    assert not ids.has_all
    assert StreamPosition.parse(ids.finished(), OWNER).finished and ids.has_all


def test_a_seed_follows_from_the_id_where_there_is_none() -> None:
    request = Request(TextPrompt("a"))
    seeds = {seed_of(request, f"{number:032x}") for number in range(100)}
    assert len(seeds) == 100 and all(0 <= seed < 1 << SEED_BITS for seed in seeds)
    assert seed_of(request, STREAM) == seed_of(request, STREAM)
    assert seed_of(replace(request, seed=5), STREAM) == 5
