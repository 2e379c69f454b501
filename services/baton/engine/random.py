"""A counter-based random number generator: a pure function of its key and counter, without state.

Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3"
(SC 2011). Any worker that knows (seed, choice, position) draws the same number, which is what lets
a sequence move between workers without repeating or losing randomness.
"""

from __future__ import annotations

_MASK = 0xFFFFFFFF
_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)

Words2 = tuple[int, int]
Words4 = tuple[int, int, int, int]


def philox4x32(counter: Words4, key: Words2) -> Words4:
    """Ten rounds over four 32-bit counter words and two 32-bit key words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0 = _MULTIPLIERS[0] * c0
        p1 = _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (p1 >> 32) ^ c1 ^ k0,
            p1 & _MASK,
            (p0 >> 32) ^ c3 ^ k1,
            p0 & _MASK,
        )
        k0 = (k0 + _WEYL[0]) & _MASK
        k1 = (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, choice: int, position: int) -> float:
    """One number in [0, 1) with 53 random bits. seed is taken modulo 2**64."""
    key = (seed & _MASK, (seed >> 32) & _MASK)
    high, low, _, _ = philox4x32((position & _MASK, choice & _MASK, 0, 0), key)
    return float((high << 21) | (low >> 11)) * 2.0**-53
