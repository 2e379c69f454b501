"""What core needs from outside, as protocols; each ships with a double that passes its tests."""

from __future__ import annotations

from typing import Protocol

from baton.core.model import KvLayout, ModelDescription
from baton.core.plan import Extents, StepPlan, StepResult


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
