"""The process that one contender runs in: one job in, progress and one answer out, as JSON lines.

Only the standard library is imported here, so that interpreters without Baton's dependencies can
run a contender too. Whatever a library prints goes to stderr, never between the lines.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from typing import Any, TextIO

_said: TextIO = sys.stdout


def progress(text: str) -> None:
    """Shown to who waits for the answer."""
    print(json.dumps({"progress": text}), file=_said, flush=True)


def main() -> None:
    global _said
    _said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    module = import_module(f"baton_loadtest.bench.{sys.argv[1]}")
    job: dict[str, Any] = json.load(sys.stdin)
    answer: dict[str, Any] = module.run(job)
    print(json.dumps({"answer": answer}), file=_said, flush=True)


if __name__ == "__main__":
    # Under its own name: what others import from here must be this very module.
    import_module("baton_loadtest.bench.child").main()
