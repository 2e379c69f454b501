"""What both schedulers share: their port, limits, orders and checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from baton.core.errors import Overloaded
from baton.core.request.attempt import Attempt
from baton.core.routing.speed import WorkerSpeed
from baton.core.scheduler.events import Event
from baton.core.scheduler.plan import StepPlan, StepResult
from baton.core.scheduler.sequence import SequenceGroup


@dataclass(frozen=True, slots=True)
class Load:
    """How busy a scheduler is. Free blocks include cached ones.

    swap_free, swap_used: blocks of swap memory, in host memory and on disk.
    """

    waiting_sequences: int
    waiting_tokens: int
    running_sequences: int
    free_blocks: int
    swap_free: tuple[int, int] = (0, 0)
    swap_used: tuple[int, int] = (0, 0)


class Scheduler(Protocol):
    """Decides what runs. Called by the engine thread only; every time is a reading of one clock.

    For each step: `plan`, run it, `observe` and `apply`. Everything else may be called in between,
    also `plan` while planned steps are not applied yet: steps run and are applied in order.
    """

    @property
    def has_work(self) -> bool:
        """Whether anything is here that has not ended, or is kept for another worker."""

    @property
    def load(self) -> Load: ...

    @property
    def speed(self) -> WorkerSpeed:
        """By the steps so far. May be read by any thread."""

    @property
    def preemptions(self) -> dict[str, int]:
        """How often blocks were taken from what ran, by what became of its KV: swap_host,
        swap_disk or recompute. What never happened may be missing."""

    def plan(self, now: float) -> StepPlan | None:
        """The next step, which the caller must run; None when nothing can run now."""

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """How long a step ran, so that the time of later ones can be predicted: from its start, or
        the end of the one before it, to its own end. Called before its result is applied, by
        whoever has a clock."""

    def apply(self, result: StepResult, now: float) -> list[Event]:
        """Takes the oldest planned step's result and tells everything that came of it."""

    def take_events(self) -> list[Event]:
        """What happened outside of `apply`, in order; each event is told once."""

    def next_wake(self, now: float) -> float | None:
        """When `plan` may find more than it did just now though nothing was called; or None."""

    def check(self) -> None:
        """Raises InvariantBroken when the books disagree. For idle moments and tests."""


RETRY_S = 0.05
"""About a step, and as often as a worker tells its load."""


@dataclass(frozen=True, slots=True)
class QueueLimit:
    """How much may wait. As long as fewer tokens than these do, an input of any length is let in:
    the queue must not run dry while a long one waits for the whole of it to be free.
    """

    tokens: int = 16384
    sequences: int = 1024

    def check(self, load: Load, attempt: Attempt) -> None:
        """Raises Overloaded when an attempt does not fit any more. The router asks again as soon as
        the worker tells that less waits."""
        full = load.waiting_tokens >= self.tokens
        if full or load.waiting_sequences + len(attempt.choices) > self.sequences:
            raise Overloaded(
                f"The worker's queue is full: {load.waiting_sequences} sequences with "
                f"{load.waiting_tokens} tokens wait.",
                retry_after_s=RETRY_S,
            )


Order = Callable[[Iterable[SequenceGroup], float], list[SequenceGroup]]
"""Who of one tenant gets the token budget first, at a time; priority classes stay in order."""


def first_come(inputs: Iterable[SequenceGroup], now: float) -> list[SequenceGroup]:
    """Priority class, then arrival."""
    return sorted(inputs, key=lambda job: (job.priority, job.arrived, job.id))


def shortest_remaining(aging_tokens_per_s: float) -> Order:
    """Priority class, then fewest positions left, where each second of waiting counts as so many
    positions less. Nobody starves: what arrives now loses against all who waited long enough."""

    def order(inputs: Iterable[SequenceGroup], now: float) -> list[SequenceGroup]:
        def rank(job: SequenceGroup) -> tuple[int, float, int]:
            waited = (now - job.arrived) * aging_tokens_per_s
            return job.priority, job.remaining - waited, job.id

        return sorted(inputs, key=rank)

    return order


def earliest(times: Iterable[float | None], now: float) -> float | None:
    """The first time that is still to come, or None."""
    return min((time for time in times if time is not None and time > now), default=None)
