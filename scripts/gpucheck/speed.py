"""How near a model of real size comes to what the GPU can do; weights are random.

Everything is measured through the runner as the engine drives it: planned, submitted, collected.
"""

from __future__ import annotations

import json
import math
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from baton_loadtest.report import Result, compared
from batonlm.core.request.model import ModelDescription
from batonlm.core.request.request import SamplingParams
from batonlm.core.scheduler.plan import ModelRunner, StepPlan
from batonlm.engine.config import EngineConfig
from batonlm.engine.loader import LoadedModel
from batonlm.engine.runner import TorchRunner
from gpucheck.ceilings import MATMUL, READ
from gpucheck.check import Check
from gpucheck.driving import GREEDY, Batch
from gpucheck.driving import run as drive
from gpucheck.figures import LLAMA_1B, LLAMA_8B, TINY, Shape, decode_bytes, median, prefill_flops
from gpucheck.timing import Mark, give_back, settle

BLOCK = 16
DECODE_GOAL = 0.8
"""Of the memory's read bandwidth."""
PREFILL_GOAL = 0.6
"""Of the rate of large products."""
IDLE_GOAL = 0.05
"""Of a step: the host's work is hidden behind the device's."""
ADAPTER_RANK = 16
ADAPTERS_GOAL = 0.75
"""Of the tokens a second without adapters, with GOAL_ADAPTERS distinct ones."""
GOAL_ADAPTERS = 16
TOP_KERNELS = 12
_CHECKED_BLOCKS = 8
"""What the check at load computes on."""
_NUCLEUS = SamplingParams(temperature=0.8, top_k=50, top_p=0.95, seed=1)


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured: in a rehearsal everything is tiny."""

    shape: Shape
    kind: str
    """The number type of weights and KV."""
    chunk: int
    """Tokens of a step of prefill."""
    prompt: int
    """Tokens of each sequence before its decode steps."""
    batches: tuple[int, ...]
    steps: int
    """Decode steps that are timed."""
    warm: int
    """Decode steps before these that do not count."""

    @property
    def context(self) -> int:
        """Positions of a sequence, decode steps of all measurements included."""
        return self.prompt + 4 * (self.steps + self.warm)


def sizes(check: Check) -> Sizes:
    if not check.on_gpu:
        return Sizes(TINY, "float32", 16, 24, (1, 2), 2, 1)
    shape = LLAMA_1B if check.quick else LLAMA_8B
    return Sizes(shape, "bfloat16", 2048, 1024, (1, 64), 32, 8)


def run(check: Check) -> Iterator[Result]:
    """Prefill, decode at all batches, and the kernels that take the time."""
    s = sizes(check)
    largest = max(s.batches)
    with model(check, s, sequences=largest, longest=max(4 * s.chunk, s.context)) as runner:
        yield from prefill(check, runner, s, 3 * s.chunk)
        for batch in s.batches:
            yield from decode(check, runner, s, batch)
        yield from _prefill_table(check, runner, s)
        for batch in s.batches:
            yield from _decode_table(check, runner, s, batch)
        if check.on_gpu:
            yield Result("most memory allocated", torch.cuda.max_memory_allocated(), "B")


def variant(check: Check) -> Iterator[Result]:
    """Prefill and decode with one thing taken away, which the part names."""
    s = sizes(check)
    graphs, decoder = check.part != "no graphs", "auto"
    if check.part == "transformers' decoder":
        decoder = "transformers"
    most = max(s.batches)
    with model(
        check,
        s,
        sequences=most,
        longest=max(2 * s.chunk, s.context),
        graphs=graphs,
        decoder=decoder,
    ) as runner:
        for batch in s.batches:
            filled, _ = fill(check, runner, s, batch, s.prompt)
            step_s = _times(check, runner, s, filled, GREEDY).step_s
            yield _beside(check, f"decode, batch {batch}, step", step_s)
        _, times = fill(check, runner, s, 1, 2 * s.chunk)
        taken = times[-1][1]
        done = prefill_flops(s.shape, s.chunk, s.chunk) / taken
        name = f"prefill, {s.chunk} tokens after {s.chunk}, {check.part}"
        yield check.speed(name, done, "FLOP/s", MATMUL)


def _beside(check: Check, name: str, step_s: float) -> Result:
    """A step's milliseconds, beside those of the engine as it is."""
    usual = check.known.get(name)
    step_ms = step_s * 1e3
    name = f"{name}, {check.part}"
    return Result(name, step_ms, "ms") if usual is None else compared(name, step_ms, "ms", usual)


def large_batches(check: Check) -> Iterator[Result]:
    s = replace(sizes(check), batches=(128, 256) if check.on_gpu else (3,))
    if check.on_gpu:
        s = replace(s, steps=16)
    with model(check, s, sequences=max(s.batches), longest=s.context) as runner:
        for batch in s.batches:
            yield from decode(check, runner, s, batch)


def long_context(check: Check) -> Iterator[Result]:
    """Chunks of a prompt of 32k tokens, and decode after it."""
    s = sizes(check)
    if check.on_gpu:
        s = replace(s, prompt=32768, batches=(1, 8), steps=4)
    else:
        s = replace(s, prompt=2 * s.chunk, batches=(1,))
    with model(check, s, sequences=max(s.batches), longest=s.context) as runner:
        yield from prefill(
            check, runner, s, s.prompt, firsts=(0, s.prompt // 2, s.prompt - s.chunk)
        )
        for batch in s.batches:
            yield from decode(check, runner, s, batch, f" after {s.prompt}")


def mixed(check: Check) -> Iterator[Result]:
    """Steps that decode for many and compute a part of one prompt: how much longer they take."""
    s = sizes(check)
    batch, part = (32, 512) if check.on_gpu else (2, 8)
    with model(check, s, sequences=batch + 1, longest=s.context) as runner:
        filled, _ = fill(check, runner, s, batch, s.prompt)
        alone = _times(check, runner, s, filled, GREEDY).step_s
        here = replace(filled, lengths=[*filled.lengths, 0], known=dict(filled.known))
        numbers = random.Random(9)

        def make() -> StepPlan:
            # The same part every time: each step has as much to do.
            here.lengths[batch] = part
            tokens = [numbers.randrange(s.shape.vocab) for _ in range(part)]
            return here.mixed(batch, tokens)

        times = _Times(check)
        drive(runner, s.steps, make, times.around)
        step = times.step_s(0)
        yield Result(f"decode, batch {batch}, step", alone * 1e3, "ms")
        yield Result(f"step of {batch} rows and {part} tokens of a prompt", step * 1e3, "ms")
        done = prefill_flops(s.shape, part, part) + 2 * batch * s.shape.step_weights
        yield check.speed("mixed step, operations", done / step, "FLOP/s", MATMUL)


def drafts(check: Check) -> Iterator[Result]:
    """Steps with drafts, recorded as CUDA graphs and not: how much longer they take than the step
    without. No such step is planned ahead, because what it computes is not known before the one
    before it is collected."""
    s = sizes(check)
    batches, counts = ((1, 8), (3, 7)) if check.on_gpu else ((1,), (3,))
    rows = max(batches) * (1 + max(counts))
    recorded: dict[str, float] = {}
    for graphs in (True, False):
        with model(check, s, sequences=rows, longest=s.context, graphs=graphs) as runner:
            for batch in batches:
                filled, _ = fill(check, runner, s, batch, s.prompt)
                alone_ms = _times(check, runner, s, filled, GREEDY).step_s * 1e3
                if graphs:
                    yield Result(f"step without drafts, batch {batch}", alone_ms, "ms")
                for count in counts:
                    name = f"step with {count} drafts each, batch {batch}"
                    step_ms = _times(check, runner, s, filled, GREEDY, count).step_s * 1e3
                    if graphs:
                        recorded[name] = step_ms
                        yield compared(name, step_ms, "ms", alone_ms)
                    else:
                        yield compared(f"{name}, no graphs", step_ms, "ms", recorded[name])


def lora(check: Check) -> Iterator[Result]:
    """Decode and prefill with adapters on all linear layers, against the same without: sequences
    take more and more distinct ones in turns."""
    s = sizes(check)
    batch, counts = (64, (1, 4, GOAL_ADAPTERS, 64)) if check.on_gpu else (2, (1, 2))
    with tempfile.TemporaryDirectory() as place:
        folders = save_adapters(s, Path(place), max(counts))
        room = (len(folders) + 1) * sum(file.stat().st_size for file in folders[0].iterdir())
        longest = max(2 * s.chunk, s.context)
        with model(check, s, sequences=batch, longest=longest, adapter_memory_bytes=room) as runner:
            began = time.perf_counter()
            digests = [runner.load_adapter(folder).digest for folder in folders]
            each = (time.perf_counter() - began) / len(digests)
            yield Result("loading one adapter", each * 1e3, "ms")
            filled, _ = fill(check, runner, s, batch, s.prompt)
            alone = batch / _times(check, runner, s, filled, GREEDY).step_s
            yield Result(f"decode without adapters, batch {batch}", alone, "tokens/s")
            for count in counts:
                own = replace(filled, adapters=digests[:count])
                rate = batch / _times(check, runner, s, own, GREEDY).step_s
                goal = ADAPTERS_GOAL if count == GOAL_ADAPTERS and check.on_gpu else None
                name = f"decode with {count} distinct adapter{'' if count == 1 else 's'}"
                yield compared(f"{name}, batch {batch}", rate, "tokens/s", alone, goal)
            yield from kernel_table(
                check,
                f"decode with {max(counts)} adapters, batch {batch}",
                lambda: drive(runner, s.steps, own.decode),
                s.steps,
                s.shape.layers,
            )
            spent = []
            for adapters in ((), digests[:1]):
                # Twice: the first time may compile.
                fill(check, runner, s, 1, 2 * s.chunk, adapters)
                _, times = fill(check, runner, s, 1, 2 * s.chunk, adapters)
                spent.append(times[-1][1] * 1e3)
            name = f"prefill with an adapter, {s.chunk} tokens after {s.chunk}"
            yield compared(name, spent[1], "ms", spent[0])


def save_adapters(s: Sizes, place: Path, count: int) -> list[Path]:
    """Folders as peft writes them. All share one file of random matrices, and differ by their
    factor."""
    shape, matrices = s.shape, {}
    heads, kv_heads = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    layers = {
        "self_attn.q_proj": (shape.hidden, heads),
        "self_attn.k_proj": (shape.hidden, kv_heads),
        "self_attn.v_proj": (shape.hidden, kv_heads),
        "self_attn.o_proj": (heads, shape.hidden),
        "mlp.gate_proj": (shape.hidden, shape.intermediate),
        "mlp.up_proj": (shape.hidden, shape.intermediate),
        "mlp.down_proj": (shape.intermediate, shape.hidden),
    }
    for index in range(shape.layers):
        for layer, (inputs, outputs) in layers.items():
            name = f"base_model.model.model.layers.{index}.{layer}.lora"
            for part, sizes in (("A", (ADAPTER_RANK, inputs)), ("B", (outputs, ADAPTER_RANK))):
                matrix = 0.02 / math.sqrt(ADAPTER_RANK) * torch.randn(sizes)
                matrices[f"{name}_{part}.weight"] = matrix.to(getattr(torch, s.kind))
    weights = place / "weights"
    save_file(matrices, weights)
    folders = []
    for number in range(count):
        folder = place / str(number)
        folder.mkdir()
        os.link(weights, folder / "adapter_model.safetensors")
        settings = {"peft_type": "LORA", "r": ADAPTER_RANK, "lora_alpha": ADAPTER_RANK + number}
        (folder / "adapter_config.json").write_text(json.dumps(settings))
        folders.append(folder)
    return folders


@contextmanager
def model(
    check: Check,
    s: Sizes,
    *,
    sequences: int,
    longest: int,
    graphs: bool = True,
    decoder: str = "auto",
    adapter_memory_bytes: int = 0,
) -> Iterator[TorchRunner]:
    """A runner over a Llama of that shape, made on the device without a checkpoint.

    sequences: how many run at once. longest: positions of one, and of all on average at most.
    """
    free = torch.cuda.mem_get_info()[0] if check.on_gpu else 1 << 40
    settings = llama(s.shape, longest)
    with torch.device(check.device):
        network = transformers.AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            settings, dtype=getattr(torch, s.kind), attn_implementation="eager"
        )
    each = -(-max(longest if sequences < 4 else 0, s.context) // BLOCK)
    config = EngineConfig(
        "random",
        device=check.device,
        attention="auto" if check.on_gpu else "triton",
        exact=False,
        num_blocks=max(sequences * each, _CHECKED_BLOCKS),
        block_size=BLOCK,
        max_model_len=longest,
        max_batch=sequences,
        max_step_tokens=s.chunk + sequences,
        graphs=graphs,
        decoder=decoder,
        adapter_memory_bytes=adapter_memory_bytes,
    )
    description = ModelDescription("random", "", longest, s.shape.vocab, ())
    device = torch.device(check.device)
    loaded = LoadedModel(network.eval().requires_grad_(False), description, device, network.config)
    runner = TorchRunner.over(loaded, config, free)
    del network, loaded
    try:
        yield runner
    finally:
        runner.close()
        give_back(check.device)


def llama(shape: Shape, longest: int) -> Any:
    """transformers' configuration of a shape."""
    return transformers.LlamaConfig(
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


def fill(
    check: Check,
    runner: ModelRunner,
    s: Sizes,
    sequences: int,
    prompt: int,
    adapters: Sequence[str] = (),
) -> tuple[Batch, list[tuple[int, float]]]:
    """Computes random prompts. Returns the batch, and (first position, seconds) of each chunk.
    adapters: which sequences take in turns."""
    numbers = random.Random(7)
    each = -(-max(prompt + BLOCK, s.context) // BLOCK)
    blocks = min(each, runner.num_blocks // sequences)
    batch = Batch([0] * sequences, blocks, adapters=adapters)
    plans = []
    firsts = []
    for i in range(sequences):
        for start in range(0, prompt, s.chunk):
            count = min(s.chunk, prompt - start)
            tokens = [numbers.randrange(s.shape.vocab) for _ in range(count)]
            plans.append(batch.prompt(i, tokens, last=start + count == prompt))
            firsts.append(start)
    times = _Times(check)
    steps = drive(runner, len(plans), iter(plans).__next__, times.around)
    batch.known = {i: step[0] for i, step in enumerate(step for step in steps if step)}
    return batch, list(zip(firsts, times.each_s(), strict=True))


def prefill(
    check: Check, runner: ModelRunner, s: Sizes, prompt: int, firsts: tuple[int, ...] = ()
) -> Iterator[Result]:
    """Whole chunks of one long prompt, as a share of the largest product's rate. firsts: the
    chunks' first positions; all, if empty."""
    fill(check, runner, s, 1, prompt)
    _, times = fill(check, runner, s, 1, prompt)
    for first, taken in times:
        if not firsts or first in firsts:
            done = prefill_flops(s.shape, s.chunk, first)
            name = f"prefill, {s.chunk} tokens after {first}"
            yield check.speed(name, done / taken, "FLOP/s", MATMUL, PREFILL_GOAL)


def decode(
    check: Check, runner: ModelRunner, s: Sizes, batch: int, when: str = ""
) -> Iterator[Result]:
    """Steps of one token per sequence: against the memory's bandwidth, with sampling, and how long
    the GPU stands idle between two steps. when: a word for the figures' names."""
    filled, _ = fill(check, runner, s, batch, s.prompt)
    name = f"decode{when}, batch {batch}"
    greedy = _times(check, runner, s, filled, GREEDY)
    element = 2 if s.kind == "bfloat16" else 4
    moved = decode_bytes(s.shape, batch, s.prompt + s.warm + s.steps // 2, element)
    yield check.speed(f"{name}, memory traffic", moved / greedy.step_s, "B/s", READ, DECODE_GOAL)
    yield Result(f"{name}, step", greedy.step_s * 1e3, "ms")
    yield Result(f"{name}, tokens", batch / greedy.step_s, "tokens/s")
    idle = f"{name}, GPU idle between steps"
    yield check.duration(idle, greedy.gap_s * 1e3, "ms", IDLE_GOAL * greedy.step_s * 1e3)
    yield Result(f"{name}, host's submit", greedy.host_s * 1e3, "ms")
    drawn = _times(check, runner, s, filled, _NUCLEUS)
    yield Result(f"{name}, step with top-k and top-p", drawn.step_s * 1e3, "ms")


@dataclass(frozen=True, slots=True)
class _Measured:
    """Of decode steps."""

    step_s: float
    """From one step's end to the next one's."""
    gap_s: float
    """The median of the time from a step's end to the next one's begin."""
    host_s: float
    """The median of the host's time to submit a step."""


def _times(
    check: Check,
    runner: ModelRunner,
    s: Sizes,
    filled: Batch,
    params: SamplingParams,
    drafts: int = 0,
) -> _Measured:
    """drafts: of each sequence in a step."""
    here = replace(filled, lengths=list(filled.lengths), known=dict(filled.known), params=params)
    times = _Times(check)
    if drafts:
        plan = partial(here.drafted, drafts)
        drive(runner, s.warm + s.steps, plan, times.around, depth=1)
    else:
        drive(runner, s.warm + s.steps, here.decode, times.around)
    return _Measured(times.step_s(s.warm), times.gap_s(s.warm), median(times.host_s[s.warm :]))


class _Times:
    """Where on the device's clock each submission's work begins and ends."""

    def __init__(self, check: Check):
        self._device = check.device
        self._edges: list[tuple[Mark, Mark]] = []
        self.host_s: list[float] = []
        """What the host took to submit each."""

    def around(self, submit: Callable[[], None]) -> None:
        clock = time.perf_counter()
        began = Mark(self._device)
        submit()
        self._edges.append((began, Mark(self._device)))
        self.host_s.append(time.perf_counter() - clock)

    def each_s(self) -> list[float]:
        settle(self._device)
        return [began.seconds_to(ended) for began, ended in self._edges]

    def step_s(self, skipped: int) -> float:
        """The mean from one end to the next, without the first ones."""
        settle(self._device)
        ends = [ended for _, ended in self._edges[skipped:]]
        return ends[0].seconds_to(ends[-1]) / (len(ends) - 1)

    def gap_s(self, skipped: int) -> float:
        settle(self._device)
        edges = self._edges[skipped:]
        return median(end.seconds_to(begin) for (_, end), (begin, _) in pairwise(edges))


def _prefill_table(check: Check, runner: ModelRunner, s: Sizes) -> Iterator[Result]:
    chunks = 2
    yield from kernel_table(
        check,
        f"prefill, {s.chunk} tokens",
        lambda: fill(check, runner, s, 1, chunks * s.chunk),
        chunks,
        s.shape.layers,
    )


def _decode_table(check: Check, runner: ModelRunner, s: Sizes, batch: int) -> Iterator[Result]:
    filled, _ = fill(check, runner, s, batch, s.prompt)
    drive(runner, 2, filled.decode)
    yield from kernel_table(
        check,
        f"decode, batch {batch}",
        lambda: drive(runner, s.steps, filled.decode),
        s.steps,
        s.shape.layers,
    )


def kernel_table(
    check: Check, name: str, work: Callable[[], object], steps: int, layers: int
) -> Iterator[Result]:
    """What torch's profiler sees of some steps: how many kernels run, and which take the time."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if check.on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        work()
        settle(check.device)
    # On a CPU there are no kernels; operators stand in for them.
    wanted = "CUDA" if check.on_gpu else "CPU"
    count = graphs = 0
    spent: dict[str, float] = {}
    for event in profile.key_averages():
        if event.key == "cudaGraphLaunch":
            graphs = event.count
        if event.device_type.name != wanted:
            continue
        taken = event.self_device_time_total if check.on_gpu else event.self_cpu_time_total
        if taken > 0:
            count += event.count
            short = event.key.split("(")[0][:60]
            spent[short] = spent.get(short, 0.0) + taken
    yield Result(f"{name}: kernels a step", count / steps, "kernels")
    yield Result(f"{name}: kernels a layer and step", count / steps / layers, "kernels")
    if graphs:
        yield Result(f"{name}: graphs a step", graphs / steps, "graphs")
    for kernel, taken in sorted(spent.items(), key=lambda pair: -pair[1])[:TOP_KERNELS]:
        yield Result(f"{name}: {kernel}", taken / steps, "µs a step")
