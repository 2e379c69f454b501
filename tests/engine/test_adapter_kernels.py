"""Triton's additions of adapters against float64 and the CPU's way, and each row against others."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from batonlm.core.scheduler.plan import Chunk, SampleRow, StepPlan
from batonlm.engine.adapters import grouped
from batonlm.engine.adapters.additions import Additions, SlicedAdditions
from batonlm.engine.adapters.grouped import GroupedAdditions, split_of
from batonlm.engine.adapters.places import Part, Place
from batonlm.engine.config import EngineConfig
from batonlm.engine.graphs import DecodeGraphs, cuda_recorder
from batonlm.engine.loader import run_network
from batonlm.engine.runner import TorchRunner
from tests.engine.adapters import expected, save_adapter
from tests.engine.devices import CUDA, INTERPRETER
from tests.engine.driving import GREEDY, generate, random_prompts, scattered
from tests.engine.test_fused_kernels import launches
from tests.engine.test_graphs import Recorder, run_again

ON = pytest.mark.parametrize("device", [INTERPRETER, CUDA])

PLACES = (
    # A merged layer of parts that fill no tile, and one whose inputs are split.
    *(Place(0, 96, 0, 64), Place(0, 96, 64, 30), Place(0, 96, 94, 7)),
    Place(1, 1100, 0, 50),
)
SHAPES = {0: (96, 101), 1: (1100, 50)}
"""Inputs and outputs of each layer."""
BATCH = 24
Layers = list[list[Part]]


def parts(
    rank: int, seed: int, *, without: Sequence[int] = (), dtype: torch.dtype = torch.float32
) -> Layers:
    """Random matrices, of all places but some."""
    generator = torch.Generator().manual_seed(seed)

    def random(*sizes: int) -> torch.Tensor:
        return (torch.randn(sizes, generator=generator) / math.sqrt(sizes[1])).to(dtype)

    found: Layers = [[] for _ in SHAPES]
    for number, place in enumerate(PLACES):
        if number not in without:
            part = Part(place, random(rank, place.inputs), random(place.outputs, rank))
            found[place.layer].append(part)
    return found


def moved(layers: Layers, device: str) -> Layers:
    return [
        [Part(place, down.to(device), up.to(device)) for place, down, up in own] for own in layers
    ]


def additions(
    device: str, *, exact: bool = False, batch: int = BATCH, dtype: torch.dtype = torch.float32
) -> GroupedAdditions:
    return GroupedAdditions(PLACES, torch.device(device), dtype, exact=exact, max_batch=batch)


def random_rows(layer: int, count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and outputs of a layer."""
    generator = torch.Generator().manual_seed(seed)
    inputs, outputs = SHAPES[layer]
    rows = torch.randn(count, inputs, generator=generator)
    return rows, torch.randn(count, outputs, generator=generator)


def added(
    which: Additions,
    layer: int,
    rows: torch.Tensor,
    output: torch.Tensor,
    sizes: Sequence[int],
    bound: Sequence[object],
    device: str = "cpu",
) -> torch.Tensor:
    """The outputs behind the step of these segments."""
    found = output.clone().to(device)
    which.begin(sizes, bound)
    which.add(layer, rows.to(device), found)
    which.end()
    return found.cpu()


def defined(
    layer: int,
    rows: torch.Tensor,
    output: torch.Tensor,
    sizes: Sequence[int],
    adapters: Sequence[Layers | None],
) -> torch.Tensor:
    """The same in float64."""
    found, first = output.double(), 0
    for size, adapter in zip(sizes, adapters, strict=True):
        own = slice(first, first + size)
        for place, down, up in [] if adapter is None else adapter[layer]:
            made = rows[own].double() @ down.double().T @ up.double().T
            found[own, place.first : place.first + place.outputs] += made
        first += size
    return found


FEW_ROWS = (3, 1, 0, 17, 2)
"""Of each segment: single ones, some of several tiles, as many as a recorded step has."""
MANY_ROWS = (70, 1, 3, 5, 2)
"""More than that, computed in large tiles."""


@ON
@pytest.mark.parametrize(
    ("sizes", "layer", "exact"),
    [
        *((FEW_ROWS, 0, False), (FEW_ROWS, 1, True), (MANY_ROWS, 0, True), (MANY_ROWS, 1, False)),
        pytest.param(FEW_ROWS, 0, True, marks=pytest.mark.deep),
        pytest.param(FEW_ROWS, 1, False, marks=pytest.mark.deep),
        pytest.param(MANY_ROWS, 0, False, marks=pytest.mark.deep),
        pytest.param(MANY_ROWS, 1, True, marks=pytest.mark.deep),
    ],
)
def test_they_add_what_is_defined(
    sizes: tuple[int, ...], layer: int, exact: bool, device: str
) -> None:
    """Several ranks; adapters that leave a part or a layer as it is; padding behind the step."""
    given = [parts(8, 1), None, parts(24, 2, without=(1,)), parts(40, 3, without=(0, 2)), None]
    which = additions(device, exact=exact)
    sliced = SlicedAdditions(exact=exact, max_batch=BATCH, alone=False)
    bound = [None if own is None else which.bind(moved(own, device)) for own in given]
    others = [None if own is None else sliced.bind(own) for own in given]
    count = sum(sizes)
    rows, output = random_rows(layer, count + 3)
    found = added(which, layer, rows, output, sizes, bound, device)
    wanted = defined(layer, rows[:count], output[:count], sizes, given)
    torch.testing.assert_close(found[:count].double(), wanted, rtol=1e-5, atol=1e-5)
    # As on CPUs.
    beside = added(sliced, layer, rows, output, sizes, others)
    torch.testing.assert_close(found, beside, rtol=1e-5, atol=1e-5)
    # Nothing is written that is not added to: not a bit of a row or a part.
    untouched = beside == output
    assert untouched[sum(sizes[:1]) : sum(sizes[:2])].all() and untouched[count:].all()
    assert torch.equal(found[untouched], output[untouched])


@ON
def test_a_layer_that_an_adapter_leaves_as_it_is(device: str) -> None:
    which = additions(device)
    bound = [which.bind(moved(parts(8, 1, without=(3,)), device))]
    rows, output = random_rows(1, 20)
    assert torch.equal(added(which, 1, rows, output, [20], bound, device), output)


@ON
def test_each_row_may_have_an_adapter_of_its_own(device: str) -> None:
    which = additions(device)
    given = [parts(8 * (1 + number % 3), number) for number in range(5)]
    bound = [which.bind(moved(own, device)) for own in given]
    sizes = [1] * len(given)
    for layer in SHAPES:
        rows, output = random_rows(layer, len(given))
        found = added(which, layer, rows, output, sizes, bound, device)
        wanted = defined(layer, rows, output, sizes, given)
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts calls of the interpreter")
def test_a_layer_takes_two_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many adapters there are."""
    which = additions("cpu")
    which.begin([2] * 6, [which.bind(parts(8, seed)) for seed in range(6)])
    rows, output = random_rows(0, 12)
    with launches(monkeypatch) as names:
        which.add(0, rows, output)
    which.end()
    assert names == ["_down", "_up"]


@ON
def test_in_half_precision_they_round_where_products_do(device: str) -> None:
    half = torch.float16
    which = additions(device, dtype=half)
    given = [parts(16, 1, dtype=half), None, parts(64, 2, dtype=half)]
    bound = [None if own is None else which.bind(moved(own, device)) for own in given]
    for sizes in ((2, 1, 4), (50, 3, 20)):
        for layer in SHAPES:
            rows, output = (each.to(half) for each in random_rows(layer, sum(sizes)))
            found = added(which, layer, rows, output, sizes, bound, device)
            wanted = defined(layer, rows, output, sizes, given)
            assert float((found.double() - wanted).norm() / wanted.norm()) < 1e-3


@ON
@pytest.mark.parametrize("layer", [1, pytest.param(0, marks=pytest.mark.deep)])
def test_a_rows_bits_do_not_depend_on_other_rows(
    layer: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    which = additions(device, exact=True)
    bound = [which.bind(moved(parts(8 * n, n), device)) for n in (1, 2, 3)]
    rows, output = random_rows(layer, 30)

    def one(index: int, adapter: object) -> torch.Tensor:
        own = slice(index, index + 1)
        return added(which, layer, rows[own], output[own], [1], [adapter], device)[0]

    # Splits of the first product with programs of their own, and one after the other in one.
    for most_bytes, sizes, order in ((1 << 30, (4, 1, 9), (0, 1, 2)), (0, (17, 3, 10), (2, 0, 1))):
        adapters = [bound[number] for number in order]
        count = sum(sizes)
        with monkeypatch.context() as patched:
            patched.setattr(grouped, "_SUM_BYTES", most_bytes)
            whole = added(which, layer, rows[:count], output[:count], sizes, adapters, device)
        for segment, adapter in enumerate(adapters):
            for index in {sum(sizes[:segment]), sum(sizes[: segment + 1]) - 1}:
                assert torch.equal(whole[index], one(index, adapter))


@pytest.mark.parametrize("inputs", [1, 96, 512, 513, 1100, 4096, 14336, 28672])
def test_splits_cover_all_inputs(inputs: int) -> None:
    for inner in (32, 64, 128):
        size, count = split_of(inputs, inner)
        assert size % inner == 0 and count <= 8
        assert (count - 1) * size < inputs <= count * size


@ON
def test_more_adapters_than_slots_take_turns(device: str) -> None:
    which = additions(device, batch=3)
    assert which.most_adapters == 3
    given = [parts(8, seed) for seed in range(7)]
    bound = [which.bind(moved(own, device)) for own in given]
    rows, output = random_rows(1, 3)
    for wanted in ((0, 1, 2), (2, 3, 4), (5, 2, 6), (6, 0, 2), (2, 6, 5)):
        adapters = [given[number] for number in wanted]
        found = added(which, 1, rows, output, [1] * 3, [bound[n] for n in wanted], device)
        wide = defined(1, rows, output, [1] * 3, adapters)
        torch.testing.assert_close(found.double(), wide, rtol=1e-5, atol=1e-5)


def test_a_slot_does_not_keep_its_adapters_memory() -> None:
    which = additions("cpu", batch=2)
    rows, output = random_rows(1, 1)
    bound = which.bind(parts(8, 1))
    added(which, 1, rows, output, [1], [bound])
    held = weakref.ref(bound)
    del bound
    gc.collect()
    assert held() is None
    again = parts(8, 2)
    found = added(which, 1, rows, output, [1], [which.bind(again)])
    wanted = defined(1, rows, output, [1], [again])
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


def opened(folder: Path, device: str) -> TorchRunner:
    return TorchRunner.load(
        EngineConfig(
            str(folder),
            device=device,
            dtype="float32",
            attention="triton",
            num_blocks=40,
            max_model_len=128,
            max_batch=4,
            exact=False,
            graphs=False,
            adapter_memory_bytes=8 << 20,
        )
    )


@ON
@pytest.mark.deep
def test_recorded_steps_give_the_tokens_of_others(
    device: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    """Which are those of transformers, whichever adapters a step has."""
    runner = opened(saved("llama"), device)
    paths = [save_adapter("llama", tmp_path / str(n), seed=n, rank=5 * n) for n in (1, 2)]
    digests = ["", *(runner.load_adapter(path).digest for path in paths)]
    prompts = random_prompts((3, 6, 2), 1000)
    tables = scattered(3, 4)
    mixes = ((1, 0, 2), (2, 2, 0))

    def answers() -> list[list[list[int]]]:
        return [
            generate(runner, prompts, tables, 2, adapters=[digests[which] for which in mix])
            for mix in mixes
        ]

    wanted = answers()
    own = [expected("llama", path, prompts, 2) for path in (None, *paths)]
    assert wanted == [[own[which][i] for i, which in enumerate(mix)] for mix in mixes]
    assert len({str(tokens) for tokens in wanted}) == len(mixes)
    recorder = Recorder(cuda_recorder() if device == "cuda" else run_again)
    with torch.inference_mode():
        fill = runner._backend.decode_buffers(4)
        assert fill is not None and runner._adapters is not None
        logits = torch.full((4, runner.model.vocab_size), torch.nan, device=device)
        run = partial(run_network, runner._network)
        runner._graphs = DecodeGraphs(run, fill, logits, recorder)
        forward = runner._adapters.as_recorded(run)
        assert forward is not None
        runner._adapted_graphs = runner._graphs.beside(forward)
    assert answers() == wanted
    # Of 4, 2 and 1 rows, and then the same with adapters. One row is padding.
    assert recorder.replays == [0, 0, 0, len(mixes), 0, 0]

    def decode(sequence: int, which: int) -> Chunk:
        row = SampleRow(sequence, 0, 0, GREEDY)
        return Chunk(sequence, [7], 0, tables[sequence], (row,), adapter=digests[which])

    with torch.inference_mode():
        # The same memory with and without adapters, step by step.
        alone = [runner.forward(StepPlan(0, (decode(0, which),))).clone() for which in range(3)]
        some = tuple(decode(sequence, which) for sequence, which in enumerate((2, 0, 1)))
        mixed = runner.forward(StepPlan(0, some)).clone()
        # A sequence with drafts has an adapter's rows side by side.
        replays = recorder.replays[3]
        rows = (SampleRow(0, 0, 0, GREEDY),) * 3
        chunk = Chunk(0, [7, 8, 9], 0, tables[0], rows, adapter=digests[2], num_drafts=2)
        drafted = StepPlan(0, (chunk, decode(1, 1)))
        recorded = runner.forward(drafted).clone()
        assert recorder.replays[3] == replays + 1
        runner._adapted_graphs = None
        torch.testing.assert_close(recorded, runner.forward(drafted))
    assert len({str(row.tolist()) for row in alone}) == 3
    torch.testing.assert_close(mixed, torch.cat([alone[2], alone[0], alone[1]]))
    torch.testing.assert_close(recorded[[0, 3]], torch.cat([alone[2], alone[1]]))
    runner.close()
