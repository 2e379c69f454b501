"""Holds greedy answers against peft's unmerged adapters on one base model; prints JSON.

stdin: a JSON object with "model", a folder, "adapters", folders by name, and "answers", by name
lists of pairs: a prompt and its answer, as token ids. Prints the names of adapters whose most
likely token is another one somewhere, as a list.
"""

import json
import sys

import torch
import transformers
from peft import PeftModel

asked = json.load(sys.stdin)
base = transformers.AutoModelForCausalLM.from_pretrained(
    asked["model"], dtype=torch.float32, attn_implementation="eager"
)
model = None
wrong = []
for name, folder in asked["adapters"].items():
    if model is None:
        model = PeftModel.from_pretrained(base, folder, adapter_name=name).eval()
    else:
        model.load_adapter(folder, adapter_name=name)
        model.set_adapter(name)
        model.eval()
    rows = [prompt + tokens for prompt, tokens in asked["answers"][name]]
    longest = max(map(len, rows))
    # A causal model reads nothing of the padding behind a sequence.
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    with torch.inference_mode():
        best = model(input_ids=ids).logits.argmax(-1).tolist()
    for (prompt, tokens), row in zip(asked["answers"][name], best, strict=True):
        if row[len(prompt) - 1 : len(prompt) + len(tokens) - 1] != tokens:
            wrong.append(name)
            break
print(json.dumps(wrong))
