"""Checker, which compiles grammars in processes that can be killed.

A grammar's limits are CPU time and memory of one process, so that a busy machine accepts the same
grammars as an idle one. Wall-clock time has a generous limit too; exceeding it means that the
machine is overloaded.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections import OrderedDict
from collections.abc import Collection
from pathlib import Path

from batonlm.core.errors import BatonError, Internal, InvalidArgument, Overloaded
from batonlm.core.request.request import Grammar
from batonlm.grammar.compiler import FIELD
from batonlm.tokenizer.child import Child
from batonlm.tokenizer.grammar_process import OUT_OF_MEMORY

MAX_KEPT = 4096
MAX_WAITING = 64
MEMORY_BYTES = 1 << 30
RETRY_AFTER_S = 1.0
_CLOCK_PER_CPU = 10.0
_START_S = 20.0


class Checker:
    """Runs on the event loop; processes are started on demand.

    special: see `load_vocabulary`. cpu_s: CPU time that a grammar may take. memory_bytes: the limit
    of a process, which includes the model's vocabulary. num_processes: grammars that are compiled
    at once.
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
        self._free: list[Child] = []
        self._started: set[Child] = set()
        self._places = asyncio.Semaphore(num_processes)
        self._known: OrderedDict[bytes, str] = OrderedDict()
        self._num_asked = 0
        self._max_asked = MAX_WAITING + num_processes

    async def check(self, grammar: Grammar) -> None:
        """Raises InvalidArgument naming `grammar` for one that does not compile or exceeds the
        limits, and Overloaded when too many wait or the machine is too busy."""
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
        """Kills the processes, also busy ones."""
        self._free.clear()
        while self._started:
            await asyncio.to_thread(self._started.pop().end)

    async def _try(self, grammar: Grammar) -> str:
        """What is wrong with the grammar, or ""."""
        child = await self._taken()
        asked = {"kind": grammar.kind.name, "text": grammar.text}
        answer = await self._ask(child, json.dumps(asked).encode() + b"\n")
        if answer is None:
            return self._said_by(child.code)
        self._free.append(child)
        return str(json.loads(answer)["error"])

    async def _taken(self) -> Child:
        while self._free:
            child = self._free.pop()
            if child.code is None:
                return child
            await asyncio.to_thread(child.end)
        self._started = {known for known in self._started if not known.over}
        child = Child("batonlm.tokenizer.grammar_process", *self._arguments)
        self._started.add(child)
        if await self._ask(child, b"") is None:
            raise _fault(child.code)
        return child

    async def _ask(self, child: Child, line: bytes) -> bytes | None:
        try:
            return await asyncio.to_thread(child.ask, line, self._timeout_s)
        except BaseException:
            child.kill()
            raise

    def _said_by(self, code: int | None) -> str:
        """What is wrong with a grammar whose process ended with `code`. Raises Internal when the
        grammar is not the cause."""
        if code == -signal.SIGPROF:
            return f"takes more than {self._cpu_s:g} s to compile"
        if code in (OUT_OF_MEMORY, -signal.SIGABRT, -signal.SIGSEGV, -signal.SIGKILL):
            return "takes too much memory to compile"
        raise _fault(code)


def _fault(code: int | None) -> BatonError:
    fault = ChildProcessError(f"a process that tries grammars ended with {code}")
    error = Internal("a grammar could not be checked")
    error.__cause__ = fault
    return error


def _busy() -> BatonError:
    return Overloaded("the tokenizer has too many grammars to check", retry_after_s=RETRY_AFTER_S)
