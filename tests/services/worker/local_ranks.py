"""A worker whose ranks are threads instead of Ray actors: `local_ranks … baton.ROLE`."""

from __future__ import annotations

import sys
from importlib import import_module

import baton.worker.engine
from tests.engine.local_ranks import LocalRanks


def local(size: int, threads: int, *, spin: bool) -> LocalRanks:
    return LocalRanks(size)


if __name__ == "__main__":
    setattr(baton.worker.engine, "RayRanks", local)  # noqa: B010  # not its own name
    sys.exit(import_module(f"{sys.argv.pop()}.__main__").main())
