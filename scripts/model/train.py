"""Trains the bundled model from nothing on made-up text, in the stages of `STAGES`.

PYTHONPATH=scripts python -m model.train --work build/model --out services/batonlm/models/baton-tiny

A run that ends early goes on when it is started again, from the last state that it saved.
"""

import argparse
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from model.corpus import completion, dialogue, edited, evaluation_set, long_dialogue
from model.evaluate import judge, load, tally
from model.tokens import (
    BEGIN,
    END,
    PAD,
    TOOL_TOKENS,
    Encoder,
    Piece,
    packaged,
    train_tokenizer,
    with_tool_tokens,
)
from model.tools import tool_chat

VOCABULARY = 2048
MAX_POSITIONS = 2048
#: Every twelfth batch is of the long shape.
LONG_EVERY = 12
#: Steps between two saved states, from which an interrupted run goes on.
SAVE_EVERY = 100


@dataclass(frozen=True)
class Stage:
    """One run of the optimiser over freshly drawn text."""

    #: Also the seed of its text.
    name: str
    steps: int
    #: Highest learning rate.
    peak: float
    #: (rows, tokens per row) of a batch: two fixed shapes, because every shape costs a compilation.
    short: tuple[int, int]
    long: tuple[int, int]
    #: Of the steps, the last so many let the learning rate fall in a straight line, after it stayed
    #: at its highest. 0: one cycle, which rises over 6 % of the steps and falls as a cosine does.
    falling: int = 0
    #: Share of conversations that have tools.
    tools: float = 0.0
    #: Share of the others that ask for what is forgotten first.
    refreshed: float = 0.0
    #: Share of conversations whose answer repeats most of what was asked.
    edits: float = 0.0

    def schedule(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        """The learning rate of every step."""
        if not self.falling:
            return torch.optim.lr_scheduler.OneCycleLR(
                optimizer, self.peak, total_steps=self.steps, pct_start=0.06
            )
        return torch.optim.lr_scheduler.LambdaLR(
            optimizer,
            lambda step: min(1.0, (step + 1) / 100, (self.steps - step) / self.falling),
        )


STAGES = (
    Stage("training", 3000, 2.5e-3, short=(10, 384), long=(4, 1024)),
    Stage("tools", 1300, 1.5e-3, short=(5, 384), long=(2, 1024), tools=0.7),
    Stage(
        "both", 2000, 1e-3, short=(8, 384), long=(2, 1024), falling=850, tools=0.45, refreshed=0.4
    ),
)
#: Never used for judging a finished model: `evaluate.py` and the tests draw other seeds.
PROGRESS_SEED = 0

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

    def state(self) -> list[Piece]:
        """What `restore` needs to go on."""
        return self._waiting

    def restore(self, state: list[Piece]) -> None:
        self._waiting = state

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


def has_amx() -> bool:
    """Whether this CPU multiplies bfloat16 matrices in hardware; on others bfloat16 is slower."""
    cpu = Path("/proc/cpuinfo")
    return cpu.exists() and "amx_bf16" in cpu.read_text("utf-8")


def loss_of(backbone: Callable[..., Any], model: Any, batch: Batch, bfloat16: bool) -> Tensor:
    """Mean cross-entropy over the tokens to be learnt; the others get no logits at all."""
    ids, targets, visible = batch
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bfloat16):
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


def begun(stage: Stage, rng: random.Random, before: Path | None) -> tuple[Any, Any]:
    """Model and tokenizer as the stage starts with them. before: the stage before's result."""
    if before is None:
        sample = (m["content"] for _ in range(20_000) for m in dialogue(rng).messages())
        package = packaged(train_tokenizer(sample, VOCABULARY), MAX_POSITIONS)
        return new_model(package), package
    model, package = load(before)
    tokenizer = package.backend_tokenizer
    if stage.tools and tokenizer.token_to_id(TOOL_TOKENS[0]) is None:
        tokenizer = with_tool_tokens(tokenizer)
        rows = [tokenizer.token_to_id(token) for token in TOOL_TOKENS]
        with torch.no_grad():  # they belonged to other tokens
            embedding = model.get_input_embeddings().weight
            embedding[rows] = embedding.mean(dim=0)
    return model, packaged(tokenizer, MAX_POSITIONS)


def train(stage: Stage, seed: int, before: Path | None, out: Path, state: Path) -> None:
    """Run one stage and leave the model in `out`. before: the folder of the stage before, or None
    to start from nothing. state: a file to go on from if it exists, written as the training
    goes."""
    torch.manual_seed(seed)
    rng = random.Random(f"{stage.name} {seed}")
    model, package = begun(stage, rng, before)
    encoder = Encoder(package)
    print(f"{stage.name}: {sum(p.numel() for p in model.parameters()):,} parameters", flush=True)

    def short_piece() -> Piece:
        if stage.tools and rng.random() < stage.tools:
            return encoder.tool_chat(tool_chat(rng))
        if stage.edits and rng.random() < stage.edits:
            return encoder.dialogue(edited(rng))
        if rng.random() < 0.04:
            return encoder.text(completion(rng))
        return encoder.dialogue(dialogue(rng, stage.refreshed))

    short = Packer(short_piece, *stage.short)
    far = Packer(lambda: encoder.dialogue(long_dialogue(rng)), *stage.long)
    # torch.compile needs a C++ compiler; without one the same steps take half as long again.
    compiled = any(shutil.which(name) for name in ("g++", "c++", "clang++"))
    backbone = torch.compile(model.model, dynamic=False) if compiled else model.model
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=stage.peak, betas=(0.9, 0.98), weight_decay=0.02, fused=True
    )
    schedule = stage.schedule(optimizer)
    first = 1
    if state.exists():
        saved = torch.load(state)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
        short.restore(saved["short"])
        far.restore(saved["far"])
        rng.setstate(saved["random"])
        first = saved["step"] + 1
    began = time.monotonic()
    bfloat16 = has_amx()
    model.train()
    for step in range(first, stage.steps + 1):
        batch = (far if step % LONG_EVERY == 0 else short).batch()
        loss: Any = loss_of(backbone, model, batch, bfloat16)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % SAVE_EVERY:
            continue
        seconds = time.monotonic() - began
        print(f"step {step}/{stage.steps}  loss {loss.item():.4f}  {seconds:.0f} s", flush=True)
        part = state.with_suffix(".pt.part")
        torch.save(
            {
                "step": step,
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "schedule": schedule.state_dict(),
                "short": short.state(),
                "far": far.state(),
                "random": rng.getstate(),
            },
            part,
        )
        os.replace(part, state)
    save(model, package, out)
    print(f"{stage.name}: trained in {time.monotonic() - began:.0f} s", flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Train the bundled model on this machine's CPU.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument(
        "--work", type=Path, required=True, help="folder of the stages' results and states"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    before = None
    *stages, last = STAGES
    for stage in stages:
        result, part = args.work / stage.name, args.work / f"{stage.name}.part"
        if not result.exists():
            train(stage, args.seed, before, part, args.work / f"{stage.name}.pt")
            part.rename(result)
        before = result
    train(last, args.seed, before, args.out, args.work / f"{last.name}.pt")
    shutil.rmtree(args.work)
    print(report(args.out, 430), flush=True)


if __name__ == "__main__":
    main()
