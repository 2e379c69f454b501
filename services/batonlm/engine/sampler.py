"""Draws tokens, and scores tokens of prompts, from a step's rows of logits on the model's device.

A row's token is a function of that row's inputs alone: neighbours, devices' ways to add and the
number of threads never change it. Random numbers are a pure function of (seed, choice, position),
so a sequence may move between workers without repeating any. `sampler_cpu` says what a row's token
is; `sampler_triton` is the same, bit for bit, on a GPU.

Everything is put in the device's queue and nothing waited for until the step is collected: whether
a row failed travels with its token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

import torch

from batonlm.core.errors import Internal
from batonlm.core.request.attempt import Logprobs
from batonlm.core.request.prompt_logprobs import packed
from batonlm.core.scheduler.plan import (
    PENDING,
    Chunk,
    SampledToken,
    SampleRow,
    Scored,
    ScoredTokens,
    StepPlan,
    StepResult,
)
from batonlm.engine.device import Download, upload
from batonlm.engine.sampler_cpu import draw_row, scale_bits, sum_row
from batonlm.engine.sampler_rows import ALL_BANNED, NOT_A_NUMBER, RowInputs, TokenCounts

CAPACITY = 16384


class LastTokens:
    """The tokens that the `capacity` sequences that sampled most recently sampled last, on the
    model's device.

    They fill in what a plan leaves open because its step still runs (`plan.PENDING`), so that the
    host need not see a token before the next step begins.
    """

    def __init__(self, device: torch.device, capacity: int = CAPACITY):
        self._tokens = torch.zeros(capacity, dtype=torch.int64, device=device)
        # Row of each sequence's token, in the order in which they sampled.
        self._rows: dict[int, int] = {}

    def store(self, sequence_ids: Sequence[int], tokens: torch.Tensor) -> None:
        """tokens: int64 [sequences], one each. What is below 0, no token, is kept as token 0."""
        rows = [self._row(sequence_id) for sequence_id in sequence_ids]
        if len(set(rows)) != len(rows):
            raise Internal("a step samples one sequence twice, or more sequences than are held")
        place = upload(rows, torch.int64, tokens.device)
        self._tokens.index_copy_(0, place, tokens.clamp_min(0))

    def fill(self, plan: StepPlan, token_ids: torch.Tensor) -> None:
        """Replaces what is pending in token_ids, int64 [T'], the plan's tokens in order first.

        Raises Internal for a sequence that has sampled nothing, or too long ago.
        """
        rows: list[int] = []
        sources: list[int] = []
        row = 0
        for chunk in plan.chunks:
            if chunk.token_ids[0] == PENDING:
                source = self._rows.get(chunk.sequence_id)
                if source is None:
                    raise Internal(f"sequence {chunk.sequence_id} has no token that is pending")
                rows.append(row)
                sources.append(source)
            row += len(chunk.token_ids)
        if rows:
            places = upload([rows, sources], torch.int64, token_ids.device)
            token_ids.index_copy_(0, places[0], self._tokens.index_select(0, places[1]))

    def _row(self, sequence_id: int) -> int:
        row = self._rows.pop(sequence_id, None)
        if row is None:
            row = len(self._rows)
            if row >= len(self._tokens):
                row = self._rows.pop(next(iter(self._rows)))
        self._rows[sequence_id] = row
        return row


class StepScores:
    """Scores tokens of prompts from a step's logits. Nothing is waited for until `result`.

    Of each row of logits only its best values and the one asked for are kept. A row's numbers do
    not depend on its neighbours.
    """

    def __init__(self, plan: StepPlan, logits: torch.Tensor):
        """logits: [wanted rows, vocab] of any float type, not changed."""
        self._chunks: list[tuple[Chunk, Scored, LogSoftmax]] = []
        first = 0
        for chunk in plan.chunks:
            if chunk.scored is not None:
                wanted = upload(list(chunk.scored.tokens), torch.int64, logits.device)
                scores = LogSoftmax(logits[first:], wanted, chunk.scored.num_top)
                self._chunks.append((chunk, chunk.scored, scores))
            first += len(chunk.wanted)
        self._download = Download([t for *_, scores in self._chunks for t in scores.tensors])

    def result(self) -> tuple[ScoredTokens, ...]:
        """Waits for the device. One of each chunk that is scored."""
        tensors = self._download.wait()
        found = []
        for chunk, scored, scores in self._chunks:
            own, top_ids, top = scores.result(tensors[: len(scores.tensors)])
            tensors = tensors[len(scores.tensors) :]
            logprobs = packed(scored.num_top, own, chain(*top_ids), chain(*top))
            found.append(ScoredTokens(chunk.sequence_id, chunk.first_position, logprobs))
        return tuple(found)


def drawn_rows(plan: StepPlan, logits: torch.Tensor) -> torch.Tensor:
    """Of logits [wanted rows, vocab] those to draw from: [chunks with samples and their drafts,
    vocab]."""
    rows: list[int] = []
    first = 0
    for chunk in plan.chunks:
        first += len(chunk.wanted)
        if chunk.samples:
            rows += range(first - 1 - chunk.num_drafts, first)
    return logits.index_select(0, upload(rows, torch.int64, logits.device))


class LogSoftmax:
    """Natural logs of the softmax of rows of logits: each row's own token and its likeliest ones.

    They have the same bits on every device. A row's sum is one of whole numbers, see `sampler_cpu`,
    and the logs are taken on the host. A row that holds a number that is none has none either.
    """

    def __init__(self, logits: torch.Tensor, wanted: torch.Tensor, num_top: int):
        """logits: [N or more, vocab] of any float type. wanted: int64 [N], a token of each row."""
        count, device = len(wanted), logits.device
        self._bits = scale_bits(logits.shape[1])
        own = torch.empty(count, device=device)
        top_ids = torch.empty(count, num_top, dtype=torch.int64, device=device)
        top = torch.empty(count, num_top, device=device)
        best = torch.empty(count, device=device)
        total = torch.empty(count, dtype=torch.int64, device=device)
        together = _ROWS_TOGETHER[device.type]
        for first in range(0, count, together):
            rows = slice(first, min(first + together, count))
            part = logits[rows].float()
            own[rows] = part.gather(1, wanted[rows, None]).squeeze(1)
            top[rows], top_ids[rows] = torch.topk(part, num_top, 1)
            if part.is_cuda:
                from batonlm.engine.sampler_triton import sum_rows

                sum_rows(part, best[rows], total[rows])
            else:
                best[first], total[first] = sum_row(part[0].numpy())
        self.tensors = [own, top_ids, top, best, total]
        """To download; `result` takes what has arrived."""

    def result(
        self, tensors: Sequence[torch.Tensor]
    ) -> tuple[list[float], list[list[int]], list[list[float]]]:
        """Of each row its own token's number, the likeliest ids, and their numbers."""
        own, top_ids, top, best, total = tensors
        logs = total.double().log_() - self._bits * math.log(2.0)
        own = ((own - best).double() - logs).float()
        top = ((top - best[:, None]).double() - logs[:, None]).float()
        return own.tolist(), top_ids.tolist(), top.tolist()


_FAILURES = {
    NOT_A_NUMBER: "the model's output is not a number",
    ALL_BANNED: "every token is banned",
}
# Rows that are scored together, as far as their temporary memory goes; on a CPU one, in its cache.
_ROWS_TOGETHER = {"cpu": 1, "cuda": 64}


class SampledStep:
    """Draws a step's tokens, without waiting for the device until `result`."""

    def __init__(self, plan: StepPlan, logits: torch.Tensor, last: LastTokens, counts: TokenCounts):
        """logits: [wanted rows, vocab] of any float type, not changed. Tokens go to `last`."""
        self._step = plan.step
        self._scores = None
        if plan.scores:
            self._scores, logits = StepScores(plan, logits), drawn_rows(plan, logits)
        self._rows: list[SampleRow] = []
        self._drafts: list[Sequence[int]] = []
        """Of each row the drafts behind which it is."""
        sources: list[int] = []
        source = 0
        for chunk in plan.chunks:
            if not chunk.samples:
                continue
            self._rows += chunk.samples
            if count := chunk.num_drafts:
                drafts = chunk.token_ids[-count:]
                self._drafts += (drafts[:i] for i in range(count + 1))
                sources += range(source, source + count + 1)
            else:
                # A prompt's choices share their logits.
                self._drafts += [()] * len(chunk.samples)
                sources += [source] * len(chunk.samples)
            source += count + 1
        tokens = torch.empty(0, dtype=torch.int64, device=logits.device)
        if self._rows:
            tokens = draw_tokens(logits, self._rows, sources, counts, self._drafts)
            self._store(plan, tokens, last)
        self._wanting = [
            i for i, row in enumerate(self._rows) if row.params.top_logprobs is not None
        ]
        self._logprobs: LogSoftmax | None = None
        if self._wanting:
            places = [[sources[i] for i in self._wanting], self._wanting]
            which = upload(places, torch.int64, logits.device)
            own = tokens.index_select(0, which[1]).clamp_min(0)
            most = max(self._rows[i].params.top_logprobs or 0 for i in self._wanting)
            most = min(most, logits.shape[1])
            self._logprobs = LogSoftmax(logits.index_select(0, which[0]), own, most)
        wanted = [] if self._logprobs is None else self._logprobs.tensors
        self._download = Download([tokens, *wanted])

    def _store(self, plan: StepPlan, tokens: torch.Tensor, last: LastTokens) -> None:
        """What a sequence with drafts drew last is not known before the host has compared them."""
        if not any(chunk.num_drafts for chunk in plan.chunks):
            last.store([row.sequence_id for row in self._rows], tokens)
            return
        drafted = {chunk.sequence_id for chunk in plan.chunks if chunk.num_drafts}
        lone = [i for i, row in enumerate(self._rows) if row.sequence_id not in drafted]
        if lone:
            kept = tokens.index_select(0, upload(lone, torch.int64, tokens.device))
            last.store([self._rows[i].sequence_id for i in lone], kept)

    def result(self) -> StepResult:
        """Waits for the device. The tokens are in the order of the plan."""
        arrived = self._download.wait()
        tokens = arrived[0].tolist()
        logprobs: dict[int, Logprobs] = {}
        if self._logprobs is not None:
            columns = self._logprobs.result(arrived[1:])
            for i, own, ids, values in zip(self._wanting, *columns, strict=True):
                top = self._rows[i].params.top_logprobs
                logprobs[i] = Logprobs(own, tuple(zip(ids[:top], values[:top], strict=True)))
        drawn: list[SampledToken] = []
        failed: list[tuple[int, str]] = []
        ended = -1
        for i, (row, token) in enumerate(zip(self._rows, tokens, strict=True)):
            behind = bool(self._drafts[i])
            if behind and row.sequence_id == ended:
                continue
            if token < 0:
                ended = row.sequence_id
                if not behind:
                    failed.append((row.sequence_id, _FAILURES[token]))
            else:
                drawn.append(SampledToken(row.sequence_id, row.choice, token, logprobs.get(i)))
        scored = () if self._scores is None else self._scores.result()
        return StepResult(self._step, tuple(drawn), tuple(failed), scored=scored)


class UnsampledStep:
    """A step whose tokens another rank draws."""

    def __init__(self, plan: StepPlan):
        self._step = plan.step

    def result(self) -> StepResult:
        """Without tokens. The device may still be computing."""
        return StepResult(self._step, ())


def draw_tokens(
    logits: torch.Tensor,
    rows: Sequence[SampleRow],
    sources: Sequence[int],
    counts: TokenCounts,
    drafts: Sequence[Sequence[int]] = (),
) -> torch.Tensor:
    """A token, or a failure, of each row: int64 [rows].

    logits: [.., vocab] of any float type, not changed. sources: each row's row of them. drafts: see
    `TokenCounts.place`.
    """
    vocab = logits.shape[1]
    places = counts.place(rows, vocab, drafts)
    inputs = RowInputs.of(rows, sources, places, vocab)
    if logits.is_cuda:
        # Triton comes with the torch of GPUs only.
        from batonlm.engine.sampler_triton import draw_rows

        return draw_rows(logits, inputs, counts.tensor)
    held = counts.tensor.numpy()
    tokens = [
        draw_row(logits[source].float().numpy(), inputs, i, held)
        for i, source in enumerate(sources)
    ]
    return torch.tensor(tokens)
