"""Draws tokens, and scores tokens of prompts, from a step's rows of logits on the model's device.

A row's token is a function of that row's inputs alone: neighbours, devices' ways to add and the
number of threads never change it. For that, every token's weight is a *whole number* held in
float64, small enough that sums of them are exact in any order. Random numbers are a pure function
of (seed, choice, position), so a sequence may move between workers without repeating any.

Everything is put in the device's queue and nothing waited for until the step is collected: whether
a row failed travels with its token.

The tokens of a row are ordered by falling logit, then by id. Every filter keeps a head of that
order: top-k, then top-p over what top-k left, then min-p, as transformers' processors do. The draw
is an inverse transform over what is left, by id.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from baton.core.errors import Internal
from baton.core.request.attempt import Logprobs
from baton.core.request.prompt_logprobs import packed
from baton.core.scheduler.plan import (
    PENDING,
    Chunk,
    SampledToken,
    SampleRow,
    ScoredTokens,
    StepPlan,
    StepResult,
)
from baton.engine.device import Download, upload, upload_bytes

_MASK = 0xFFFFFFFF
_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)

Words2 = tuple[int, int]
Words4 = tuple[int, int, int, int]


def philox4x32(counter: Words4, key: Words2) -> Words4:
    """Ten rounds over four 32-bit counter words and two 32-bit key words.

    Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3"
    (SC 2011): a counter-based generator, a pure function of its key and counter, without state.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0 = _MULTIPLIERS[0] * c0
        p1 = _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (p1 >> 32) ^ c1 ^ k0,
            p1 & _MASK,
            (p0 >> 32) ^ c3 ^ k1,
            p0 & _MASK,
        )
        k0 = (k0 + _WEYL[0]) & _MASK
        k1 = (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, choice: int, position: int) -> float:
    """One number in [0, 1) with 53 random bits. seed is taken modulo 2**64."""
    key = (seed & _MASK, (seed >> 32) & _MASK)
    high, low, _, _ = philox4x32((position & _MASK, choice & _MASK, 0, 0), key)
    return float((high << 21) | (low >> 11)) * 2.0**-53


# A float32 that is not negative orders like its bits: 31 of them, looked at from the top.
_DIGITS = ((20, 2048), (10, 1024), (0, 1024))


def greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [rows, vocab] of any float type -> highest value [rows] and its lowest id, int64
    [rows]. The value is not finite where a row cannot be sampled."""
    return torch.max(logits, 1)


def penalize(
    logits: torch.Tensor,
    seen: torch.Tensor,
    used: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> torch.Tensor:
    """Penalized float32 logits [rows, vocab].

    seen: bool [rows, vocab], tokens of prompt or output. used: float32 [rows, vocab], how often the
    output has a token. The penalties are float32 [rows, 1]. Repetition is transformers'; presence
    and frequency follow OpenAI's definition and count output tokens only.
    """
    repeated = torch.where(logits < 0, logits * repetition, logits / repetition)
    return torch.where(seen, repeated, logits) - (presence * (used > 0) + frequency * used)


def distances(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """How far each token lies under its row's best, in units of temperature: float32
    [rows, vocab], 0 for the best. temperature: float32 [rows, 1], above 0."""
    return (logits.amax(1, keepdim=True) - logits) / temperature


def weigh(distance: torch.Tensor) -> torch.Tensor:
    """Whole numbers proportional to the probabilities, float64 [rows, vocab].

    They add up to at most 2**52, below which float64 knows every whole number. What is less likely
    than the best token by about 2**-35 (in a vocabulary of 128 Ki) weighs nothing.
    """
    scale = 2.0 ** (52 - (distance.shape[1] - 1).bit_length())
    return torch.exp(-distance).mul_(scale).round_().double()


def head(distance: torch.Tensor, amounts: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    """Which tokens are kept, bool [rows, vocab]: those before which less than `limit` has come.

    amounts: whole numbers, float64 [rows, vocab], a function of the distance. limit: float64
    [rows, 1], above 0. With amounts of 1 this is top-k, with weights it is top-p. Radix select: the
    bin of the last kept token is found digit by digit, and ties with it are counted by id.
    """
    whole = bits = distance.view(torch.int32)
    ids = None
    before = torch.zeros_like(limit)
    last = torch.zeros_like(limit, dtype=torch.int32)
    for shift, size in _DIGITS:
        # The mask also takes the sign off NaN, which only rows hold that fail anyway.
        digits = ((bits >> shift) & (size - 1)).long()
        sums = amounts.new_zeros(len(bits), size).scatter_add_(1, digits, amounts)
        starts = before + sums.cumsum(1) - sums
        places = torch.arange(size, device=bits.device)
        found = torch.where((starts < limit) & (sums > 0), places, 0).amax(1, keepdim=True)
        before = starts.gather(1, found)
        last = (last * size).bitwise_or_(found.int())
        inside = (bits >> shift) == last
        if len(bits) == 1 and not bits.is_cuda:
            # What is left is little. To know how little a GPU would have to be waited for.
            left = inside.nonzero()[:, 1]
            bits, amounts = bits[:, left], amounts[:, left]
            ids = left if ids is None else ids[left]
        else:
            amounts = torch.where(inside, amounts, 0.0)
    fits = before + amounts.cumsum(1) - amounts < limit
    kept = whole < last
    if ids is None:
        return kept | (inside & fits)
    return kept.index_copy_(1, ids, fits)


def keep(
    distance: torch.Tensor,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
) -> torch.Tensor:
    """Weights of the tokens that survive the filters and 0 for the others, float64 [rows, vocab].

    Filters are float64 [rows, 1], or None where no row has one. top_k: as large as the vocabulary
    keeps all; top_p: a share of what top-k left; min_p: relative to the likeliest token.
    """
    weights = weigh(distance)
    if top_k is not None:
        weights = torch.where(head(distance, torch.ones_like(weights), top_k), weights, 0.0)
    if top_p is not None:
        limit = top_p * weights.sum(1, keepdim=True)
        weights = torch.where(head(distance, weights, limit), weights, 0.0)
    if min_p is not None:
        least = min_p * weights.amax(1, keepdim=True)
        weights = torch.where(weights >= least, weights, 0.0)
    return weights


def draw(weights: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """One id per row, int64 [rows], each token with its share of the weights [rows, vocab].

    number: float64 [rows, 1] in [0, 1).
    """
    cumulative = weights.cumsum(1)
    found = torch.searchsorted(cumulative, number * cumulative[:, -1:], right=True)
    # A row that fails anyway may hold NaN; its id must still be one.
    return found.squeeze(1).clamp_max(weights.shape[1] - 1)


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
        scored = []
        for i, chunk in enumerate(self._chunks):
            own, top_ids, top = (part.flatten().tolist() for part in tensors[3 * i : 3 * i + 3])
            num_top = 0 if chunk.scored is None else chunk.scored.num_top
            logprobs = packed(num_top, own, top_ids, top)
            scored.append(ScoredTokens(chunk.sequence_id, chunk.first_position, logprobs))
        return tuple(scored)


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
    """Draws a step's tokens, without waiting for the device until `result`."""

    def __init__(self, plan: StepPlan, logits: torch.Tensor, last: LastTokens):
        """logits: [wanted rows, vocab] of any float type, not changed. Tokens go to `last`."""
        self._step = plan.step
        self._scores = None
        if plan.scores:
            self._scores, logits = StepScores(plan, logits), drawn_rows(plan, logits)
        self._rows: list[SampleRow] = []
        sources: list[int] = []
        for source, chunk in enumerate(chunk for chunk in plan.chunks if chunk.samples):
            self._rows += chunk.samples
            sources += [source] * len(chunk.samples)
        rows = self._rows
        if len(rows) != len(logits):
            # A prompt's choices share their logits.
            logits = logits.index_select(0, upload(sources, torch.int64, logits.device))
        tokens = _tokens(logits, rows)
        if rows:
            last.store([row.sequence_id for row in rows], tokens)
        self._wanting = [i for i, row in enumerate(rows) if row.params.top_logprobs is not None]
        self._download = Download([tokens, *_logprobs(logits, rows, tokens, self._wanting)])

    def result(self) -> StepResult:
        """Waits for the device. The tokens are in the order of the plan."""
        tokens, *columns = (tensor.tolist() for tensor in self._download.wait())
        logprobs: dict[int, Logprobs] = {}
        for i, own, values, ids in zip(self._wanting, *columns, strict=True):
            top = self._rows[i].params.top_logprobs
            logprobs[i] = Logprobs(own, tuple(zip(ids[:top], values[:top], strict=True)))
        drawn: list[SampledToken] = []
        failed: list[tuple[int, str]] = []
        for i, (row, token) in enumerate(zip(self._rows, tokens, strict=True)):
            if token < 0:
                failed.append((row.sequence_id, _FAILURES[token]))
            else:
                drawn.append(SampledToken(row.sequence_id, row.choice, token, logprobs.get(i)))
        scored = () if self._scores is None else self._scores.result()
        return StepResult(self._step, tuple(drawn), tuple(failed), scored=scored)


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
    """Natural logs of the untouched logits' softmax, float32, of the rows that want them: their own
    values [N], the best values [N, K] and these ones' ids [N, K]; nothing when N is 0."""
    if not wanting:
        return []
    which = upload(wanting, torch.int64, logits.device)
    scores = torch.log_softmax(logits.index_select(0, which).float(), 1)
    own = scores.gather(1, tokens.index_select(0, which).clamp_min(0)[:, None]).squeeze(1)
    most = max(rows[i].params.top_logprobs or 0 for i in wanting)
    top = torch.topk(scores, min(most, logits.shape[1]), 1)
    return [own, top.values, top.indices]
