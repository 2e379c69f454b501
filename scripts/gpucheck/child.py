"""The program that runs one part of one section.

    python -m gpucheck.child MODULE:FUNCTION --part PART --device cuda --known FILE --out FILE

A section is a generator of figures. Each is written as one line of JSON as soon as it is there, so
that what was measured before a crash or a time limit counts.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from baton_loadtest.report import Result, table
from gpucheck.check import Check, Skip

Run = Callable[[Check], Iterator[Result]]


def load(name: str) -> Run:
    """The section of a MODULE:FUNCTION."""
    module, _, function = name.partition(":")
    run: Run = getattr(importlib.import_module(module), function)
    return run


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Runs one part of one section.")
    parser.add_argument("run")
    parser.add_argument("--part", default="")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--known", type=Path, required=True, help="JSON: figures by name")
    parser.add_argument("--out", type=Path, required=True, help="where the lines go")
    chosen = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    known = json.loads(chosen.known.read_text())
    check = Check(chosen.device, chosen.quick, chosen.part, known)
    with chosen.out.open("w") as out:

        def line(what: object) -> None:
            out.write(json.dumps(what) + "\n")
            out.flush()

        try:
            for result in load(chosen.run)(check):
                line(asdict(result))
                print(table([result]), flush=True)
        except Skip as reason:
            line({"skipped": str(reason)})
            print(f"skipped: {reason}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
