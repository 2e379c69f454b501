"""Runs sequences on a runner in chosen chunks and blocks, as a scheduler would."""

from __future__ import annotations

import random
from collections.abc import Sequence

from batonlm.core.kvcache.block_pool import Extents
from batonlm.core.request.request import SamplingParams
from batonlm.core.scheduler.plan import Chunk, ModelRunner, SampleRow, StepPlan

GREEDY = SamplingParams(temperature=0.0)


def random_prompts(lengths: Sequence[int], vocab: int, seed: int = 1) -> list[list[int]]:
    numbers = random.Random(seed)
    return [[numbers.randrange(4, vocab) for _ in range(length)] for length in lengths]


def together(sequences: int, blocks: int) -> list[Extents]:
    """One extent per sequence, one behind the other."""
    return [((i * blocks, blocks),) for i in range(sequences)]


def scattered(sequences: int, blocks: int) -> list[Extents]:
    """Every block of a sequence apart from its neighbours, in falling order."""
    return [
        tuple((j * sequences + i, 1) for j in reversed(range(blocks))) for i in range(sequences)
    ]


def generate(
    runner: ModelRunner,
    prompts: Sequence[Sequence[int]],
    tables: Sequence[Extents],
    new_tokens: int,
    *,
    chunk: int = 10_000,
    start: int = 0,
    params: SamplingParams = GREEDY,
    adapters: Sequence[str] = (),
) -> list[list[int]]:
    """All sequences at once, each advancing by at most `chunk` positions a step.

    adapters: of each sequence; none are the model alone.

    start: how many positions already have their KV, at most a prompt's length less one.
    """
    texts = [list(prompt) for prompt in prompts]
    done = [min(start, len(prompt) - 1) for prompt in prompts]
    ends = [len(prompt) + new_tokens for prompt in prompts]
    step = 0
    while any(len(text) < end for text, end in zip(texts, ends, strict=True)):
        chunks = []
        for i, text in enumerate(texts):
            if len(text) == ends[i]:
                continue
            new = text[done[i] : done[i] + chunk]
            position = len(text) - len(prompts[i])
            row = SampleRow(i, 0, position, params, (), tuple(text), len(prompts[i]))
            last = done[i] + len(new) == len(text)
            adapter = adapters[i] if adapters else ""
            samples = (row,) if last else ()
            chunks.append(Chunk(i, new, done[i], tables[i], samples, adapter=adapter))
            done[i] += len(new)
        runner.submit(StepPlan(step, tuple(chunks)))
        result = runner.collect()
        assert result.step == step
        assert not result.failed
        for token in result.tokens:
            texts[token.sequence_id].append(token.token_id)
        step += 1
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


def verify(
    runner: ModelRunner,
    prompts: Sequence[Sequence[int]],
    tables: Sequence[Extents],
    likely: Sequence[Sequence[int]],
    *,
    params: SamplingParams = GREEDY,
    seed: int = 1,
    most: int = 5,
) -> tuple[list[list[int]], int]:
    """All sequences at once, with up to `most` drafts a step from what is likely, one in six of
    them another token. Returns as many tokens as are likely, and in how many steps they came."""
    numbers = random.Random(seed)
    texts = [list(prompt) for prompt in prompts]
    done = [0] * len(texts)
    ends = [len(p) + len(tokens) for p, tokens in zip(prompts, likely, strict=True)]
    step = 0
    while any(len(text) < end for text, end in zip(texts, ends, strict=True)):
        chunks = []
        for i, text in enumerate(texts):
            if len(text) >= ends[i]:
                continue
            position = len(text) - len(prompts[i])
            drafts = [
                token if numbers.randrange(6) else numbers.randrange(4, 500)
                for token in likely[i][position : position + numbers.randrange(most + 1)]
            ]
            rows = [SampleRow(i, 0, position, params, (), tuple(text), len(prompts[i]))]
            rows += [SampleRow(i, 0, position + 1 + j, params) for j in range(len(drafts))]
            new = (*text[done[i] :], *drafts)
            chunk = Chunk(i, new, done[i], tables[i], tuple(rows), num_drafts=len(drafts))
            chunks.append(chunk)
        runner.submit(StepPlan(step, tuple(chunks)))
        drawn: dict[int, list[int]] = {}
        for token in runner.collect().tokens:
            drawn.setdefault(token.sequence_id, []).append(token.token_id)
        for chunk in chunks:
            text = texts[chunk.sequence_id]
            drafts = list(chunk.token_ids[len(chunk.token_ids) - chunk.num_drafts :])
            for draft, made in zip([*drafts, -1], drawn[chunk.sequence_id], strict=True):
                text.append(made)
                if made != draft:
                    break
            done[chunk.sequence_id] = len(text) - 1
        step += 1
    return [text[len(p) : end] for text, p, end in zip(texts, prompts, ends, strict=True)], step


def fill(runner: ModelRunner, tokens: Sequence[int], table: Extents, first: int = 0) -> None:
    """Computes KV of tokens without sampling."""
    runner.submit(StepPlan(0, (Chunk(0, list(tokens), first, table),)))
    runner.collect()


def packed(runner: ModelRunner, table: Extents, first: int, count: int) -> bytearray:
    payload = bytearray(count * runner.layout.bytes_per_position)
    runner.pack(table, first, count, memoryview(payload))
    return payload
