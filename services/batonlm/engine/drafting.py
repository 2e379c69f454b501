"""A small model that drafts for a large one, over KV in the same blocks.

Its runner has memory for as many blocks as the large one's, under the same ids: a block's table is
the sequence's, and its bytes are counted in what a block takes. It is never exact: a wrong draft
changes no token.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

import torch

from batonlm.core.errors import InvalidArgument
from batonlm.core.request.model import ModelDescription
from batonlm.core.scheduler.drafts import MOST_DRAFTS
from batonlm.core.scheduler.model_drafts import Guess
from batonlm.core.scheduler.plan import Chunk, StepPlan
from batonlm.engine.config import EngineConfig
from batonlm.engine.device import upload

Forward = Callable[[StepPlan], torch.Tensor]
"""Logits [wanted rows, vocab]."""


def draft_config(config: EngineConfig) -> EngineConfig:
    """The engine's configuration of the draft model, but for the number of blocks."""
    return replace(
        config,
        model=config.draft_model,
        draft_model="",
        model_name="",
        tokenizer_digest="",
        exact=False,
        max_model_len=0,
        kv_cache_dtype="auto",
        kv_wire_dtype="auto",
        swap_host_bytes=0,
        swap_disk_bytes=0,
        prefix_host_bytes=0,
        adapter_memory_bytes=0,
        adapter_host_bytes=0,
    )


def refused(error: InvalidArgument) -> InvalidArgument:
    """Why the draft model cannot be used, naming its field."""
    return InvalidArgument(f"the draft model: {error.message}", field="draft_model")


def check_fits(draft: ModelDescription, model: ModelDescription) -> None:
    """Raises InvalidArgument where tokens of one are unknown to the other. A few ids behind the
    tokenizer's, which fill up a matrix, may differ."""
    if abs(draft.vocab_size - model.vocab_size) > _FILLED_UP:
        raise InvalidArgument(
            f"it has {draft.vocab_size} tokens and the model {model.vocab_size}: both need the "
            "same tokenizer",
            field="draft_model",
        )


_FILLED_UP = 1024
"""Most ids behind a tokenizer's that a vocabulary is filled up with, to round its size."""


class TorchDraftModel:
    """Implements `DraftModel`."""

    def __init__(
        self,
        forward: Forward,
        draft: ModelDescription,
        model: ModelDescription,
        clock: Callable[[], float] = time.perf_counter,
        *,
        recorded: bool = False,
    ):
        """clock: seconds; it is read when the device is done. recorded: whether the draft model's
        steps are recorded as CUDA graphs."""
        self.max_positions = draft.max_model_len
        self.clock = clock
        self._forward = forward
        self._recorded = recorded
        self._vocab_size = min(draft.vocab_size, model.vocab_size)

    def start(self, sequence_id: int, computed: int) -> int:
        return computed

    @torch.inference_mode()
    def compute(self, chunks: Sequence[Chunk]) -> tuple[list[Guess], float]:
        began = self.clock()
        plan = StepPlan(0, tuple(map(self._given, chunks)))
        logits = self._forward(plan)
        if any(chunk.num_drafts for chunk in plan.chunks):
            counts = (len(chunk.wanted) for chunk in plan.chunks if chunk.samples)
            last = [end - 1 for end in accumulate(counts)]
            logits = logits.index_select(0, upload(last, torch.int64, logits.device))
        logits = logits[:, : self._vocab_size].float()
        best, tokens = logits.max(1)
        odds = (best - logits.logsumexp(1)).exp()
        # One copy for both, which waits for the device.
        found = torch.stack((tokens.double(), odds.double())).tolist()
        guesses = [
            Guess(int(token), 0.0 if math.isnan(each) else each)
            for token, each in zip(*found, strict=True)
        ]
        return guesses, self.clock() - began

    def _given(self, chunk: Chunk) -> Chunk:
        """Without ids that only the large model has. Where steps are recorded, the few positions
        that a sequence is behind are computed as drafts are: such steps are among the recorded."""
        count = len(chunk.token_ids)
        if max(chunk.token_ids) >= self._vocab_size:
            tokens = [token if token < self._vocab_size else 0 for token in chunk.token_ids]
            chunk = chunk._replace(token_ids=tokens)
        if self._recorded and chunk.samples and count <= MOST_DRAFTS:
            chunk = chunk._replace(samples=chunk.samples * count, num_drafts=count - 1)
        return chunk
