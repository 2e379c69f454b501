"""What every ModelRunner does, over the one without torch and the real one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from batonlm.core.errors import Internal
from batonlm.core.kvcache.block_pool import BlockCopy
from batonlm.core.request.request import SamplingParams
from batonlm.core.scheduler.plan import PENDING, Chunk, SampleRow, StepPlan
from tests.engine.contract import BLOCKS, POISON, MakeRunner, draw, prompts
from tests.engine.driving import GREEDY, fill, generate, packed, scattered, together, verify


def test_tokens_do_not_depend_on_blocks_or_chunks(make: MakeRunner) -> None:
    runner = make()
    wanted = generate(runner, prompts(), together(4, 4), 8)
    assert len({tuple(text) for text in wanted}) == 4
    assert generate(runner, prompts(), scattered(4, 4), 8) == wanted
    assert generate(runner, prompts(), scattered(4, 4), 8, chunk=3) == wanted
    alone = [generate(runner, [prompt], [((9, 4),)], 8)[0] for prompt in prompts()]
    assert alone == wanted


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(seed=4, top_p=0.9),
        SamplingParams(seed=5, repetition_penalty=1.2, frequency_penalty=0.3),
    ],
)
def test_tokens_do_not_depend_on_drafts(make: MakeRunner, params: SamplingParams) -> None:
    """Neither on right ones nor on wrong ones, whose positions are overwritten."""
    runner = make()
    wanted = generate(runner, prompts(), together(4, 5), 24, params=params)
    for tables in (together(4, 5), scattered(4, 5)):
        found, steps = verify(runner, prompts(), tables, wanted, params=params)
        assert found == wanted
        assert steps < 20


def test_tokens_behind_drafts_come_up_to_the_first_that_cannot_be_drawn(make: MakeRunner) -> None:
    runner = make()
    for stuck in (2, 0):
        rows = [SampleRow(3, 0, i, GREEDY) for i in range(4)]
        rows[stuck] = rows[stuck]._replace(allowed=bytes(1))
        chunk = Chunk(3, (8, 9, 7, 6), 0, ((0, 1),), tuple(rows), num_drafts=3)
        runner.submit(StepPlan(0, (chunk,)))
        result = runner.collect()
        assert len(result.tokens) == stuck
        assert [sequence for sequence, _ in result.failed] == ([] if stuck else [3])


def test_kv_moves_to_other_blocks_of_another_runner(make: MakeRunner) -> None:
    sender, taker = make(), make()
    assert sender.layout.difference(taker.layout) == ""
    prompt = prompts()[3]
    wanted = generate(sender, [prompt], [((0, 4),)], 8)
    here, there = ((0, 4),), ((30, 1), (7, 2), (50, 1))
    for first, count in ((0, 5), (5, 16), (21, 18)):
        taker.unpack(there, first, count, memoryview(packed(sender, here, first, count)))
    assert packed(taker, there, 0, 39) == packed(sender, here, 0, 39)
    assert generate(taker, [prompt], [there], 8, start=39) == wanted


def test_a_read_only_payload_can_be_unpacked(make: MakeRunner) -> None:
    sender, taker = make(), make()
    fill(sender, prompts()[3], ((0, 3),))
    payload = bytes(packed(sender, ((0, 3),), 0, 40))
    taker.unpack(((4, 3),), 0, 40, memoryview(payload))
    assert packed(taker, ((4, 3),), 0, 40) == payload


def test_other_kv_gives_other_tokens(make: MakeRunner) -> None:
    runner = make()
    prompt = prompts()[3]
    wanted = generate(runner, [prompt], [((0, 4),)], 8)
    payload = packed(runner, ((0, 4),), 0, 39)
    fill(runner, prompt[::-1], ((10, 4),))
    stale = packed(runner, ((0, 1), (11, 1), (2, 1)), 0, 39)
    assert stale != payload
    runner.unpack(((0, 4),), 0, 39, memoryview(stale))
    assert generate(runner, [prompt], [((0, 4),)], 8, start=39) != wanted


def test_a_copied_block_continues_by_itself(make: MakeRunner) -> None:
    runner = make()
    prompt = prompts()[2]
    fill(runner, prompt, ((0, 2),))
    chunk = Chunk(1, [5], 21, ((0, 1), (9, 1)))
    runner.submit(StepPlan(1, (), (BlockCopy(1, 9, 5),)))
    runner.collect()
    fill(runner, [6], ((0, 2),), 21)
    forked = draw(runner, chunk, SampleRow(1, 0, 0, GREEDY))
    wanted = generate(runner, [[*prompt, 5]], [((20, 2),)], 1)
    assert forked.token_id == wanted[0][0]


def test_a_copy_comes_before_what_the_same_plan_computes(make: MakeRunner) -> None:
    runner = make()
    prompt = prompts()[2]
    fill(runner, prompt, ((0, 2),))
    both = (Chunk(1, [5], 21, ((0, 1), (9, 1))), Chunk(2, [6], 21, ((0, 2),)))
    rows = [SampleRow(c.sequence_id, 0, 0, GREEDY) for c in both]
    chunks = tuple(c._replace(samples=(row,)) for c, row in zip(both, rows, strict=True))
    runner.submit(StepPlan(1, chunks, (BlockCopy(1, 9, 5),)))
    got = [token.token_id for token in runner.collect().tokens]
    wanted = generate(runner, [[*prompt, 5], [*prompt, 6]], [((20, 2),), ((30, 2),)], 1)
    assert [[token] for token in got] == wanted


def test_results_come_in_the_order_submitted(make: MakeRunner) -> None:
    runner = make()
    for step, prompt in enumerate(prompts()):
        row = SampleRow(step, 0, 0, GREEDY)
        runner.submit(StepPlan(step, (Chunk(step, prompt, 0, ((step * 4, 4),), (row,)),)))
    results = [runner.collect() for _ in prompts()]
    assert [result.step for result in results] == [0, 1, 2, 3]
    wanted = generate(runner, prompts(), together(4, 4), 1)
    assert [[result.tokens[0].token_id] for result in results] == wanted


def test_choices_of_one_prompt_are_drawn_apart(make: MakeRunner) -> None:
    runner = make()
    params = GREEDY.__class__(temperature=1.0, seed=3)
    rows = tuple(SampleRow(choice, choice, 0, params) for choice in range(8))
    plan = StepPlan(0, (Chunk(0, prompts()[2], 0, ((0, 2),), rows),))
    runner.submit(plan)
    tokens = runner.collect().tokens
    assert [(t.sequence_id, t.choice) for t in tokens] == [(i, i) for i in range(8)]
    assert len({token.token_id for token in tokens}) > 1
    runner.submit(plan)
    assert runner.collect().tokens == tokens


def test_seed_choice_and_position_key_the_draw(make: MakeRunner) -> None:
    runner = make()
    chunk = Chunk(0, prompts()[2], 0, ((0, 2),))
    params = GREEDY.__class__(temperature=5.0, seed=1)
    first = SampleRow(0, 0, 0, params)
    others = [
        first._replace(params=replace(params, seed=2)),
        first._replace(choice=1),
        first._replace(position=1),
    ]
    drawn = [draw(runner, chunk, row).token_id for row in (first, *others)]
    assert len(set(drawn)) > 1
    assert draw(runner, chunk, first).token_id == drawn[0]


def test_banned_tokens_are_not_drawn(make: MakeRunner) -> None:
    runner = make()
    chunk = Chunk(0, prompts()[2], 0, ((0, 2),))
    banned: tuple[int, ...] = ()
    for _ in range(5):
        token = draw(runner, chunk, SampleRow(0, 0, 0, GREEDY, banned)).token_id
        assert token not in banned
        banned += (token,)


def test_only_allowed_tokens_are_drawn(make: MakeRunner) -> None:
    """Bit i of byte i // 8 is token i; whoever has no bit has none."""
    runner = make()
    chunk = Chunk(0, prompts()[2], 0, ((0, 2),))
    hot = replace(GREEDY, temperature=5.0)
    for params in (GREEDY, hot):
        few = SampleRow(0, 0, 0, params, allowed=bytes([0, 0b1000_0001, 0, 2]))
        drawn = {draw(runner, chunk, few._replace(position=i)).token_id for i in range(12)}
        assert drawn <= {8, 15, 25}
        assert len(drawn) > 1 or params is GREEDY
        alone = SampleRow(0, 0, 0, params, banned=(8, 25), allowed=few.allowed)
        assert draw(runner, chunk, alone).token_id == 15
    eos = runner.model.eos_token_ids[0]
    end = SampleRow(0, 0, 0, GREEDY, allowed=(1 << eos).to_bytes(9, "little"))
    assert draw(runner, chunk, end).token_id == eos


def test_where_nothing_is_allowed_that_row_fails(make: MakeRunner) -> None:
    runner = make()
    rows = (SampleRow(0, 0, 0, GREEDY, allowed=bytes(3)), SampleRow(1, 1, 0, GREEDY))
    runner.submit(StepPlan(0, (Chunk(0, prompts()[2], 0, ((0, 2),), rows),)))
    result = runner.collect()
    assert [token.sequence_id for token in result.tokens] == [1]
    assert [(sequence, "banned" in why) for sequence, why in result.failed] == [(0, True)]


def test_logprobs_are_given_when_asked(make: MakeRunner) -> None:
    runner = make()
    chunk = Chunk(0, prompts()[2], 0, ((0, 2),))
    assert draw(runner, chunk, SampleRow(0, 0, 0, GREEDY)).logprobs is None
    for wanted in (0, 4):
        params = replace(GREEDY, top_logprobs=wanted)
        token = draw(runner, chunk, SampleRow(0, 0, 0, params))
        assert token.logprobs is not None
        assert len(token.logprobs.top) == wanted
        assert token.logprobs.logprob < 0
        values = [value for _, value in token.logprobs.top]
        assert values == sorted(values, reverse=True)
        if wanted:
            assert token.logprobs.top[0] == (token.token_id, token.logprobs.logprob)


def test_one_poisoned_sequence_fails_alone_and_leaves_nothing_behind(make: MakeRunner) -> None:
    runner = make()
    texts = prompts()
    wanted = generate(runner, texts, together(4, 4), 1)
    texts.insert(1, [8, 9, POISON])
    chunks = tuple(
        Chunk(i, text, 0, ((i * 4, 4),), (SampleRow(i, 0, 0, GREEDY),))
        for i, text in enumerate(texts)
    )
    runner.submit(StepPlan(0, chunks))
    result = runner.collect()
    assert [sequence for sequence, _ in result.failed] == [1]
    assert "number" in result.failed[0][1]
    assert [[token.token_id] for token in result.tokens] == wanted
    # The next owner of the blocks sees none of it.
    for prompt, text in zip(prompts(), wanted, strict=True):
        assert generate(runner, [prompt], [((4, 4),)], 1) == [text]


@pytest.mark.deep
@pytest.mark.parametrize(
    "chunk",
    [
        Chunk(0, [], 0, ((0, 1),)),
        Chunk(0, [5], 0, ()),
        Chunk(0, [5] * 17, 0, ((0, 1),)),
        Chunk(0, [5], 0, ((BLOCKS, 1),)),
        Chunk(0, [5], 0, ((-1, 1),)),
        Chunk(0, [1000], 0, ((0, 1),)),
        Chunk(0, [PENDING], 0, ((0, 1),)),
        Chunk(0, [5, PENDING], 1, ((0, 1),)),
        Chunk(0, [-2], 1, ((0, 1),)),
        Chunk(0, [5], -1, ((0, 1),)),
        Chunk(0, [5], 1 << 20, ((0, 1),)),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(make: MakeRunner, chunk: Chunk) -> None:
    with pytest.raises(Internal):
        make().submit(StepPlan(0, (chunk,)))


def test_two_writers_of_a_block_and_bad_copies_are_refused(make: MakeRunner) -> None:
    runner = make()
    writers = (Chunk(0, [5], 0, ((3, 1),)), Chunk(1, [6], 0, ((3, 1),)))
    plans = [StepPlan(0, writers)]
    for copy in (BlockCopy(BLOCKS, 0, 1), BlockCopy(0, -1, 1), BlockCopy(0, 1, 17)):
        plans.append(StepPlan(0, (), (copy,)))
    for plan in plans:
        with pytest.raises(Internal):
            runner.submit(plan)


def test_payloads_of_a_wrong_size_are_refused(make: MakeRunner) -> None:
    runner = make()
    payload = memoryview(bytearray(3 * runner.layout.bytes_per_position))
    for table, count in ((((0, 1),), 4), (((0, 1),), 2), ((), 3)):
        with pytest.raises(Internal):
            runner.pack(table, 0, count, payload)
        with pytest.raises(Internal):
            runner.unpack(table, 0, count, payload)


def test_nothing_to_collect_is_an_error_and_close_is_idempotent(make: MakeRunner) -> None:
    runner = make()
    with pytest.raises(Internal):
        runner.collect()
    runner.close()
    runner.close()
