"""Drafts that a model computes: over KV of its own in the sequences' blocks, by rounds that pay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from batonlm.core.kvcache.block_pool import BlockPool
from batonlm.core.request.attempt import Attempt
from batonlm.core.scheduler.drafts import Prices, Wish
from batonlm.core.scheduler.loop import EngineLoop
from batonlm.core.scheduler.model_drafts import Drafters, ModelDrafter
from batonlm.core.scheduler.plan import StepWork
from batonlm.core.scheduler.policy import SchedulerPolicy
from batonlm.core.scheduler.scheduler import Scheduler
from batonlm.core.scheduler.speculation import Speculation
from tests.core.attempts import BLOCK_SIZE, Outputs, attempt, expected, run_out, runner
from tests.core.drafting import Guesser

BLOCKS = 800
"""Of each wish below."""


def knowing(*attempts: Attempt, **fields: Any) -> Guesser:
    guesser = Guesser(BLOCK_SIZE, **fields)
    for one in attempts:
        for tokens in expected(one).values():
            guesser.foretell(one.token_ids, tokens)
    return guesser


def loop_with(guesser: Guesser, *, num_blocks: int = 64, **of_runner: Any) -> EngineLoop:
    depth = of_runner.get("depth", 1)
    engine = runner(num_blocks, delay_steps=depth - 1, **of_runner)
    policy = SchedulerPolicy(headroom=1, speculation="draft")
    swap = engine.num_swap_blocks
    pool = BlockPool(num_blocks, BLOCK_SIZE)
    scheduler = Scheduler(pool, policy, engine.model, num_swap_blocks=swap, draft_model=guesser)
    return EngineLoop(engine, scheduler)


def counted(loop: EngineLoop) -> Speculation:
    assert loop.scheduler.speculation is not None
    return loop.scheduler.speculation


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("wrong_every", [0, 2, 5])
def test_guesses_change_nothing_and_are_made_of_what_was_drawn(
    depth: int, wrong_every: int
) -> None:
    asked = [attempt(f"r{i}", seed=i, n=1 + i % 2, max_tokens=30) for i in range(5)]
    guesser = knowing(*asked, wrong_every=wrong_every)
    loop = loop_with(guesser, depth=depth)
    for one in asked:
        loop.scheduler.add(one, 0.0)
    heard = Outputs().take(run_out(loop))
    assert all(heard.of(one) == expected(one) for one in asked)
    counts = counted(loop).counts["draft"]
    assert 0 < counts.saved_steps <= counts.accepted <= counts.drafted
    assert (counts.accepted < counts.drafted) == (wrong_every > 0)
    assert not guesser.misread


@pytest.mark.parametrize("swap", [(0, 0), (30, 0)])
def test_what_was_computed_in_other_blocks_is_computed_again(swap: tuple[int, int]) -> None:
    asked = [attempt(f"r{i}", seed=i, size=21, max_tokens=40) for i in range(3)]
    guesser = knowing(*asked, wrong_every=6)
    loop = loop_with(guesser, num_blocks=21, num_swap_blocks=swap)
    for one in asked:
        loop.scheduler.add(one, 0.0)
    heard = Outputs().take(run_out(loop))
    assert all(heard.of(one) == expected(one) for one in asked)
    assert sum(loop.scheduler.preemptions.values()) > 0
    assert counted(loop).counts["draft"].accepted > 0
    assert not guesser.misread


def text(seed: int, size: int) -> list[int]:
    """Repeats nothing."""
    return [(seed * 1009 + i * 37) % 5003 + 10 for i in range(size)]


class Pool:
    """Sequences that draft side by side, each step of which gives each one token at least."""

    def __init__(self, drafter: Any, guesser: Guesser, count: int, prompt: int, size: int) -> None:
        self.drafter = drafter
        self.texts = [text(i, size) for i in range(count)]
        self.ends = [prompt] * count
        for each in self.texts:
            guesser.foretell(each, ())

    def step(self, prices: Prices, most: int = 15, left: int = 1000) -> list[int]:
        """How many drafts each one gets."""
        wishes = [
            Wish(i, each[:end], most, ((i * BLOCKS, BLOCKS),), left=left)
            for i, (each, end) in enumerate(zip(self.texts, self.ends, strict=True))
        ]
        found = self.drafter.draft(wishes, prices)
        for i, draft in enumerate(found):
            behind = self.texts[i][self.ends[i] :]
            right = next(
                (k for k, token in enumerate(draft.tokens) if token != behind[k]),
                len(draft.tokens),
            )
            self.ends[i] += right + 1
        return [len(draft.tokens) for draft in found]


def flat(seconds: float, position_s: float = 0.0) -> Callable[[int], float]:
    return lambda positions: seconds + position_s * positions


def test_there_are_as_many_rounds_as_pay() -> None:
    guesser = Guesser(BLOCK_SIZE, wrong_every=4, seconds=flat(0.001))
    pool = Pool(ModelDrafter(guesser), guesser, 1, 30, 600)
    dear, cheap = Prices(1, 0.010, 0.0001), Prices(1, 0.100, 0.0001)
    few = [pool.step(dear)[0] for _ in range(30)][-10:]
    many = [pool.step(cheap)[0] for _ in range(30)][-10:]
    assert 1 <= max(few) < min(many) <= 15


def test_drafts_that_take_long_to_verify_are_not_computed() -> None:
    guesser = Guesser(BLOCK_SIZE, wrong_every=3, seconds=flat(0.0001))
    pool = Pool(ModelDrafter(guesser), guesser, 4, 30, 900)
    for _ in range(20):
        pool.step(Prices(4, 0.010, 0.0001))
    assert sum(pool.step(Prices(4, 0.010, 0.0001))) > 4
    assert sum(pool.step(Prices(4, 0.010, 0.0020))) <= 4


def test_where_there_is_room_for_few_drafts_as_many_sequences_have_one() -> None:
    guesser = Guesser(BLOCK_SIZE, seconds=flat(0.001))
    pool = Pool(ModelDrafter(guesser), guesser, 16, 30, 900)
    found = [pool.step(Prices(16, 0.100, 0.0001, room=8)) for _ in range(20)]
    assert all(sum(counts) == 8 and max(counts) == 1 for counts in found)
    assert len(guesser.calls) == len(found)
    # More than one each.
    assert all(sum(pool.step(Prices(16, 0.100, 0.0001, room=24))) == 24 for _ in range(3))


def test_what_does_not_pay_is_tried_now_and_then_with_a_few() -> None:
    guesser = Guesser(BLOCK_SIZE, seconds=flat(0.050))
    pool = Pool(ModelDrafter(guesser), guesser, 16, 30, 3000)
    prices = Prices(16, 0.020, 0.0001)
    pool.step(prices)
    drafted = [sum(map(bool, pool.step(prices))) for _ in range(300)]
    assert max(drafted) <= 2
    assert 3 <= sum(map(bool, drafted)) <= 5
    # It got cheaper: that shows at the next try.
    guesser.seconds = flat(0.0005)
    later = [sum(map(bool, pool.step(prices))) for _ in range(240)]
    assert later[-1] == 16


def test_a_long_prompt_is_computed_a_part_at_a_time() -> None:
    guesser = Guesser(BLOCK_SIZE, seconds=flat(0.001, 0.0001))
    pool = Pool(ModelDrafter(guesser), guesser, 2, 900, 1500)
    prices = Prices(2, 0.040, 0.0001)
    found = [pool.step(prices) for _ in range(20)]
    assert found[0] == [0, 0]
    assert all(counts[-1] > 0 for counts in zip(*found, strict=True))
    sizes = [sum(len(chunk.token_ids) for chunk in call) for call in guesser.calls]
    # What takes half of a step, once that is known.
    assert max(sizes) <= 256
    assert 100 < max(sizes[4:]) <= 200
    parts = [chunk for call in guesser.calls for chunk in call if not chunk.samples]
    assert len(parts) > 2 and all(chunk.end_position % 16 == 0 for chunk in parts)
    assert not guesser.misread


def test_a_prompt_is_not_computed_for_few_tokens() -> None:
    guesser = Guesser(BLOCK_SIZE, seconds=flat(0.001, 0.0001))
    pool = Pool(ModelDrafter(guesser), guesser, 2, 900, 1500)
    prices = Prices(2, 0.010, 0.0001)
    for _ in range(20):
        pool.step(prices, left=4)
    # Until it is known what that takes.
    assert len(guesser.calls) <= 3


def test_a_limit_of_time_is_kept() -> None:
    guesser = Guesser(BLOCK_SIZE, seconds=flat(0.001))
    drafter = ModelDrafter(guesser)
    pool = Pool(drafter, guesser, 1, 30, 600)
    for _ in range(20):
        pool.step(Prices(1, 0.100, 0.0001))
    assert drafter.seconds > 0.004
    pool.step(Prices(1, 0.100, 0.0001, within_s=0.0035))
    assert 0 < drafter.seconds <= 0.0035
    for _ in range(200):
        pool.step(Prices(1, 0.100, 0.0001, within_s=-0.001))
        assert drafter.seconds == 0.0


def test_nothing_is_drafted_beyond_the_models_length_or_an_end() -> None:
    guesser = Guesser(BLOCK_SIZE)
    guesser.max_positions = 34
    pool = Pool(ModelDrafter(guesser), guesser, 1, 30, 60)
    assert pool.step(Prices()) == [4]
    # The last one is behind the last position.
    assert pool.step(Prices()) == [0]
    guesser = Guesser(BLOCK_SIZE)
    one = text(0, 60)
    guesser.foretell(one, ())
    wish = Wish(0, one[:30], 15, ((0, BLOCKS),), ends={one[31]})
    (draft,) = ModelDrafter(guesser).draft([wish], Prices())
    assert [*draft.tokens] == one[30:32]


def test_a_repetition_is_looked_up_and_the_model_computes_the_rest() -> None:
    guesser = Guesser(BLOCK_SIZE, wrong_every=2, seconds=flat(0.001))
    drafter = Drafters(guesser)
    repeated, other = text(0, 40) * 12, text(1, 480)
    for each in repeated, other:
        guesser.foretell(each, ())
    for end in range(60, 240, 2):
        wishes = [
            Wish(i, each[:end], 8, ((i * BLOCKS, BLOCKS),))
            for i, each in enumerate((repeated, other))
        ]
        found = drafter.draft(wishes, Prices(2, 0.050, 0.0001))
    assert [draft.kind for draft in found] == ["ngram", "draft"]
    assert {chunk.sequence_id for call in guesser.calls[-4:] for chunk in call} == {1}
    drafter.forget(0)
    drafter.forget(1)
    drafter.forget(1)


def test_a_step_says_what_drafting_for_it_took() -> None:
    one = attempt(max_tokens=60)
    guesser = knowing(one, seconds=flat(0.002))
    loop = loop_with(guesser)
    loop.scheduler.add(one, 0.0)
    works: list[StepWork] = []
    while (plan := loop.plan(0.0)) is not None:
        loop.submit(plan)
        works.append(plan.work)
        loop.scheduler.observe(plan, 0.010 + 0.0001 * plan.work.drafts)
        loop.apply(loop.collect()[1], 0.0)
    drafted = [work for work in works if work.drafts]
    assert drafted and all(work.drafting_s >= 0.002 for work in drafted)
    assert all(work.drafting_s == 0.0 for work in works[:1])
