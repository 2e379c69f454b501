"""Samples the rows of a step on the model's device.

Everything is put in the device's queue and nothing waited for until the step is collected: whether
a row failed travels with its token. A row's token does not depend on its neighbours, see `sampler`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from baton.core.request.attempt import Logprobs
from baton.core.scheduler.plan import SampledToken, SampleRow, StepPlan, StepResult
from baton.engine.last_tokens import LastTokens
from baton.engine.prompt_scores import StepScores, drawn_rows
from baton.engine.random import uniform
from baton.engine.sampler import distances, draw, greedy, keep, penalize
from baton.engine.transfer import Download, upload, upload_bytes

_NOT_A_NUMBER = -1
_ALL_BANNED = -2
_FAILURES = {
    _NOT_A_NUMBER: "the model's output is not a number",
    _ALL_BANNED: "every token is banned",
}
# A row's few passes over its vocabulary run fastest on a CPU one row at a time, in its cache; on a
# GPU together, as far as their temporary memory goes.
_ROWS_TOGETHER = {"cpu": 1, "cuda": 64}


class SampledStep:
    """A step whose tokens are drawn, or will be. rows: in the order of the plan's samples."""

    def __init__(
        self,
        step: int,
        rows: Sequence[SampleRow],
        tokens: torch.Tensor,
        wanting: Sequence[int],
        logprobs: Sequence[torch.Tensor],
        scores: StepScores | None = None,
    ):
        """tokens: int64 [rows], or a failure. wanting: the rows that want logprobs. logprobs: their
        own values [N], best values [N, K] and these ones' ids [N, K]; nothing when N is 0."""
        self.step = step
        self._rows = rows
        self._wanting = wanting
        self._scores = scores
        self._download = Download([tokens, *logprobs])

    def result(self) -> StepResult:
        """Waits for the device. The tokens are told in the order of the plan."""
        tokens, *logprobs = (tensor.tolist() for tensor in self._download.wait())
        said: dict[int, Logprobs] = {}
        for i, own, values, ids in zip(self._wanting, *logprobs, strict=True):
            top = self._rows[i].params.top_logprobs
            said[i] = Logprobs(own, tuple(zip(ids[:top], values[:top], strict=True)))
        drawn: list[SampledToken] = []
        failed: list[tuple[int, str]] = []
        for i, (row, token) in enumerate(zip(self._rows, tokens, strict=True)):
            if token < 0:
                failed.append((row.sequence_id, _FAILURES[token]))
            else:
                drawn.append(SampledToken(row.sequence_id, row.choice, token, said.get(i)))
        scored = () if self._scores is None else self._scores.result()
        return StepResult(self.step, tuple(drawn), tuple(failed), scored=scored)


def sample_step(plan: StepPlan, logits: torch.Tensor, last: LastTokens) -> SampledStep:
    """logits: [wanted rows, vocab] of any float type, not changed. Tokens go to `last`."""
    scores = None
    if plan.scores:
        scores, logits = StepScores(plan, logits), drawn_rows(plan, logits)
    rows: list[SampleRow] = []
    sources: list[int] = []
    sampled = (chunk for chunk in plan.chunks if chunk.samples)
    for source, chunk in enumerate(sampled):
        rows += chunk.samples
        sources += [source] * len(chunk.samples)
    if len(rows) != len(logits):
        # A prompt's choices share their logits.
        logits = logits.index_select(0, upload(sources, torch.int64, logits.device))
    tokens = _tokens(logits, rows)
    if rows:
        last.store([row.sequence_id for row in rows], tokens)
    wanting = [i for i, row in enumerate(rows) if row.params.top_logprobs is not None]
    logprobs = _logprobs(logits, rows, tokens, wanting)
    return SampledStep(plan.step, rows, tokens, wanting, logprobs, scores)


def _tokens(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """logits [rows, vocab] -> a token, or a failure, of each row: int64 [rows]."""
    if all(row.params.greedy and not _adjusts(row) for row in rows):
        top, best = greedy(logits)
        return torch.where(top.isfinite(), best, _NOT_A_NUMBER)
    together = _ROWS_TOGETHER[logits.device.type]
    numbers = _numbers(rows, logits.shape[1], logits.device)
    return torch.cat(
        [
            _group(logits[i : i + together], rows[i : i + together], numbers[i : i + together])
            for i in range(0, len(rows), together)
        ]
    )


def _group(logits: torch.Tensor, rows: Sequence[SampleRow], numbers: torch.Tensor) -> torch.Tensor:
    raw = logits.float()
    top, best = greedy(raw)
    broken = torch.where(top.isfinite(), 0, _NOT_A_NUMBER)
    if any(_adjusts(row) for row in rows):
        raw = _adjusted(raw, rows)
        top, best = greedy(raw)
        broken = torch.where((broken == 0) & (top == -torch.inf), _ALL_BANNED, broken)
    token = best
    if not all(row.params.greedy for row in rows):
        temperature, number, top_k, top_p, min_p = (c[:, None] for c in numbers.unbind(1))
        weights = keep(
            distances(raw, temperature.float()),
            top_k if any(row.params.top_k > 0 for row in rows) else None,
            top_p if any(row.params.top_p < 1.0 for row in rows) else None,
            min_p if any(row.params.min_p > 0.0 for row in rows) else None,
        )
        token = torch.where(numbers[:, 1] < 0, best, draw(weights, number))
    return torch.where(broken == 0, token, broken)


def _numbers(rows: Sequence[SampleRow], vocab: int, device: torch.device) -> torch.Tensor:
    """float64 [rows, 5]: temperature, random number (-1 where none is drawn), top-k, top-p, min-p.

    The values mean no filter where a row has none, whatever its neighbours have.
    """
    values = []
    for row in rows:
        p = row.params
        number = -1.0 if p.greedy else uniform(p.seed, row.choice, row.position)
        limit = min(p.top_k, vocab) if p.top_k > 0 else vocab
        values.append((p.temperature or 1.0, number, limit, p.top_p, p.min_p))
    return upload(values, torch.float64, device)


def _adjusts(row: SampleRow) -> bool:
    p = row.params
    biased = p.needs_history or p.logit_bias or p.allowed_token_ids
    return bool(biased or row.banned or row.allowed)


def _adjusted(raw: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """A copy of raw, float32 [rows, vocab], with penalties, biases and bans, and all but what is
    allowed left out."""
    vocab, device = raw.shape[1], raw.device
    adjusted = raw.clone()
    penalized = [i for i, row in enumerate(rows) if row.params.needs_history]
    if penalized:
        which = upload(penalized, torch.int64, device)
        chosen = [rows[i] for i in penalized]
        adjusted.index_copy_(0, which, _penalized(adjusted.index_select(0, which), chosen))
    biased = [
        (i * vocab + token, bias)
        for i, row in enumerate(rows)
        for token, bias in row.params.logit_bias
    ]
    if biased:
        places = upload([place for place, _ in biased], torch.int64, device)
        biases = upload([bias for _, bias in biased], torch.float32, device)
        adjusted.view(-1).index_add_(0, places, biases)
    for i, row in enumerate(rows):
        if row.params.allowed_token_ids:
            allowed = upload(row.params.allowed_token_ids, torch.int64, device)
            kept = adjusted[i].index_select(0, allowed)
            adjusted[i].fill_(-torch.inf).index_copy_(0, allowed, kept)
    banned = [i * vocab + token for i, row in enumerate(rows) for token in row.banned]
    if banned:
        adjusted.view(-1).index_fill_(0, upload(banned, torch.int64, device), -torch.inf)
    bound = [i for i, row in enumerate(rows) if row.allowed]
    if bound:
        which = upload(bound, torch.int64, device)
        forbidden = _forbidden([rows[i].allowed for i in bound], vocab, device)
        masked = adjusted.index_select(0, which).masked_fill_(forbidden, -torch.inf)
        adjusted.index_copy_(0, which, masked)
    return adjusted


def _forbidden(masks: Sequence[bytes], vocab: int, device: torch.device) -> torch.Tensor:
    """bool [masks, vocab]: which ids a mask's bits do not allow."""
    size = (vocab + 7) // 8
    bits = b"".join(mask[:size].ljust(size, b"\0") for mask in masks)
    packed = upload_bytes(bits, device).view(len(masks), size, 1)
    shifts = torch.arange(8, dtype=torch.uint8, device=device)
    return ((packed >> shifts) & 1).view(len(masks), size * 8)[:, :vocab] == 0


def _penalized(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    vocab, device = logits.shape[1], logits.device
    seen_at: list[int] = []
    used_at: list[int] = []
    for i, row in enumerate(rows):
        places = [i * vocab + token for token in row.history]
        seen_at += places
        used_at += places[row.num_prompt_tokens :]
    seen = torch.zeros(logits.shape, dtype=torch.bool, device=device)
    used = torch.zeros_like(logits)
    seen.view(-1).index_fill_(0, upload(seen_at, torch.int64, device), True)
    places_used = upload(used_at, torch.int64, device)
    used.view(-1).index_add_(0, places_used, used.new_ones(()).expand(len(used_at)))
    penalties = [
        (p.repetition_penalty, p.presence_penalty, p.frequency_penalty)
        for p in (row.params for row in rows)
    ]
    repetition, presence, frequency = (
        column[:, None] for column in upload(penalties, torch.float32, device).unbind(1)
    )
    return penalize(logits, seen, used, repetition, presence, frequency)


def _logprobs(
    logits: torch.Tensor,
    rows: Sequence[SampleRow],
    tokens: torch.Tensor,
    wanting: Sequence[int],
) -> list[torch.Tensor]:
    """Natural logs of the untouched logits' softmax, float32; see SampledStep."""
    if not wanting:
        return []
    which = upload(wanting, torch.int64, logits.device)
    scores = torch.log_softmax(logits.index_select(0, which).float(), 1)
    own = scores.gather(1, tokens.index_select(0, which).clamp_min(0)[:, None]).squeeze(1)
    most = max(rows[i].params.top_logprobs or 0 for i in wanting)
    top = torch.topk(scores, min(most, logits.shape[1]), 1)
    return [own, top.values, top.indices]
