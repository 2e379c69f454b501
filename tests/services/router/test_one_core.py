"""A process's threads give way to each other where it has one core, and only there."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SETTLE = """
import os, threading
from batonlm.router.__main__ import yield_on_one_core
os.sched_setaffinity(0, {cores})
yield_on_one_core()
policies = [os.sched_getscheduler(0)]
thread = threading.Thread(target=lambda: policies.append(os.sched_getscheduler(0)))
thread.start()
thread.join()
print(*policies)
"""


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="a policy of Linux")
@pytest.mark.parametrize("cores", [1, 2])
def test_threads_give_way_on_one_core(cores: int) -> None:
    mine = sorted(os.sched_getaffinity(0))
    if len(mine) < cores:
        pytest.skip("there are not so many cores")
    program = SETTLE.format(cores=mine[:cores])
    said = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
    expected = os.SCHED_BATCH if cores == 1 else os.SCHED_OTHER
    assert said.stdout.split() == [str(expected)] * 2
