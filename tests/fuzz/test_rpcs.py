"""Any bytes sent to any RPC of any process are refused in order, and leave nothing behind."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st

from tests.fuzz.calls import check, send
from tests.fuzz.rpcs import Rpc, all_rpcs
from tests.fuzz.runs import fuzz
from tests.fuzz.streams import Stream, streams
from tests.fuzz.target import Face, Target

pytestmark = pytest.mark.deep

RPCS = all_rpcs()
INPUTS = 1_400
SLOW_INPUTS = 80_000


def test_every_rpc_is_served_somewhere(target: Target) -> None:
    """So none of them escapes, and no process serves one that the protos here do not know."""
    served = set().union(*(face.services for face in target.faces))
    assert served == {rpc.service for rpc in RPCS}


@pytest.mark.parametrize("rpc", RPCS, ids=lambda rpc: rpc.path)
def test_an_rpc(target: Target, rpc: Rpc) -> None:
    _fuzz(target, rpc, INPUTS // len(RPCS), fixed=True)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("rpc", RPCS, ids=lambda rpc: rpc.path)
def test_an_rpc_at_length(real_target: Target, rpc: Rpc) -> None:
    _fuzz(real_target, rpc, SLOW_INPUTS // len(RPCS), fixed=False)


def _fuzz(target: Target, rpc: Rpc, count: int, *, fixed: bool) -> None:
    calls = st.tuples(
        st.sampled_from(target.serving(rpc.service)),
        streams(rpc, target.seeds.get(rpc.path, [[b""]]), target.words),
    )

    def one(call: tuple[Face, Stream]) -> None:
        face, stream = call
        check(rpc, send(face.channel, rpc, stream))

    fuzz(calls, count, one, fixed=fixed)
    target.check()
