"""A prefill worker that loads its model for as long as it is not told to go on, by a line."""

from __future__ import annotations

import sys

from baton.core.scheduler.plan import ModelRunner
from baton.prefill.__main__ import main
from baton.worker import process
from baton.worker.engine import Loading, open_runner
from baton.worker.options import WorkerOptions


def load_when_told(options: WorkerOptions, loading: Loading) -> ModelRunner:
    loading(43, 100)
    sys.stdin.readline()
    return open_runner(options, loading)


if __name__ == "__main__":
    process.open_runner = load_when_told  # type: ignore[attr-defined,assignment]
    sys.exit(main())
