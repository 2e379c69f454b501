"""Greedy tokens and log-probabilities of peft's unmerged adapters; prints JSON.

argv: a JSON object with "model", a folder, "adapters", folders by name, "prompts", lists of token
ids, and "count", of new tokens. Prints {name: [[tokens, last token's log-probability], ...]}.
"""

import json
import sys

import torch
import transformers
from peft import PeftModel

asked = json.loads(sys.argv[1])
found = {}
for name, folder in asked["adapters"].items():
    base = transformers.AutoModelForCausalLM.from_pretrained(
        asked["model"], dtype=torch.float32, attn_implementation="eager"
    )
    model = PeftModel.from_pretrained(base, folder).eval()
    found[name] = []
    for prompt in asked["prompts"]:
        with torch.inference_mode():
            output = model.generate(
                input_ids=torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                max_new_tokens=asked["count"],
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            logits = model(input_ids=output[:, :-1]).logits[0, -1].log_softmax(-1)
        tokens = output[0].tolist()
        found[name].append([tokens[len(prompt) :], float(logits[tokens[-1]])])
print(json.dumps(found))
