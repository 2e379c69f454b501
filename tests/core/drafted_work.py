"""A real scheduler whose steps take made-up times, and drafts that are right as often as wanted."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from batonlm.core.kvcache.block_pool import BlockPool
from batonlm.core.request.attempt import Attempt
from batonlm.core.request.model import ModelDescription
from batonlm.core.request.request import SamplingParams, StopParams
from batonlm.core.scheduler.drafts import Draft, Prices, Wish
from batonlm.core.scheduler.events import NewTokens
from batonlm.core.scheduler.plan import SampledToken, StepResult, StepWork
from batonlm.core.scheduler.policy import SchedulerPolicy
from batonlm.core.scheduler.scheduler import Scheduler

PROMPT, BLOCK_SIZE, VOCAB_SIZE = 16, 16, 1 << 20


def token_at(sequence_id: int, position: int) -> int:
    """The token of a sequence that stands at a position."""
    return 4 + (sequence_id * 7919 + position * 104729) % (VOCAB_SIZE - 8)


@dataclass
class RandomDrafter:
    """Implements `Drafter`. Each of its drafts is right with probability `right`, and its odds are
    that times `confidence`."""

    right: float
    confidence: float = 1.0
    seed: int = 0
    kinds = ("random",)
    computes = False
    seconds = 0.0
    behind_s = 0.0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def draft(self, wishes: Sequence[Wish], prices: Prices) -> list[Draft]:
        return [self._draft(wish) for wish in wishes]

    def peek(self, wishes: Sequence[Wish], prices: Prices) -> list[Draft]:
        return self.draft(wishes, prices)

    def forget(self, sequence_id: int) -> None:
        pass

    def _draft(self, wish: Wish) -> Draft:
        size = len(wish.tokens)
        tokens = [
            token_at(wish.sequence_id, size + i) + (self._random.random() >= self.right)
            for i in range(wish.most)
        ]
        return Draft(tokens, [min(0.99, self.right * self.confidence)] * wish.most, "random")


class Work:
    """So many sequences, whose steps take what a formula says."""

    def __init__(
        self,
        rows: int,
        seconds: Callable[[StepWork], float],
        drafter: RandomDrafter,
        target_step_s: float = 0.0,
    ) -> None:
        model = ModelDescription("m", "m", 1 << 20, VOCAB_SIZE, (), "t")
        policy = SchedulerPolicy(max_sequences=512, headroom=1, target_step_s=target_step_s)
        pool = BlockPool(1 << 16, BLOCK_SIZE)
        self.scheduler = Scheduler(pool, policy, model, drafter=drafter)
        self.works: list[StepWork] = []
        """Of the steps so far, but the first one."""
        self.made = [0]
        """How many tokens there were before each, and are now."""
        self.seconds = seconds
        for i in range(rows):
            self.scheduler.add(_attempt(i), 0.0)
        self.run(1)
        self.works, self.made = [], [0]

    def run(self, count: int) -> list[StepWork]:
        """So many steps. Returns what they had to compute."""
        for _ in range(count):
            plan = self.scheduler.plan(0.0)
            assert plan is not None
            tokens = tuple(
                SampledToken(row.sequence_id, 0, token_at(row.sequence_id, PROMPT + row.position))
                for chunk in plan.chunks
                for row in chunk.samples
            )
            self.scheduler.observe(plan, self.seconds(plan.work))
            events = self.scheduler.apply(StepResult(plan.step, tokens), 0.0)
            made = [one for e in events if isinstance(e, NewTokens) for one in e.tokens]
            self.works.append(plan.work)
            self.made.append(self.made[-1] + sum(len(one.token_ids) for one in made))
        return self.works[-count:]


def _attempt(number: int) -> Attempt:
    prompt = tuple(token_at(number, i) for i in range(PROMPT))
    return Attempt(
        str(number), 0, (0,), prompt, PROMPT, SamplingParams(temperature=0.0), StopParams(100_000)
    )
