"""Recorded decode steps over the real kernels.

What a graph adds on a GPU is that it runs on the memory of its recording. That everything is put
there, and padding harms nobody, shows without one too: kernels are interpreted then, and a
recording just runs again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from batonlm.core.errors import InvalidArgument
from batonlm.core.request.request import SamplingParams
from batonlm.core.scheduler.plan import PENDING, Chunk, SampleRow, StepPlan
from batonlm.engine.attention.interface import ForwardPass
from batonlm.engine.config import EngineConfig
from batonlm.engine.drafting import TorchDraftModel
from batonlm.engine.graphs import (
    DecodeGraphs,
    NotRecordable,
    Record,
    batch_sizes,
    cuda_recorder,
    refusing_host_waits,
)
from batonlm.engine.loader import run_network
from batonlm.engine.runner import TorchRunner
from tests.engine.devices import CUDA, INTERPRETER
from tests.engine.driving import GREEDY, generate, random_prompts, scattered, verify

pytest.importorskip("triton")

MOST = 4


@pytest.fixture(scope="module", params=[CUDA, INTERPRETER])
def runner(request: pytest.FixtureRequest, saved: Callable[[str], Path]) -> Iterator[TorchRunner]:
    torch.set_num_threads(1)
    made = TorchRunner.load(
        EngineConfig(
            str(saved("llama")),
            device=request.param,
            dtype="float32",
            attention="triton",
            num_blocks=40,
            max_model_len=128,
            exact=False,
            graphs=False,
        )
    )
    yield made
    made.close()


class Recorder:
    """Counts the replays of each recording."""

    def __init__(self, record: Record) -> None:
        self.replays: list[int] = []
        self._record = record

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        replay = self._record(run)
        index = len(self.replays)
        self.replays.append(0)

        def counted() -> None:
            self.replays[index] += 1
            replay()

        return counted


def run_again(run: Callable[[], None]) -> Callable[[], None]:
    """Runs once, as recording does."""
    run()
    return run


@pytest.fixture(scope="module")
def recorder(runner: TorchRunner) -> Iterator[Recorder]:
    device = runner.memory.device
    recorder = Recorder(cuda_recorder() if device.type == "cuda" else run_again)
    with torch.inference_mode():
        fill = runner._backend.decode_buffers(MOST)
        assert fill is not None
        logits = torch.full((MOST, runner.model.vocab_size), torch.nan, device=device)
        runner._graphs = DecodeGraphs(partial(run_network, runner._network), fill, logits, recorder)
    yield recorder
    runner._graphs = None


def test_sizes_grow_up_to_the_largest_batch() -> None:
    assert batch_sizes(1) == [1]
    assert batch_sizes(3) == [1, 2, 3]
    assert batch_sizes(64) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]
    assert batch_sizes(500)[-4:] == [320, 384, 448, 500]
    for most in (7, 100, 256, 1000):
        sizes = batch_sizes(most)
        assert sizes == sorted(set(sizes)) and sizes[-1] == most
        assert all(after <= max(2 * size, 8) for size, after in itertools.pairwise(sizes))


@pytest.mark.deep
def test_recorded_steps_give_the_tokens_of_others(runner: TorchRunner, recorder: Recorder) -> None:
    """A batch that fits, one that is padded, and one that is larger than any recorded."""
    texts = random_prompts((1, 15, 16, 17, 30), 1000)
    tables = scattered(5, 4)
    # More than are recorded, so these run as usual.
    wanted = generate(runner, texts, tables, 2)
    assert recorder.replays == [0, 0, 0]
    for count in (1, 3):
        assert generate(runner, texts[:count], tables[:count], 2) == wanted[:count]
    # Recorded largest first: 4, 2, 1. A prompt of one token is a step of one token too.
    assert recorder.replays == [1, 0, 2]


@pytest.mark.deep
@pytest.mark.parametrize("drafts", [(3,), (0, 1), (1, 1), (2, 0)])
def test_steps_with_drafts_are_recorded_ones(
    runner: TorchRunner, recorder: Recorder, drafts: tuple[int, ...]
) -> None:
    """Whichever sequences have them: the logits are those of a step that is not recorded, and their
    best tokens those of steps without drafts."""
    texts = random_prompts((5, 17), 1000)[: len(drafts)]
    tables = scattered(len(drafts), 4)
    likely = generate(runner, texts, tables, 5)
    chunks = []
    for i, (text, count) in enumerate(zip(texts, drafts, strict=True)):
        rows = tuple(SampleRow(i, 0, 1 + j, GREEDY) for j in range(1 + count))
        tokens = likely[i][: 1 + count]
        chunks.append(Chunk(i, tokens, len(text), tables[i], rows, num_drafts=count))
    plan = StepPlan(0, tuple(chunks))
    replays, graphs = sum(recorder.replays), runner._graphs
    with torch.inference_mode():
        got = runner.forward(plan).clone()
        assert sum(recorder.replays) == replays + 1
        runner._graphs = None
        wanted = runner.forward(plan)
    runner._graphs = graphs
    best = [likely[i][1 + j] for i, count in enumerate(drafts) for j in range(1 + count)]
    assert got.argmax(1).tolist() == best
    if runner.on_device:
        # Products of other numbers of rows may end in other bits there.
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    else:
        assert torch.equal(got, wanted)


@pytest.mark.deep
@pytest.mark.parametrize(
    ("count", "most", "params"),
    [(1, 3, SamplingParams(temperature=0.9, top_k=20, seed=3)), (2, 1, GREEDY)],
)
def test_drafts_change_no_token(
    runner: TorchRunner, recorder: Recorder, count: int, most: int, params: SamplingParams
) -> None:
    texts, tables = random_prompts((9, 20), 1000)[:count], scattered(count, 4)
    wanted = generate(runner, texts, tables, 8, params=params)
    replays = sum(recorder.replays)
    got, steps = verify(runner, texts, tables, wanted, params=params, most=most)
    assert got == wanted
    assert steps < 8
    # All but the prompts'.
    assert sum(recorder.replays) == replays + steps - 1


@pytest.mark.deep
def test_a_draft_model_that_is_a_token_behind_runs_as_recorded(
    runner: TorchRunner, recorder: Recorder
) -> None:
    texts, tables = random_prompts((5, 17), 1000), scattered(2, 4)
    likely = generate(runner, texts, tables, 3)
    wanted = (SampleRow(0, 0, 0, GREEDY),)
    chunks = [
        Chunk(0, likely[0][:2], len(texts[0]), tables[0], wanted),
        Chunk(1, likely[1][:1], len(texts[1]), tables[1], wanted),
    ]
    found = []
    for recorded in (True, False):
        replays = sum(recorder.replays)
        model = TorchDraftModel(runner.forward, runner.model, runner.model, recorded=recorded)
        found.append(model.compute(chunks)[0])
        assert sum(recorder.replays) == replays + recorded
    assert [guess.token_id for guess in found[0]] == [likely[0][2], likely[1][1]]
    for one, other in zip(*found, strict=True):
        assert one.token_id == other.token_id
        assert one.probability == pytest.approx(other.probability, rel=1e-3)


@pytest.mark.deep
def test_more_drafts_than_are_recorded_run_as_usual(
    runner: TorchRunner, recorder: Recorder
) -> None:
    texts, tables = random_prompts((9,), 1000), scattered(1, 4)
    likely = generate(runner, texts, tables, MOST + 2)
    drafts = likely[0][: MOST + 1]
    rows = tuple(SampleRow(0, 0, 1 + j, GREEDY) for j in range(MOST + 1))
    replays = list(recorder.replays)
    runner.submit(StepPlan(0, (Chunk(0, drafts, 9, tables[0], rows, num_drafts=MOST),)))
    assert [token.token_id for token in runner.collect().tokens] == likely[0][1:]
    assert recorder.replays == replays


@pytest.mark.deep
def test_padding_leaves_every_block_alone(runner: TorchRunner, recorder: Recorder) -> None:
    memory = runner.memory
    texts = random_prompts((20, 21, 22), 1000)
    generate(runner, texts, scattered(3, 2), 1)
    before = torch.empty(memory.num_blocks, memory.block_bytes, dtype=torch.uint8)
    memory.blocks_out(0, memory.num_blocks, before)
    tables = scattered(3, 2)
    row = SampleRow(0, 0, 1, GREEDY)
    lone = [Chunk(i, [7], 20 + i, tables[i], (row._replace(sequence_id=i),)) for i in range(3)]
    drafted = Chunk(0, [7, 8, 9], 20, tables[0], (row,) * 3, num_drafts=2)
    for chunks, own in ((lone, tables), ([drafted], tables[:1])):
        runner.submit(StepPlan(9, tuple(chunks)))
        assert len(runner.collect().tokens) == 3
        after = torch.empty_like(before)
        memory.blocks_out(0, memory.num_blocks, after)
        changed = (before != after).any(1).nonzero().flatten().tolist()
        assert changed == sorted(table[1][0] for table in own)
        before = after


@pytest.mark.deep
def test_pending_tokens_and_rows_without_samples(runner: TorchRunner, recorder: Recorder) -> None:
    texts = random_prompts((5, 6, 7), 1000)
    tables = scattered(3, 2)
    wanted = generate(runner, texts, tables, 4)
    first = tuple(
        Chunk(i, text, 0, tables[i], (SampleRow(i, 0, 0, GREEDY),)) for i, text in enumerate(texts)
    )
    runner.submit(StepPlan(0, first))
    # Another order, and one of them not sampled.
    second = tuple(
        Chunk(
            i,
            [PENDING],
            len(texts[i]),
            tables[i],
            (SampleRow(i, 0, 1, GREEDY),) if i != 1 else (),
        )
        for i in (2, 1, 0)
    )
    replays = sum(recorder.replays)
    runner.submit(StepPlan(1, second))
    assert sum(recorder.replays) == replays + 1
    assert [[t.token_id] for t in runner.collect().tokens] == [text[:1] for text in wanted]
    # A pending one behind a sequence with a draft.
    rows = tuple(SampleRow(2, 0, position, GREEDY) for position in (2, 3))
    third = (
        Chunk(2, wanted[2][1:3], len(texts[2]) + 1, tables[2], rows, num_drafts=1),
        Chunk(0, [PENDING], len(texts[0]) + 1, tables[0], (SampleRow(0, 0, 2, GREEDY),)),
    )
    runner.submit(StepPlan(2, third))
    assert sum(recorder.replays) == replays + 2
    drawn = {token.sequence_id: token.token_id for token in runner.collect().tokens}
    assert drawn == {2: wanted[2][1], 0: wanted[0][1]}
    drawn_last = [(token.sequence_id, token.token_id) for token in runner.collect().tokens]
    assert drawn_last == [(2, wanted[2][2]), (2, wanted[2][3]), (0, wanted[0][2])]


@pytest.mark.deep
def test_a_network_that_cannot_be_recorded_runs_as_usual(
    runner: TorchRunner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> Callable[[Callable[[], None]], Callable[[], None]]:
        def record(run: Callable[[], None]) -> Callable[[], None]:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

        return record

    monkeypatch.setattr("batonlm.engine.runner.cuda_recorder", refuse)
    monkeypatch.setattr(runner, "_graphs", None)
    with torch.inference_mode():
        runner._record(2, 1000)
    assert runner._graphs is None
    assert "without CUDA graphs: operation not permitted when stream is capturing" in caplog.text
    assert len(generate(runner, random_prompts((3,), 1000), scattered(1, 2), 2)[0]) == 2
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.11.0+cu130"))
    with (
        torch.inference_mode(),
        pytest.raises(InvalidArgument, match=r"torch 2.11.0\+cu130 cannot go on") as raised,
    ):
        runner._record(2, 1000)
    assert raised.value.field == "graphs"


def _choose(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if bool(x.sum() > 0) else x


WAITING: dict[str, tuple[Callable[[torch.Tensor], object], str]] = {
    "a branch": (_choose, "aten::_local_scalar_dense"),
    "a number": (lambda x: torch.arange(int(x.max())), "aten::_local_scalar_dense"),
    "places": (lambda x: torch.where(x > 1), "aten::nonzero"),
    "a mask": (lambda x: x[x > 1], "aten::index"),
    "rows of a mask": (lambda x: x.index_put_((x > 1,), x), "aten::index_put_"),
    "kinds": (torch.unique, "aten::_unique2"),
    "classes": (lambda x: nn.functional.one_hot(x.long()), "aten::_local_scalar_dense"),
    "comparison": (lambda x: torch.equal(x, x), "aten::equal"),
    "repeats": (lambda x: torch.repeat_interleave(x, x.long()), "aten::repeat_interleave"),
    "another device": (lambda x: x.to("meta"), "aten::_to_copy"),
}
"""What makes a host wait, and the operator that is named."""

PLAIN: dict[str, Callable[[torch.Tensor], object]] = {
    "products": lambda x: nn.functional.linear(x[:, None], x[:, None]) @ x + x,
    "places": lambda x: x[x.long()].index_put_((x.long(),), x),
    "a number in a mask": lambda x: x.clone().__setitem__(x > 1, 0.0),
    "a choice": lambda x: torch.where(x > 1, x, 0).masked_fill(x > 2, 1.0),
    "order": lambda x: (torch.topk(x, 2), x.sort(), x.cumsum(0), x.argmax()),
    "one device": lambda x: x.to("cpu").to(torch.bfloat16).float(),
    "repeats": lambda x: torch.repeat_interleave(x, x.long(), output_size=15),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", WAITING)
def test_what_makes_the_host_wait_is_refused_by_name(name: str, *, inference: bool) -> None:
    run, operator = WAITING[name]
    with (
        torch.inference_mode(inference),
        pytest.raises(NotRecordable, match=operator),
        refusing_host_waits(),
    ):
        run(torch.arange(6.0))


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", PLAIN)
def test_what_waits_for_nothing_is_not_refused(name: str, *, inference: bool) -> None:
    with torch.inference_mode(inference), refusing_host_waits():
        PLAIN[name](torch.arange(6.0))


def test_a_network_that_waits_is_refused_before_anything_is_recorded() -> None:
    recordings: list[Callable[[], None]] = []

    def record(run: Callable[[], None]) -> Callable[[], None]:
        recordings.append(run)
        return run

    def forward(inputs: ForwardPass) -> torch.Tensor:
        return _choose(inputs.positions.float()[0])[:, None].expand(-1, 8)

    def fill(plan: StepPlan, rows: int) -> ForwardPass:
        numbers = torch.zeros(1, rows, dtype=torch.int64)
        return ForwardPass(numbers, numbers, numbers[0], None)

    with pytest.raises(NotRecordable, match="makes the host wait"):
        DecodeGraphs(forward, fill, torch.empty(2, 8), record)
    assert not recordings
