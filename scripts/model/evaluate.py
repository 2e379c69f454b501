"""Asks a saved model the questions of an evaluation set.

    python scripts/model/evaluate.py services/batonlm/models/baton-tiny --json result.json

An answer counts only if it is right to the last character and the model ended it by itself.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from model.corpus import Example, Message, evaluation_set

#: More than the longest answer of the corpus needs.
MAX_NEW_TOKENS = 400


def load(path: Path) -> tuple[Any, Any]:
    """Model in float32 and tokenizer, as any user of transformers would load them."""
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return model.eval(), tokenizer


@torch.inference_mode()
def greedy(
    model: Any, tokenizer: Any, chats: list[tuple[list[Message], list[dict[str, Any]]]]
) -> list[str | None]:
    """The model's answer to each chat of messages and tools, or None where it did not end its
    turn."""
    prompts = [
        tokenizer.apply_chat_template(
            messages, tools=tools or None, tokenize=False, add_generation_prompt=True
        )
        for messages, tools in chats
    ]
    batch = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
    output = model.generate(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        max_new_tokens=MAX_NEW_TOKENS,
        do_sample=False,
    )
    answers: list[str | None] = []
    for row in output[:, batch["input_ids"].shape[1] :].tolist():
        ended = tokenizer.eos_token_id in row
        ids = row[: row.index(tokenizer.eos_token_id)] if ended else row
        answers.append(tokenizer.decode(ids, skip_special_tokens=False) if ended else None)
    return answers


def judge(
    model: Any, tokenizer: Any, examples: list[Example], batch_size: int = 48
) -> list[tuple[Example, str | None]]:
    """Each example with the answer it got."""
    # A batch runs as long as its longest answer: alike lengths together waste the least.
    order = sorted(examples, key=lambda example: len(example.answer))
    judged: list[tuple[Example, str | None]] = []
    for start in range(0, len(order), batch_size):
        part = order[start : start + batch_size]
        answers = greedy(model, tokenizer, [(e.messages, e.tools) for e in part])
        judged.extend(zip(part, answers, strict=True))
    return judged


def tally(judged: list[tuple[Example, str | None]]) -> dict[str, tuple[int, int]]:
    """kind -> (right, asked), in the order of the kinds' names."""
    counts: dict[str, tuple[int, int]] = {}
    for example, answer in judged:
        right, asked = counts.get(example.kind, (0, 0))
        counts[example.kind] = (right + (answer == example.answer), asked + 1)
    return dict(sorted(counts.items()))


def main() -> None:
    """Command line: print the accuracy per kind, and optionally every answer as JSON."""
    parser = argparse.ArgumentParser(description="Measure the bundled model's exact answers.")
    parser.add_argument("path", type=Path, help="folder of the model")
    parser.add_argument("--seed", type=int, default=1, help="seed of the evaluation set")
    parser.add_argument("-n", type=int, default=680, help="number of questions")
    parser.add_argument("--json", type=Path, help="write counts and wrong answers to this file")
    args = parser.parse_args()

    model, tokenizer = load(args.path)
    judged = judge(model, tokenizer, evaluation_set(args.seed, args.n))
    counts = tally(judged)
    for kind, (right, asked) in counts.items():
        print(f"{kind:24} {right:4} / {asked:4}  {right / asked:6.1%}")
    total = sum(right for right, _ in counts.values())
    print(f"{'all':24} {total:4} / {len(judged):4}  {total / len(judged):6.1%}")
    if args.json:
        wrong = [
            {"kind": e.kind, "messages": e.messages, "expected": e.answer, "answer": answer}
            for e, answer in judged
            if answer != e.answer
        ]
        report = {"seed": args.seed, "right": total, "asked": len(judged), "kinds": counts}
        args.json.write_text(
            json.dumps(report | {"wrong": wrong}, indent=1, ensure_ascii=False), encoding="utf-8"
        )


if __name__ == "__main__":
    main()
