"""A KV chunk verifies only as it was sealed: a change of bytes, header, secret or model is seen."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from batonlm.core.handover.leaf_hash import points_of
from batonlm.core.handover.table import KvChunkRange
from batonlm.core.request.model import KvLayout
from batonlm.transfer.kv_chunk import (
    DIGESTS,
    HEADER_BYTES,
    POLY,
    XXH3,
    Sealer,
    layout_fingerprint,
    positions_per_kv_chunk,
)
from batonlm.transfer.leaf_hash import leaf_hashes
from batonlm.transfer.staging import HostMemory
from batonlm.v1 import handover_pb2 as pb

LAYOUT = KvLayout("ab" * 32, "float32", 2, 2, 8, 8)
ID, INSTANCE_ID = bytes(range(16)), "0123456789abcdef" * 2
MEMORY = HostMemory(4096)
RUN = KvChunkRange(3, 40, 5)
FIELDS = [name for name in pb.KvChunkHeader.DESCRIPTOR.fields_by_name if name != "digest"]


def sealed(
    digest: str = XXH3, handover_id: bytes = ID
) -> tuple[Sealer, pb.KvChunkHeader, bytearray]:
    sealer = Sealer(handover_id, INSTANCE_ID, LAYOUT, MEMORY, digest)
    header = sealer.header(RUN)
    buffer = bytearray(4096)
    payload = hashlib.shake_128(b"payload").digest(header.payload_bytes)
    buffer[HEADER_BYTES : HEADER_BYTES + header.payload_bytes] = payload
    sealer.seal(header, memoryview(buffer))
    return sealer, header, buffer


@pytest.mark.parametrize("digest", DIGESTS)
def test_what_was_sealed_verifies(digest: str) -> None:
    sealer, header, buffer = sealed(digest)
    assert header.payload_bytes == 5 * LAYOUT.bytes_per_position
    assert len(header.digest) == 16
    assert sealer.mismatch(header, memoryview(buffer)) == ""


@pytest.mark.parametrize("digest", DIGESTS)
@given(data=st.data())
def test_any_flipped_bit_shows(digest: str, data: st.DataObject) -> None:
    sealer, header, buffer = sealed(digest)
    first = 0 if digest == XXH3 else 8 * HEADER_BYTES
    bit = data.draw(st.integers(first, 8 * (HEADER_BYTES + header.payload_bytes) - 1))
    buffer[bit // 8] ^= 1 << bit % 8
    expected = "header" if bit < 8 * HEADER_BYTES else "digest"
    assert sealer.mismatch(header, memoryview(buffer)) == expected


def test_bytes_behind_the_payload_do_not_matter() -> None:
    sealer, header, buffer = sealed()
    buffer[-1] ^= 1
    assert sealer.mismatch(header, memoryview(buffer)) == ""


@pytest.mark.parametrize("digest", DIGESTS)
@pytest.mark.parametrize("name", FIELDS)
def test_every_field_of_the_header_is_bound(name: str, digest: str) -> None:
    sealer, header, buffer = sealed(digest)
    other = {"instance_id": "f" * 32, "handover_id": bytes(16)}.get(name, getattr(header, name))
    if isinstance(other, int):
        other += 1
    setattr(header, name, other)
    expected = "header" if digest == XXH3 else "digest"
    assert sealer.mismatch(header, memoryview(buffer)) == expected


@pytest.mark.parametrize("name", FIELDS)
def test_an_announcement_of_another_kv_chunk_is_not_expected(name: str) -> None:
    sealer, header, _ = sealed()
    assert sealer.expects(header, RUN), "whatever its digest is"
    other = {"instance_id": "f" * 32, "handover_id": bytes(16)}.get(name, getattr(header, name))
    setattr(header, name, other + 1 if isinstance(other, int) else other)
    assert not sealer.expects(header, RUN)


def test_a_newer_sender_may_announce_more_than_this_build_understands() -> None:
    sealer, header, _ = sealed()
    newer = pb.KvChunkHeader.FromString(header.SerializeToString() + b"\xf8\x07\x01")
    assert newer != header and sealer.expects(newer, RUN)


def test_a_buffer_says_nothing_of_the_secret() -> None:
    """Whoever reads the KV network has no key, also where a buffer was used with xxh3 before."""
    _, _, before = sealed(XXH3, bytes(range(1, 17)))
    sealer, header, _ = sealed(POLY)
    sealer.seal(header, memoryview(before))
    assert before[:HEADER_BYTES] == bytes(HEADER_BYTES)
    assert ID not in before and header.digest not in before


@pytest.mark.parametrize("digest", DIGESTS)
def test_another_secret_seals_differently(digest: str) -> None:
    assert sealed(digest)[1].digest != sealed(digest, bytes(16))[1].digest


def test_the_digest_cannot_be_made_without_the_secret() -> None:
    keyless: dict[str, Callable[[bytes], Any]] = {
        XXH3: xxhash.xxh3_128,
        POLY: lambda content: hashlib.blake2b(
            content[:112] + leaf_hashes(memoryview(content)[112:], points_of(bytes(16))),
            digest_size=16,
        ),
    }
    for digest in DIGESTS:
        _, header, buffer = sealed(digest)
        content = buffer[: HEADER_BYTES - 16] + buffer[HEADER_BYTES:][: header.payload_bytes]
        assert keyless[digest](bytes(content)).digest() != header.digest


@pytest.mark.parametrize(("sealed_with", "read_with"), [(XXH3, POLY), (POLY, XXH3)])
def test_the_kind_of_digest_is_bound(sealed_with: str, read_with: str) -> None:
    _, header, buffer = sealed(sealed_with)
    other = Sealer(ID, INSTANCE_ID, LAYOUT, MEMORY, read_with)
    expected = "header" if read_with == XXH3 else "digest"
    assert other.mismatch(header, memoryview(buffer)) == expected


@pytest.mark.parametrize(
    "change",
    [
        {"model_digest": "cd" * 32},
        {"dtype": "bfloat16"},
        {"num_layers": 3},
        {"num_kv_heads": 1},
        {"key_size": 4},
        {"value_size": 4},
    ],
)
def test_another_layout_has_another_fingerprint(change: dict[str, object]) -> None:
    other = replace(LAYOUT, **change)  # type: ignore[arg-type]
    assert layout_fingerprint(other) != layout_fingerprint(LAYOUT)


def test_an_unknown_digest_is_refused() -> None:
    with pytest.raises(ValueError, match="xxh3-128, poly61"):
        Sealer(ID, INSTANCE_ID, LAYOUT, MEMORY, "crc32")


@pytest.mark.parametrize(
    ("buffer_bytes", "positions"), [(4096, 15), (128 + 256, 1), (128 + 255, 0), (64, 0)]
)
def test_whole_positions_fit_behind_the_header(buffer_bytes: int, positions: int) -> None:
    assert positions_per_kv_chunk(buffer_bytes, LAYOUT) == positions


def test_a_layout_without_a_state_has_the_fingerprint_of_versions_that_knew_none() -> None:
    text = "|".join(map(str, ("ab" * 32, "float32", 2, 2, 8, 8)))
    assert layout_fingerprint(LAYOUT) == hashlib.blake2b(text.encode(), digest_size=8).digest()
    assert layout_fingerprint(replace(LAYOUT, state_positions=1)) != layout_fingerprint(LAYOUT)
