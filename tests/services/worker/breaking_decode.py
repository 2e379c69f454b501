"""A decode worker whose engine breaks at the first step, as when device memory is gone."""

from __future__ import annotations

import sys

from batonlm.core.scheduler.plan import StepPlan
from batonlm.testing.fake_runner import FakeRunner
from batonlm.testing.worker import main


def out_of_memory(self: FakeRunner, plan: StepPlan) -> None:
    raise MemoryError("out of device memory")


if __name__ == "__main__":
    FakeRunner.submit = out_of_memory  # type: ignore[method-assign]
    sys.exit(main("decode", sys.argv[1:]))
