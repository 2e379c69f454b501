"""PrefixChain and prefix_hashes: names of prefixes of token histories, by chained, keyed hashes.

A prefix is cut into units of equal size. The hash of a unit is keyed by the hash before it, and the
first one by a namespace made of {tenant salt, model, adapter}. Equal hashes therefore mean equal
prefixes in one namespace, and two tenants never share one. Two chains are in use: blocks of a
worker's own size inside its pool, keyed by the model (`PrefixChain`), and units of 64 tokens
between processes, whatever a worker's block size is, keyed by the tokenizer (`prefix_hashes`): a
router compares these with all workers, whichever model files each of them has.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from struct import Struct
from typing import NamedTuple

UNIT_TOKENS = 64
HASH_BYTES = 16

_TOKEN_BYTES = 4
_UNIT_BYTES = UNIT_TOKENS * _TOKEN_BYTES


def namespace(salt: bytes, digest: str, adapter: str = "") -> bytes:
    """The key of a chain's first hash, HASH_BYTES long. Parts cannot run into each other.

    digest: of the model for blocks, of the tokenizer for units.
    """
    hasher = blake2b(digest_size=HASH_BYTES, person=b"baton-prefix")
    for part in (salt, digest.encode(), adapter.encode()):
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.digest()


def prefix_hashes(
    token_ids: Sequence[int], salt: bytes, tokenizer_digest: str, adapter: str = ""
) -> bytes:
    """One hash of HASH_BYTES per full unit of UNIT_TOKENS tokens, concatenated.

    Each covers all tokens up to its unit's end. adapter: the digest of the one that computes them.
    Raises OverflowError for ids beyond int32.
    """
    data = memoryview(token_bytes(token_ids))
    digest = namespace(salt, tokenizer_digest, adapter)
    hashes = bytearray()
    for start in range(0, len(data) - _UNIT_BYTES + 1, _UNIT_BYTES):
        digest = _next_hash(digest, data[start : start + _UNIT_BYTES])
        hashes += digest
    return bytes(hashes)


def unit_names(prefix: Prefix, tokenizer_digest: str) -> list[UnitName]:
    """The full units of a prefix, in order."""
    root = parent = namespace(prefix.cache_salt, tokenizer_digest, prefix.adapter)
    hashes = prefix_hashes(prefix.token_ids, prefix.cache_salt, tokenizer_digest, prefix.adapter)
    names: list[UnitName] = []
    for start in range(0, len(hashes), HASH_BYTES):
        unit = hashes[start : start + HASH_BYTES]
        names.append(UnitName(unit, parent, root, len(names) * UNIT_TOKENS))
        parent = unit
    return names


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian int32."""
    ids = array("i", token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


class Prefix(NamedTuple):
    """The beginning of an input, and whose it is. Equal ones have the same KV."""

    token_ids: Sequence[int]
    cache_salt: bytes
    adapter: str
    """The digest of the one that computes it, or empty."""


class PrefixLink(NamedTuple):
    """One full block of a chain. Links are equal only when their tokens are equal too."""

    digest: bytes
    parent: bytes
    tokens: bytes
    depth: int
    """How many links are before it."""
    units: tuple[bytes, ...]
    """The hashes of those units that end in this block."""
    parent_unit: bytes = b""
    """The hash of the unit before these; before the first one, the namespace."""
    namespace: bytes = b""
    """Of units: whose prefix it is, by the tenant's salt and the adapter."""


class UnitName(NamedTuple):
    """What is known about a unit of UNIT_TOKENS positions wherever its KV is kept."""

    unit: bytes
    """Its hash."""
    parent: bytes
    """The hash of the unit before it; the namespace of the first one."""
    namespace: bytes
    first_position: int


class PrefixChain:
    """The links of one growing token history, made on demand and never twice."""

    __slots__ = ("_begun", "_block_size", "_pack", "_root", "_unit", "_unit_root", "links")

    def __init__(self, root: bytes, unit_root: bytes, block_size: int):
        """root, unit_root: the namespaces of blocks and of units."""
        self._root = root
        self._block_size = block_size
        # For a block's few ids a quarter of what `token_bytes` takes.
        self._pack = Struct(f"<{block_size}i").pack
        self._unit = self._unit_root = unit_root
        self._begun = b""
        self.links: list[PrefixLink] = []

    def extend(self, token_ids: Sequence[int], num_blocks: int) -> None:
        """Adds links until there are num_blocks. token_ids go on from what is linked already."""
        size = self._block_size
        parent = self.links[-1].digest if self.links else self._root
        for index in range(len(self.links), num_blocks):
            tokens = self._pack(*token_ids[index * size : (index + 1) * size])
            digest = _next_hash(parent, tokens)
            before, units = self._unit, self._units(tokens)
            self.links.append(
                PrefixLink(digest, parent, tokens, index, units, before, self._unit_root)
            )
            parent = digest

    def fork(self) -> PrefixChain:
        """An independent chain with the same history."""
        chain = PrefixChain(self._root, self._unit, self._block_size)
        chain._unit_root = self._unit_root
        chain._begun = self._begun
        chain.links = self.links.copy()
        return chain

    def _units(self, tokens: bytes) -> tuple[bytes, ...]:
        """The units that end in the next block's tokens; what begins in it is kept for later."""
        self._begun = begun = self._begun + tokens
        if len(begun) < _UNIT_BYTES:
            return ()
        units = []
        while len(begun) >= _UNIT_BYTES:
            self._unit = _next_hash(self._unit, begun[:_UNIT_BYTES])
            units.append(self._unit)
            begun = begun[_UNIT_BYTES:]
        self._begun = begun
        return tuple(units)


def _next_hash(previous: bytes, unit: bytes | memoryview) -> bytes:
    return blake2b(unit, digest_size=HASH_BYTES, key=previous).digest()
