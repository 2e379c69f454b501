"""The bound on which the seal of KV chunks rests: decision 043, checked where all can be tried."""

from __future__ import annotations

from itertools import product

import pytest

from batonlm.core.handover.leaf_hash import LEAF_BYTES, PRIME, WORD_BYTES, powers
from batonlm.transfer.receiver import MAX_IN_FLIGHT


def value(words: tuple[int, ...], point: int, prime: int) -> int:
    """As `batonlm.core.handover.leaf_hash` defines a leaf's hash, in a field of any size."""
    found = 0
    for word in reversed(words):
        found = (found * point + word) % prime
    return found


@pytest.mark.parametrize(("prime", "length"), [(5, 2), (5, 3), (7, 3), (11, 3), (7, 4), (13, 2)])
def test_two_leaves_agree_at_fewer_points_than_they_have_words(prime: int, length: int) -> None:
    """For all pairs of leaves and all pairs of points. Leaves differ by a leaf that is not zero,
    and hashes are linear, so that all differences stand for all pairs."""
    most = 0
    for difference in product(range(prime), repeat=length):
        if not any(difference):
            continue
        roots = [point for point in range(prime) if not value(difference, point, prime)]
        agreeing = sum(
            one in roots and other in roots for one, other in product(range(prime), repeat=2)
        )
        assert agreeing <= (length - 1) ** 2
        most = max(most, agreeing)
    assert most == (length - 1) ** 2, "the bound is met, so no smaller one would be true"


def test_hashes_are_linear_so_differences_stand_for_pairs() -> None:
    prime, length = 5, 3
    for one in product(range(prime), repeat=length):
        for other in product(range(prime), repeat=length):
            difference = tuple((a - b) % prime for a, b in zip(one, other, strict=True))
            for point in range(prime):
                equal = value(one, point, prime) == value(other, point, prime)
                assert equal == (value(difference, point, prime) == 0)


def test_a_word_too_large_for_the_field_would_break_the_bound() -> None:
    """Words below the prime are different coefficients; others agree at every point."""
    assert all(value((0, 1), point, 5) == value((0, 6), point, 5) for point in range(5))
    assert 1 << 8 * WORD_BYTES < PRIME


def test_the_numbers_of_the_real_field() -> None:
    words = LEAF_BYTES // WORD_BYTES
    assert pow(2, PRIME - 1, PRIME) == 1 and PRIME == (1 << 61) - 1
    # (words - 1)^2 of PRIME^2 pairs of points, for each chunk that may still be verified after one
    # that was not: below 2^-91.
    assert MAX_IN_FLIGHT * (words - 1) ** 2 << 91 < PRIME**2
    assert MAX_IN_FLIGHT == 4


def test_powers_are_of_the_field() -> None:
    point = PRIME - 2
    assert powers(point, words := 6) == [pow(point, i, PRIME) for i in range(words)]
