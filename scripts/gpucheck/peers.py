"""Other engines' figures on the same shape and the same machine, beside ours."""

from __future__ import annotations

import importlib
import json
import random
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers as hf

from baton_loadtest.report import Result, compared
from gpucheck.ceilings import MATMUL
from gpucheck.check import Check, Skip
from gpucheck.figures import median, prefill_flops
from gpucheck.speed import Sizes, llama, sizes
from gpucheck.timing import seconds, settle

VLLM_GOAL = 0.9
"""Of vLLM's tokens a second."""


@torch.inference_mode()
def transformers(check: Check) -> Iterator[Result]:
    """transformers with its fastest attention that needs nothing else, torch's own, and a cache
    that grows."""
    s = sizes(check)
    with torch.device(check.device):
        network = hf.AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            llama(s.shape, 4 * s.chunk),
            dtype=getattr(torch, s.kind),
            attn_implementation="sdpa",
        ).eval()
    ids = torch.randint(s.shape.vocab, (1, s.chunk), device=check.device)

    def chunk() -> object:
        return network(input_ids=ids, use_cache=False, logits_to_keep=1)

    yield from _prefill_beside(check, "transformers", s, seconds(chunk, check.device, 5))
    for batch in s.batches:
        step = _decode_step(check, network, s, batch)
        yield from _beside(check, "transformers", batch, step)


def _decode_step(check: Check, network: Any, s: Sizes, batch: int) -> float:
    """Seconds of a decode step, by the host's clock: launching the kernels counts."""
    cache = hf.DynamicCache()
    ids = torch.randint(s.shape.vocab, (batch, s.prompt), device=check.device)
    network(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    token = ids[:, :1]
    times = []
    for _ in range(s.warm + s.steps):
        settle(check.device)
        began = time.perf_counter()
        output = network(input_ids=token, past_key_values=cache, use_cache=True, logits_to_keep=1)
        token = output.logits[:, -1:].argmax(-1)
        settle(check.device)
        times.append(time.perf_counter() - began)
    return median(times[s.warm :])


def vllm(check: Check) -> Iterator[Result]:
    """vLLM's decode with weights that it makes up itself, from the difference of two lengths."""
    if find_spec("vllm") is None:
        raise Skip("vLLM is not installed here")
    peer: Any = importlib.import_module("vllm")

    s = sizes(check)
    new_tokens = 65
    with tempfile.TemporaryDirectory() as folder:
        settings = json.loads(llama(s.shape, 4 * s.chunk).to_json_string())
        settings["architectures"] = ["LlamaForCausalLM"]
        (Path(folder) / "config.json").write_text(json.dumps(settings))
        engine = peer.LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype=s.kind,
            max_model_len=4 * s.chunk,
            max_num_seqs=max(s.batches),
            gpu_memory_utilization=0.85,
            enable_prefix_caching=False,
        )
    numbers = random.Random(7)

    def timed(batch: int, count: int, prompt: int = s.prompt) -> float:
        prompts = [
            {"prompt_token_ids": [numbers.randrange(s.shape.vocab) for _ in range(prompt)]}
            for _ in range(batch)
        ]
        params = peer.SamplingParams(
            temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False
        )
        began = time.perf_counter()
        engine.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - began

    timed(1, 1, s.chunk)
    yield from _prefill_beside(check, "vllm", s, timed(1, 1, s.chunk))
    for batch in s.batches:
        timed(batch, 2)
        step = (timed(batch, new_tokens) - timed(batch, 1)) / (new_tokens - 1)
        yield from _beside(check, "vllm", batch, step, VLLM_GOAL)


def _prefill_beside(check: Check, engine: str, s: Sizes, taken_s: float) -> Iterator[Result]:
    """Another engine's first chunk of a prompt, and ours as a share of it."""
    theirs = prefill_flops(s.shape, s.chunk, 0) / taken_s
    yield check.speed(f"{engine}, prefill, {s.chunk} tokens", theirs, "FLOP/s", MATMUL)
    ours = check.known.get(f"prefill, {s.chunk} tokens after 0")
    if ours is not None:
        yield compared(f"our prefill beside {engine}", ours, "FLOP/s", theirs)


def _beside(
    check: Check, engine: str, batch: int, step_s: float, goal: float | None = None
) -> Iterator[Result]:
    """Another engine's step, and our tokens a second as a share of its."""
    yield Result(f"{engine}, decode, batch {batch}, step", step_s * 1e3, "ms")
    ours = check.known.get(f"decode, batch {batch}, tokens")
    if ours is not None:
        goal = goal if check.on_gpu else None
        name = f"our decode beside {engine}, batch {batch}"
        yield compared(name, ours, "tokens/s", batch / step_s, goal)
