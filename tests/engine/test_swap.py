"""SwapMemory over a real block pool: what comes back, what cannot be had, and disks that fail."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batonlm.core.errors import InvalidArgument
from batonlm.core.request.model import KvLayout
from batonlm.core.scheduler.plan import (
    BlockSwap,
    Chunk,
    SampledToken,
    SampleRow,
    StepPlan,
    StepResult,
)
from batonlm.engine.kv import swap as swap_module
from batonlm.engine.kv.cache import KvCache
from batonlm.engine.kv.extents import LOST, Moved, joined, owners
from batonlm.engine.kv.swap import SwapMemory
from tests.engine.driving import GREEDY

BLOCKS, BLOCK_SIZE, LAYERS = 12, 16, 2
Transfer = Callable[[int, list[memoryview], int], int]
MakeSwap = Callable[[KvCache, int, int], SwapMemory]


def cache(key_size: int = 8, value_size: int = 4, *, even: bool = False) -> KvCache:
    """Every element has a value of its own."""
    layout = KvLayout("m", "float32", LAYERS, 3, key_size, value_size)
    made = KvCache(layout, BLOCKS, BLOCK_SIZE, torch.device("cpu"), even=even)
    for memory in (made.keys, made.values):
        memory.copy_(torch.arange(memory.numel()).view(memory.shape))
    return made


@pytest.fixture
def swap_memory() -> Iterator[Callable[..., SwapMemory]]:
    """Makes swap memory of so many blocks in host memory and on disk."""
    with ExitStack() as ends:

        def make(memory: KvCache, host: int, disk: int, folder: Path | str = "") -> SwapMemory:
            size = memory.block_bytes
            made = SwapMemory(
                memory,
                host_bytes=host * size,
                disk_bytes=disk and disk * size + size - 1,
                folder=str(folder),
            )
            ends.callback(made.close)
            return made

        yield make


def block(memory: KvCache, number: int) -> torch.Tensor:
    places = slice(number * BLOCK_SIZE, (number + 1) * BLOCK_SIZE)
    return torch.cat([m[:, :, places].flatten() for m in (memory.keys, memory.values)])


def plan(
    out: BlockSwap | None = None, back: BlockSwap | None = None, *, tables: tuple[int, ...] = ()
) -> StepPlan:
    """tables: the blocks of one sequence each, numbered from 0."""
    chunks = tuple(
        Chunk(i, (5,), 0, ((first, 1),), (SampleRow(i, 0, 0, GREEDY),))
        for i, first in enumerate(tables)
    )
    return StepPlan(1, chunks, (), (out,) if out else (), (back,) if back else ())


@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("sizes", [(8, 4), (4, 8), (24, 16)])
def test_blocks_come_back_bit_equal_from_host_and_disk(
    sizes: tuple[int, int],
    even: bool,
    swap_memory: MakeSwap,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = cache(*sizes, even=even)
    # A staging memory of two blocks, so that runs are cut.
    monkeypatch.setattr(swap_module, "_STAGING_BYTES", 2 * memory.block_bytes + 1)
    swap = swap_memory(memory, 3, 6)
    assert swap.num_blocks == (3, 6)
    wanted = [block(memory, number) for number in range(BLOCKS)]
    out = BlockSwap((0, 1, 2, 3, 4, 7, 6, 9), (1, 2, 3, 4, 5, 0, 8, 7))
    moved = swap.move(plan(out))
    assert moved.seconds > 0 and not moved.lost
    memory.keys.fill_(-1)
    memory.values.fill_(-1)
    back = BlockSwap((5, 6, 7, 8, 9, 2, 1, 0), out.stored)
    assert not swap.move(plan(None, back)).lost
    for here, was in zip(back.blocks, out.blocks, strict=True):
        assert torch.equal(block(memory, here), wanted[was])
    for untouched in (3, 4, 10, 11):
        assert (block(memory, untouched) == -1).all()


def test_out_comes_before_in(swap_memory: MakeSwap) -> None:
    memory = cache()
    swap = swap_memory(memory, 2, 0)
    first, second = block(memory, 0), block(memory, 1)
    swap.move(plan(BlockSwap((0,), (0,))))
    swap.move(plan(BlockSwap((1,), (1,)), BlockSwap((1,), (0,))))
    assert torch.equal(block(memory, 1), first)
    swap.move(plan(None, BlockSwap((0,), (1,))))
    assert torch.equal(block(memory, 0), second)


def test_a_step_without_swaps_costs_nothing_and_is_told_as_it_is(swap_memory: MakeSwap) -> None:
    moved = swap_memory(cache(), 1, 0).move(plan(tables=(0,)))
    assert moved == Moved()
    result = StepResult(1, (SampledToken(0, 0, 7),))
    assert moved.applied_to(result) is result


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_a_disk_that_fails_costs_only_who_lay_there(
    call: str, swap_memory: MakeSwap, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = cache()
    swap = swap_memory(memory, 1, 3)
    good: Transfer = getattr(os, call)

    def failing(file: int, buffers: list[memoryview], offset: int) -> int:
        if offset == memory.block_bytes:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return good(file, buffers, offset)

    wanted = [block(memory, number) for number in range(BLOCKS)]
    with monkeypatch.context() as patched:
        patched.setattr(os, call, failing)
        # Apart from one another, so that each is a call of its own.
        swap.move(plan(BlockSwap((0, 2, 4, 6), (0, 1, 2, 3))))
        moved = swap.move(plan(None, BlockSwap((1, 3, 5, 7), (0, 1, 2, 3)), tables=(1, 3, 5, 7)))
    assert moved.lost == {2}
    for here, was in ((1, 0), (3, 2), (7, 6)):
        assert torch.equal(block(memory, here), wanted[was])
    # The place is good again once something was written there.
    assert not swap.move(plan(BlockSwap((8,), (2,)))).lost
    assert not swap.move(plan(None, BlockSwap((9,), (2,)), tables=(9,))).lost
    assert torch.equal(block(memory, 9), wanted[8])


def test_what_is_not_what_was_written_does_not_come_back(swap_memory: MakeSwap) -> None:
    memory = cache()
    swap = swap_memory(memory, 0, 3)
    never = swap.move(plan(None, BlockSwap((1,), (1,)), tables=(1,)))
    assert never.lost == {0}
    swap.move(plan(BlockSwap((0, 2), (0, 2))))
    assert swap._disk is not None
    os.pwrite(swap._disk._file.fileno(), b"\x01", 2 * memory.block_bytes + 5)
    moved = swap.move(plan(None, BlockSwap((4, 5), (0, 2)), tables=(4, 5, 6)))
    assert moved.lost == {1}


def test_transfers_go_on_where_a_call_stopped(
    swap_memory: MakeSwap, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = cache()
    swap = swap_memory(memory, 0, 3)
    for name in ("pwritev", "preadv"):
        whole: Transfer = getattr(os, name)
        monkeypatch.setattr(os, name, lambda f, b, at, whole=whole: whole(f, [b[0][:1000]], at))
    wanted = block(memory, 3)
    swap.move(plan(BlockSwap((3, 4), (1, 2))))
    assert not swap.move(plan(None, BlockSwap((0,), (1,)), tables=(0,))).lost
    assert torch.equal(block(memory, 0), wanted)
    swap._disk._file.truncate(0)  # type: ignore[union-attr]
    assert swap.move(plan(None, BlockSwap((0,), (1,)), tables=(0,))).lost == {0}


def test_a_lost_sequence_fails_and_its_choices_too() -> None:
    tokens = (SampledToken(4, 0, 7), SampledToken(5, 1, 8), SampledToken(6, 0, 9))
    made = StepResult(3, tokens, ((8, "bad logits"), (5, "bad logits")))
    told = Moved(0.5, frozenset({4, 5})).applied_to(made)
    assert told.tokens == tokens[2:]
    assert told.failed == ((8, "bad logits"), (4, LOST), (5, LOST))
    assert told.swap_s == 0.5


def test_all_choices_of_a_table_are_its_owners() -> None:
    rows = (SampleRow(4, 0, 0, GREEDY), SampleRow(5, 1, 0, GREEDY))
    chunks = (Chunk(4, (9,), 16, ((3, 2),), rows), Chunk(6, (9,), 0, ((5, 1),)))
    made = StepPlan(1, chunks)
    assert owners(made, {4}) == {4, 5}
    assert owners(made, {5, 7}) == {6}
    assert owners(made, set()) == frozenset()


def test_the_file_has_no_name_and_all_its_room(
    swap_memory: Callable[..., SwapMemory], tmp_path: Path
) -> None:
    memory = cache()
    swap = swap_memory(memory, 0, 5, tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert swap._disk is not None
    found = os.fstat(swap._disk._file.fileno())
    assert found.st_size == 5 * memory.block_bytes <= found.st_blocks * 512
    swap.close()
    swap.close()


def test_what_cannot_be_had_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = cache()
    refused = {
        "swap_host_bytes": {"host_bytes": memory.block_bytes - 1},
        "swap_disk_bytes": {"disk_bytes": 1},
        "swap_folder": {"disk_bytes": 1 << 20, "folder": str(tmp_path / "missing")},
    }
    for field, settings in refused.items():
        with pytest.raises(InvalidArgument) as caught:
            SwapMemory(memory, **settings)  # type: ignore[arg-type]
        assert caught.value.field == field

    def full(file: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(InvalidArgument, match="No space left") as caught:
        SwapMemory(memory, disk_bytes=1 << 20, folder=str(tmp_path))
    assert caught.value.field == "swap_disk_bytes"


@given(
    pairs=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=12),
    cut=st.integers(0, 12),
    border=st.integers(0, 10),
)
def test_runs_are_the_pairs_in_order(pairs: list[tuple[int, int]], cut: int, border: int) -> None:
    swaps = [
        BlockSwap(tuple(b for b, _ in part), tuple(s for _, s in part))
        for part in (pairs[:cut], pairs[cut:])
    ]
    runs = list(joined(swaps, border))
    assert [(b + i, s + i) for b, s, count in runs for i in range(count)] == pairs
    assert not any(s < border < s + count for _, s, count in runs)
    for (b, s, count), (b2, s2, _) in pairwise(runs):
        assert (b2, s2) != (b + count, s + count) or s2 == border
