"""The contender llama.cpp, weights and KV in float16, through llama-cpp-python's C functions.

All sequences are in one context with a KV stream each (its faster way), under the same token budget
a step as the others: decode first, the rest for prompts. Runs in an interpreter that has llama_cpp,
numpy and gguf, and imports nothing else of Baton that needs more.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton_loadtest.bench import gguf_file
from baton_loadtest.bench.workload import Workload

MAX_RUNNING = 64
STREAM = 256
"""Positions that a sequence's KV stream is a multiple of."""


@dataclass(slots=True)
class _Sequence:
    """done: leading tokens that are computed."""

    index: int
    place: int
    tokens: list[int]
    prompt: int
    output: int
    done: int = 0

    @property
    def made(self) -> int:
        return len(self.tokens) - self.prompt


def run(job: dict[str, Any]) -> dict[str, Any]:
    """job: model, gguf (made when missing), threads, step_tokens, workload, warm.

    Returns tokens, seconds and cpu_seconds.
    """
    file = Path(job["gguf"])
    if not file.exists():
        gguf_file.write(Path(job["model"]), file)
    workload = Workload.from_json(job["workload"])
    llama = _Llama(file, workload, job["threads"], job["step_tokens"])
    llama.serve(Workload.from_json(job["warm"]))
    began, cpu = time.perf_counter(), time.process_time()
    tokens = llama.serve(workload)
    return {
        "tokens": tokens,
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - cpu,
    }


class _Llama:
    """One context that fits a workload."""

    def __init__(self, file: Path, workload: Workload, threads: int, step_tokens: int):
        import llama_cpp

        self._api: Any = llama_cpp
        self._budget = step_tokens
        self._places = min(MAX_RUNNING, len(workload.prompts))
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_model_load_from_file(
            str(file).encode(), llama_cpp.llama_model_default_params()
        )
        if not model:
            sys.exit("llama.cpp cannot load the GGUF file")
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = -(-workload.longest // STREAM) * STREAM * self._places
        settings.n_seq_max = self._places
        settings.n_batch = settings.n_ubatch = step_tokens
        settings.n_threads = settings.n_threads_batch = threads
        settings.kv_unified = False
        self._context = llama_cpp.llama_init_from_model(model, settings)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(step_tokens, 0, 1)

    def serve(self, workload: Workload) -> list[list[int]]:
        waiting = list(enumerate(zip(workload.prompts, workload.outputs, strict=True)))[::-1]
        free = list(range(self._places))
        running: list[_Sequence] = []
        answers: list[list[int]] = [[] for _ in waiting]
        while waiting or running:
            while waiting and free:
                index, (prompt, output) = waiting.pop()
                running.append(_Sequence(index, free.pop(), list(prompt), len(prompt), output))
            self._step(running)
            for sequence in [s for s in running if s.made >= s.output]:
                running.remove(sequence)
                free.append(sequence.place)
                answers[sequence.index] = sequence.tokens[sequence.prompt :]
                self._api.llama_memory_seq_rm(self._memory, sequence.place, -1, -1)
        return answers

    def _step(self, running: list[_Sequence]) -> None:
        import numpy as np

        chunks = [(s, 1) for s in running if s.done >= s.prompt]
        budget = self._budget - len(chunks)
        for sequence in running:
            count = min(sequence.prompt - sequence.done, budget)
            if count > 0:
                chunks.append((sequence, count))
                budget -= count
        batch, row = self._batch, 0
        sampled: list[tuple[_Sequence, int]] = []
        for sequence, count in chunks:
            for position in range(sequence.done, sequence.done + count):
                batch.token[row] = sequence.tokens[position]
                batch.pos[row] = position
                batch.n_seq_id[row] = 1
                batch.seq_id[row][0] = sequence.place
                batch.logits[row] = 0
                row += 1
            sequence.done += count
            if sequence.done == len(sequence.tokens):
                batch.logits[row - 1] = 1
                sampled.append((sequence, row - 1))
        batch.n_tokens = row
        if self._api.llama_decode(self._context, batch):
            raise RuntimeError("llama_decode failed")
        for sequence, index in sampled:
            logits = self._api.llama_get_logits_ith(self._context, index)
            row_logits = np.ctypeslib.as_array(logits, shape=(self._vocab,))
            sequence.tokens.append(int(row_logits.argmax()))
