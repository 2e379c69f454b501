"""How near a model of real size comes to what the GPU can do; weights are random.

Everything is measured through the runner as the engine drives it: planned, submitted, collected.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import transformers

from baton.core.request.model import ModelDescription
from baton.core.request.request import SamplingParams
from baton.engine.config import EngineConfig
from baton.engine.loader import LoadedModel
from baton.engine.runner import TorchRunner
from baton_loadtest.report import Result, compared
from gpucheck.driving import GREEDY, Batch, run
from gpucheck.figures import Shape, decode_bytes, median, prefill_flops
from gpucheck.timing import event

BLOCK = 16
CHUNK = 2048
_NUCLEUS = SamplingParams(temperature=0.8, top_k=50, top_p=0.95, seed=1)


def open_model(
    shape: Shape, batch: int, positions: int, longest: int, device: str = "cuda"
) -> TorchRunner:
    """A bfloat16 Llama of a shape, made on the device. positions: of KV, in all. longest: of one
    sequence."""
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else 1 << 40
    settings = transformers.LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_size,
        max_position_embeddings=longest,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )
    with torch.device(device):
        network = transformers.AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            settings, dtype=torch.bfloat16, attn_implementation="eager"
        )
    description = ModelDescription("random", "", longest, shape.vocab, ())
    config = EngineConfig(
        "random",
        device=device,
        num_blocks=-(-positions // BLOCK),
        block_size=BLOCK,
        max_model_len=longest,
        max_batch=batch,
        max_step_tokens=CHUNK + batch,
    )
    loaded = LoadedModel(network.eval().requires_grad_(False), description, torch.device(device))
    return TorchRunner.over(loaded, config, free)


def fill(
    runner: TorchRunner, sequences: int, prompt: int, context: int, vocab: int
) -> tuple[Batch, list[tuple[int, float]]]:
    """Computes random prompts. Returns the batch, and (first position, seconds) of each chunk."""
    numbers = random.Random(7)
    batch = Batch([0] * sequences, -(-context // BLOCK))
    plans = []
    firsts = []
    for i in range(sequences):
        for start in range(0, prompt, CHUNK):
            count = min(CHUNK, prompt - start)
            tokens = [numbers.randrange(vocab) for _ in range(count)]
            plans.append(batch.prompt(i, tokens, last=start + count == prompt))
            firsts.append(start)
    edges: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    steps = run(runner, len(plans), iter(plans).__next__, _between(edges))
    batch.known = {i: step[0] for i, step in enumerate(step for step in steps if step)}
    torch.cuda.synchronize()
    times = [began.elapsed_time(ended) / 1e3 for began, ended in edges]
    return batch, list(zip(firsts, times, strict=True))


def prefill(runner: TorchRunner, shape: Shape, peak: float, prompt: int) -> list[Result]:
    """Whole chunks of one long prompt, as a share of the largest product's rate."""
    fill(runner, 1, prompt, prompt + BLOCK, shape.vocab)
    _, times = fill(runner, 1, prompt, prompt + BLOCK, shape.vocab)
    return [
        compared(
            f"prefill, {CHUNK} tokens after {first}",
            prefill_flops(shape, CHUNK, first) / taken,
            "FLOP/s",
            peak,
        )
        for first, taken in times
    ]


def decode(
    runner: TorchRunner, shape: Shape, bandwidth: float, batch: int, prompt: int, context: int
) -> list[Result]:
    """Steps of one token per sequence: against the memory's bandwidth, without graphs, and with
    sampling, and how long the GPU stands idle between two steps."""
    steps = 32
    filled, _ = fill(runner, batch, prompt, context, shape.vocab)
    name = f"decode, batch {batch}"

    def timed(params: SamplingParams) -> tuple[float, float, float]:
        """Median seconds of a step, of the gap before it, and of the host's own work for it."""
        here = replace(
            filled, lengths=list(filled.lengths), known=dict(filled.known), params=params
        )
        edges: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        spent: list[float] = []
        run(runner, steps, here.decode, _between(edges, spent))
        torch.cuda.synchronize()
        edges = edges[8:]
        ends = [ended for _, ended in edges]
        begins = [began for began, _ in edges]
        step = ends[0].elapsed_time(ends[-1]) / (len(ends) - 1) / 1e3
        gaps = [end.elapsed_time(next) / 1e3 for end, next in zip(ends, begins[1:], strict=False)]
        return step, median(gaps), median(spent[8:])

    step, gap, host = timed(GREEDY)
    moved = decode_bytes(shape, batch, prompt + steps // 2, 2)
    found = [
        compared(f"{name}, memory traffic", moved / step, "B/s", bandwidth),
        Result(f"{name}, step", step * 1e3, "ms"),
        Result(f"{name}, GPU idle between steps", gap * 1e3, "ms"),
        Result(f"{name}, host's submit", host * 1e3, "ms"),
    ]
    drawn, _, _ = timed(_NUCLEUS)
    found.append(compared(f"{name}, step with top-k and top-p", drawn * 1e3, "ms", step * 1e3))
    with _without_graphs(runner) as had_graphs:
        if had_graphs:
            plain, _, _ = timed(GREEDY)
            found.append(compared(f"{name}, step without graphs", plain * 1e3, "ms", step * 1e3))
    if not had_graphs:
        raise RuntimeError("decode steps were not recorded; see the warning above")
    return found


def _between(
    edges: list[tuple[torch.cuda.Event, torch.cuda.Event]], spent: list[float] | None = None
) -> Callable[[Callable[[], None]], None]:
    """Notes where on the GPU's clock each submission's work begins and ends, and the host's time
    to submit it."""

    def around(submit: Callable[[], None]) -> None:
        clock = time.perf_counter()
        began = event()
        submit()
        edges.append((began, event()))
        if spent is not None:
            spent.append(time.perf_counter() - clock)

    return around


@contextmanager
def _without_graphs(runner: TorchRunner) -> Iterator[bool]:
    graphs, runner._graphs = runner._graphs, None
    try:
        yield graphs is not None
    finally:
        runner._graphs = graphs
