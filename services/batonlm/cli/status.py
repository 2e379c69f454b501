"""`baton status`: lists the Batons that `baton up` runs on this machine for this user."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from batonlm.cli import state

UNNAMED = "(no name)"
_WITH_MODEL = ("decode", "encode")
"""Roles of which each process has one model, that clients can name."""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("status")
    parser.add_argument("--json", action="store_true", help="print one JSON line for each")


def run(args: argparse.Namespace) -> int:
    """Returns 1 if none runs."""
    found = state.everyone()
    if not found:
        print("baton status: nothing runs", file=sys.stderr)
    for name, running in found.items():
        facts = {key: running[key] for key in ("pid", "http", "grpc")}
        processes = running["processes"]
        models = list(
            dict.fromkeys(each["model"] for each in processes if each["role"] in _WITH_MODEL)
        )
        if args.json:
            print(
                json.dumps({"name": name, **facts, "models": models, "processes": len(processes)})
            )
        else:
            print(
                f"{name or UNNAMED}: {facts['http']}, gRPC {facts['grpc']}, process "
                f"{facts['pid']}, {', '.join(models)}"
            )
    return 0 if found else 1
