"""Measures what each precision of the weights costs in a model's distributions, and what it saves.

    python scripts/precisions.py --json docs/benchmarks/precisions.json

The texts are conversations of the evaluation set of the bundled model, which it was not trained on.
The distributions behind which tokens of answers follow are compared with those of the model in
float32. Computed on a CPU.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoTokenizer

from baton_loadtest.report import Result, table, write
from batonlm.core.scheduler.plan import Chunk, Scored, StepPlan
from batonlm.engine.config import EngineConfig
from batonlm.engine.footprint import foresee
from batonlm.engine.runner import TorchRunner

sys.path.insert(0, str(Path(__file__).resolve().parent))

from model.corpus import evaluation_set

BUNDLED = Path(__file__).resolve().parents[1] / "services/batonlm/models/baton-tiny"
SEED = 3
MOST_TOKENS = 200
PRECISIONS = (
    ("float32", "none"),
    ("bfloat16", "none"),
    ("float32", "int8"),
    ("float32", "int4"),
    ("bfloat16", "int4"),
    ("float32", "fp8"),
)


def texts(model: Path, count: int) -> list[tuple[list[int], int]]:
    """Conversations as token ids, and where in each the last answer begins."""
    tokenizer = AutoTokenizer.from_pretrained(model)

    def ids(chat: list[dict[str, str]], *, ended: bool) -> list[int]:
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=not ended)
        found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    found = []
    for example in evaluation_set(SEED, count):
        chat = [dict(message) for message in example.messages]
        whole = ids([*chat, {"role": "assistant", "content": example.answer}], ended=True)
        found.append((whole[:MOST_TOKENS], len(ids(chat, ended=False))))
    return [(text, start) for text, start in found if start < len(text)]


def distributions(
    config: EngineConfig, given: list[tuple[list[int], int]]
) -> Iterator[torch.Tensor]:
    """Of each text the log-probabilities [tokens of the answer, vocab] of what comes next."""
    runner = TorchRunner.load(config)
    for text, start in given:
        blocks = -(-len(text) // config.block_size)
        chunk = Chunk(0, text, 0, ((0, blocks),), (), Scored(text[1:], 1))
        yield runner.forward(StepPlan(0, (chunk,)))[start - 1 :].float().log_softmax(-1)
    runner.close()


def measure(model: Path, count: int) -> list[Result]:
    given = texts(model, count)
    targets = [torch.tensor(text[start:]) for text, start in given]
    exact: list[torch.Tensor] = []
    results = []
    for dtype, quantize in PRECISIONS:
        config = EngineConfig(
            str(model), num_blocks=64, dtype=dtype, quantize=quantize, exact=False, device="cpu"
        )
        found = [each.clone() for each in distributions(config, given)]
        exact = exact or found
        name = dtype if quantize == "none" else f"{quantize} in {dtype}"
        apart = torch.cat([(q.exp() * (q - p)).sum(-1) for p, q in zip(found, exact, strict=True)])
        same = torch.cat([p.argmax(-1) == q.argmax(-1) for p, q in zip(found, exact, strict=True)])
        loss, best = (
            torch.cat([-p.gather(1, t[:, None])[:, 0] for p, t in zip(each, targets, strict=True)])
            for each in (found, exact)
        )
        memory = foresee(config).memory.weights_bytes
        results += [
            Result(f"{name}: weights", memory / 2**20, "MiB"),
            Result(f"{name}: KL divergence from float32, mean", float(apart.mean()), "nats"),
            Result(f"{name}: most likely token is the same", 100 * float(same.float().mean()), "%"),
            Result(
                f"{name}: perplexity",
                math.exp(float(loss.mean())),
                "",
                against=math.exp(float(best.mean())),
                ratio=math.exp(float(loss.mean() - best.mean())),
            ),
        ]
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=BUNDLED, help="a folder")
    parser.add_argument("--count", type=int, default=80, help="conversations")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    args = parser.parse_args()
    results = measure(args.model, args.count)
    print(table(results))
    if args.json is not None:
        write(args.json, SEED, results)


if __name__ == "__main__":
    main()
