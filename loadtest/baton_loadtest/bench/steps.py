"""Times single steps of a runner at a chosen batch and context.

What KV holds does not change how long a step takes, so memory is filled with random numbers once
and every sequence of a plan is given a run of blocks in it. A runner's memory must be filled before
it is timed: pages that were never written all read the same physical one, from cache.
"""

from __future__ import annotations

import time
from itertools import count

from baton.core.request.request import SamplingParams
from baton.core.scheduler.plan import Chunk, ModelRunner, SampleRow, StepPlan

FILL_POSITIONS = 256
GREEDY = SamplingParams(temperature=0.0)
TOKEN = 5


class StepTimer:
    """Steps over one runner, whose whole memory it fills and overwrites."""

    def __init__(self, runner: ModelRunner):
        self.runner = runner
        self.positions = runner.num_blocks * runner.block_size
        self._numbers = count(1)
        self._fill()

    def decode(self, batch: int, context: int, *, least: int = 3, seconds: float = 0.3) -> float:
        """Seconds of a step that gives each of `batch` sequences its token after `context`
        positions: the best of at least `least` steps, which take at least `seconds`."""
        self._decode(batch, context)
        times = [self._decode(batch, context)]
        while len(times) < least or sum(times) < seconds:
            times.append(self._decode(batch, context))
        return min(times)

    def prefill(self, length: int, chunk: int) -> float:
        """Seconds that a prompt takes in chunks."""
        blocks = self._blocks(length)
        began = time.perf_counter()
        for first in range(0, length, chunk):
            end = min(first + chunk, length)
            tokens = tuple(TOKEN + position % 97 for position in range(first, end))
            samples = (self._row(0),) if end == length else ()
            self._run((Chunk(0, tokens, first, ((0, blocks),), samples),))
        return time.perf_counter() - began

    def fits(self, batch: int, context: int) -> bool:
        longest = self.runner.model.max_model_len
        room = self._blocks(context + 1) * batch <= self.runner.num_blocks
        return room and context < longest

    def _decode(self, batch: int, context: int) -> float:
        blocks = self._blocks(context + 1)
        chunks = tuple(
            Chunk(index, (TOKEN,), context, ((index * blocks, blocks),), (self._row(index),))
            for index in range(batch)
        )
        began = time.perf_counter()
        self._run(chunks)
        return time.perf_counter() - began

    def _run(self, chunks: tuple[Chunk, ...]) -> None:
        self.runner.submit(StepPlan(next(self._numbers), chunks))
        self.runner.collect()

    def _blocks(self, positions: int) -> int:
        return -(-positions // self.runner.block_size)

    def _row(self, sequence_id: int) -> SampleRow:
        return SampleRow(sequence_id, 0, 0, GREEDY)

    def _fill(self) -> None:
        import torch

        layout = self.runner.layout
        dtype = getattr(torch, layout.dtype)
        everything = ((0, self.runner.num_blocks),)
        for first in range(0, self.positions, FILL_POSITIONS):
            size = min(FILL_POSITIONS, self.positions - first)
            if first == 0 or size < FILL_POSITIONS:
                numbers = size * layout.bytes_per_position // dtype.itemsize
                payload = torch.randn(numbers).to(dtype).view(torch.uint8).numpy().data
            self.runner.unpack(everything, first, size, payload)
