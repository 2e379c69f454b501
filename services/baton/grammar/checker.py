"""Checker, grammars tried in processes that may die of them; knows no wire.

What a grammar may cost is CPU time and memory of one process, so a busy machine refuses nothing
that an idle one takes. The time on the clock is bounded too, generously: then it is the machine
that is too busy.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import OrderedDict
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from baton.core.errors import BatonError, Internal, InvalidArgument, Overloaded
from baton.core.grammar import Grammar
from baton.grammar.check_process import NO_TOKENS, OUT_OF_MEMORY
from baton.grammar.compiler import FIELD

MAX_KEPT = 4096
MAX_WAITING = 64
MEMORY_BYTES = 1 << 30
RETRY_AFTER_S = 1.0
_CLOCK_PER_CPU = 10.0
_START_S = 20.0


class Checker:
    """Lives on the event loop; processes are started when they are needed. special: see
    `vocabulary.load`. cpu_s: CPU time that a grammar may take. memory_bytes: what a process
    may take, the model's tokens included. num_processes: grammars that are tried at once.
    """

    def __init__(
        self,
        folder: Path,
        special: Collection[str],
        *,
        cpu_s: float,
        num_processes: int,
        memory_bytes: int = MEMORY_BYTES,
    ) -> None:
        self._arguments = (str(folder), json.dumps(list(special)), str(cpu_s), str(memory_bytes))
        self._cpu_s = cpu_s
        self._timeout_s = _START_S + _CLOCK_PER_CPU * cpu_s
        self._free: list[Process] = []
        self._started: set[Process] = set()
        self._places = asyncio.Semaphore(num_processes)
        self._known: OrderedDict[bytes, str] = OrderedDict()
        self._num_asked = 0
        self._max_asked = MAX_WAITING + num_processes

    async def check(self, grammar: Grammar) -> None:
        """Raises InvalidArgument naming `grammar` for one that cannot be followed, or costs too
        much; Overloaded when there is too much to try, or the machine is too busy."""
        digest = grammar.digest
        if digest not in self._known:
            if self._num_asked >= self._max_asked:
                raise _busy()
            self._num_asked += 1
            try:
                async with asyncio.timeout(self._timeout_s), self._places:
                    error = await self._try(grammar)
            except TimeoutError:
                raise _busy() from None
            finally:
                self._num_asked -= 1
            self._known[digest] = error
            if len(self._known) > MAX_KEPT:
                self._known.popitem(last=False)
        self._known.move_to_end(digest)
        if self._known[digest]:
            raise InvalidArgument(self._known[digest], field=FIELD)

    async def close(self) -> None:
        """Ends the processes, whatever they try."""
        self._free.clear()
        for process in list(self._started):
            _kill(process)
            await process.wait()
            self._started.discard(process)

    async def _try(self, grammar: Grammar) -> str:
        """What is wrong with it, or ""."""
        process = self._free.pop() if self._free else await self._start()
        try:
            assert process.stdin is not None and process.stdout is not None
            asked = {"kind": grammar.kind.name, "text": grammar.text}
            process.stdin.write(json.dumps(asked).encode() + b"\n")
            with suppress(ConnectionError):
                await process.stdin.drain()
            answer = await process.stdout.readline()
            if not answer:
                code = await process.wait()
                self._started.discard(process)
                return self._said_by(code)
        except BaseException:
            _kill(process)
            raise
        self._free.append(process)
        return str(json.loads(answer)["error"])

    def _said_by(self, code: int) -> str:
        """What the end of a process says of the grammar that it tried. Raises Internal."""
        if code == -signal.SIGPROF:
            return f"takes more than {self._cpu_s:g} s to compile"
        if code == NO_TOKENS:
            return "cannot be followed with this model's tokenizer"
        if code in (OUT_OF_MEMORY, -signal.SIGABRT, -signal.SIGSEGV, -signal.SIGKILL):
            return "takes too much memory to compile"
        fault = ChildProcessError(f"a process that tries grammars ended with {code}")
        raise Internal("a grammar could not be checked") from fault

    async def _start(self) -> Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "baton.grammar.check_process", *self._arguments,
            stdin=PIPE, stdout=PIPE, stderr=DEVNULL,
        )  # fmt: skip
        self._started = {known for known in self._started if known.returncode is None}
        self._started.add(process)
        return process


def _kill(process: Process) -> None:
    with suppress(ProcessLookupError):
        process.kill()


def _busy() -> BatonError:
    return Overloaded("the tokenizer has too many grammars to check", retry_after_s=RETRY_AFTER_S)
