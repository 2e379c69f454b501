"""A second process that a measuring one talks to in lines of JSON.

Both ends are here: `Beside` asks, `answer` is the main of who is asked. Whatever a library prints
there goes to stderr, never between the lines.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from baton_loadtest.bench.process import ContenderFailed

LONGEST_LINE = 2**24
GOODBYE_S = 5.0

Answer = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


class Beside:
    """The process, from the asking end. It ends when it is closed or when we are gone."""

    def __init__(self, module: str, process: asyncio.subprocess.Process) -> None:
        self._module, self._process = module, process
        self._turn = asyncio.Lock()

    @classmethod
    async def start(cls, module: str, core: int | None = None) -> Beside:
        """Runs `baton_loadtest.bench.MODULE`, pinned to a core where the system can."""
        pin = ["taskset", "-c", str(core)] if core is not None and shutil.which("taskset") else []
        process = await asyncio.create_subprocess_exec(
            *pin,
            sys.executable,
            "-m",
            f"baton_loadtest.bench.{module}",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=LONGEST_LINE,
        )
        return cls(module, process)

    async def ask(self, **command: Any) -> dict[str, Any]:
        """One command, one answer. Raises ContenderFailed when the process is gone."""
        assert self._process.stdin is not None and self._process.stdout is not None
        async with self._turn:
            try:
                self._process.stdin.write(json.dumps(command).encode() + b"\n")
                await self._process.stdin.drain()
                line = await self._process.stdout.readline()
            except ConnectionError:
                line = b""
        if not line:
            raise ContenderFailed(f"{self._module} ended without an answer")
        said: dict[str, Any] = json.loads(line)
        return said

    async def close(self) -> None:
        """Lets it end by itself, bounded, then kills it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(GOODBYE_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


async def answer(handle: Answer) -> None:
    """Answers one command after the other until who asks is gone."""
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    lines = asyncio.StreamReader(LONGEST_LINE)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), sys.stdin
    )
    while line := await lines.readline():
        print(json.dumps(await handle(json.loads(line))), file=said, flush=True)
