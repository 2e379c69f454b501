"""Whatever is disturbed: a request's stages cover all of its time, every span of a worker has its
place in the router's trace, and no process that lives on has a span that nobody ends.
"""

from __future__ import annotations

import pytest

from tests.sim import schedule
from tests.sim.traces import Traces

SCHEDULES = 60


@pytest.mark.deep
def test_traces_of_disturbed_schedules() -> None:
    names: set[str] = set()
    for seed in range(SCHEDULES):
        traces = Traces()
        assert not schedule.run(seed, traces).violations
        assert not traces.at["router"].open, f"seed {seed}"
        assert not traces.faults(), f"seed {seed}"
        names |= {span.name for span in traces.spans}
    assert {
        "tokenizer.encode", "prefill.run", "prefill.compute", "handover.give", "handover.collect",
        "decode.run", "decode.prefill", "decode.generate", "detokenizer.text", "attempt",
    } <= names  # fmt: skip


def test_spans_change_nothing_of_a_schedule() -> None:
    assert schedule.run(7).fingerprint == schedule.run(7, Traces()).fingerprint
