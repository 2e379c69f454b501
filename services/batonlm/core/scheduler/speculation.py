"""Speculation: which sequences compute drafts behind their last token, and how many.

A sequence with drafts has several rows in a step, one behind its last token and one behind each
draft. Random numbers are keyed by position, so each row draws the token that it would draw in a
step of its own, if the drafts before it are right: up to the first wrong one all of them count, and
the others are dropped. So drafts change no token, only how many steps it takes.

A draft is worth its odds, which is the part of a step that it saves its sequence, and costs what
one position more takes in a step of so many rows, which is measured. It is computed if it is worth
more than the tokens that the step could make in that time. So speculation ends by itself where
batches are large or drafts are wrong, and comes back when they are not.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many

from batonlm.core.kvcache.block_pool import BlockPool
from batonlm.core.scheduler.drafts import MOST_DRAFTS, Draft, Drafter, Wish
from batonlm.core.scheduler.plan import StepWork
from batonlm.core.scheduler.policy import SchedulerPolicy
from batonlm.core.scheduler.sequence import Sequence
from batonlm.core.scheduler.step_cost import StepCost

LEAST_WORTH = 0.05
"""A draft of lesser odds is not worth looking at, however cheap."""

MARGIN = 1.2
"""How much more a draft must be worth than it costs, as far as that is known."""

_FADE = 0.99
"""Each step without drafts because of their price lets it fade a little: it is measured again when
it has fallen below what they are worth."""
_TRIED = 8
"""Drafts of a step that measures what they take, at most, and for every other row one."""


class Speculation:
    """Chooses drafts, and counts what becomes of them."""

    def __init__(
        self, drafter: Drafter, pool: BlockPool, policy: SchedulerPolicy, cost: StepCost
    ) -> None:
        self.drafter = drafter
        self.drafted = 0
        """Drafts that were computed."""
        self.accepted = 0
        """Those that were right, behind none that was not."""
        self.saved_steps = 0
        """How many more steps their sequences would have taken without them."""
        self._pool = pool
        self._policy = policy
        self._cost = cost
        self._faded: dict[int, float] = {}
        """By `StepCost.class_of` rows, how much of their price still counts; 1 if missing."""

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
        asked = [one for one in rows if one.speculates and not one.in_flight]
        room = min(
            policy.max_sequences - len(rows) - num_sampled,
            policy.token_budget - len(rows) - prefill,
        )
        if not asked or room <= 0:
            return {}
        step_s, draft_s = self._seconds(rows, prefill)
        if policy.target_step_s and draft_s:
            room = min(room, int((policy.target_step_s - step_s) / draft_s))
            if room <= 0:
                return {}
        size = self._cost.class_of(len(rows))
        if size in self._faded or not self._cost.knows_drafts(size):
            room = min(room, max(_TRIED, len(rows) // 2))
        least = _least_worth(len(rows), 0.0, 0, step_s, draft_s)
        if least >= 1.0:
            self._faded[size] = self._faded.get(size, 1.0) * _FADE
            return {}
        wishes = []
        for one in asked:
            most = min(MOST_DRAFTS, room, one.ceiling - 1 - one.num_computed_tokens)
            if most > 0:
                wishes.append(Wish(one.id, one.tokens, most))
        found = {
            wish.sequence_id: draft
            for wish, draft in zip(wishes, self.drafter.draft(wishes), strict=True)
            if draft.tokens
        }
        worths = {key: _worths(draft) for key, draft in found.items()}
        kept = _worth_more(worths, least, room)
        # With these the step makes more tokens, so the last of them are worth less than that.
        gain, count = sum(map(sum, kept.values())), sum(map(len, kept.values()))
        least = _least_worth(len(rows), gain, count, step_s, draft_s)
        kept = _worth_more(kept, least, room)
        if not kept:
            if any(own[0] > LEAST_WORTH for own in worths.values()):
                self._faded[size] = self._faded.get(size, 1.0) * _FADE
            return {}
        self._faded.pop(size, None)
        chosen: dict[int, Many[int]] = {}
        for one in asked:
            if one.id in kept:
                drafts = self._that_fit(
                    one, found[one.id].tokens[: len(kept[one.id])], blocks_to_keep
                )
                if drafts:
                    chosen[one.id] = drafts
        return chosen

    def waiting(self, running: Many[Sequence]) -> set[int]:
        """Ids of those that had better wait for the tokens in flight than be planned ahead of them,
        because their drafts are worth more than the step in which they sit out."""
        asked = [one for one in running if one.speculates and one.in_flight]
        least = _least_worth(len(running), 0.0, 0, *self._seconds(running, 0)) if asked else 1.0
        if least >= 1.0:
            return set()
        drafts = self.drafter.draft([Wish(one.id, one.tokens, MOST_DRAFTS) for one in asked])
        worths = {one.id: _worths(draft) for one, draft in zip(asked, drafts, strict=True)}
        kept = _worth_more(worths, least, self._policy.max_sequences)
        return {key for key, own in kept.items() if sum(own) > 1.0}

    def took(self, drafted: int, accepted: int, saved: int) -> None:
        """Drafts were computed, so many of them were right, and so many steps saved."""
        self.drafted += drafted
        self.accepted += accepted
        self.saved_steps += saved

    def _seconds(self, rows: Many[Sequence], prefill: int) -> tuple[float, float]:
        """Of a step with these rows and so many positions of inputs, and of one draft in it."""
        context = sum(one.num_computed_tokens for one in rows)
        step_s, draft_s = self._cost.with_drafts(StepWork(len(rows), context, prefill))
        return step_s, draft_s * self._faded.get(self._cost.class_of(len(rows)), 1.0)

    def _that_fit(
        self, one: Sequence, drafts: Many[int], blocks_to_keep: Callable[[], int]
    ) -> Many[int]:
        """Those that can be followed by something, and for which there are blocks."""
        ends = one.rule.end_ids
        count = next((i for i, token in enumerate(drafts) if token in ends), len(drafts))
        assert one.table is not None
        while one.num_computed_tokens + count >= one.room:
            if self._pool.num_free <= blocks_to_keep() or not self._pool.grow(one.table):
                count = one.room - 1 - one.num_computed_tokens
                break
            one.settle(self._pool)
        return tuple(drafts[:count])


def _least_worth(rows: int, gain: float, count: int, step_s: float, draft_s: float) -> float:
    """What a draft must be worth in a step with `count` of them that are worth `gain`: as much as
    the tokens that such steps make in the time that it takes."""
    whole_s = step_s + count * draft_s
    return max(LEAST_WORTH, MARGIN * draft_s * (rows + gain) / whole_s) if whole_s else LEAST_WORTH


def _worths(draft: Draft) -> list[float]:
    """How likely each draft is right with all before it."""
    worth = 1.0
    found = []
    for odds in draft.odds:
        worth *= odds
        found.append(worth)
    return found


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
