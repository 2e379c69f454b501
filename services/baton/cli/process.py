"""One child process of the supervisor: starts it, reads what it announces, notices its end.

Knows nothing of roles. A child announces itself by JSON lines on stdout: `{"loading": done,
"total": all}` in bytes while it loads, a line with "role" once it serves. Its stderr goes to the
log file.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path

from baton.cli.layout import ProcessSpec

LAST_LINES = 20


class Child:
    """One life of one process."""

    def __init__(self, spec: ProcessSpec, process: asyncio.subprocess.Process, log: Path) -> None:
        self.spec = spec
        self.serving = asyncio.Event()
        self.last_words: deque[str] = deque(maxlen=LAST_LINES)
        self._process = process
        self._log = log
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def start(
        cls, spec: ProcessSpec, log: Path, threads: int, on_loading: Callable[[str, int, int], None]
    ) -> Child:
        environment = {
            **os.environ,
            "BATON_PARENT_PID": str(os.getpid()),
            # Must be set before torch is imported: idle threads would else spin on the other
            # engine's core.
            "OMP_NUM_THREADS": str(threads),
            "OMP_WAIT_POLICY": "PASSIVE",
            "PYTHONUNBUFFERED": "1",
            # gRPC tells every goodbye of a peer as if it were news.
            "GRPC_VERBOSITY": os.environ.get("GRPC_VERBOSITY", "ERROR"),
        }
        process = await asyncio.create_subprocess_exec(
            *spec.command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment,
        )
        child = cls(spec, process, log)
        assert process.stdout is not None and process.stderr is not None
        child._tasks = [
            asyncio.create_task(child._announcements(process.stdout, on_loading)),
            asyncio.create_task(child._logs(process.stderr)),
        ]
        return child

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> int:
        """The exit code, after everything the child said was read."""
        code = await self._process.wait()
        await asyncio.wait(self._tasks, timeout=1.0)
        return code

    def terminate(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def _announcements(
        self, stream: asyncio.StreamReader, on_loading: Callable[[str, int, int], None]
    ) -> None:
        async for line in stream:
            try:
                said = json.loads(line)
            except ValueError:
                continue
            if "loading" in said:
                on_loading(self.spec.name, int(said["loading"]), int(said["total"]))
            elif "role" in said:
                self.serving.set()

    async def _logs(self, stream: asyncio.StreamReader) -> None:
        with self._log.open("ab", buffering=0) as log:
            async for line in stream:
                log.write(line)
                self.last_words.append(line.decode(errors="replace").rstrip())
