"""A decode worker that freezes process $SENDER before reading from it, once file $FREEZE exists.

Its steps take 10 ms, so that what runs is still running when the freeze is found out.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import psutil

from batonlm.core.scheduler.plan import StepPlan
from batonlm.testing.fake_runner import FakeRunner
from batonlm.testing.worker import main
from batonlm.transfer.nixl import NixlTransport

post, submit = NixlTransport.post, FakeRunner.submit


def freeze_and_post(
    self: NixlTransport, peer: str, remote_buffer: int, local_buffer: int, num_bytes: int
) -> object:
    if Path(os.environ["FREEZE"]).exists() and peer != self._instance_id:
        sender = psutil.Process(int(os.environ["SENDER"]))
        sender.send_signal(signal.SIGSTOP)
        while sender.status() != psutil.STATUS_STOPPED:
            time.sleep(0.001)
    return post(self, peer, remote_buffer, local_buffer, num_bytes)


def submit_slowly(self: FakeRunner, plan: StepPlan) -> None:
    time.sleep(0.01)
    submit(self, plan)


if __name__ == "__main__":
    NixlTransport.post = freeze_and_post  # type: ignore[method-assign]
    FakeRunner.submit = submit_slowly  # type: ignore[method-assign]
    sys.exit(main("decode", sys.argv[1:]))
