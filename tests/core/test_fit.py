"""What keeps two workers' KV apart is told in words that name both sides' values."""

from __future__ import annotations

from dataclasses import replace

import pytest

from batonlm.core.handover.fit import difference, refusal
from batonlm.core.request.model import KvLayout, WorkerIdentity

LAYOUT = KvLayout("d1", "float32", 2, 1, 8, 8)
BOTH = ("nixl", "loopback")


@pytest.mark.parametrize(
    ("other", "transports", "told"),
    [
        (LAYOUT, BOTH, ""),
        (LAYOUT, ("loopback",), ""),
        (LAYOUT, (), ""),
        (LAYOUT, ("rdma",), "transports: nixl, loopback against rdma"),
        (replace(LAYOUT, dtype="bfloat16"), BOTH, "dtype: float32 against bfloat16"),
        (
            replace(LAYOUT, model_digest="d2", num_layers=3),
            BOTH,
            "model_digest: d1 against d2; num_layers: 2 against 3",
        ),
        (
            replace(LAYOUT, min_wire_version=2, max_wire_version=3),
            ("rdma",),
            "wire versions: 1-1 against 2-3; transports: nixl, loopback against rdma",
        ),
        (replace(LAYOUT, state_positions=5), BOTH, "state_positions: 0 against 5"),
        (None, BOTH, "KV layout: one against none"),
    ],
)
def test_a_difference(other: KvLayout | None, transports: tuple[str, ...], told: str) -> None:
    assert difference(LAYOUT, BOTH, other, transports) == told


@pytest.mark.parametrize(
    ("ours", "theirs", "common"), [((1, 2), (2, 3), 2), ((1, 1), (1, 2), 1), ((1, 4), (2, 3), 3)]
)
def test_ranges_of_wire_versions_meet_at_the_newest_common_one(
    ours: tuple[int, int], theirs: tuple[int, int], common: int
) -> None:
    one, other = (
        replace(LAYOUT, min_wire_version=oldest, max_wire_version=newest)
        for oldest, newest in (ours, theirs)
    )
    assert one.difference(other) == other.difference(one) == ""
    assert one.common_wire_version(other) == other.common_wire_version(one) == common


def test_a_refusal_names_both_workers_in_the_order_of_the_values() -> None:
    sender = WorkerIdentity("prefill", "a1" * 16, "10.0.0.1:1")
    receiver = WorkerIdentity("decode", "b2" * 16, "10.0.0.2:1")
    assert refusal(sender, receiver, "dtype: float32 against bfloat16").message == (
        "KV does not fit between prefill a1a1a1a1 and decode b2b2b2b2: "
        "dtype: float32 against bfloat16"
    )
