"""Run, what workers tell of one attempt; a port, which knows nothing."""

from __future__ import annotations

from typing import Protocol

from baton.core.errors import BatonError
from baton_loadtest.simulator.requests import Record


class Run(Protocol):
    """Each is called at the time at which it happens on the worker."""

    @property
    def record(self) -> Record: ...

    def planned(self) -> None:
        """Prefill: the first chunk is in the step that begins now."""

    def computed(self, end: int, cached: int) -> None:
        """Prefill: KV of all positions before `end` is there, of `cached` from the prefix cache."""

    def first_token(self, queue_s: float, compute_s: float) -> None:
        """Prefill: token 0 is sampled."""

    def started(self, cached: int) -> None:
        """Decode: all KV is there."""

    def ended(self) -> None:
        """Decode: the newest token was the last one."""

    def failed(self, error: BatonError) -> None:
        """The scheduler gave it up."""
