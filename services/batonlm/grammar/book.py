"""GrammarBook, a worker's compiled grammars, and the matchers of its choices."""

from __future__ import annotations

import asyncio
import ctypes
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from time import thread_time

from llguidance import LLMatcher, LLTokenizer

from batonlm.core.errors import InvalidArgument, Overloaded
from batonlm.core.request.request import Grammar
from batonlm.grammar.compiler import FIELD, compile_grammar, report

SEEN_S = 50e-6
"""Masks that take longer are computed twice, to measure the automaton's growth."""
LOOKED_AT = 64
"""How many such masks of a grammar are all measured."""
THEN_ONE_OF = 8
"""Afterwards one of so many is measured, and counts for all."""
GROWN_BYTES_PER_S = 1e9
"""An upper estimate: 0.1 to 0.6 KB per microsecond were measured."""
MAX_GROWN_BYTES = 24 << 20
"""The most that an automaton grows: it has at most `LIMITS.max_lexer_states` states."""


class TokenMatcher:
    """Implements core's `Matcher`. Its state depends only on the tokens that `allowed` receives.

    The matchers of a grammar share an automaton, which grows by up to 20 MB and lives as long as
    the grammar. llguidance does not report its size, and asking the allocator before each mask
    costs more than the mask on a fragmented heap. But new states take time: a slow mask is computed
    a second time, and the difference is the time that went into new states.
    """

    def __init__(self, matcher: LLMatcher, grammar: Compiled) -> None:
        """matcher: a copy for this choice, at the start of the grammar."""
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
        return self._mask(self._matcher) or self._give_up(
            "cannot be followed further with this model's tokens"
        )

    def allowed_behind(
        self, tokens: Sequence[int], first: int, drafts: Sequence[int]
    ) -> list[bytes]:
        masks = [self.allowed(tokens, first)]
        if self._stuck:
            return masks
        # A copy cannot leave behind what it took, nor an error.
        ahead = self._matcher.deep_copy()
        for draft in drafts:
            byte = masks[-1][draft >> 3 : (draft >> 3) + 1]
            if not (byte and byte[0] >> (draft & 7) & 1 and ahead.consume_token(draft)):
                break
            mask = self._mask(ahead)
            if not mask:
                break
            masks.append(mask)
        return masks

    def _mask(self, matcher: LLMatcher) -> bytes:
        """What may follow; empty where nothing may."""
        mask, spent_s = _timed_mask(matcher)
        if spent_s > SEEN_S and (weight := self._grammar.weight_of_look()):
            mask, again_s = _timed_mask(matcher)
            self._grammar.grew(weight * (spent_s - again_s))
        return b"" if matcher.is_error() or not any(mask) else mask

    def _give_up(self, why: str) -> bytes:
        detail = report(self._matcher)
        self._stuck = f"{why}: {detail}" if detail else why
        return bytes(1)


def _timed_mask(matcher: LLMatcher) -> tuple[bytes, float]:
    began = thread_time()
    mask = matcher.compute_bitmask()
    return mask, thread_time() - began


class Compiled:
    """Implements core's `CompiledGrammar`. Its matchers share an automaton of the grammar's
    lexemes. num_bytes: the grammar's size when it was compiled."""

    def __init__(self, matcher: LLMatcher, num_bytes: int = 0) -> None:
        self._matcher = matcher
        self._num_bytes = num_bytes
        self._grown_bytes = 0
        self._num_long = 0

    @property
    def num_bytes(self) -> int:
        """The estimated size of the grammar and its automaton."""
        return self._num_bytes + self._grown_bytes

    def weight_of_look(self) -> int:
        """For a slow mask: how many slow masks its measurement stands for; 0 to skip it."""
        self._num_long += 1
        if self._grown_bytes >= MAX_GROWN_BYTES:
            return 0
        if self._num_long <= LOOKED_AT:
            return 1
        return 0 if self._num_long % THEN_ONE_OF else THEN_ONE_OF

    def grew(self, spent_s: float) -> None:
        """Adds the automaton's growth in so much CPU time."""
        grown = self._grown_bytes + int(max(0.0, spent_s) * GROWN_BYTES_PER_S)
        self._grown_bytes = min(grown, MAX_GROWN_BYTES)

    def matcher(self) -> TokenMatcher:
        return TokenMatcher(self._matcher.deep_copy(), self)


MAX_KEPT_BYTES = 128 << 20
LEAST_BYTES = 1 << 16
"""The least size of a compiled grammar, that of an object with a few numbers and words."""
COMPILED_BYTES_PER_S = 1e9
"""An upper bound: 0.2 GB per second of CPU time were measured."""
MAX_COMPILING = 64
TIMEOUT_S = 20.0


class GrammarBook:
    """A worker's compiled grammars, as many as fit into max_bytes. Used on the event loop.

    Grammars are compiled one after the other on a separate thread, beside steps: llguidance
    releases the GIL. A tokenizer has compiled each of them before, within its limits.

    tokenizer: None without a tokenizer in the model's folder; then every grammar is refused.
    timeout_s: the longest wait for a compilation.
    """

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
        """In the order of eviction: the next one first."""
        self._compiling: dict[bytes, asyncio.Future[Compiled]] = {}
        self._thread = ThreadPoolExecutor(1, "grammar")

    async def compiled(self, grammar: Grammar | None) -> Compiled | None:
        """The grammar, compiled now or before; None stays None.

        Raises InvalidArgument naming `grammar`, and Overloaded when too many others wait or it
        takes too long.
        """
        if grammar is None:
            return None
        tokenizer, digest = self._tokenizer, grammar.digest
        if tokenizer is None or not tokenizer.eos_tokens:
            raise InvalidArgument("cannot be followed by this worker's model", field=FIELD)
        if digest in self._kept:
            self._kept.move_to_end(digest)
            found = self._kept[digest]
            self._forget()  # because grammars grow with use
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
        """The estimated size of all kept grammars."""
        return sum(compiled.num_bytes for compiled in self._kept.values())

    def close(self) -> None:
        """Cancels waiting compilations. A running one ends with the process at the latest."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _begin(
        self, digest: bytes, compile_now: Callable[[], Compiled]
    ) -> asyncio.Future[Compiled]:
        """Starts a compilation. It continues when its caller is cancelled: others may wait for
        it."""
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
        """Evicts until the rest fits. Matchers of an evicted grammar stay usable."""
        total = self.num_bytes
        while total > self._max_bytes:
            _, forgotten = self._kept.popitem(last=False)
            total -= forgotten.num_bytes


def _measured(tokenizer: LLTokenizer, grammar: Grammar) -> Compiled:
    """Compiles a grammar and estimates its size, which llguidance does not report: by the memory
    allocated meanwhile, bounded by what the CPU time can have used, since other threads allocate
    and free memory too."""
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
with suppress(AttributeError):  # only glibc since 2021 has it; without it the least size counts
    _mallinfo2 = ctypes.CDLL(None).mallinfo2
    _mallinfo2.restype = _MallInfo
    _mallinfo = _mallinfo2


def _allocated() -> int:
    """The bytes that all threads of this process have allocated with malloc."""
    info = _mallinfo()
    return int(info.uordblks + info.hblkhd)


def _busy() -> Overloaded:
    return Overloaded("this worker compiles too many grammars", retry_after_s=1.0)
