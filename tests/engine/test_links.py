"""Links between a runner and its ranks: messages of any size, both ways at once, and their end."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from batonlm.engine.ranks.link import MAX_MESSAGE_BYTES, Link, LinkLost, receive_each, watch

PATIENCE_S = 120.0
Pair = tuple[Link, Link]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ends = socket.socketpair()
    links = Link(ends[0]), Link(ends[1])
    yield links
    for link in links:
        link.close()


def test_messages_come_whole_and_in_order(pair: Pair) -> None:
    here, there = pair
    sent = [b"", b"x", os.urandom(100_000), b"last"]
    for message in sent:
        here.send(message, PATIENCE_S)
    assert [there.receive(PATIENCE_S) for _ in sent] == sent


def test_a_message_comes_whole_however_it_is_torn() -> None:
    ours, theirs = socket.socketpair()
    link, messages = Link(ours), [b"", b"a", b"bc" * 5, b""]
    for byte in b"".join(struct.pack("<Q", len(each)) + each for each in messages):
        theirs.send(bytes([byte]))
    assert [link.receive(PATIENCE_S) for _ in messages] == messages
    link.close()
    theirs.close()


def test_both_ends_may_send_more_than_fits(pair: Pair) -> None:
    """Neither reads before it has sent."""
    here, there = pair
    big = os.urandom(8 << 20)
    back: list[bytes] = []

    def answer() -> None:
        there.send(big[::-1], PATIENCE_S)
        back.append(there.receive(PATIENCE_S))

    thread = threading.Thread(target=answer)
    thread.start()
    here.send(big, PATIENCE_S)
    assert here.receive(PATIENCE_S) == big[::-1]
    thread.join(PATIENCE_S)
    assert back == [big]


def test_one_message_of_each_link_as_they_come() -> None:
    pairs = [socket.socketpair() for _ in range(3)]
    ours, theirs = [Link(a) for a, _ in pairs], [Link(b) for _, b in pairs]
    try:
        theirs[2].send(b"first", PATIENCE_S)
        theirs[2].send(b"of the next round", PATIENCE_S)
        found = receive_each(ours, PATIENCE_S)
        assert next(found) == (2, b"first")
        for i in (1, 0):
            theirs[i].send(b"later", PATIENCE_S)
        assert sorted(found) == [(0, b"later"), (1, b"later")]
        assert ours[2].receive(PATIENCE_S) == b"of the next round"
        theirs[0].send(b"alive", PATIENCE_S)
        theirs[1].close()
        with pytest.raises(LinkLost):
            list(receive_each(ours, PATIENCE_S))
    finally:
        for link in (*ours, *theirs):
            link.close()


def test_silence_ends_at_the_deadline_and_a_closed_end_at_once(pair: Pair) -> None:
    here, there = pair
    with pytest.raises(LinkLost):
        here.receive(0.01)
    there.close()
    with pytest.raises(LinkLost):
        here.receive(None)
    with pytest.raises(LinkLost):
        here.send(b"x", PATIENCE_S)
    here.close()
    here.close()
    with pytest.raises(LinkLost):
        here.receive(PATIENCE_S)


def test_a_length_that_is_none_is_refused() -> None:
    ours, theirs = socket.socketpair()
    link = Link(ours)
    theirs.send(struct.pack("<Q", MAX_MESSAGE_BYTES + 1))
    with pytest.raises(LinkLost):
        link.receive(PATIENCE_S)
    link.close()
    theirs.close()


@pytest.mark.parametrize("which", [0, 1])
def test_a_loss_is_noticed_while_nobody_waits(pair: Pair, which: int) -> None:
    lost = [threading.Event(), threading.Event()]
    for link, event in zip(pair, lost, strict=True):
        watch([link], event.set)
    pair[which].close()
    assert all(event.wait(PATIENCE_S) for event in lost)


def test_an_end_that_shows_no_life_any_more_is_lost() -> None:
    """Though another one lives."""
    (first, alive), (second, silent) = [socket.socketpair() for _ in range(2)]
    ours, theirs, lost = [Link(first), Link(second)], Link(alive), threading.Event()
    silent.send(b"x")
    watch([theirs], lambda: None, silence_s=1.0)
    watch(ours, lost.set, silence_s=1.0)
    assert lost.wait(PATIENCE_S)
    for link in (*ours, theirs):
        link.close()
    silent.close()


@pytest.mark.deep
def test_ends_that_show_life_are_kept(pair: Pair) -> None:
    """Far longer than either may be silent."""
    lost = threading.Event()
    for link in pair:
        watch([link], lost.set, silence_s=3.0)
    assert not lost.wait(10.0)


def test_a_cut_ends_a_call_under_way(pair: Pair) -> None:
    ended: list[bool] = []

    def wait() -> None:
        with pytest.raises(LinkLost):
            pair[0].receive(None)
        ended.append(True)

    thread = threading.Thread(target=wait)
    thread.start()
    pair[0].cut()
    thread.join(PATIENCE_S)
    assert ended
