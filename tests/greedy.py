"""What transformers generates, which is what every engine has to say."""

from __future__ import annotations

from typing import Any

import torch


@torch.inference_mode()
def greedy_tokens(network: Any, prompt: list[int], count: int) -> list[int]:
    """So many tokens behind a prompt, whatever ends an answer."""
    ids = torch.tensor([prompt])
    output = network.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    tokens: list[int] = output[0].tolist()[len(prompt) :]
    return tokens
