"""`baton down`: stops what `baton up` started, within STOP_BOUND_S plus a few seconds."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

from batonlm.cli import state
from batonlm.cli.supervisor import STOP_BOUND_S
from batonlm.rpc.children import KILL_S

PATIENCE_S = STOP_BOUND_S + 2.0
"""Time for the supervisor to end all processes, before it is killed."""
LOOK_S = 0.05


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("down")
    parser.add_argument("--name", default="", help="of the Baton, where it has one")


def run(args: argparse.Namespace) -> int:
    if args.name:
        state.choose(args.name)
    running = state.read() or {}
    supervisor = state.stop()
    if supervisor is None:
        print("baton down: nothing runs", file=sys.stderr)
        return 0
    processes = running.get("processes", ())
    text = f"Stopping {len(processes)} processes" if running else "Stopping what was starting"
    print(text, file=sys.stderr)
    if _gone([supervisor], PATIENCE_S):
        return 0
    print(f"baton down: process {supervisor['pid']} hangs and is killed", file=sys.stderr)
    # The children end with the supervisor, except on systems that cannot do that.
    everyone = [supervisor, *processes]
    for each in everyone:
        state.send(each, signal.SIGKILL)
    if _gone(everyone, KILL_S):
        return 0
    left = ", ".join(str(each["pid"]) for each in everyone if state.alive(each))
    print(f"baton down: cannot be killed: {left}", file=sys.stderr)
    return 1


def _gone(processes: Sequence[dict[str, Any]], timeout_s: float) -> bool:
    """Returns whether all processes end in time."""
    deadline = time.monotonic() + timeout_s
    while any(map(state.alive, processes)):
        if time.monotonic() > deadline:
            return False
        time.sleep(LOOK_S)
    return True
