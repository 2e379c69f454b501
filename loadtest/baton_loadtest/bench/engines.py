"""Models of known shapes with random weights, and Baton's engine in this process.

In: a shape's name, or a model's folder or hub id, and requests of token ids. Out: a model's folder,
a runner, tokens and times. torch is imported when a runner is opened, after threads are set.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton_loadtest.launch import call, say
from batonlm.cli.layout import resolve_model
from batonlm.core.errors import BatonError
from batonlm.core.kvcache.block_pool import BlockPool
from batonlm.core.request.attempt import Attempt
from batonlm.core.request.request import SamplingParams, StopParams
from batonlm.core.scheduler.events import AttemptFailed, Event, NewTokens
from batonlm.core.scheduler.loop import EngineLoop
from batonlm.core.scheduler.plan import Chunk, ModelRunner, SampleRow, StepPlan
from batonlm.core.scheduler.policy import QueueLimit, SchedulerPolicy
from batonlm.core.scheduler.scheduler import Scheduler
from batonlm.engine.config import EngineConfig, configure_threads

if TYPE_CHECKING:
    from batonlm.engine.runner import TorchRunner

BUILD_DEADLINE_S = 300.0
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")

BLOCK_SIZE = 16
GROWTH = 128
"""Additional positions of a sequence: headroom, and a partly filled last block."""

EVERYTHING = QueueLimit(tokens=2**40, sequences=2**20)
FIRST_TOKEN, LAST_TOKEN = 3, 7999
"""Random token ids: above the special ones, and within any large vocabulary."""

GREEDY = SamplingParams(temperature=0.0)


def _shape(
    vocab: int, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, **more: Any
) -> dict[str, Any]:
    """Returns the class of a transformers configuration, and its settings."""
    return {
        "config": "LlamaConfig",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 16384,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
        "initializer_range": 0.05,
        **more,
    }


def _hybrid(vocab: int, hidden: int, intermediate: int, layers: int, *heads: int) -> dict[str, Any]:
    """Three of four layers have linear attention, and a state for each sequence."""
    size = hidden // heads[0]
    return _shape(
        *(vocab, hidden, intermediate, layers, *heads),
        config="Qwen3_5TextConfig",
        head_dim=size,
        full_attention_interval=4,
        linear_key_head_dim=size,
        linear_value_head_dim=size,
        linear_num_key_heads=heads[1],
        linear_num_value_heads=heads[0],
    )


SHAPES = {
    "tiny": _shape(2048, 64, 128, 2, 4, 2, initializer_range=0.3),
    "wide": _shape(131072, 64, 128, 2, 4, 2, initializer_range=0.3),
    "8m": _shape(4096, 512, 1536, 2, 8, 4),
    "25m": _shape(4096, 512, 1536, 8, 8, 4),
    "100m": _shape(32000, 768, 2048, 12, 12, 4),
    "tiny-hybrid": _hybrid(2048, 64, 128, 4, 4, 2),
    "hybrid-25m": _hybrid(4096, 512, 1536, 8, 8, 4),
    "500m": _shape(32000, 1024, 3072, 28, 16, 8, config="Qwen3Config", head_dim=128),
    "qwen3-0.6b": _shape(
        *(151936, 1024, 3072, 28, 16, 8), config="Qwen3Config", head_dim=128, dtype="bfloat16"
    ),
    "llama-3.2-1b": _shape(128256, 2048, 8192, 16, 32, 8, dtype="bfloat16"),
}


def folder(shape: str) -> Path:
    """Returns the folder of one of SHAPES, which is built if necessary, or of any model.

    Raises InvalidArgument if there is no such model.
    """
    settings = SHAPES.get(shape)
    if settings is None:
        return resolve_model(shape)[0]
    digest = blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=4).hexdigest()
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    target = Path(cache, "baton", "bench", f"{shape}-{digest}")
    if not (target / "model.safetensors").is_file():
        say(f"building {shape} in {target}")
        job = {"settings": settings, "target": str(target)}
        call(build, job, threads=1, deadline_s=BUILD_DEADLINE_S)
    return target


def build(job: dict[str, Any]) -> dict[str, Any]:
    """job: settings, as in SHAPES, and the target folder, which appears only when complete."""
    import torch

    transformers: Any = import_module("transformers")
    settings, target = dict(job["settings"]), Path(job["target"])
    config = getattr(transformers, settings.pop("config"))(**settings)
    torch.manual_seed(0)
    dtype = getattr(torch, settings.get("dtype", "float32"))
    network = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as place:
        made = Path(place, "made")
        network.save_pretrained(made)
        if not target.exists():
            os.replace(made, target)
    return {}


def with_tokenizer(model: Path, empty: Path) -> Path:
    """Returns a model's folder; one without a tokenizer gets the bundled one's, in an empty
    folder."""
    if (model / "tokenizer.json").is_file():
        return model
    bundled = resolve_model("")[0]
    borrowed = [bundled / name for name in TOKENIZER_FILES]
    for file in (*model.iterdir(), *(file for file in borrowed if file.is_file())):
        (empty / file.name).symlink_to(file)
    return empty


def config_of(model: Path) -> dict[str, Any]:
    """Returns a model's config.json."""
    read: dict[str, Any] = json.loads((model / "config.json").read_text())
    return read


def head_size(config: dict[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def kv_heads(config: dict[str, Any]) -> int:
    return int(config.get("num_key_value_heads") or config["num_attention_heads"])


def kv_bytes(config: dict[str, Any]) -> int:
    """Returns the bytes of float32 KV of one position in all layers."""
    return 2 * 4 * int(config["num_hidden_layers"]) * kv_heads(config) * head_size(config)


def weights_read(model: Path, config: dict[str, Any]) -> int:
    """Returns how many weights of a dense model a step of one token reads: all, except that only
    one row of an embedding is read that is not tied to the output."""
    from safetensors import safe_open

    tied, total = config.get("tie_word_embeddings", False), 0
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, framework="np") as opened:
            for name in opened.keys():  # noqa: SIM118  # it is no dictionary
                if tied or not name.endswith("embed_tokens.weight"):
                    total += math.prod(opened.get_slice(name).get_shape())
    return total


@dataclass(frozen=True, slots=True)
class EngineRequests:
    """Requests of token ids that all contenders of a benchmark get."""

    prompts: tuple[tuple[int, ...], ...]
    outputs: tuple[int, ...]
    """The exact number of output tokens of each request."""

    @classmethod
    def draw(
        cls,
        seed: int,
        requests: int,
        prompt_tokens: tuple[int, int],
        output_tokens: tuple[int, int],
        vocab_size: int,
    ) -> EngineRequests:
        """Lengths are uniform within inclusive bounds. No two prompts share a prefix."""
        draw = random.Random(seed)
        end = min(LAST_TOKEN + 1, vocab_size)
        prompts, outputs = [], []
        for _ in range(requests):
            length = draw.randint(*prompt_tokens)
            prompts.append(tuple(draw.randrange(FIRST_TOKEN, end) for _ in range(length)))
            outputs.append(draw.randint(*output_tokens))
        return cls(tuple(prompts), tuple(outputs))

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def output_tokens(self) -> int:
        return sum(self.outputs)

    def positions(self, at_once: int) -> int:
        """Returns the KV positions with which so many requests run at once without preemption."""
        pairs = zip(self.prompts, self.outputs, strict=True)
        longest = sorted((len(prompt) + output for prompt, output in pairs), reverse=True)
        return sum(length + GROWTH for length in longest[:at_once])


def from_json(value: dict[str, Sequence[Any]]) -> EngineRequests:
    return EngineRequests(tuple(map(tuple, value["prompts"])), tuple(value["outputs"]))


def attempt(
    name: str, prompt: Sequence[int], max_tokens: int, choices: tuple[int, ...] = (0,)
) -> Attempt:
    """Returns a greedy attempt with a known number of output tokens."""
    return Attempt(
        request_id=name,
        attempt=1,
        choices=choices,
        token_ids=tuple(prompt),
        num_prompt_tokens=len(prompt),
        sampling=GREEDY,
        stop=StopParams(max_tokens=max_tokens, ignore_eos=True),
    )


def open_runner(
    model: str,
    threads: int,
    positions: int,
    *,
    exact: bool = True,
    dtype: str = "auto",
    quantize: str = "none",
    device: str = "cpu",
    decoder: str = "auto",
    adapter_bytes: tuple[int, int] = (0, 0),
    draft_model: str = "",
) -> TorchRunner:
    """Opens a runner with KV memory for so many positions. The number of threads is set only by the
    first one in a process. adapter_bytes: for adapters that are ready, and for all."""
    if "torch" not in sys.modules:
        configure_threads(threads)
    from batonlm.engine.runner import TorchRunner

    return TorchRunner.load(
        EngineConfig(
            model=model,
            device=device,
            block_size=BLOCK_SIZE,
            num_blocks=-(-positions // BLOCK_SIZE),
            exact=exact,
            threads=threads,
            dtype=dtype,
            quantize=quantize,
            decoder=decoder,
            adapter_memory_bytes=adapter_bytes[0],
            adapter_host_bytes=adapter_bytes[1],
            draft_model=draft_model,
        )
    )


def weights_bytes(model: str, *, dtype: str = "auto", quantize: str = "none") -> int:
    """Returns what a runner's weights take on a CPU. Called after `open_runner`, which has set the
    number of threads."""
    from batonlm.engine.footprint import foresee

    config = EngineConfig(model=model, device="cpu", num_blocks=64, dtype=dtype, quantize=quantize)
    return foresee(config).memory.weights_bytes


def policy(max_sequences: int, step_tokens: int, *, beside: int = 0) -> SchedulerPolicy:
    """Returns a policy with steps of at most step_tokens positions, decode first and the rest for
    prefill; beside: additional positions for decode only."""
    return SchedulerPolicy(
        max_sequences=max_sequences,
        token_budget=step_tokens + beside,
        prefill_budget=step_tokens,
        limit=EVERYTHING,
    )


def engine_loop(runner: ModelRunner, rules: SchedulerPolicy) -> EngineLoop:
    """Returns a runner's loop with a new scheduler and an empty prefix cache."""
    scheduler = Scheduler(
        BlockPool(
            runner.num_blocks,
            runner.block_size,
            state_positions=runner.layout.state_positions,
            stepwise=getattr(runner, "stepwise", False),
        ),
        rules,
        runner.model,
        num_swap_blocks=runner.num_swap_blocks,
        draft_model=getattr(runner, "draft_model", None),
    )
    return EngineLoop(runner, scheduler)


@dataclass(slots=True)
class Served:
    """What an engine generated for requests."""

    tokens: list[list[int]]
    """Of each request."""
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    occupancy: list[int] = field(default_factory=list)
    """Number of sequences that got a token in each step."""


def serve(
    loop: EngineLoop,
    requests: EngineRequests,
    batches: Iterable[range] | None = None,
) -> Served:
    """Runs every request to its end. batches: requests that wait until all before them have ended;
    None admits all at once."""
    served = Served([[] for _ in requests.prompts])
    began, cpu = time.perf_counter(), time.process_time()
    for batch in batches or [range(len(requests.prompts))]:
        for index in batch:
            one = attempt(str(index), requests.prompts[index], requests.outputs[index])
            loop.scheduler.add(one, time.monotonic())
        while loop.scheduler.has_work:
            for tokens in step(loop):
                served.occupancy.append(len(tokens.tokens))
                for made in tokens.tokens:
                    served.tokens[int(made.key.request_id)].extend(made.token_ids)
    served.seconds = time.perf_counter() - began
    served.cpu_seconds = time.process_time() - cpu
    return served


def step(loop: EngineLoop) -> list[NewTokens]:
    """Runs one step and returns its sampled tokens. Raises the error of a failed request."""
    return [event for event in step_events(loop) if isinstance(event, NewTokens)]


def step_events(loop: EngineLoop) -> list[Event]:
    """Runs one step and returns all that it tells. Raises the error of a failed request."""
    events = loop.step(time.monotonic())
    for event in events:
        if isinstance(event, AttemptFailed):
            raise BatonError(event.error.message)
    return events


class StepTimer:
    """Times single steps of a runner at a chosen batch and context.

    The contents of KV do not change a step's duration. So memory is filled with random numbers
    once, and every sequence of a plan gets a run of its blocks. It must be filled, because pages
    that were never written are all read from one physical page, which is in the CPU's cache.
    """

    def __init__(self, runner: ModelRunner):
        self.runner = runner
        self._numbers = count(1)
        self._fill()

    def decode(
        self,
        batch: int,
        context: int,
        *,
        least: int = 3,
        seconds: float = 0.3,
        adapters: Sequence[str] = ("",),
    ) -> float:
        """Returns the seconds of a step in which each of `batch` sequences gets a token after
        `context` positions: the best of at least `least` steps, over at least `seconds`. adapters:
        their digests, shared out in turn."""
        chunks = self._decoding(batch, context, adapters)
        self._run(chunks)
        times = [self._run(chunks)]
        while len(times) < least or sum(times) < seconds:
            times.append(self._run(chunks))
        return min(times)

    def once(self, batch: int, context: int, adapters: Sequence[str]) -> float:
        """Returns the seconds of a single such step."""
        return self._run(self._decoding(batch, context, adapters))

    def _decoding(self, batch: int, context: int, adapters: Sequence[str]) -> tuple[Chunk, ...]:
        blocks = self._blocks(context + 1)
        return tuple(
            Chunk(
                index,
                (5,),
                context,
                ((index * blocks, blocks),),
                (self._row(index),),
                adapter=adapters[index % len(adapters)],
            )
            for index in range(batch)
        )

    def prefill(self, length: int, chunk: int) -> float:
        """Returns the seconds that a prompt takes in chunks."""
        blocks, seconds = self._blocks(length), 0.0
        for first in range(0, length, chunk):
            end = min(first + chunk, length)
            tokens = tuple(5 + position % 97 for position in range(first, end))
            samples = (self._row(0),) if end == length else ()
            seconds += self._run((Chunk(0, tokens, first, ((0, blocks),), samples),))
        return seconds

    def fits(self, batch: int, context: int) -> bool:
        room = self._blocks(context + 1) * batch <= self.runner.num_blocks
        return room and context < self.runner.model.max_model_len

    def _run(self, chunks: tuple[Chunk, ...]) -> float:
        began = time.perf_counter()
        self.runner.submit(StepPlan(next(self._numbers), chunks))
        self.runner.collect()
        return time.perf_counter() - began

    def _blocks(self, positions: int) -> int:
        return -(-positions // self.runner.block_size)

    def _row(self, sequence_id: int) -> SampleRow:
        return SampleRow(sequence_id, 0, 0, GREEDY)

    def _fill(self) -> None:
        import torch

        layout, size = self.runner.layout, self.runner.block_size
        dtype = getattr(torch, layout.dtype)
        numbers = size * layout.bytes_per_position // dtype.itemsize
        payload = torch.randn(numbers).to(dtype).view(torch.uint8).numpy().data
        for block in range(self.runner.num_blocks):
            self.runner.unpack(((block, 1),), 0, size, payload)
