"""Decode steps as recorded CUDA graphs.

A step in which every sequence computes one token runs the same kernels every time, on the same
memory if its inputs are put where they were when it was recorded. So the host has one launch to do
instead of hundreds. Steps are padded to the next recorded number of rows; padding works on a block
that belongs to nobody.

Nothing in a recording says which rows are of one sequence: each row has a position, and where its
sequence's blocks are. So the same recordings serve steps with drafts, whichever sequences have how
many of them, as far as all rows fit the largest. All else, prompts above all, runs as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from batonlm.core.scheduler.plan import StepPlan
from batonlm.engine.attention.interface import Fill, ForwardPass
from batonlm.engine.device import upload
from batonlm.engine.sampler import LastTokens

Forward = Callable[[ForwardPass], torch.Tensor]
"""Runs the network: logits [S, vocab] of the sampled rows."""

Record = Callable[[Callable[[], None]], Callable[[], None]]
"""Runs what it is given once or more, and returns how to run it again on the same memory."""


class NotRecordable(RuntimeError):
    """A step makes the host wait for the device, which no recording may contain; names the
    operator."""


_WAITS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
# Operators that are tagged for what only some of their arguments make them do.
_INDEXING = ("aten::index", "aten::index_put", "aten::index_put_")
_REPEATING = ("aten::repeat_interleave",)


class _HostWaits(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's is untyped
    """Raises NotRecordable at the first operator for which the host waits."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        # What is made of other operators reaches this method whole where there is no autograd.
        with self:
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        if _waits(func, args, kwargs):
            raise NotRecordable(f"{func.name()} makes the host wait for the device")
        return func(*args, **kwargs)


def _waits(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    name = func.name().partition(".")[0]
    if name in _INDEXING:
        # A mask is turned into places, whose number the host needs; writing one number everywhere
        # in it is not.
        masked = any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
        return masked and (name == "aten::index" or args[2].numel() > 1)
    if name in _REPEATING:
        return kwargs.get("output_size") is None
    if name == "aten::copy_":
        return bool(args[0].device != args[1].device)
    if name == "aten::_to_copy":
        device = kwargs.get("device")
        return device is not None and torch.device(device).type != args[0].device.type
    return not _WAITS.isdisjoint(func.tags)


@contextmanager
def refusing_host_waits() -> Iterator[None]:
    """Raises NotRecordable at the first operator inside for which the host would wait for the
    device: one that reads a value, makes a tensor whose size depends on values, or copies between
    host and device. It shows on every device, but for copies; Triton's kernels wait for nothing
    and are not looked at.
    """
    with _HostWaits():  # type: ignore[no-untyped-call]  # torch's class is untyped
        yield


def batch_sizes(most: int) -> list[int]:
    """The numbers of rows that are recorded, `most` being the largest. A padded row costs little
    where reading the weights is what takes time; further up, sizes differ by an eighth or so."""
    sizes = {1, 2, 4, *range(8, 65, 8), *range(80, 129, 16), *range(160, 257, 32)}
    sizes |= set(range(320, most, 64))
    return sorted({size for size in sizes if size < most} | {most})


def cuda_recorder() -> Record:
    """Records CUDA graphs that share their temporary memory: they never run at the same time."""
    pool = torch.cuda.graph_pool_handle()
    aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def record(run: Callable[[], None]) -> Callable[[], None]:
        # Once as usual, off the main stream: compiles kernels, and lets libraries get their memory.
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            run()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # Thread-local: what other threads do with the device meanwhile is not our recording's.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            run()
        return graph.replay

    return record


class DecodeGraphs:
    """Steps of up to max_rows tokens, of sequences that decode."""

    def __init__(
        self,
        forward: Forward,
        fill: Fill,
        logits: torch.Tensor,
        record: Record,
    ):
        """logits: [max_rows, vocab], as the network makes them. Records every size, the largest
        first, so that the smaller ones fit into its memory.

        Raises NotRecordable, with nothing recorded, for a network that looks at values on the way;
        RuntimeError where recording fails for another reason.
        """
        self._fill = fill
        self._logits = logits
        self._record = record
        self._sizes = batch_sizes(len(logits))
        # A recording that fails may leave torch's allocator unusable, so what would make it fail
        # is found first. Code may choose by the number of rows.
        with refusing_host_waits():
            for rows in {self._sizes[0], self._sizes[-1]}:
                self._step(forward, rows)()
        self._replays = {rows: record(self._step(forward, rows)) for rows in reversed(self._sizes)}

    def beside(self, forward: Forward) -> DecodeGraphs:
        """Recordings of another way to run the network, over the same memory: of both together, the
        last run's logits hold. Raises as this does when it is made."""
        return DecodeGraphs(forward, self._fill, self._logits, self._record)

    def fits(self, plan: StepPlan) -> bool:
        return plan.num_tokens <= self._sizes[-1] and all(
            chunk.decodes and chunk.scored is None for chunk in plan.chunks
        )

    def run(self, plan: StepPlan, last: LastTokens) -> torch.Tensor:
        """A plan that fits: logits [wanted rows, vocab], which hold until the next run."""
        count = plan.num_tokens
        rows = next(size for size in self._sizes if size >= count)
        last.fill(plan, self._fill(plan, rows).token_ids[0])
        self._replays[rows]()
        sampled: list[int] = []
        row = 0
        for chunk in plan.chunks:
            end = row + len(chunk.token_ids)
            sampled += range(row, end) if chunk.samples else ()
            row = end
        if len(sampled) == count:
            return self._logits[:count]
        return self._logits.index_select(0, upload(sampled, torch.int64, self._logits.device))

    def _step(self, forward: Forward, rows: int) -> Callable[[], None]:
        inputs = self._fill(StepPlan(0, ()), rows)

        def run() -> None:
            # One buffer for all sizes: logits are the largest thing that a graph leaves behind.
            self._logits[:rows].copy_(forward(inputs))

        return run
