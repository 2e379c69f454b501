"""The table of sections: what is measured, in the order of its worth, and what it may cost.

Seconds are those of one H100, estimated before the first run: `expected_s` decides whether a
section still fits a budget, `limit_s` ends a part that hangs.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.engine.tiny_models import ARCHS


@dataclass(frozen=True, slots=True)
class Section:
    name: str
    command: str
    """A, B or C: which of the three runs of ten minutes it belongs to."""
    run: str
    """MODULE:FUNCTION of its generator of figures."""
    about: str
    expected_s: float
    """Of all parts together."""
    limit_s: float
    """Of one part."""
    parts: tuple[str, ...] = ("",)
    """Each runs in a process of its own."""
    quick_parts: tuple[str, ...] = ()
    """Those of a quick run; all, if empty."""
    together: bool = False
    """Whether parts run at the same time: nothing in them is timed."""


_KINDS = ("float32", "bfloat16", "float16")
_CASES = ("llama", "odd head", "wide head", "window", "sinks", "one KV head")
FIVE = ("llama", "qwen3", "gemma2", "gpt_oss", "mistral")
"""Architectures that command B checks, one of each kind of attention."""
TESTED = (
    *("test_triton_attention", "test_fused_kernels", "test_triton_models", "test_sampler_triton"),
    *(
        "test_fused_experts",
        "test_triton_copies",
        "test_wire_dtypes",
        "test_graphs",
        "test_leaf_hash",
    ),
    *("test_block_cache", "test_adapter_kernels"),
)
"""Files of tests that run on a GPU where there is one, the longest first."""
OTHERS = tuple(name for name in ARCHS if name not in FIVE)

SECTIONS = (
    Section(
        "ceilings",
        "A",
        "gpucheck.ceilings:run",
        "what this GPU, its memory and its link to the host can do",
        expected_s=30,
        limit_s=120,
    ),
    Section(
        "kernels",
        "A",
        "gpucheck.kernels:correctness",
        "attention and copies against float64, in every number type",
        expected_s=75,
        limit_s=180,
        parts=tuple(f"{kind}, {case}" for kind in _KINDS for case in _CASES),
        quick_parts=("float32, llama", "bfloat16, window", "float16, sinks"),
        together=True,
    ),
    Section(
        "speed",
        "A",
        "gpucheck.speed:run",
        "prefill and decode of an 8B model, and which kernels take the time",
        expected_s=120,
        limit_s=300,
    ),
    Section(
        "sampler",
        "A",
        "gpucheck.sampling:speed",
        "time of a step's sampling at 64 x 128k",
        expected_s=25,
        limit_s=120,
    ),
    Section(
        "fused kernels",
        "A",
        "gpucheck.fused:run",
        "the fused decoder's norms and gates, right and fast",
        expected_s=25,
        limit_s=90,
    ),
    Section(
        "kernel speed",
        "A",
        "gpucheck.kernels:speed",
        "attention alone at several batches and contexts",
        expected_s=40,
        limit_s=120,
    ),
    Section(
        "transformers",
        "A",
        "gpucheck.peers:transformers",
        "Hugging Face's own decode and prefill of the same shape",
        expected_s=75,
        limit_s=180,
    ),
    Section(
        "variants",
        "A",
        "gpucheck.speed:variant",
        "the same without CUDA graphs, and with transformers' code instead of the fused decoder",
        expected_s=100,
        limit_s=180,
        parts=("transformers' decoder", "no graphs"),
    ),
    Section(
        "vllm",
        "A",
        "gpucheck.peers:vllm",
        "vLLM's decode and prefill of the same shape, where it is installed",
        expected_s=10,
        limit_s=240,
    ),
    Section(
        "link",
        "B",
        "gpucheck.link:run",
        "what NIXL alone moves between two processes",
        expected_s=60,
        limit_s=90,
        parts=("host", "device"),
    ),
    Section(
        "handover",
        "B",
        "gpucheck.handover:run",
        "prefill and decode in two processes over NIXL: tokens and bytes a second",
        expected_s=100,
        limit_s=150,
        parts=("host", "device"),
    ),
    Section(
        "parity",
        "B",
        "gpucheck.parity:float32",
        "tokens of five architectures against transformers, float32",
        expected_s=60,
        limit_s=180,
        parts=FIVE,
        quick_parts=("llama", "gpt_oss"),
        together=True,
    ),
    Section(
        "tests",
        "B",
        "gpucheck.own_tests:run",
        "the kernels' own tests, compiled instead of interpreted",
        expected_s=150,
        limit_s=240,
        parts=TESTED,
        quick_parts=("test_block_cache",),
        together=True,
    ),
    Section(
        "sampler bits",
        "B",
        "gpucheck.sampling:bits",
        "the sampler's tokens against those of the CPU",
        expected_s=30,
        limit_s=120,
    ),
    Section(
        "packing",
        "B",
        "gpucheck.packing:run",
        "KV out of the pool and into it",
        expected_s=30,
        limit_s=120,
    ),
    Section(
        "agreement",
        "B",
        "gpucheck.parity:bfloat16",
        "tokens of five architectures against transformers, bfloat16",
        expected_s=60,
        limit_s=180,
        parts=FIVE,
        quick_parts=("llama",),
        together=True,
    ),
    Section(
        "drafts",
        "B",
        "gpucheck.speed:drafts",
        "steps with 3 and 7 drafts a sequence, with and without CUDA graphs",
        expected_s=50,
        limit_s=180,
    ),
    Section(
        "large batches",
        "C",
        "gpucheck.speed:large_batches",
        "decode at batch 128 and 256",
        expected_s=100,
        limit_s=240,
    ),
    Section(
        "long context",
        "C",
        "gpucheck.speed:long_context",
        "prefill and decode at 32k positions",
        expected_s=75,
        limit_s=200,
    ),
    Section(
        "mixed steps",
        "C",
        "gpucheck.speed:mixed",
        "decode rows and a chunk of a prompt in one step",
        expected_s=60,
        limit_s=180,
    ),
    Section(
        "swap",
        "C",
        "gpucheck.packing:swap",
        "blocks to host memory and back, between steps",
        expected_s=30,
        limit_s=120,
    ),
    Section(
        "other parity",
        "C",
        "gpucheck.parity:float32",
        "tokens of all other architectures against transformers, float32",
        expected_s=150,
        limit_s=180,
        parts=OTHERS,
        quick_parts=("qwen3_moe",),
        together=True,
    ),
    Section(
        "lora",
        "C",
        "gpucheck.speed:lora",
        "tokens a second with 1 to 64 distinct adapters in a step, against none",
        expected_s=100,
        limit_s=240,
    ),
)
