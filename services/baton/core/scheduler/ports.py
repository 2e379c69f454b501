"""What core needs from outside, as protocols; each ships with a double that passes its tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from baton.core.request.model import KvLayout, ModelDescription
from baton.core.scheduler.plan import Extents, StepPlan, StepResult


class ModelRunner(Protocol):
    """Runs steps of one model over one block pool's memory.

    Called by the engine thread only, but for copies (`copies_beside_steps`). `submit` starts a step
    and may return before it is done; `collect` waits for the oldest submitted one. Steps complete
    in the order submitted. Doubles: `baton.engine.fake.FakeRunner` (no torch), real:
    `baton.engine.runner.TorchRunner`.
    """

    @property
    def model(self) -> ModelDescription: ...

    @property
    def layout(self) -> KvLayout: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def block_size(self) -> int: ...

    @property
    def num_swap_blocks(self) -> tuple[int, int]:
        """Blocks of swap memory: in host memory, on disk."""

    @property
    def depth(self) -> int:
        """How many steps may be submitted before the oldest is collected; 1 where `submit`
        computes, 2 where the next step is better prepared while one runs."""

    @property
    def copies_beside_steps(self) -> bool:
        """Whether pack and unpack may be called on another thread while a step runs, for positions
        that no step in flight writes (pack) or reads (unpack)."""

    def submit(self, plan: StepPlan) -> None: ...

    def collect(self) -> StepResult: ...

    def pack(self, extents: Extents, first_position: int, count: int, out: memoryview) -> None:
        """Writes KV of `count` positions from first_position into `out` in the wire layout.

        `out` has exactly count * layout.bytes_per_position bytes. The step that wrote these
        positions has been collected.
        """

    def unpack(
        self, extents: Extents, first_position: int, count: int, payload: memoryview
    ) -> None:
        """The inverse of pack. The blocks are owned by the sequence and no step reads them yet.

        In position order: what follows the last position in its block may be cleared.
        """

    def close(self) -> None:
        """Frees memory and threads, once no step in flight can touch them; such steps are dropped.
        Idempotent."""


class Matcher(Protocol):
    """One choice's way through a grammar: a function of the tokens it has so far, so that a choice
    may go on wherever these are known. Engine thread only. Double: `tests.core.grammars`, real:
    `baton.grammar.matcher.TokenMatcher`.
    """

    def allowed(self, tokens: Sequence[int], first: int) -> bytes:
        """Which tokens may be drawn next: a bit for each id, least significant first.

        tokens: of the choice; its output begins at index `first` and only ever grows. An end token
        is among them where the grammar is satisfied, and alone where nothing can follow. All bits
        are 0 when no token can be drawn; then `stuck` says why.
        """

    @property
    def stuck(self) -> str:
        """Why nothing can be drawn any more, in words for the client, or ""."""


class CompiledGrammar(Protocol):
    """A grammar in terms of one model's tokens."""

    def matcher(self) -> Matcher:
        """A new choice's, which has no output yet."""
