"""The contenders of transformers itself: continuous batching, and `generate` in static batches.

Both in float32 with `sdpa`. Continuous batching gets pages of 32, which were its fastest on CPUs;
`generate` gets prompts padded on the left, and each batch runs as long as its longest answer.
"""

from __future__ import annotations

import time
from importlib import import_module
from typing import Any

from baton_loadtest.bench.child import progress
from baton_loadtest.bench.workload import Workload

PAGE = 32
PAD = 0
MAX_RUNNING = 64
POLL_S = 5.0


def run(job: dict[str, Any]) -> dict[str, Any]:
    """job: model, threads, batch (0: continuous), step_tokens, workload, warm, seconds.

    Static batching begins no further batch after so many seconds: its batches are independent, so
    those that were done measure its speed. Returns tokens (of the requests that were done, in
    order), seconds and cpu_seconds.
    """
    import torch

    transformers: Any = import_module("transformers")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(job["threads"])
    network = transformers.AutoModelForCausalLM.from_pretrained(
        job["model"], dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    workload, warm = Workload.from_json(job["workload"]), Workload.from_json(job["warm"])
    if job["batch"]:
        _static(network, warm, job["batch"], job["seconds"])
        return _timed(lambda: _static(network, workload, job["batch"], job["seconds"]))
    settings = transformers.GenerationConfig(
        do_sample=False, eos_token_id=-1, pad_token_id=PAD, max_new_tokens=max(workload.outputs)
    )
    pages = sum(
        -(-(len(prompt) + output) // PAGE) + 1
        for prompt, output in zip(workload.prompts, workload.outputs, strict=True)
    )
    batching = transformers.ContinuousBatchingConfig(
        page_size=PAGE,
        num_blocks=pages,
        max_batch_tokens=job["step_tokens"],
        max_requests_per_batch=MAX_RUNNING,
    )
    with network.continuous_batching_context_manager(
        generation_config=settings, continuous_batching_config=batching
    ) as manager:
        _continuous(manager, warm)
        return _timed(lambda: _continuous(manager, workload))


def _timed(work: Any) -> dict[str, Any]:
    began, cpu = time.perf_counter(), time.process_time()
    tokens = work()
    return {
        "tokens": tokens,
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - cpu,
    }


def _continuous(manager: Any, workload: Workload) -> list[list[int]]:
    names = [
        manager.add_request(list(prompt), max_new_tokens=output)
        for prompt, output in zip(workload.prompts, workload.outputs, strict=True)
    ]
    done: dict[str, list[int]] = {}
    while len(done) < len(names):
        found = manager.get_result(timeout=POLL_S)
        if found is None and not manager.is_running():
            raise RuntimeError("continuous batching has stopped")
        if found is not None and found.error:
            raise RuntimeError(found.error)
        if found is not None and found.is_finished():
            done[found.request_id] = list(found.generated_tokens)
    return [done[name] for name in names]


def _static(network: Any, workload: Workload, size: int, seconds: float) -> list[list[int]]:
    import torch

    answers: list[list[int]] = []
    began = time.perf_counter()
    for first in range(0, len(workload.prompts), size):
        if time.perf_counter() - began > seconds:
            break
        prompts = workload.prompts[first : first + size]
        outputs = workload.outputs[first : first + size]
        longest = max(map(len, prompts))
        ids = torch.tensor([[PAD] * (longest - len(p)) + list(p) for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        with torch.inference_mode():
            made = network.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=max(outputs),
                do_sample=False,
                eos_token_id=None,
                pad_token_id=PAD,
            )[:, longest:].tolist()
        answers += [tokens[:count] for tokens, count in zip(made, outputs, strict=True)]
        if len(workload.prompts) > size:
            progress(f"{len(answers)} of {len(workload.prompts)} requests")
    return answers
