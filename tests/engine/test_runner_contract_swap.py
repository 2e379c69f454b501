"""What every ModelRunner does with swap memory, and with tokens that are still to come."""

from __future__ import annotations

from dataclasses import replace

import pytest

from batonlm.core.errors import Internal
from batonlm.core.kvcache.block_pool import BlockCopy
from batonlm.core.scheduler.plan import PENDING, BlockSwap, Chunk, SampleRow, StepPlan
from tests.engine.contract import BLOCKS, POISON, SWAP_BLOCKS, MakeRunner, prompts, run
from tests.engine.driving import GREEDY, fill, generate, packed, scattered, together


def test_swapped_blocks_come_back_as_they_were(make: MakeRunner) -> None:
    runner = make()
    assert runner.num_swap_blocks == SWAP_BLOCKS
    prompt = prompts()[3]
    wanted = generate(runner, [prompt], [((40, 4),)], 8)
    fill(runner, prompt[:39], ((0, 3),))
    kv = packed(runner, ((0, 3),), 0, 39)
    # Places 3 and 4 are the last in host memory, 5 is the first on disk.
    out = run(runner, StepPlan(1, (), swap_out=(BlockSwap((0, 1, 2), (3, 4, 5)),)))
    assert out.swap_s > 0.0
    fill(runner, prompt[::-1], ((0, 3),))
    back = (BlockSwap((9, 10), (5, 3)), BlockSwap((2,), (4,)))
    assert run(runner, StepPlan(2, (), swap_in=back)).swap_s > 0.0
    there = ((10, 1), (2, 1), (9, 1), (20, 1))
    assert packed(runner, there, 0, 39) == kv
    assert generate(runner, [prompt], [there], 8, start=39) == wanted
    assert run(runner, StepPlan(3, ())).swap_s == 0.0


def test_out_then_in_then_copies_then_compute(make: MakeRunner) -> None:
    """One sequence leaves its blocks, another takes them in the same step and is forked."""
    runner = make()
    leaving, coming = prompts()[3][:21], prompts()[2]
    texts = [[*coming, 5], [*coming, 6], [*leaving, 7]]
    wanted = generate(runner, texts, together(3, 2), 1)
    fill(runner, coming, ((0, 2),))
    run(runner, StepPlan(1, (), swap_out=(BlockSwap((0, 1), (0, 10)),)))
    fill(runner, leaving, ((0, 2),))

    chunks = tuple(
        Chunk(i, (text[-1],), 21, table, (SampleRow(i, 0, 0, GREEDY),))
        for i, (text, table) in enumerate(
            zip(texts, (((0, 2),), ((0, 1), (9, 1)), ((30, 2),)), strict=True)
        )
    )
    first = run(
        runner,
        StepPlan(
            2,
            chunks[:2],
            (BlockCopy(1, 9, 5),),
            swap_out=(BlockSwap((0, 1), (4, 5)),),
            swap_in=(BlockSwap((0, 1), (0, 10)),),
        ),
    )
    second = run(runner, StepPlan(3, chunks[2:], swap_in=(BlockSwap((30, 31), (4, 5)),)))
    assert [[token.token_id] for token in (*first.tokens, *second.tokens)] == wanted


def test_swap_memory_that_was_never_written_gives_other_tokens(make: MakeRunner) -> None:
    runner = make()
    prompt = prompts()[3]
    wanted = generate(runner, [prompt], [((0, 4),)], 8)
    lost = run(
        runner,
        StepPlan(
            1,
            (Chunk(0, prompt[39:], 39, ((0, 4),), (SampleRow(0, 0, 0, GREEDY),)),),
            swap_in=(BlockSwap((1,), (7,)),),
        ),
    )
    assert lost.failed or lost.tokens[0].token_id != wanted[0][0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_token_still_to_come_is_the_one_that_comes(make: MakeRunner, temperature: float) -> None:
    runner = make()
    params = replace(GREEDY, temperature=temperature, seed=7)
    tables = scattered(4, 4)
    wanted = generate(runner, prompts(), tables, 4, params=params)

    def plan(step: int) -> StepPlan:
        """The sequences in another order each time."""
        chunks = []
        for i in range(4) if step % 2 else reversed(range(4)):
            prompt = prompts()[i]
            tokens, first = (prompt, 0) if not step else ([PENDING], len(prompt) + step - 1)
            chunks.append(Chunk(i, tokens, first, tables[i], (SampleRow(i, 0, step, params),)))
        return StepPlan(step, tuple(chunks))

    texts: list[list[int]] = [[], [], [], []]
    runner.submit(plan(0))
    for step in range(1, 5):
        if step < 4:
            runner.submit(plan(step))
        result = runner.collect()
        assert result.step == step - 1
        for token in result.tokens:
            texts[token.sequence_id].append(token.token_id)
    assert texts == wanted


def test_a_token_that_never_came_harms_nobody(make: MakeRunner) -> None:
    runner = make()
    text = prompts()[2]
    wanted = generate(runner, [text], [((0, 2),)], 2)
    poisoned, good = [8, 9, POISON], [((30, 1),), ((0, 2),)]
    for step, tokens in enumerate(((poisoned, text), ([PENDING], [PENDING]))):
        firsts = (0, 0) if step == 0 else (len(poisoned), len(text))
        chunks = tuple(
            Chunk(i, tokens[i], firsts[i], good[i], (SampleRow(i, 0, step, GREEDY),))
            for i in range(2)
        )
        runner.submit(StepPlan(step, chunks))
    made = [
        token.token_id for _ in range(2) for token in runner.collect().tokens if token.sequence_id
    ]
    assert made == wanted[0]


def test_swaps_that_do_not_fit_are_refused(make: MakeRunner) -> None:
    runner = make()
    for swaps in (
        (BlockSwap((0, 1), (0,)),),
        (BlockSwap((BLOCKS,), (0,)),),
        (BlockSwap((-1,), (0,)),),
        (BlockSwap((0,), (sum(SWAP_BLOCKS),)),),
        (BlockSwap((0,), (-1,)),),
        (BlockSwap((0, 0), (1, 1)),),
        (BlockSwap((0,), (1,)), BlockSwap((0,), (1,))),
    ):
        for plan in (StepPlan(0, (), swap_out=swaps), StepPlan(0, (), swap_in=swaps)):
            with pytest.raises(Internal):
                runner.submit(plan)
