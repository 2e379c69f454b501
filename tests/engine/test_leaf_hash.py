"""The hash of a payload is the polynomial that its definition names, on a CPU and by the kernel."""

from __future__ import annotations

import random

import pytest
import torch

pytest.importorskip("triton")

from batonlm.core.handover.leaf_hash import (
    HASH_BYTES,
    LEAF_BYTES,
    PRIME,
    Points,
    num_leaves,
    points_of,
    powers,
)
from batonlm.engine.kv.staging import DeviceStaging
from batonlm.transfer.leaf_hash import leaf_hashes
from tests.engine.devices import CUDA, INTERPRETER

SIZES = (4, 1000, LEAF_BYTES - 4, LEAF_BYTES, LEAF_BYTES + 4, 3 * LEAF_BYTES + 512)
POINTS = (points_of(b"a" * 16), Points(0, 1), Points(PRIME - 1, PRIME - 2))
ROOM = 4 * LEAF_BYTES


def by_definition(payload: bytes, points: Points) -> bytes:
    """In whole numbers of any size, by Horner's rule."""
    found = b""
    for start in range(0, len(payload), LEAF_BYTES):
        leaf = payload[start : start + LEAF_BYTES]
        leaf += bytes(-len(leaf) % 4)
        words = [int.from_bytes(leaf[i : i + 4], "little") for i in range(0, len(leaf), 4)]
        for point in points:
            value = 0
            for word in reversed(words):
                value = (value * point + word) % PRIME
            found += value.to_bytes(8, "little")
    return found


def payloads(size: int) -> list[bytes]:
    """Random, and of the largest words, which carry the most."""
    return [random.Random(size).randbytes(size), b"\xff" * size]


@pytest.mark.parametrize("size", [1, 7, *SIZES])
@pytest.mark.parametrize("points", POINTS)
def test_a_cpu_computes_the_definition(size: int, points: Points) -> None:
    for payload in payloads(size):
        found = leaf_hashes(memoryview(payload), points)
        assert found == by_definition(payload, points)
        assert len(found) == HASH_BYTES * num_leaves(size)


@pytest.mark.parametrize("device", [INTERPRETER, CUDA])
@pytest.mark.parametrize("size", SIZES)
def test_the_kernel_computes_what_a_cpu_does(size: int, device: str) -> None:
    memory = DeviceStaging(torch.device(device), ROOM)
    part = memory.part(128, size)
    for points in POINTS:
        for payload in payloads(size):
            memory.write(part, payload)
            assert memory.leaf_hashes(part, points) == leaf_hashes(memoryview(payload), points)
    assert memory.read(part) == payload
    memory.close()


def test_leaves_that_change_places_change_the_hash() -> None:
    one, other = (random.Random(i).randbytes(LEAF_BYTES) for i in (1, 2))
    hashes = leaf_hashes(memoryview(one + other), POINTS[0])
    swapped = leaf_hashes(memoryview(other + one), POINTS[0])
    assert swapped == hashes[HASH_BYTES:] + hashes[:HASH_BYTES] != hashes


def test_points_differ_by_hand_over_and_powers_are_theirs() -> None:
    assert len({point for i in range(50) for point in points_of(i.to_bytes(16, "big"))}) == 100
    point = points_of(bytes(16)).first
    assert powers(point, 3, 5) == [1, pow(point, 5, PRIME), pow(point, 10, PRIME)]
