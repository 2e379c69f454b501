"""GrammarBook, a worker's compiled grammars; knows neither attempts nor steps.

Compiling happens on a thread of its own, beside steps, one after the other: llguidance lets other
threads run meanwhile. A tokenizer has compiled each of them before, within its limits.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from llguidance import LLTokenizer

from baton.core.errors import InvalidArgument, Overloaded
from baton.core.grammar import Grammar
from baton.grammar.compiler import FIELD, compile_grammar
from baton.grammar.matcher import Compiled

MAX_KEPT = 128
MAX_COMPILING = 64
TIMEOUT_S = 20.0


class GrammarBook:
    """Lives on the event loop. tokenizer: None where the model's tokens are not known as text; then
    every grammar is refused."""

    def __init__(self, tokenizer: LLTokenizer | None, *, timeout_s: float = TIMEOUT_S) -> None:
        self._tokenizer = tokenizer
        self._timeout_s = timeout_s
        self._kept: OrderedDict[bytes, Compiled] = OrderedDict()
        self._compiling: dict[bytes, asyncio.Future[Compiled]] = {}
        self._thread = ThreadPoolExecutor(1, "grammar")

    async def compiled(self, grammar: Grammar | None) -> Compiled | None:
        """The grammar, compiled now or before; None stays None.

        Raises InvalidArgument naming `grammar`, and Overloaded when too many others are compiled
        first.
        """
        if grammar is None:
            return None
        tokenizer, digest = self._tokenizer, grammar.digest
        if tokenizer is None or not tokenizer.eos_tokens:
            raise InvalidArgument("cannot be followed by this worker's model", field=FIELD)
        if digest in self._kept:
            self._kept.move_to_end(digest)
            return self._kept[digest]
        task = self._compiling.get(digest)
        if task is None:
            if len(self._compiling) >= MAX_COMPILING:
                raise _busy()
            task = self._begin(digest, lambda: Compiled(compile_grammar(tokenizer, grammar)))
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.shield(task)
        except TimeoutError:
            raise _busy() from None

    def close(self) -> None:
        """Compiles nothing more. What is being compiled ends with the process at the latest."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _begin(
        self, digest: bytes, compile_now: Callable[[], Compiled]
    ) -> asyncio.Future[Compiled]:
        """Goes on when whoever asked first is gone: others may wait for it too."""
        task = asyncio.get_running_loop().run_in_executor(self._thread, compile_now)
        self._compiling[digest] = task
        task.add_done_callback(lambda done: self._ended(digest, done))
        return task

    def _ended(self, digest: bytes, done: asyncio.Future[Compiled]) -> None:
        del self._compiling[digest]
        if done.cancelled() or done.exception() is not None:
            return
        self._kept[digest] = done.result()
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)


def _busy() -> Overloaded:
    return Overloaded("this worker compiles too many grammars", retry_after_s=1.0)
