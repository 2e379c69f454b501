"""Makes a model of a hundred million parameters of the bundled one, and trains it further.

PYTHONPATH=scripts python -m model.larger --work build/larger --out build/baton-larger

It is the target of a pair for speculation, whose draft is the bundled model: both have one
tokenizer, and learnt from the same corpus. Widened as in Net2Net (Chen, Goodfellow and Shlens,
2016), it begins as good as the bundled model is; what it learns besides are answers that repeat
most of their prompt.
"""

import argparse
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from model.evaluate import load
from model.train import Stage, report, save, train

BUNDLED = Path(__file__).parents[2] / "services/batonlm/models/baton-tiny"
LAYERS, HIDDEN, HEADS, KV_HEADS, INNER = 15, 768, 12, 6, 2048
KEPT = (0, 4, 8, 12)
"""Where the bundled model's layers stand. The others pass on what they get until they have learnt
something better."""
SPREAD = 0.02
"""Standard deviation of new weights; those that lead back into the old part are 0."""


def widened(small: Any) -> Any:
    """Returns a model that computes what the small one does, up to rounding, and has room for
    more."""
    config = LlamaConfig(**{
        **small.config.to_dict(),
        "num_hidden_layers": LAYERS,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "intermediate_size": INNER,
    })  # fmt: skip
    large: Any = LlamaForCausalLM(config)
    before = small.config.hidden_size
    # A norm divides by the mean over all of its inputs, of which most are near 0 now.
    scale = (before / HIDDEN) ** 0.5
    with torch.no_grad():
        for name, weight in large.named_parameters():
            if name.endswith("norm.weight"):
                weight.fill_(scale)
            elif "o_proj" in name or "down_proj" in name:
                weight.zero_()
            else:
                weight.normal_(std=SPREAD)
        _put(large.model.embed_tokens.weight, small.model.embed_tokens.weight)
        large.model.embed_tokens.weight[:, before:].normal_(std=SPREAD / 10)
        large.model.norm.weight[:before] = small.model.norm.weight * scale
        for place, old in zip(KEPT, small.model.layers, strict=True):
            new = large.model.layers[place]
            for (_, target), (name, source) in zip(
                new.named_parameters(), old.named_parameters(), strict=True
            ):
                _put(target, source * scale if name.endswith("norm.weight") else source)
    return large


def _put(target: Tensor, source: Tensor) -> None:
    """Writes a weight into the first rows and columns of a larger one, whose old rows then read
    nothing new."""
    if target.dim() == 2:
        target[: source.shape[0]] = 0
        target[: source.shape[0], : source.shape[1]] = source
    else:
        target[: source.shape[0]] = source


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--work", type=Path, required=True, help="folder of the training's state")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--steps", type=int, default=1000)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    begun = args.work / "widened"
    if not begun.exists():
        torch.manual_seed(0)
        small, tokenizer = load(BUNDLED)
        save(widened(small), tokenizer, begun)
    stage = Stage(
        "edits", args.steps, 3e-4, short=(6, 512), long=(2, 1024),
        falling=args.steps // 3, tools=0.1, edits=0.6,
    )  # fmt: skip
    train(stage, 0, begun, args.out, args.work / "edits.pt")
    shutil.rmtree(args.work)
    print(report(args.out, 430), flush=True)


if __name__ == "__main__":
    main()
