"""Trains the bundled model from nothing on made-up text.

PYTHONPATH=scripts python -m model.train --out services/batonlm/models/baton-tiny
"""

import argparse
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from model.corpus import completion, dialogue, evaluation_set, long_dialogue
from model.evaluate import judge, load, tally
from model.tokens import BEGIN, END, PAD, Encoder, packaged, train_tokenizer

VOCABULARY = 2048
MAX_POSITIONS = 2048
#: (rows, tokens per row): two fixed shapes, because every shape costs a compilation.
SHORT, LONG = (10, 384), (4, 1024)
LONG_EVERY = 12
PEAK_LEARNING_RATE = 2.5e-3
#: Share of that rate when weights are already good and only need to get better.
CONTINUED = 0.5
#: Never used for judging a finished model: `evaluate.py` and the tests draw other seeds.
PROGRESS_SEED = 0

Piece = tuple[list[int], list[bool]]
Batch = tuple[Tensor, Tensor, Tensor]


def new_model(tokenizer: Any) -> Any:
    """An untrained Llama of three million parameters."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.convert_tokens_to_ids(BEGIN),
        eos_token_id=tokenizer.convert_tokens_to_ids(END),
        pad_token_id=tokenizer.convert_tokens_to_ids(PAD),
    )
    return LlamaForCausalLM(config)


class Packer:
    """Fills rows of one length with whole conversations that do not see each other."""

    def __init__(self, draw: Callable[[], Piece], rows: int, length: int) -> None:
        self._draw = draw
        self._rows = rows
        self._length = length
        self._waiting: list[Piece] = []

    def _row(self) -> list[Piece]:
        row: list[Piece] = []
        free = self._length
        while True:
            while len(self._waiting) < 48:
                piece = self._draw()
                if len(piece[0]) <= self._length:
                    self._waiting.append(piece)
            fits = next((i for i, p in enumerate(self._waiting) if len(p[0]) <= free), None)
            if fits is None:
                return row
            row.append(self._waiting.pop(fits))
            free -= len(row[-1][0])

    def batch(self) -> Batch:
        """Ids, targets (-100 where nothing is to be learnt) and who may look at whom."""
        ids = torch.zeros(self._rows, self._length, dtype=torch.long)
        targets = torch.full((self._rows, self._length), -100)
        owner = torch.zeros(self._rows, self._length, dtype=torch.long)
        for row in range(self._rows):
            start = 0
            for number, (tokens, learnt) in enumerate(self._row(), start=1):
                end = start + len(tokens)
                ids[row, start:end] = torch.tensor(tokens)
                owner[row, start:end] = number
                for offset in range(1, len(tokens)):
                    if learnt[offset]:
                        targets[row, start + offset - 1] = tokens[offset]
                start = end
        causal = torch.ones(self._length, self._length, dtype=torch.bool).tril()
        visible = (owner[:, :, None] == owner[:, None, :]) & causal
        return ids, targets, visible[:, None]


def loss_of(backbone: Callable[..., Any], model: Any, batch: Batch) -> Tensor:
    """Mean cross-entropy over the tokens to be learnt; the others get no logits at all."""
    ids, targets, visible = batch
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = backbone(input_ids=ids, attention_mask=visible, use_cache=False)
        wanted = targets != -100
        logits = model.lm_head(hidden.last_hidden_state[wanted])
    return functional.cross_entropy(logits.float(), targets[wanted])


def save(model: Any, tokenizer: Any, out: Path) -> None:
    """Write all files in bfloat16, each moved into place whole: readers never see half a file."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as name:
        scratch: Any = LlamaForCausalLM(model.config)
        scratch.to(torch.bfloat16)
        scratch.load_state_dict(model.state_dict())
        scratch.config.dtype = torch.bfloat16
        scratch.generation_config.do_sample = False
        scratch.save_pretrained(name)
        tokenizer.save_pretrained(name)
        for file in Path(name).iterdir():
            file.chmod(0o644)
            os.replace(file, out / file.name)


def report(out: Path, questions: int) -> str:
    """How the saved files answer; names the kinds that are not yet right."""
    model, tokenizer = load(out)
    counts = tally(judge(model, tokenizer, evaluation_set(PROGRESS_SEED, questions)))
    right = sum(right for right, _ in counts.values())
    missing = [f"{kind} {r}/{asked}" for kind, (r, asked) in counts.items() if r < asked]
    return f"{right}/{questions} right; " + (", ".join(missing) or "every kind")


def train(out: Path, steps: int, seed: int, compiled: bool, start: Path | None) -> None:
    """Train for `steps` steps and leave the model in `out`."""
    torch.manual_seed(seed)
    rng = random.Random(f"training {seed}")

    peak = PEAK_LEARNING_RATE
    if start:
        model, package = load(start)
        package.padding_side = "right"  # `load` turns it round for generation
        tokenizer = package.backend_tokenizer
        peak *= CONTINUED
    else:
        sample = (m["content"] for _ in range(20_000) for m in dialogue(rng).messages())
        tokenizer = train_tokenizer(sample, VOCABULARY)
        package = packaged(tokenizer, MAX_POSITIONS)
        model = new_model(package)
    encoder = Encoder(tokenizer)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)

    def short_piece() -> Piece:
        if rng.random() < 0.04:
            return encoder.text(completion(rng))
        return encoder.dialogue(dialogue(rng))

    short = Packer(short_piece, *SHORT)
    far = Packer(lambda: encoder.dialogue(long_dialogue(rng)), *LONG)
    backbone = torch.compile(model.model, dynamic=False) if compiled else model.model
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=peak, betas=(0.9, 0.98), weight_decay=0.02, fused=True
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, peak, total_steps=steps, pct_start=0.06
    )
    began = time.monotonic()
    model.train()
    for step in range(1, steps + 1):
        loss: Any = loss_of(backbone, model, (far if step % LONG_EVERY == 0 else short).batch())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            seconds = time.monotonic() - began
            print(f"step {step}/{steps}  loss {loss.item():.4f}  {seconds:.0f} s", flush=True)
        if step % 2000 == 0 and step < steps:
            with tempfile.TemporaryDirectory() as name:
                save(model, package, Path(name))
                print(f"step {step}: {report(Path(name), 136)}", flush=True)
    save(model, package, out)
    print(f"trained in {time.monotonic() - began:.0f} s; {report(out, 340)}", flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Train the bundled model on this machine's CPU.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=Path, help="continue from this saved model")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    # torch.compile needs a C++ compiler; without one the same steps take half as long again.
    compiled = any(shutil.which(name) for name in ("g++", "c++", "clang++"))
    train(args.out, args.steps, args.seed, compiled, args.start)


if __name__ == "__main__":
    main()
