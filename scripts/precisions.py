"""Measures what precisions of weights and KV cost in a model's distributions, and what they save.

    python scripts/precisions.py --json docs/benchmarks/precisions.json

There are two texts. The answers of conversations of the evaluation set of the bundled model, which
it was not trained on, are of the kinds that it was trained for, and it is sure of them; the prose
of this repository's licence is like nothing that it knows, and it hesitates everywhere.
Distributions are compared with those of the model in float32. Checkpoints are made of the bundled
model, with numbers rounded to the nearest. Computed on a CPU.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoTokenizer

from baton_loadtest import quantised
from baton_loadtest.report import Result, table, write
from batonlm.core.scheduler.plan import Chunk, Scored, StepPlan
from batonlm.engine.config import EngineConfig
from batonlm.engine.footprint import foresee
from batonlm.engine.runner import TorchRunner

sys.path.insert(0, str(Path(__file__).resolve().parent))

from model.corpus import evaluation_set

ROOT = Path(__file__).resolve().parents[1]
BUNDLED = ROOT / "services/batonlm/models/baton-tiny"
SEED = 3
MOST_TOKENS = 200
ANSWERS, PROSE = "answers", "prose"


@dataclass(frozen=True, slots=True)
class Precision:
    dtype: str = "float32"
    quantize: str = "none"
    kv: str = "auto"
    """kv_cache_dtype."""
    checkpoint: str = ""
    """Of quantised.KINDS; "" for the plain one."""

    @property
    def name(self) -> str:
        parts = [f"`{self.quantize}`"] if self.quantize != "none" else []
        parts += [self.checkpoint] if self.checkpoint else []
        parts += [f"KV {self.kv}"] if self.kv != "auto" else []
        return ", ".join([self.dtype, *parts])


PRECISIONS = (
    Precision(),
    Precision("bfloat16"),
    *(Precision(quantize=name) for name in ("int8", "int4", "fp8")),
    *(Precision("bfloat16", quantize=name) for name in ("int8", "int4")),
    *(Precision(kv=name) for name in ("int8", "fp8")),
    *(
        Precision(dtype, checkpoint=kind)
        for kind, each in quantised.KINDS.items()
        if each.of_layers
        for dtype in ("float32", "bfloat16")
    ),
)
Texts = dict[str, list[tuple[list[int], int]]]


def texts(model: Path, count: int) -> Texts:
    """By kind of text: token ids, and where in each begins what is looked at."""
    tokenizer = AutoTokenizer.from_pretrained(model)

    def ids(chat: list[dict[str, str]], *, ended: bool) -> list[int]:
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=not ended)
        found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    answers = []
    for example in evaluation_set(SEED, count):
        chat = [dict(message) for message in example.messages]
        whole = ids([*chat, {"role": "assistant", "content": example.answer}], ended=True)
        answers.append((whole[:MOST_TOKENS], len(ids(chat, ended=False))))
    prose = tokenizer((ROOT / "LICENSE").read_text(), add_special_tokens=False)["input_ids"]
    pieces = [(prose[at : at + MOST_TOKENS], 1) for at in range(0, len(prose), MOST_TOKENS)]
    return {
        ANSWERS: [(text, start) for text, start in answers if start < len(text)],
        PROSE: [(text, start) for text, start in pieces[:count] if start < len(text)],
    }


def distributions(
    runner: TorchRunner, given: list[tuple[list[int], int]]
) -> Iterator[torch.Tensor]:
    """Of each text the log-probabilities [tokens that are looked at, vocab]."""
    for text, start in given:
        blocks = -(-len(text) // runner.block_size)
        chunk = Chunk(0, text, 0, ((0, blocks),), (), Scored(text[1:], 1))
        yield runner.forward(StepPlan(0, (chunk,)))[start - 1 :].float().log_softmax(-1).clone()


def measure(model: Path, count: int) -> list[Result]:
    given = texts(model, count)
    targets = {
        kind: torch.cat([torch.tensor(text[start:]) for text, start in pieces])[:, None]
        for kind, pieces in given.items()
    }
    exact: dict[str, torch.Tensor] = {}
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for precision in PRECISIONS:
            source = model
            if kind := precision.checkpoint:
                own = Path(folder, kind)
                source = own / "quantised" if own.exists() else quantised.write(kind, model, own)[0]
            config = EngineConfig(
                str(source),
                num_blocks=64,
                dtype=precision.dtype,
                quantize=precision.quantize,
                kv_cache_dtype=precision.kv,
                exact=False,
                device="cpu",
            )
            memory = foresee(config).memory
            runner = TorchRunner.load(config)
            found = {
                kind: torch.cat(list(distributions(runner, pieces)))
                for kind, pieces in given.items()
            }
            runner.close()
            exact = exact or found
            results.append(
                Result(f"{precision.name}: weights", memory.weights_bytes / 2**20, "MiB")
            )
            for kind in given:
                results += compare(precision.name, kind, found[kind], exact[kind], targets[kind])
    return results


def compare(
    name: str, kind: str, found: torch.Tensor, exact: torch.Tensor, targets: torch.Tensor
) -> list[Result]:
    """found, exact: log-probabilities [tokens, vocab]. targets: [tokens, 1]."""
    apart = (exact.exp() * (exact - found)).sum(-1)
    same = found.argmax(-1) == exact.argmax(-1)
    scores, best = found.gather(1, targets), exact.gather(1, targets)
    off = (scores - best).abs()
    return [
        Result(f"{name}: KL divergence, {kind}", max(0.0, float(apart.mean())), "nats"),
        Result(f"{name}: log-prob error, {kind}", float(off.mean()), "nats"),
        Result(f"{name}: same likeliest token, {kind}", 100 * float(same.float().mean()), "%"),
        Result(f"{name}: perplexity, {kind}", math.exp(-float(scores.mean())), ""),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=BUNDLED, help="a folder")
    parser.add_argument("--count", type=int, default=80, help="conversations, and pieces of prose")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    args = parser.parse_args()
    results = measure(args.model, args.count)
    print(table(results))
    if args.json is not None:
        write(args.json, SEED, results)


if __name__ == "__main__":
    main()
