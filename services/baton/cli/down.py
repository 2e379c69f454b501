"""`baton down`: stops what `baton up` started; knows only the supervisor's pid."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from typing import Any

from baton.cli import state

PATIENCE_S = 60.0


def add_parser(subparsers: Any) -> None:
    subparsers.add_parser("down", help="stop what `baton up` started")


def run(args: argparse.Namespace) -> int:
    running = state.read()
    if running is None:
        print("baton down: nothing runs", file=sys.stderr)
        return 0
    pid = int(running["pid"])
    os.kill(pid, signal.SIGTERM)
    print(f"Stopping {len(running['processes'])} processes", file=sys.stderr)
    deadline = time.monotonic() + PATIENCE_S
    while state.alive(pid):
        if time.monotonic() > deadline:
            print(f"baton down: the supervisor {pid} did not end in time", file=sys.stderr)
            return 1
        time.sleep(0.05)
    return 0
