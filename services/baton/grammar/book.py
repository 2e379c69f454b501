"""GrammarBook, a worker's compiled grammars.

Compiling happens on a thread of its own, beside steps, one after the other: llguidance lets other
threads run meanwhile. A tokenizer has compiled each of them before, within its limits.

Kept are as many as fit into memory. What a grammar takes lies in llguidance, which tells nobody:
it is what the allocator has given out meanwhile, within what so much computing can have taken,
since other threads take and give back memory, too. What its use adds, `Compiled` knows.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from time import thread_time

from llguidance import LLMatcher, LLTokenizer

from baton.core.errors import InvalidArgument, Overloaded
from baton.core.request.request import Grammar
from baton.grammar.compiler import FIELD, compile_grammar, report

# TokenMatcher, one choice's way through a compiled grammar.
#
# The matchers of a grammar share an automaton, which grows with whatever one of them meets first,
# by up to 20 MB, and stays as long as the grammar. llguidance tells nobody how large it is, and
# asking the allocator before each mask costs more than the mask where a heap has many holes. But
# new states cost time: a mask that took long is computed once more, and by as much as that is
# quicker, states were made. What is allocated in that time is an estimate on the safe side (0.1 to
# 0.6 KB a microsecond were measured, beyond some that masks make too quickly to be seen). Where
# many masks have been looked at, only some are, for all.


SEEN_S = 50e-6
LOOKED_AT = 64
THEN_ONE_OF = 8
GROWN_BYTES_PER_S = 1e9
MAX_GROWN_BYTES = 24 << 20
"""An automaton has at most `LIMITS.max_lexer_states` states."""


class TokenMatcher:
    """Implements core's `Matcher`: what it is told of output makes its state, nothing else."""

    def __init__(self, matcher: LLMatcher, grammar: Compiled) -> None:
        """matcher: its own, at the start of the grammar."""
        self._matcher = matcher
        self._grammar = grammar
        self._num_taken = 0
        self._stuck = ""

    @property
    def stuck(self) -> str:
        return self._stuck

    def allowed(self, tokens: Sequence[int], first: int) -> bytes:
        new = list(tokens[first + self._num_taken :])
        self._num_taken += len(new)
        if new and not self._matcher.consume_tokens(new):
            return self._give_up("cannot be followed behind what the answer holds so far")
        mask, spent_s = self._timed_mask()
        if spent_s > SEEN_S and (weight := self._grammar.weight_of_look()):
            mask, again_s = self._timed_mask()
            self._grammar.grew(weight * (spent_s - again_s))
        if self._matcher.is_error() or not any(mask):
            return self._give_up("cannot be followed further with this model's tokens")
        return mask

    def _timed_mask(self) -> tuple[bytes, float]:
        began = thread_time()
        mask = self._matcher.compute_bitmask()
        return mask, thread_time() - began

    def _give_up(self, why: str) -> bytes:
        detail = report(self._matcher)
        self._stuck = f"{why}: {detail}" if detail else why
        return bytes(1)


class Compiled:
    """Implements core's `CompiledGrammar`. Its matchers share what they find out about the
    grammar's lexemes. num_bytes: of it when it was compiled."""

    def __init__(self, matcher: LLMatcher, num_bytes: int = 0) -> None:
        self._matcher = matcher
        self._num_bytes = num_bytes
        self._grown_bytes = 0
        self._num_long = 0

    @property
    def num_bytes(self) -> int:
        """Of it and what its matchers have found out; nearly, for nobody can ask."""
        return self._num_bytes + self._grown_bytes

    def weight_of_look(self) -> int:
        """Of a mask that took long: how many such it stands for; 0 where it is not looked at."""
        self._num_long += 1
        if self._grown_bytes >= MAX_GROWN_BYTES:
            return 0
        if self._num_long <= LOOKED_AT:
            return 1
        return 0 if self._num_long % THEN_ONE_OF else THEN_ONE_OF

    def grew(self, spent_s: float) -> None:
        """CPU time was spent on finding out more."""
        grown = self._grown_bytes + int(max(0.0, spent_s) * GROWN_BYTES_PER_S)
        self._grown_bytes = min(grown, MAX_GROWN_BYTES)

    def matcher(self) -> TokenMatcher:
        return TokenMatcher(self._matcher.deep_copy(), self)


MAX_KEPT_BYTES = 128 << 20
LEAST_BYTES = 1 << 16
"""Of a compiled grammar; what an object of a few numbers and words takes."""
COMPILED_BYTES_PER_S = 1e9
"""At most: 0.2 GB a second of CPU time were measured."""
MAX_COMPILING = 64
TIMEOUT_S = 20.0


class GrammarBook:
    """Lives on the event loop. tokenizer: None where the model's tokens are not known as text; then
    every grammar is refused."""

    def __init__(
        self,
        tokenizer: LLTokenizer | None,
        *,
        timeout_s: float = TIMEOUT_S,
        max_bytes: int = MAX_KEPT_BYTES,
    ) -> None:
        self._tokenizer = tokenizer
        self._timeout_s = timeout_s
        self._max_bytes = max_bytes
        self._kept: OrderedDict[bytes, Compiled] = OrderedDict()
        """The first to be forgotten first."""
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
            found = self._kept[digest]
            self._forget()  # for those that are used have grown
            return found
        task = self._compiling.get(digest)
        if task is None:
            if len(self._compiling) >= MAX_COMPILING:
                raise _busy()
            task = self._begin(digest, lambda: _measured(tokenizer, grammar))
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.shield(task)
        except TimeoutError:
            raise _busy() from None

    @property
    def num_bytes(self) -> int:
        """Of those that are kept."""
        return sum(compiled.num_bytes for compiled in self._kept.values())

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
        self._forget()

    def _forget(self) -> None:
        """Until the rest fits. Whoever follows a forgotten one goes on with it."""
        total = self.num_bytes
        while total > self._max_bytes:
            _, forgotten = self._kept.popitem(last=False)
            total -= forgotten.num_bytes


def _measured(tokenizer: LLTokenizer, grammar: Grammar) -> Compiled:
    before, began = _allocated(), thread_time()
    matcher = compile_grammar(tokenizer, grammar)
    most = LEAST_BYTES + int((thread_time() - began) * COMPILED_BYTES_PER_S)
    least = LEAST_BYTES + len(grammar.text)
    return Compiled(matcher, min(max(_allocated() - before, least), max(most, least)))


class _MallInfo(ctypes.Structure):
    """glibc's mallinfo2."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


_mallinfo: Callable[[], _MallInfo] = _MallInfo
with suppress(
    AttributeError
):  # another library has it not, nor glibc before 2021: the least counts
    _mallinfo2 = ctypes.CDLL(None).mallinfo2
    _mallinfo2.restype = _MallInfo
    _mallinfo = _mallinfo2


def _allocated() -> int:
    """Bytes that this process has from malloc, of all threads."""
    info = _mallinfo()
    return int(info.uordblks + info.hblkhd)


def _busy() -> Overloaded:
    return Overloaded("this worker compiles too many grammars", retry_after_s=1.0)
