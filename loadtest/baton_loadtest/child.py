"""The process of `launch` that runs one function of a module, and answers in JSON.

Output of libraries goes to stderr, never between the JSON lines.

    python -m baton_loadtest.child MODULE FUNCTION

A plain function is called with each command from stdin and returns the answer. A coroutine function
passes a handler of commands to `answer`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from importlib import import_module
from inspect import iscoroutinefunction
from typing import Any, TextIO

LONGEST_LINE = 2**27
"""Maximum bytes of a command or an answer."""

_out: TextIO = sys.stdout

Handler = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
"""Takes a command and returns its answer."""


def progress(text: str) -> None:
    """Shows a line of progress before the answer of a command."""
    print(json.dumps({"progress": text}), file=_out, flush=True)


async def answer(handle: Handler) -> None:
    """Answers commands one after another until stdin ends."""
    lines = asyncio.StreamReader(LONGEST_LINE)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), sys.stdin
    )
    while line := await lines.readline():
        print(json.dumps({"answer": await handle(json.loads(line))}), file=_out, flush=True)


def main() -> None:
    global _out
    _out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    function = getattr(import_module(sys.argv[1]), sys.argv[2])
    if iscoroutinefunction(function):
        from batonlm.rpc.loop import Loop

        with asyncio.Runner(loop_factory=Loop) as runner:
            runner.run(function())
    else:
        for line in sys.stdin:
            print(json.dumps({"answer": function(json.loads(line))}), file=_out, flush=True)


if __name__ == "__main__":
    # Run under its module name: imports of this module elsewhere must get this instance.
    import_module("baton_loadtest.child").main()
