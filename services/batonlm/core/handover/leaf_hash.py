"""The keyed hash of a KV chunk's payload that a GPU computes as well as a CPU.

The payload is cut into leaves of 64 KiB, the last one padded with zeros. The words m[0], m[1], ...
of a leaf, little-endian and of 32 bits, are the coefficients of a polynomial over the integers
modulo the prime 2^61 - 1, and the leaf's two hashes are its values at two secret points:

    h = m[0] + m[1] r + m[2] r^2 + ... + m[16383] r^16383   mod 2^61 - 1

Two different leaves agree at a random point with a probability of at most 16383 / (2^61 - 1), so at
both with less than 2^-93. (A polynomial hash as of Carter and Wegman, 1981; that a pseudorandom
function over such hashes authenticates is shown by Shoup, 1996.) The hashes are secret, too: what
travels is BLAKE2b over them and the header, keyed with another part of the hand-over's secret, see
`batonlm.transfer.kv_chunk`. The argument as a whole:
docs/decisions/043-payloads-hashed-on-the-device.md.

Implementations, which agree in every bit: `batonlm.transfer.leaf_hash` on a CPU and
`batonlm.engine.attention.triton.leaf_hash` on a GPU.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

PRIME = (1 << 61) - 1
LEAF_BYTES = 64 << 10
WORD_BYTES = 4
HASH_BYTES = 16
"""Of one leaf: its two values, little-endian and of 64 bits each."""


class Points(NamedTuple):
    """The two points of one hand-over. Secret, and used for nothing else."""

    first: int
    second: int


def points_of(handover_id: bytes) -> Points:
    """Derived from a hand-over's secret, the id of 16 random bytes."""
    drawn = hashlib.blake2b(handover_id, digest_size=32, person=b"baton kv points").digest()
    # 128 bits modulo 61 of them: no remainder is likelier than another by more than 2^-66.
    return Points(*(int.from_bytes(drawn[i : i + 16], "little") % PRIME for i in (0, 16)))


def powers(point: int, count: int, step: int = 1) -> list[int]:
    """point^0, point^step, point^(2 step), ..., `count` of them, modulo PRIME."""
    factor, found = pow(point, step, PRIME), [1]
    for _ in range(count - 1):
        found.append(found[-1] * factor % PRIME)
    return found


def num_leaves(num_bytes: int) -> int:
    """Leaves of a payload."""
    return -(-num_bytes // LEAF_BYTES)
