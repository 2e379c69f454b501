"""Scores tokens of prompts from logits, on the model's device; draws nothing and knows no KV.

Of each row of logits only its best values and the one asked for are kept. A row's numbers do not
depend on its neighbours.
"""

from __future__ import annotations

import torch

from baton.core.request.prompt_logprobs import packed
from baton.core.scheduler.plan import Chunk, ScoredTokens, StepPlan
from baton.engine.transfer import Download, upload

_ROWS_TOGETHER = {"cpu": 1, "cuda": 64}
"""A row of float32 scores each: temporary memory."""


class StepScores:
    """The scores of a step, or what will be. Nothing is waited for until they are collected."""

    def __init__(self, plan: StepPlan, logits: torch.Tensor):
        """logits: [wanted rows, vocab] of any float type, not changed."""
        self._chunks = [chunk for chunk in plan.chunks if chunk.scored is not None]
        tensors = []
        first = 0
        for chunk in plan.chunks:
            count = len(chunk.wanted)
            if chunk.scored is not None:
                tensors += _scores(chunk, logits[first : first + count])
            first += count
        self._download = Download(tensors)

    def result(self) -> tuple[ScoredTokens, ...]:
        """Waits for the device. One of each chunk that is scored."""
        tensors = self._download.wait()
        told = []
        for i, chunk in enumerate(self._chunks):
            own, top_ids, top = (part.flatten().tolist() for part in tensors[3 * i : 3 * i + 3])
            num_top = 0 if chunk.scored is None else chunk.scored.num_top
            logprobs = packed(num_top, own, top_ids, top)
            told.append(ScoredTokens(chunk.sequence_id, chunk.first_position, logprobs))
        return tuple(told)


def drawn_rows(plan: StepPlan, logits: torch.Tensor) -> torch.Tensor:
    """Of logits [wanted rows, vocab] those to draw from: [chunks with samples, vocab]."""
    rows, first = [], 0
    for chunk in plan.chunks:
        first += len(chunk.wanted)
        if chunk.samples:
            rows.append(first - 1)
    return logits.index_select(0, upload(rows, torch.int64, logits.device))


def _scores(chunk: Chunk, logits: torch.Tensor) -> list[torch.Tensor]:
    """Natural logs of the softmax: own values float32 [N], best ids [N, K] and best values [N, K].

    logits: [N or more, vocab], of the chunk's positions.
    """
    assert chunk.scored is not None
    tokens, num_top = chunk.scored
    together = _ROWS_TOGETHER[logits.device.type]
    wanted = upload(list(tokens), torch.int64, logits.device)
    own = torch.empty(len(tokens), device=logits.device)
    top_ids = torch.empty(len(tokens), num_top, dtype=torch.int64, device=logits.device)
    top = torch.empty(len(tokens), num_top, device=logits.device)
    for first in range(0, len(tokens), together):
        rows = slice(first, min(first + together, len(tokens)))
        scores = torch.log_softmax(logits[rows].float(), 1)
        own[rows] = scores.gather(1, wanted[rows, None]).squeeze(1)
        top[rows], top_ids[rows] = torch.topk(scores, num_top, 1)
    return [own, top_ids, top]
