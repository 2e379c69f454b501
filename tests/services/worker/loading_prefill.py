"""A prefill worker that loads its model for as long as it is not told to go on, by a line."""

from __future__ import annotations

import sys

from batonlm.core.scheduler.plan import ModelRunner
from batonlm.testing.worker import main, open_disturbed
from batonlm.worker.engine import Loading
from batonlm.worker.options import WorkerOptions


def load_when_told(options: WorkerOptions, loading: Loading) -> ModelRunner:
    loading(43, 100)
    sys.stdin.readline()
    return open_disturbed(options, loading)


if __name__ == "__main__":
    sys.exit(main("prefill", sys.argv[1:], load_when_told))
