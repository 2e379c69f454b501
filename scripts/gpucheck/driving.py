"""Drives a runner as the engine's loop does, with steps planned ahead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from batonlm.core.request.request import SamplingParams
from batonlm.core.scheduler.plan import PENDING, Chunk, ModelRunner, SampleRow, StepPlan

GREEDY = SamplingParams(temperature=0.0)


@dataclass
class Batch:
    """Sequences that decode together. lengths: positions that have KV, or will by then. known:
    their last tokens, as far as they have been collected."""

    lengths: list[int]
    blocks_each: int
    known: dict[int, int] = field(default_factory=dict)
    params: SamplingParams = GREEDY
    position: int = 0
    step: int = 0
    adapters: Sequence[str] = ()
    """Their digests, which sequences take in turns; none are the model alone."""

    def prompt(self, sequence: int, tokens: Sequence[int], *, last: bool) -> StepPlan:
        """The next chunk of one sequence's prompt."""
        first = self.lengths[sequence]
        self.lengths[sequence] += len(tokens)
        return self._plan([self._chunk(sequence, tokens, first, sampled=last)])

    def decode(self) -> StepPlan:
        """The next token of all, from those that are known at first, then still to come."""
        return self._plan(self._next_tokens(len(self.lengths)))

    def drafted(self, count: int) -> StepPlan:
        """`count` drafts behind a token of every sequence. All are made up, and each sequence goes
        on by one position, so that every such step has as much to do."""
        self.position += 1
        tokens = range(4, 5 + count)
        chunks = []
        for i, first in enumerate(self.lengths):
            chunk = self._chunk(i, tokens, first, sampled=True)
            (row,) = chunk.samples
            rows = tuple(row._replace(position=row.position + j) for j in range(1 + count))
            chunks.append(chunk._replace(samples=rows, num_drafts=count))
            self.lengths[i] += 1
        return self._plan(chunks)

    def mixed(self, sequence: int, tokens: Sequence[int]) -> StepPlan:
        """The next token of all sequences before this one, and the next part of its prompt."""
        first = self.lengths[sequence]
        chunks = self._next_tokens(sequence)
        self.lengths[sequence] += len(tokens)
        return self._plan([*chunks, self._chunk(sequence, tokens, first, sampled=False)])

    def _next_tokens(self, count: int) -> list[Chunk]:
        self.position += 1
        chunks = [
            self._chunk(i, (self.known.get(i, PENDING),), self.lengths[i], sampled=True)
            for i in range(count)
        ]
        self.known = {}
        for i in range(count):
            self.lengths[i] += 1
        return chunks

    def _chunk(self, i: int, tokens: Sequence[int], first: int, *, sampled: bool) -> Chunk:
        table = ((i * self.blocks_each, self.blocks_each),)
        rows = (SampleRow(i, 0, self.position, self.params),) if sampled else ()
        adapter = self.adapters[i % len(self.adapters)] if self.adapters else ""
        return Chunk(i, tokens, first, table, rows, adapter=adapter)

    def _plan(self, chunks: list[Chunk]) -> StepPlan:
        self.step += 1
        return StepPlan(self.step, tuple(chunks))


def run(
    runner: ModelRunner,
    plans: int,
    make: Callable[[], StepPlan],
    around: Callable[[Callable[[], None]], None] = lambda submit: submit(),
    depth: int | None = None,
) -> list[list[int]]:
    """Tokens of each step, with up to `depth` steps submitted, by default the runner's. around:
    called with each submission, which it has to do."""
    depth = depth or runner.depth
    waiting = 0
    made: list[list[int]] = []

    def collect() -> None:
        made.append([token.token_id for token in runner.collect().tokens])

    for _ in range(plans):
        plan = make()
        around(lambda plan=plan: runner.submit(plan))  # type: ignore[misc]
        waiting += 1
        if waiting == depth:
            collect()
            waiting -= 1
    for _ in range(waiting):
        collect()
    return made


def generate(
    runner: ModelRunner, prompts: Sequence[Sequence[int]], new_tokens: int, chunk: int = 2048
) -> list[list[int]]:
    """Greedy continuations, all sequences decoding together after their prompts."""
    longest = max(map(len, prompts)) + new_tokens
    batch = Batch([0] * len(prompts), -(-longest // runner.block_size))
    texts: list[list[int]] = []
    for i, prompt in enumerate(prompts):
        starts = range(0, len(prompt), chunk)
        plans = [
            batch.prompt(i, prompt[s : s + chunk], last=s + chunk >= len(prompt)) for s in starts
        ]
        texts.append(run(runner, len(plans), iter(plans).__next__)[-1])
        batch.known[i] = texts[i][0]
    for step in run(runner, new_tokens - 1, batch.decode):
        for text, token in zip(texts, step, strict=True):
            text.append(token)
    return texts
