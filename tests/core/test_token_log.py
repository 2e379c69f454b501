"""The token log: fencing, overlaps, ends, truncation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonlm.core.request.attempt import ChoiceTokens, Logprobs, PositionGap, SequenceKey, TokenLog
from batonlm.core.request.request import FinishReason


def message(
    position: int,
    ids: tuple[int, ...],
    *,
    attempt: int = 0,
    end: FinishReason | None = None,
    stop_token_id: int | None = None,
    logprobs: bool = False,
) -> ChoiceTokens:
    return ChoiceTokens(
        SequenceKey("r", 0, attempt),
        position,
        ids,
        tuple(Logprobs(-float(i)) for i in ids) if logprobs else (),
        end,
        stop_token_id,
    )


def fresh_log() -> TokenLog:
    log = TokenLog(0)
    log.attempt = 0
    return log


REFERENCE = tuple(range(100, 130))


@st.composite
def slices(draw: st.DrawFn) -> tuple[int, int]:
    start = draw(st.integers(0, len(REFERENCE)))
    return start, draw(st.integers(start, len(REFERENCE)))


@given(st.lists(slices(), max_size=30))
def test_any_overlapping_messages_make_one_sequence(pieces: list[tuple[int, int]]) -> None:
    """Whatever comes, the log is a prefix of the reference; only a gap is refused."""
    log = fresh_log()
    for start, end in pieces:
        before = len(log)
        piece = message(start, REFERENCE[start:end], logprobs=True)
        if start > before:
            with pytest.raises(PositionGap):
                log.accept(piece)
            assert len(log) == before
        else:
            assert log.accept(piece) == max(0, end - before)
        assert log.token_ids() == REFERENCE[: len(log)]
        assert [entry.logprob for entry in log.logprobs()] == [-float(i) for i in log.token_ids()]


@given(st.integers(0, 5), st.integers(0, 40))
def test_only_the_current_attempt_may_append(attempt: int, position: int) -> None:
    log = TokenLog(0)
    assert log.accept(message(position, (1,), attempt=attempt)) == 0
    log.attempt = 6
    assert log.accept(message(position, (1,), attempt=attempt)) == 0
    assert len(log) == 0


def test_the_end_may_come_with_tokens_that_are_known() -> None:
    """Token 0 came from prefill; the copy that says it was the last one came first, or later."""
    log = fresh_log()
    log.accept(message(0, (5, 6)))
    assert log.accept(message(0, (5,), end=FinishReason.STOP, stop_token_id=5)) == 0
    assert not log.ended, "that end is below what is known: it cannot be"
    assert log.accept(message(1, (6,), end=FinishReason.STOP, stop_token_id=6)) == 0
    assert log.finish_reason is FinishReason.STOP
    assert log.stop_token_id == 6


def test_after_the_end_everything_is_dropped() -> None:
    log = fresh_log()
    log.accept(message(0, (1, 2), end=FinishReason.LENGTH))
    assert log.accept(message(2, (3,))) == 0
    assert log.accept(message(7, (3,))) == 0
    assert log.token_ids() == (1, 2)


@given(st.integers(0, 9))
def test_truncation_forgets_what_follows(position: int) -> None:
    log = fresh_log()
    ids = tuple(range(10))
    log.accept(message(0, ids, end=FinishReason.STOP, stop_token_id=9, logprobs=True))
    log.truncate(position, "stop")
    assert log.token_ids() == ids[: position + 1]
    assert len(log.logprobs()) == position + 1
    assert log.finish_reason is FinishReason.STOP
    assert log.stop_string == "stop"
    assert log.stop_token_id is None


def test_nothing_can_be_truncated_that_was_not_accepted() -> None:
    log = fresh_log()
    log.accept(message(0, (1,)))
    with pytest.raises(PositionGap):
        log.truncate(1, "stop")
    assert log.token_ids() == (1,)
    assert not log.ended
