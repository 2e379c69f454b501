"""The contenders of `baton bench engine` other than Baton: transformers and llama.cpp."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from baton_loadtest.child import progress

MAX_RUNNING = 64
PAGE = 32
"""Positions per page in transformers' continuous batching: its fastest setting on CPUs."""

PAD = 0
POLL_S = 5.0
STREAM = 256
"""The length of a sequence's KV stream in llama.cpp is a multiple of this."""


def _timed(work: Callable[[dict[str, Any]], list[list[int]]], job: dict[str, Any]) -> Any:
    """Runs job["warm"], then job["requests"], and returns the tokens and times of the latter."""
    work(job["warm"])
    began, cpu = time.perf_counter(), time.process_time()
    tokens = work(job["requests"])
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
    return {"tokens": tokens, "seconds": seconds, "cpu_seconds": cpu_seconds}


def run_transformers(job: dict[str, Any]) -> Any:
    """transformers in float32 with `sdpa`: continuous batching, or `generate` in static batches.

    job: model, threads, batch (0: continuous), step_tokens, requests, warm, seconds. Static
    batching starts no batch after so many seconds: batches are independent, so the finished ones
    suffice to measure its speed. Returns tokens (of the finished requests, in order), seconds and
    cpu_seconds.
    """
    import torch

    transformers: Any = import_module("transformers")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(job["threads"])
    network = transformers.AutoModelForCausalLM.from_pretrained(
        job["model"], dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    if job["batch"]:
        return _timed(lambda asked: _static(network, asked, job["batch"], job["seconds"]), job)
    lengths = zip(job["requests"]["prompts"], job["requests"]["outputs"], strict=True)
    settings = transformers.GenerationConfig(
        do_sample=False,
        eos_token_id=-1,
        pad_token_id=PAD,
        max_new_tokens=max(job["requests"]["outputs"]),
    )
    batching = transformers.ContinuousBatchingConfig(
        page_size=PAGE,
        num_blocks=sum(-(-(len(prompt) + output) // PAGE) + 1 for prompt, output in lengths),
        max_batch_tokens=job["step_tokens"],
        max_requests_per_batch=MAX_RUNNING,
    )
    with network.continuous_batching_context_manager(
        generation_config=settings, continuous_batching_config=batching
    ) as manager:
        return _timed(lambda asked: _continuous(manager, asked), job)


def _continuous(manager: Any, asked: dict[str, Any]) -> list[list[int]]:
    names = [
        manager.add_request(list(prompt), max_new_tokens=output)
        for prompt, output in zip(asked["prompts"], asked["outputs"], strict=True)
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


def _static(network: Any, asked: dict[str, Any], size: int, seconds: float) -> list[list[int]]:
    """Prompts are padded on the left, and a batch runs as long as its longest answer."""
    import torch

    answers: list[list[int]] = []
    began = time.perf_counter()
    for first in range(0, len(asked["prompts"]), size):
        if time.perf_counter() - began > seconds:
            break
        prompts = asked["prompts"][first : first + size]
        outputs = asked["outputs"][first : first + size]
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
        if len(asked["prompts"]) > size:
            progress(f"{len(answers)} of {len(asked['prompts'])} requests")
    return answers


def write_gguf(model: Path, target: Path) -> None:
    """Writes a Llama or Qwen 3 model as one GGUF file, unless it exists: matrices in float16, the
    rest in float32, and a made-up tokenizer, because only token ids are used.

    Needs the gguf package. Raises ValueError for other architectures.
    """
    import gguf
    import numpy as np
    from safetensors.numpy import load_file

    if target.exists():
        return
    config = json.loads((model / "config.json").read_text())
    kind = config["model_type"]
    if kind not in ("llama", "qwen3"):
        raise ValueError(f"no GGUF writer for {kind}")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or config
    part = target.with_suffix(".part")
    writer = gguf.GGUFWriter(part, kind)
    writer.add_name(model.name)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(size)
    writer.add_rope_freq_base(float(rope.get("rope_theta", 10000.0)))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([f"<{i}>" for i in range(config["vocab_size"])])
    writer.add_token_types([gguf.TokenType.NORMAL] * config["vocab_size"])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    arch = gguf.MODEL_ARCH.LLAMA if kind == "llama" else gguf.MODEL_ARCH.QWEN3
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    rotated = {"q_proj": heads, "k_proj": kv_heads} if kind == "llama" else {}
    for file in sorted(model.glob("*.safetensors")):
        for name, values in load_file(file).items():
            if name == "lm_head.weight" and config.get("tie_word_embeddings"):
                continue
            place = names.get_name(name, try_suffixes=(".weight", ".bias"))
            if place is None:
                raise ValueError(f"{name} has no place in a GGUF file of this shape")
            if pairs := rotated.get(name.split(".")[-2]):
                # llama.cpp rotates adjacent elements, transformers the two halves of a head.
                halves = values.reshape(pairs, 2, -1, values.shape[-1])
                values = halves.swapaxes(1, 2).reshape(values.shape)
            stored = np.float16 if values.ndim == 2 else np.float32
            writer.add_tensor(place, np.ascontiguousarray(values, dtype=stored))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(part, target)


class _Opaque(ctypes.Structure):
    """A structure of parameters of llama.cpp, of which only the first fields are known here.

    What lies behind them differs between releases, and stays as the library's own function for
    defaults fills it. More bytes than a structure has do no harm: one that is larger than two
    registers is returned and passed in memory.
    """

    _fields_ = (("first", ctypes.c_uint32 * 4), ("rest", ctypes.c_uint8 * 1008))


class _Batch(ctypes.Structure):
    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    )


FLOAT16, Q8_0, Q4_0 = "float16", "q8_0", "q4_0"
_FILE_TYPES = {Q8_0: 7, Q4_0: 2}
"""Of llama.cpp's enum llama_ftype."""

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int32
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ggml_backend_load_all_from_path": (None, (ctypes.c_char_p,)),
    "llama_backend_init": (None, ()),
    "llama_model_default_params": (_Opaque, ()),
    "llama_model_load_from_file": (_POINTER, (ctypes.c_char_p, _Opaque)),
    "llama_model_get_vocab": (_POINTER, (_POINTER,)),
    "llama_model_size": (ctypes.c_uint64, (_POINTER,)),
    "llama_vocab_n_tokens": (_INT, (_POINTER,)),
    "llama_context_default_params": (_Opaque, ()),
    "llama_init_from_model": (_POINTER, (_POINTER, _Opaque)),
    "llama_set_n_threads": (None, (_POINTER, _INT, _INT)),
    "llama_n_ubatch": (ctypes.c_uint32, (_POINTER,)),
    "llama_n_seq_max": (ctypes.c_uint32, (_POINTER,)),
    "llama_n_threads": (_INT, (_POINTER,)),
    "llama_get_memory": (_POINTER, (_POINTER,)),
    "llama_batch_init": (_Batch, (_INT, _INT, _INT)),
    "llama_memory_seq_rm": (ctypes.c_bool, (_POINTER, _INT, _INT, _INT)),
    "llama_decode": (_INT, (_POINTER, _Batch)),
    "llama_get_logits_ith": (ctypes.POINTER(ctypes.c_float), (_POINTER, _INT)),
    "llama_model_quantize_default_params": (_Opaque, ()),
    "llama_model_quantize": (
        ctypes.c_uint32,
        (ctypes.c_char_p, ctypes.c_char_p, ctypes.POINTER(_Opaque)),
    ),
}
"""Of llama.h and ggml-backend.h: what each returns and takes."""


def llama_library(folder: Path) -> Any:
    """llama.cpp's library in a folder that also has its backends, the best of which for this CPU
    it loads itself. Raises ValueError where there is none, or one too old to have what is called.
    """
    found = [file for file in folder.glob("libllama.*") if ".so" in file.name]
    if not found:
        raise ValueError(f"{folder} has no libllama")
    try:
        library = ctypes.CDLL(str(min(found).resolve()))
        for name, (returned, taken) in _FUNCTIONS.items():
            function = getattr(library, name)
            function.restype, function.argtypes = returned, taken
    except (OSError, AttributeError) as error:
        raise ValueError(f"{folder}: {error}") from error
    library.ggml_backend_load_all_from_path(str(folder.resolve()).encode())
    library.llama_backend_init()
    return library


def quantize_gguf(job: dict[str, Any]) -> dict[str, Any]:
    """Writes a file of float16 in another precision, as llama.cpp's own tool does, unless it
    exists. job: library, source, target, precision. Raises ValueError where llama.cpp cannot."""
    target = Path(job["target"])
    if not target.exists():
        library = llama_library(Path(job["library"]))
        settings = library.llama_model_quantize_default_params()
        settings.first[:2] = 0, _FILE_TYPES[job["precision"]]
        part = target.with_suffix(".part")
        source = str(job["source"]).encode()
        if library.llama_model_quantize(source, str(part).encode(), ctypes.byref(settings)):
            raise ValueError(f"llama.cpp cannot quantise to {job['precision']}")
        os.replace(part, target)
    return {}


def run_llama(job: dict[str, Any]) -> Any:
    """llama.cpp through the functions of its library, with the weights of a file and KV in float16.

    All sequences are in one context with a KV stream each (its faster mode), under the same token
    budget per step as the others: decode first, the rest for prompts. job: library, gguf, threads,
    step_tokens, requests, warm. Returns tokens, seconds, cpu_seconds and weights_bytes.
    """
    llama = _Llama(job)
    return {**_timed(llama.serve, job), "weights_bytes": llama.weights_bytes}


@dataclass(slots=True)
class _LlamaSequence:
    index: int
    place: int
    tokens: list[int]
    prompt: int
    """Number of prompt tokens, with which `tokens` begins."""
    output: int
    """Number of requested tokens."""
    done: int = 0
    """Number of leading tokens that are computed."""


class _Llama:
    """One context with room for the requests of a job."""

    def __init__(self, job: dict[str, Any]) -> None:
        prompts, outputs = job["requests"]["prompts"], job["requests"]["outputs"]
        longest = max(len(p) + output for p, output in zip(prompts, outputs, strict=True))
        self._budget = job["step_tokens"]
        self._places = min(MAX_RUNNING, len(prompts))
        self._api = api = llama_library(Path(job["library"]))
        model = api.llama_model_load_from_file(
            job["gguf"].encode(), api.llama_model_default_params()
        )
        if not model:
            sys.exit("llama.cpp cannot load the GGUF file")
        self.weights_bytes: int = api.llama_model_size(model)
        self._vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
        settings = api.llama_context_default_params()
        positions = -(-longest // STREAM) * STREAM * self._places
        # n_ctx, n_batch, n_ubatch, n_seq_max
        settings.first[:] = positions, self._budget, self._budget, self._places
        self._context = api.llama_init_from_model(model, settings)
        if not self._context:
            sys.exit("llama.cpp cannot make a context")
        api.llama_set_n_threads(self._context, job["threads"], job["threads"])
        has = api.llama_n_ubatch, api.llama_n_seq_max, api.llama_n_threads
        if [get(self._context) for get in has] != [self._budget, self._places, job["threads"]]:
            sys.exit("this llama.cpp has other parameters than are known here")
        self._memory = api.llama_get_memory(self._context)
        self._batch = api.llama_batch_init(self._budget, 0, 1)

    def serve(self, asked: dict[str, Any]) -> list[list[int]]:
        waiting = list(enumerate(zip(asked["prompts"], asked["outputs"], strict=True)))[::-1]
        free = list(range(self._places))
        running: list[_LlamaSequence] = []
        answers: list[list[int]] = [[] for _ in waiting]
        while waiting or running:
            while waiting and free:
                index, (prompt, output) = waiting.pop()
                running.append(_LlamaSequence(index, free.pop(), list(prompt), len(prompt), output))
            self._step(running)
            for one in [s for s in running if len(s.tokens) - s.prompt >= s.output]:
                running.remove(one)
                free.append(one.place)
                answers[one.index] = one.tokens[one.prompt :]
                self._api.llama_memory_seq_rm(self._memory, one.place, -1, -1)
        return answers

    def _step(self, running: list[_LlamaSequence]) -> None:
        import numpy as np

        chunks = [(s, 1) for s in running if s.done >= s.prompt]
        budget = self._budget - len(chunks)
        for sequence in running:
            count = min(sequence.prompt - sequence.done, budget)
            if count > 0:
                chunks.append((sequence, count))
                budget -= count
        batch, row = self._batch, 0
        sampled: list[tuple[_LlamaSequence, int]] = []
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
