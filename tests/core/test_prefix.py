"""Prefix hashes: what they cover, what they are keyed by."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonlm.core.kvcache.prefix import (
    HASH_BYTES,
    UNIT_TOKENS,
    PrefixChain,
    namespace,
    prefix_hashes,
    token_bytes,
)

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=200)


def hashes(data: bytes) -> list[bytes]:
    return [data[i : i + HASH_BYTES] for i in range(0, len(data), HASH_BYTES)]


@given(TOKENS, TOKENS)
def test_hashes_agree_exactly_as_far_as_tokens_do(a: list[int], b: list[int]) -> None:
    common = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    if common is None:
        common = min(len(a), len(b))
    one, other = (hashes(prefix_hashes(tokens, b"salt", "model")) for tokens in (a, b))
    assert len(one) == len(a) // UNIT_TOKENS
    agreeing = sum(x == y for x, y in zip(one, other, strict=False))
    assert agreeing == common // UNIT_TOKENS


def test_a_change_in_an_early_unit_changes_all_later_hashes() -> None:
    tokens = list(range(4 * UNIT_TOKENS))
    changed = [*tokens]
    changed[UNIT_TOKENS] += 1
    one, other = (hashes(prefix_hashes(t, b"", "model")) for t in (tokens, changed))
    assert [x == y for x, y in zip(one, other, strict=True)] == [True, False, False, False]


def test_nothing_is_shared_between_namespaces() -> None:
    tokens = list(range(UNIT_TOKENS))
    keys = [(b"", "m"), (b"a", "m"), (b"", "n"), (b"m", ""), (b"am", "")]
    found = {prefix_hashes(tokens, salt, digest) for salt, digest in keys}
    assert len(found) == len(keys)
    assert namespace(b"a", "b", "c") != namespace(b"a", "bc", "")


def test_hashes_are_the_same_in_every_process() -> None:
    assert prefix_hashes(range(64), b"salt", "model").hex() == "aaf51948a86cddc78807fd1809eb145c"


def test_tokens_are_little_endian_int32() -> None:
    assert token_bytes([1, 258, 2**31 - 1]) == b"\1\0\0\0\2\1\0\0\xff\xff\xff\x7f"
    with pytest.raises(OverflowError):
        token_bytes([2**31])


def test_a_chain_grows_with_its_history_and_forks() -> None:
    chain = PrefixChain(namespace(b"", "m"), namespace(b"", "t"), 4)
    chain.extend([1, 2, 3, 4, 5], 1)
    fork = chain.fork()
    chain.extend([1, 2, 3, 4, 5, 6, 7, 8], 2)
    fork.extend([1, 2, 3, 4, 5, 6, 7, 9], 2)
    assert chain.links[0] is fork.links[0]
    assert chain.links[1].parent == fork.links[1].parent == chain.links[0].digest
    assert chain.links[1].digest != fork.links[1].digest
