"""The sampler of GPUs against that of hosts, bit for bit: every token, failure and count."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

import batonlm
from batonlm.core.request.request import SamplingParams
from batonlm.core.scheduler.plan import SampleRow
from batonlm.engine.sampler import draw_tokens
from batonlm.engine.sampler_cpu import sum_row
from batonlm.engine.sampler_rows import ALL_BANNED, NOT_A_NUMBER, RowInputs, TokenCounts
from batonlm.engine.sampler_triton import draw_rows, sum_rows
from tests.depth import examples
from tests.engine.devices import CUDA, INTERPRETER

GREEDY = SamplingParams(temperature=0.0)
CPU = torch.device("cpu")


def check(
    logits: torch.Tensor,
    rows: Sequence[SampleRow],
    sources: Sequence[int] | None = None,
    *,
    device: str = "cpu",
    tile: int = 1024,
) -> list[int]:
    """The rows' tokens, once both samplers agree on them and on the counts."""
    vocab = logits.shape[1]
    sources = sources or range(len(rows))
    counts, held = TokenCounts(CPU), TokenCounts(torch.device(device))
    tokens = draw_tokens(logits, rows, sources, counts).tolist()
    inputs = RowInputs.of(rows, sources, held.place(rows, vocab), vocab)
    # Of the interpreter, which computes with numpy.
    with np.errstate(over="ignore"):
        got = draw_rows(logits.to(device), inputs, held.tensor, tile=tile)
    assert got.tolist() == tokens
    assert torch.equal(held.tensor.cpu(), counts.tensor)
    return tokens


def random_logits(rows: int, vocab: int, spread: float, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def rows_of(params: Sequence[SamplingParams]) -> list[SampleRow]:
    return [SampleRow(i, i % 3, i, p) for i, p in enumerate(params)]


@st.composite
def row(draw: st.DrawFn, index: int, vocab: int) -> SampleRow:
    """A row that asks for any combination."""
    ids = st.integers(0, vocab - 1)
    some = st.lists(ids, max_size=6)
    history = draw(st.lists(ids, min_size=1, max_size=12))
    penalized = draw(st.booleans())
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 1e-6, 0.01, 0.7, 1.0, 100.0])),
        top_p=draw(st.sampled_from([1.0, 1.0, 1e-9, 0.3, 0.9, 0.999])),
        top_k=draw(st.sampled_from([0, 0, 1, 3, 40, vocab - 1, vocab, 9999])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.05, 1.0])),
        repetition_penalty=draw(st.sampled_from([0.6, 1.0, 100.0])) if penalized else 1.0,
        presence_penalty=draw(st.sampled_from([-1.0, 0.0, 1.5])) if penalized else 0.0,
        frequency_penalty=draw(st.sampled_from([0.0, 0.3])) if penalized else 0.0,
        logit_bias=tuple((t, draw(st.floats(-100, 100, width=32))) for t in set(draw(some))),
        seed=draw(st.integers(0, 2**64 - 1)),
        allowed_token_ids=tuple(set(draw(some))),
    )
    allowed = b""
    if draw(st.booleans()):
        allowed = draw(st.binary(min_size=1, max_size=-(-vocab // 8)))
    position = draw(st.integers(0, 1000))
    banned = tuple(set(draw(some)))
    prompt = draw(st.integers(0, len(history)))
    kept = history if params.needs_history else ()
    return SampleRow(index, index % 2, position, params, banned, kept, prompt, allowed)


@st.composite
def steps(draw: st.DrawFn) -> tuple[torch.Tensor, list[SampleRow]]:
    vocab = draw(st.sampled_from([1, 8, 100, 1200]))
    count = draw(st.integers(1, 3))
    spread = draw(st.sampled_from([0.0, 1e-41, 0.3, 3.0, 30.0, 1e38]))
    logits = random_logits(count, vocab, spread, draw(st.integers(0, 99)))
    # Ties, as bfloat16 makes them, and what poisons a row or is no token.
    logits = logits.to(draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])))
    odd = draw(st.sampled_from([None, -math.inf, math.inf, math.nan]))
    if odd is not None:
        logits[draw(st.integers(0, count - 1)), :: draw(st.integers(1, 5))] = odd
    return logits, [draw(row(i, vocab)) for i in range(count)]


# The interpreter takes numpy's maximum of a row that holds no number.
@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
@settings(max_examples=examples(90), deadline=None)
@given(steps())
def test_every_combination_gives_the_token_of_the_host(
    step: tuple[torch.Tensor, list[SampleRow]],
) -> None:
    check(*step)


FILTERS = [
    SamplingParams(seed=1),
    SamplingParams(top_k=50, top_p=0.95, seed=2),
    SamplingParams(top_p=0.9, seed=3),
    SamplingParams(top_p=0.99, temperature=2.0, seed=4),
    SamplingParams(top_k=3000, top_p=0.8, seed=5),
    SamplingParams(min_p=0.02, seed=6),
    SamplingParams(top_k=40, min_p=0.1, temperature=0.6, seed=7),
]


@pytest.mark.deep
@pytest.mark.parametrize("device", [INTERPRETER, CUDA])
@pytest.mark.parametrize(
    ("vocab", "spread"),
    [
        (32000, 0.001),
        (151669, 0.0),
        *(
            pytest.param(vocab, spread, marks=pytest.mark.slow)
            for vocab, spread in ((32000, 0.0), (32000, 2.5), (151669, 0.001), (151669, 2.5))
        ),
    ],
)
def test_large_vocabularies(vocab: int, spread: float, device: str) -> None:
    """Flat rows, whose filters keep more tokens than are gathered, and others."""
    logits = random_logits(len(FILTERS), vocab, spread)
    check(logits, rows_of(FILTERS), device=device, tile=4096)


@pytest.mark.parametrize("device", [INTERPRETER, CUDA])
def test_flat_rows_need_more_tokens_than_are_gathered(device: str) -> None:
    params = [FILTERS[1], FILTERS[2], SamplingParams(top_k=4500, top_p=0.99, seed=8)]
    check(random_logits(3, 5003, 0.001), rows_of(params), device=device, tile=2048)


@pytest.mark.parametrize("device", [INTERPRETER, CUDA])
def test_a_row_of_no_numbers_fails_alone(device: str) -> None:
    logits = random_logits(6, 300, 2.0)
    logits[1, 200], logits[2, 0], logits[3] = math.nan, math.inf, -math.inf
    rows = rows_of([GREEDY, GREEDY, FILTERS[1], FILTERS[2], FILTERS[1], FILTERS[1]])
    rows[4] = rows[4]._replace(banned=tuple(range(300)))
    tokens = check(logits, rows, device=device)
    assert tokens[1:5] == [NOT_A_NUMBER, NOT_A_NUMBER, NOT_A_NUMBER, ALL_BANNED]
    assert tokens[0] >= 0 and tokens[5] >= 0


@pytest.mark.parametrize("device", [INTERPRETER, CUDA])
def test_choices_of_a_prompt_share_its_logits(device: str) -> None:
    logits = random_logits(2, 500, 1.0)
    tokens = check(logits, rows_of([SamplingParams(seed=9)] * 6), [0, 0, 1, 1, 0, 1], device=device)
    assert len(set(tokens)) > 2


@pytest.mark.parametrize("device", [INTERPRETER, CUDA])
@pytest.mark.parametrize(("vocab", "spread"), [(1, 1.0), (7, 0.0), (1200, 3.0), (5003, 30.0)])
def test_sums_of_rows_have_the_bits_of_the_host(vocab: int, spread: float, device: str) -> None:
    logits = random_logits(5, vocab, spread)
    logits[1, -1], logits[2, 0], logits[3] = math.nan, math.inf, -math.inf
    logits[4, ::2] = -math.inf
    logits[4, vocab // 2] = 1.0
    best, total = torch.empty(5, device=device), torch.empty(5, dtype=torch.int64, device=device)
    sum_rows(logits.to(device), best, total, tile=1024)
    wanted = [sum_row(row.numpy()) for row in logits]
    assert total.tolist() == [number for _, number in wanted]
    expected = torch.tensor([number for number, _ in wanted])
    assert torch.equal(best.cpu().view(torch.int32), expected.view(torch.int32))


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """Names of the operators that ran, but for those that only view memory."""

    VIEWS = ("aten::slice.Tensor", "aten::view.dtype", "aten::detach", "aten::lift_fresh")

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self.names: list[str] = []
        self.paused = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if not self.paused and func.name() not in self.VIEWS:
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("params", [GREEDY, FILTERS[1]])
def test_a_step_is_one_kernel_and_one_upload(
    params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    operators = Operators()
    launch = GridExecutor.__call__

    def counted(*arguments: Any, **options: Any) -> Any:
        operators.names.append("kernel")
        operators.paused = True  # The interpreter copies arguments.
        launch(*arguments, **options)
        operators.paused = False

    monkeypatch.setattr(GridExecutor, "__call__", counted)
    logits = random_logits(3, 400, 1.0)
    penalized = SamplingParams(frequency_penalty=0.5, logit_bias=((3, 1.0),), seed=3)
    rows = rows_of([params, penalized, params])
    rows[1] = rows[1]._replace(history=(5, 6, 7), num_prompt_tokens=2)
    counts = TokenCounts(CPU)
    counts.place(rows, 400)
    rows[1] = rows[1]._replace(history=(5, 6, 7, 8))
    with operators:
        inputs = RowInputs.of(rows, [0, 1, 2], counts.place(rows, 400), 400)
        draw_rows(logits, inputs, counts.tensor, tile=512)
    # Memory for tokens and distances; the upload is on this device already.
    assert operators.names == ["aten::empty.memory_format"] * 2 + ["kernel"]
    assert counts.tensor[0, [5, 6, 7, 8]].tolist() == [1, 1, 2, 2]


def test_counts_follow_a_history_without_being_made_again() -> None:
    counts = TokenCounts(CPU)
    params = SamplingParams(presence_penalty=1.0)
    logits = random_logits(1, 50, 1.0)

    def step(history: Sequence[int], sequence: int = 0) -> None:
        row = SampleRow(sequence, 0, 0, params, (), history, 2)
        draw_tokens(logits, [row], [0], counts)

    def expected(history: Sequence[int]) -> list[int]:
        wanted = [0] * 50
        for token in set(history[:2]):
            wanted[token] += 1
        for token in history[2:]:
            wanted[token] += 2
        return wanted

    history = [4, 4]
    for token in (4, 9, 9, 30):
        step(history)
        # A step whose token was dropped is done again.
        step(history)
        history.append(token)
    step(history)
    assert counts.rebuilt == 1
    assert counts.tensor[0].tolist() == expected(history)
    others = ([*history[:-1], 31], 1), (history[:4], 1), ([*history, 1, 2], 0)
    for other, times in others:
        before = counts.rebuilt
        step(other)
        assert counts.rebuilt == before + times
        assert counts.tensor[0].tolist() == expected(other)


def test_a_slot_goes_to_whoever_needs_it_when_its_sequence_stays_away() -> None:
    counts = TokenCounts(CPU)
    params = SamplingParams(presence_penalty=1.0)

    def place(*sequences: int) -> list[int]:
        rows = [SampleRow(i, 0, 0, params, (), (1, 2, 3), 1) for i in sequences]
        return [slot for slot, _ in counts.place(rows, 10)]

    assert place(0, 1, 2, 3) == [0, 1, 2, 3]
    # None of these has been away for long.
    assert place(4) == [4]
    assert len(counts.tensor) == 8
    for _ in range(TokenCounts.RECENT + 1):
        place(4, 5, 6, 7)
    assert place(8) == [0]
    assert place(0, 8) == [1, 0]
    assert len(counts.tensor) == 8


@pytest.mark.deep
@pytest.mark.parametrize("capability", [80, 90])
def test_they_compile_for_gpus_without_spills_or_fused_arithmetic(
    capability: int, tmp_path: Path
) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    roots = Path(batonlm.__path__[0]).parent, Path(__file__).parents[2]
    environment["PYTHONPATH"] = os.pathsep.join(map(str, roots))
    program = Path(__file__).with_name("compiling_sampler.py")
    done = subprocess.run(
        [sys.executable, str(program), str(capability)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert set(report) == {"sample", "sum"}
    for kernel in report.values():
        assert kernel["stack"] == 0
        assert kernel["shared"] <= 48 * 1024
        # What rounds otherwise than the host does.
        assert kernel["inexact"] == []
