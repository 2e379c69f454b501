"""HTTP/2 as no client speaks it, on every gRPC port: such connections end, nothing else does."""

from __future__ import annotations

import struct
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import strategies as st

from batonlm.rpc.address import split
from tests.fuzz import oracle
from tests.fuzz.http2 import Attack, attacks, call_headers, floods, frame, mixed, send_all
from tests.fuzz.mutations import damages
from tests.fuzz.rpcs import all_rpcs
from tests.fuzz.runs import fuzz
from tests.fuzz.target import Face, Target

pytestmark = pytest.mark.deep

INPUTS = 60
FLOOD = 5_000
SLOW_INPUTS = 2_000
SLOW_FLOOD = 50_000


def test_attacks_on_every_port(target: Target) -> None:
    """All at once: who does not answer is waited for, and nobody waits for the others."""
    wanted = [(face, attack) for face in target.faces for attack in attacks(_path(face))]
    with ThreadPoolExecutor(32) as pool:
        list(pool.map(_attack, *zip(*wanted, strict=True)))
    target.check()


def test_floods_on_the_public_port(target: Target) -> None:
    _flood(target.face("router"), FLOOD)
    target.check()


def test_frames(target: Target) -> None:
    _fuzz(target, INPUTS, fixed=True)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_frames_and_floods_at_length(real_target: Target) -> None:
    for face in real_target.faces:
        _flood(face, SLOW_FLOOD)
    _fuzz(real_target, SLOW_INPUTS, fixed=False)


def _fuzz(target: Target, count: int, *, fixed: bool) -> None:
    faces = st.sampled_from(target.faces)
    payload = st.sampled_from(
        (b"", bytes(4), bytes(8), struct.pack(">HI", 3, 0), b"\0\0\0\0\0", b"\xff" * 20)
    ) | st.binary(max_size=20)
    stream = st.sampled_from((0, 1, 1, 1, 2, 3, 2**31 - 1, 2**32 - 1))
    kind, flags = st.integers(0, 10), st.sampled_from((0, 1, 4, 5, 8, 0x20, 0xFF))
    length = st.sampled_from((-1, -1, -1, -1, 0, 5, 2**24 - 1))

    def one(drawn: tuple[Face, list[bytes], bool]) -> None:
        face, pieces, opened = drawn
        call = frame(1, 4, 1, call_headers(_path(face)))
        _attack(face, Attack("drawn", mixed([call, *pieces] if opened else pieces)))

    frames = st.builds(frame, kind, flags, stream, payload, length)
    damaged = st.builds(lambda one, damage: damage(one), frames, damages())
    drawn = st.tuples(faces, st.lists(frames | damaged, max_size=6), st.booleans())
    fuzz(drawn, count, one, fixed=fixed)
    target.check()


def _flood(face: Face, count: int) -> None:
    for attack in floods(_path(face), count):
        _attack(face, attack)


def _attack(face: Face, attack: Attack) -> None:
    heard = send_all(split(face.address, "face"), attack.data)
    oracle.check_transport(heard.decode("latin-1"))


def _path(face: Face) -> bytes:
    return next(rpc.path.encode() for rpc in all_rpcs() if rpc.service in face.services)
