"""Speculation: which sequences compute drafts behind their last token, and how many.

A sequence with drafts has several rows in a step, one behind its last token and one behind each
draft. Random numbers are keyed by position, so each row draws the token that it would draw in a
step of its own, if the drafts before it are right: up to the first wrong one all of them count, and
the others are dropped. So drafts change no token, only how many steps it takes.

A draft is worth its odds, which is the part of a step that it saves its sequence, and costs what
one position more takes in a step of so many rows, which is measured. It is computed if it is worth
more than the tokens that the step could make in that time, and as long as drafts have not lost more
time than they may (`DraftCost`). So speculation ends by itself where batches are large or drafts
are wrong, and comes back when they are not.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from math import inf

from batonlm.core.kvcache.block_pool import BlockPool
from batonlm.core.scheduler.drafts import (
    LEAST_WORTH,
    MARGIN,
    MOST_DRAFTS,
    Drafter,
    Prices,
    Wish,
    worths,
)
from batonlm.core.scheduler.plan import StepWork
from batonlm.core.scheduler.policy import SchedulerPolicy
from batonlm.core.scheduler.sequence import Sequence
from batonlm.core.scheduler.step_cost import DraftCost, StepCost


@dataclass(slots=True)
class DraftCounts:
    """What became of drafts of one kind."""

    drafted: int = 0
    """Drafts that were computed."""
    accepted: int = 0
    """Those that were right, behind none that was not."""
    saved_steps: int = 0
    """How many more steps their sequences would have taken without them."""


class Speculation:
    """Chooses drafts, and counts what becomes of them."""

    def __init__(
        self, drafter: Drafter, pool: BlockPool, policy: SchedulerPolicy, cost: StepCost
    ) -> None:
        self.counts = {kind: DraftCounts() for kind in drafter.kinds}
        """By kind."""
        self.drafting_s = 0.0
        """What finding the drafts of the planned step took of the device."""
        self._drafter = drafter
        self._kinds: dict[int, str] = {}
        """Of drafts in flight, by sequence id."""
        self._pool = pool
        self._policy = policy
        self._cost = DraftCost(cost)

    @property
    def drafted(self) -> int:
        """Of all kinds."""
        return sum(counts.drafted for counts in self.counts.values())

    @property
    def accepted(self) -> int:
        """Of all kinds."""
        return sum(counts.accepted for counts in self.counts.values())

    @property
    def saved_steps(self) -> int:
        """Of all kinds."""
        return sum(counts.saved_steps for counts in self.counts.values())

    def choose(
        self,
        rows: Many[Sequence],
        num_sampled: int,
        prefill: int,
        blocks_to_keep: Callable[[], int],
    ) -> dict[int, Many[int]]:
        """The drafts that rows of the planned step compute, by sequence id.

        num_sampled: tokens that the step draws for others. prefill: positions of inputs in it.
        blocks_to_keep: how many have to stay free.
        """
        policy = self._policy
        self.drafting_s = 0.0
        asked = [one for one in rows if one.speculates and not one.in_flight]
        room = min(
            policy.max_sequences - len(rows) - num_sampled,
            policy.token_budget - len(rows) - prefill,
            self._cost.room(len(rows)),
        )
        if not asked or room <= 0:
            if not prefill:
                self._cost.passed()
            return {}
        step_s, draft_s = self._seconds(rows, prefill)
        within_s = policy.target_step_s - step_s if policy.target_step_s else inf
        full_s = self._cost.draft_s(len(rows))
        if policy.target_step_s and full_s:
            room = min(room, int(within_s / full_s))
            if room <= 0:
                return {}
        least = _least_worth(len(rows), 0.0, 0, step_s, draft_s)
        if least >= 1.0:
            self._cost.declined(len(rows))
            return {}
        wishes = []
        for one in asked:
            most = min(MOST_DRAFTS, room, one.ceiling - 1 - one.num_computed_tokens)
            if most > 0 and self._drafter.computes:
                most = self._room_for(one, most, blocks_to_keep)
            if most > 0:
                wishes.append(_wish(one, most))
        prices = Prices(len(rows), step_s, draft_s, within_s, room)
        drafts = self._drafter.draft(wishes, prices)
        self.drafting_s = self._drafter.seconds
        self._cost.found(len(rows), self.drafting_s - self._drafter.behind_s)
        found = {
            wish.sequence_id: draft
            for wish, draft in zip(wishes, drafts, strict=True)
            if draft.tokens
        }
        all_worths = {key: worths(draft.odds) for key, draft in found.items()}
        kept = _worth_more(all_worths, least, room)
        # With these the step makes more tokens, so the last of them are worth less than that.
        gain, count = sum(map(sum, kept.values())), sum(map(len, kept.values()))
        least = _least_worth(len(rows), gain, count, step_s, draft_s)
        kept = _worth_more(kept, least, room)
        if not kept:
            if any(own[0] > LEAST_WORTH for own in all_worths.values()):
                self._cost.declined(len(rows))
            return {}
        self._cost.accepted(len(rows))
        chosen: dict[int, Many[int]] = {}
        for one in asked:
            if one.id in kept:
                best = found[one.id].tokens[: len(kept[one.id])]
                if own := self._that_fit(one, best, blocks_to_keep):
                    chosen[one.id] = own
                    self._kinds[one.id] = found[one.id].kind
        return chosen

    def waiting(self, running: Many[Sequence]) -> set[int]:
        """Ids of those that had better wait for the tokens in flight than be planned ahead of them,
        because their drafts are worth more than the step in which they sit out."""
        asked = [one for one in running if one.speculates and one.in_flight]
        if not asked or not self._cost.room(len(running)):
            return set()
        step_s, draft_s = self._seconds(running, 0)
        least = _least_worth(len(running), 0.0, 0, step_s, draft_s)
        if least >= 1.0:
            return set()
        wishes = [_wish(one, MOST_DRAFTS) for one in asked]
        drafts = self._drafter.peek(wishes, Prices(len(running), step_s, draft_s))
        found = {one.id: worths(draft.odds) for one, draft in zip(asked, drafts, strict=True)}
        kept = _worth_more(found, least, self._policy.max_sequences)
        waiting = {key for key, own in kept.items() if sum(own) > 1.0}
        if len(waiting) < len(running):
            self._cost.sat_out(len(waiting), len(running))
        return waiting

    def observe(self, work: StepWork, seconds: float | None) -> None:
        """A step with rows took so long; see `DraftCost.observe`. Called before `took` for its
        drafts."""
        self._cost.observe(work, seconds)

    def took(self, sequence_id: int, drafted: int, accepted: int, saved: int) -> None:
        """Drafts of a sequence were computed, so many of them were right, and so many steps
        saved."""
        counts = self.counts[self._kinds.pop(sequence_id)]
        counts.drafted += drafted
        counts.accepted += accepted
        counts.saved_steps += saved
        self._cost.saved(saved)

    def forget(self, sequence_id: int) -> None:
        """The sequence has ended."""
        self._kinds.pop(sequence_id, None)
        self._drafter.forget(sequence_id)

    def _seconds(self, rows: Many[Sequence], prefill: int) -> tuple[float, float]:
        """Of a step with these rows and so many positions of inputs, and of one draft in it."""
        context = sum(one.num_computed_tokens for one in rows)
        return self._cost.seconds(StepWork(len(rows), context, prefill))

    def _that_fit(
        self, one: Sequence, drafts: Many[int], blocks_to_keep: Callable[[], int]
    ) -> Many[int]:
        """Those that can be followed by something, and for which there are blocks."""
        ends = one.rule.end_ids
        count = next((i for i, token in enumerate(drafts) if token in ends), len(drafts))
        return tuple(drafts[: self._room_for(one, count, blocks_to_keep)])

    def _room_for(self, one: Sequence, count: int, blocks_to_keep: Callable[[], int]) -> int:
        """For how many drafts it has blocks, up to `count`; takes some where there are enough."""
        assert one.table is not None
        while one.num_computed_tokens + count >= one.room:
            if self._pool.num_free <= blocks_to_keep() or not self._pool.grow(one.table):
                return one.room - 1 - one.num_computed_tokens
            one.settle(self._pool)
        return count


def _wish(one: Sequence, most: int) -> Wish:
    left = one.rule.max_positions - len(one.tokens)
    return Wish(one.id, one.tokens, most, one.extents, one.stay, left, one.rule.end_ids)


def _least_worth(rows: int, gain: float, count: int, step_s: float, draft_s: float) -> float:
    """What a draft must be worth in a step with `count` of them that are worth `gain`: as much as
    the tokens that such steps make in the time that it takes."""
    whole_s = step_s + count * draft_s
    return max(LEAST_WORTH, MARGIN * draft_s * (rows + gain) / whole_s) if whole_s else LEAST_WORTH


def _worth_more(worths: dict[int, list[float]], least: float, room: int) -> dict[int, list[float]]:
    """Those worth more than `least`, and of these the best `room` ones."""
    kept = {key: [w for w in own if w > least] for key, own in worths.items()}
    best = sorted((worth for own in kept.values() for worth in own), reverse=True)
    if len(best) > room:
        last = best[room]
        equal = sum(worth == last for worth in best[:room])
        for key, own in kept.items():
            better = [w for w in own if w > last]
            kept[key] = own[: len(better) + equal]
            equal -= len(kept[key]) - len(better)
    return {key: own for key, own in kept.items() if own}
