"""Draws a step's tokens on a GPU in one kernel, bit for bit as `sampler_cpu` does on the host.

One program draws one row. It reads the row once from the logits, and keeps distances in memory of
its own, which a GPU's second-level cache holds. Where filters are set it gathers the likeliest
tokens, a few thousand at most, and works on these; only where they do not hold all that the filters
keep, as for a flat distribution, it works on the whole row.

All arithmetic is of whole numbers, or of single IEEE operations that are rounded one by one: the
kernel is compiled without fused multiply-adds, and divisions are the rounded ones. No loop
depends on the host, so that the kernel may be part of a CUDA graph.
"""

from __future__ import annotations

import torch
import triton.language as tl

from batonlm.engine.attention.triton.jit import jit, jit_of_any
from batonlm.engine.sampler_cpu import EXP2, LOG2_E, scale_bits
from batonlm.engine.sampler_rows import ALL_BANNED, NOT_A_NUMBER, NUMBERS, SETTINGS, RowInputs

TILE = 4096
"""Tokens that a program has in its registers at a time."""
CANDIDATES = 2048
"""Most tokens that are gathered."""
WARPS = 16


def draw_rows(
    logits: torch.Tensor, inputs: RowInputs, counts: torch.Tensor, *, tile: int = TILE
) -> torch.Tensor:
    """The token, or the number of the failure, of each row: int64 [rows].

    logits: [.., vocab] of any float type, the last dimension contiguous, not changed; a row's own
    is its `source`. counts: int32 [slots, vocab], see `TokenCounts`; the rows' newest tokens are
    added.
    """
    rows, vocab = len(inputs.settings), logits.shape[1]
    device = logits.device
    sent = inputs.to(device)
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    scratch = torch.empty(rows, vocab + 2 * CANDIDATES, dtype=torch.float32, device=device)
    _sample[(rows,)](
        logits,
        counts if len(counts) else sent["settings"],
        sent["numbers"],
        sent["settings"],
        sent["bias_tokens"],
        sent["biases"],
        sent["banned"],
        sent["masks"],
        scratch,
        tokens,
        logits.stride(0),
        vocab,
        BITS=scale_bits(vocab),
        TILE=tile,
        CANDIDATES=CANDIDATES,
        num_warps=WARPS,
        enable_fp_fusion=False,
    )
    return tokens


def sum_rows(
    logits: torch.Tensor, best: torch.Tensor, total: torch.Tensor, *, tile: int = TILE
) -> None:
    """Writes `sampler_cpu.sum_row` of each row: best float32 [rows], total int64 [rows].

    logits: float32 [rows, vocab], the last dimension contiguous.
    """
    rows, vocab = logits.shape
    _sum[(rows,)](
        logits,
        best,
        total,
        logits.stride(0),
        vocab,
        BITS=scale_bits(vocab),
        TILE=tile,
        num_warps=WARPS,
        enable_fp_fusion=False,
    )


_NUMBERS = tl.constexpr(NUMBERS.itemsize // 8)
_SETTINGS = tl.constexpr(SETTINGS.itemsize // 4)
_LIST = tl.constexpr(256)
_LOG2_E = tl.constexpr(LOG2_E)
_POWER = tuple(tl.constexpr(factor) for factor in EXP2)
_C0, _C1, _C2, _C3, _C4, _C5 = _POWER
# Adding and subtracting it rounds a float32 below 2**22 to a whole number, ties to even.
_ROUND = tl.constexpr(12582912.0)
_NOT_A_NUMBER = tl.constexpr(NOT_A_NUMBER)
_ALL_BANNED = tl.constexpr(ALL_BANNED)
# A histogram of distances: bins for each unit of temperature, and of them all. The last bin is
# everything beyond.
_PER_UNIT = tl.constexpr(32.0)
_BINS = tl.constexpr(1024)
_HIGHEST = tl.constexpr(0x7FFFFFFF)
_PIVOTS = tl.constexpr(4)


@jit
def _weigh(distance: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    """`sampler_cpu.weigh`, as int64."""
    SCALE: tl.constexpr = 2.0**BITS
    scaled = tl.minimum(distance * _LOG2_E, BITS + 3.0)
    whole = (scaled + _ROUND) - _ROUND
    part = whole - scaled
    power = part * (_C5 * SCALE)
    power = (power + _C4 * SCALE) * part
    power = (power + _C3 * SCALE) * part
    power = (power + _C2 * SCALE) * part
    power = (power + _C1 * SCALE) * part
    power = power + _C0 * SCALE
    binary = power.to(tl.int32, bitcast=True) - (whole.to(tl.int32) << 23)
    return binary.to(tl.float32, bitcast=True).to(tl.int64)


@jit
def _bin(distance: tl.tensor) -> tl.tensor:
    """The histogram's bin of a distance, which rises with it."""
    return tl.minimum(distance * _PER_UNIT, _BINS - 1.0).to(tl.int32)


@jit
def _kept(
    bits: tl.tensor, place: tl.tensor, count: tl.tensor, last: tl.tensor, end: tl.tensor
) -> tl.tensor:
    """Which of a list's tokens are kept: those nearer than `last`, a distance's bits, and of those
    that are as near the ones before place `end`."""
    return (place < count) & ((bits < last) | ((bits == last) & (place < end)))


@jit
def _mass(
    listed: tl.tensor,
    count: tl.tensor,
    last: tl.tensor,
    end: tl.tensor,
    least: tl.tensor,
    BITS: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Together, the weights of a list's tokens that are kept and weigh `least` or more."""
    total = tl.zeros((TILE,), tl.int64)
    for start in range(0, count, TILE):
        place = start + tl.arange(0, TILE)
        distance = tl.load(listed + place, mask=place < count, other=0.0)
        kept = _kept(distance.to(tl.int32, bitcast=True), place, count, last, end)
        weight = _weigh(distance, BITS)
        total += tl.where(kept & (weight >= least), weight, 0)
    return tl.sum(total)


@jit
def _head(
    listed: tl.tensor,
    count: tl.tensor,
    last: tl.tensor,
    end: tl.tensor,
    limit: tl.tensor,
    WEIGHED: tl.constexpr,
    BITS: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tuple:
    """The new `last` and `end` of which a list's kept tokens are those before which less than
    `limit` has come: weight, or tokens unless WEIGHED. limit: above 0 and at most what there is.

    The last token's bits are found two by two: a pass sums up what lies before each of four
    pivots. Tokens that are as near as the last one weigh the same, so how many of them are kept is
    a division.
    """
    found = limit * 0
    before = limit * 0
    pivot = tl.arange(0, _PIVOTS).to(tl.int64)
    for turn in range(16):
        shift = 30 - 2 * turn
        pivots = found + (pivot << shift)
        sums = tl.zeros((TILE, _PIVOTS), tl.int64)
        for start in range(0, count, TILE):
            place = start + tl.arange(0, TILE)
            distance = tl.load(listed + place, mask=place < count, other=0.0)
            bits = distance.to(tl.int32, bitcast=True)
            kept = _kept(bits, place, count, last, end)
            amount = kept.to(tl.int64)
            if WEIGHED:
                amount *= _weigh(distance, BITS)
            nearer = bits.to(tl.int64)[:, None] < pivots[None, :]
            sums += tl.where(nearer, amount[:, None], 0)
        reached = tl.sum(sums, 0)
        below = reached < limit
        found += (tl.sum(below.to(tl.int64)) - 1) << shift
        before = tl.max(tl.where(below, reached, 0))
    new_last = found.to(tl.int32)
    each = limit * 0 + 1
    if WEIGHED:
        each = _weigh(new_last.to(tl.float32, bitcast=True), BITS)
    ties = ((limit - before + each - 1) // each).to(tl.int32)
    seen = ties * 0
    new_end = count
    for start in range(0, count, TILE):
        place = start + tl.arange(0, TILE)
        distance = tl.load(listed + place, mask=place < count, other=0.0)
        bits = distance.to(tl.int32, bitcast=True)
        tied = (_kept(bits, place, count, last, end) & (bits == new_last)).to(tl.int32)
        here = tl.sum(tied)
        if (seen < ties) & (ties <= seen + here):
            new_end = start + tl.sum((seen + tl.cumsum(tied, 0) < ties).to(tl.int32)) + 1
        seen += here
    return new_last, new_end


@jit
def _ceiling(value: tl.tensor) -> tl.tensor:
    """The least whole number that is not below a float64: int64."""
    whole = value.to(tl.int64)
    return whole + (whole.to(tl.float64) < value).to(tl.int64)


@jit_of_any("vocab")
def _sample(
    logits: tl.tensor,
    counts: tl.tensor,
    numbers: tl.tensor,
    settings: tl.tensor,
    bias_tokens: tl.tensor,
    biases: tl.tensor,
    banned: tl.tensor,
    masks: tl.tensor,
    scratch: tl.tensor,
    tokens: tl.tensor,
    logits_stride: tl.tensor,
    vocab: tl.tensor,
    BITS: tl.constexpr,
    TILE: tl.constexpr,
    CANDIDATES: tl.constexpr,
) -> None:
    """Program r: the token of row r."""
    row = tl.program_id(0).to(tl.int64)
    settings += row * _SETTINGS
    source = tl.load(settings).to(tl.int64)
    top_k = tl.load(settings + 1)
    slot = tl.load(settings + 2)
    latest = tl.load(settings + 3)
    first_bias = tl.load(settings + 4)
    end_bias = tl.load(settings + 5)
    first_banned = tl.load(settings + 6)
    end_banned = tl.load(settings + 7)
    mask = tl.load(settings + 8)
    numbers += row * _NUMBERS
    number = tl.load(numbers)
    temperature = tl.load(numbers + 1).to(tl.float32)
    top_p = tl.load(numbers + 2)
    min_p = tl.load(numbers + 3)
    repetition = tl.load(numbers + 4).to(tl.float32)
    presence = tl.load(numbers + 5).to(tl.float32)
    frequency = tl.load(numbers + 6).to(tl.float32)
    own = scratch + row * (vocab + 2 * CANDIDATES)
    logits += source * logits_stride
    counts += slot.to(tl.int64) * vocab
    masks += mask.to(tl.int64) * ((vocab + 7) // 8)
    listed_changes = (end_bias > first_bias) | (end_banned > first_banned)
    drawn = number >= 0.0

    # The row's logits with all that changes them but lists, and the best of them.
    spot = tl.arange(0, TILE)
    raw_top = tl.full((TILE,), float("-inf"), tl.float32)
    broken = tl.zeros((TILE,), tl.int32)
    top = tl.full((TILE,), float("-inf"), tl.float32)
    best = tl.zeros((TILE,), tl.int32)
    for start in range(0, vocab, TILE):
        token = start + spot
        inside = token < vocab
        logit = tl.load(logits + token, mask=inside, other=float("-inf")).to(tl.float32)
        broken |= ((logit != logit) | (logit == float("inf"))).to(tl.int32)
        raw_top = tl.maximum(raw_top, logit)
        if slot >= 0:
            used = tl.load(counts + token, mask=inside, other=0)
            newest = token == latest
            used += tl.where(newest, 2, 0)
            tl.store(counts + token, used, mask=inside & newest)
            times = (used >> 1).to(tl.float32)
            spent = presence * (times > 0.0).to(tl.float32) + frequency * times
            repeated = tl.where(logit < 0.0, logit * repetition, tl.div_rn(logit, repetition))
            logit = tl.where(used > 0, repeated - spent, logit)
        if mask >= 0:
            byte = tl.load(masks + token // 8, mask=inside, other=0).to(tl.int32)
            logit = tl.where(((byte >> (token % 8)) & 1) == 1, logit, float("-inf"))
        better = logit > top
        best = tl.where(better, token, best)
        top = tl.where(better, logit, top)
        if drawn | listed_changes:
            tl.store(own + token, logit, mask=inside)
    if listed_changes:
        # One part of the program reads what another wrote.
        tl.debug_barrier()
        for start in range(first_bias, end_bias, _LIST):
            entry = start + tl.arange(0, _LIST)
            live = entry < end_bias
            token = tl.load(bias_tokens + entry, mask=live, other=0)
            bias = tl.load(biases + entry, mask=live, other=0.0)
            logit = tl.load(own + token, mask=live, other=0.0)
            tl.store(own + token, logit + bias, mask=live)
        tl.debug_barrier()
        for start in range(first_banned, end_banned, _LIST):
            entry = start + tl.arange(0, _LIST)
            live = entry < end_banned
            token = tl.load(banned + entry, mask=live, other=0)
            tl.store(own + token, tl.full((_LIST,), float("-inf"), tl.float32), mask=live)
        tl.debug_barrier()
        top = tl.full((TILE,), float("-inf"), tl.float32)
        best = tl.zeros((TILE,), tl.int32)
        for start in range(0, vocab, TILE):
            token = start + spot
            logit = tl.load(own + token, mask=token < vocab, other=float("-inf"))
            better = logit > top
            best = tl.where(better, token, best)
            top = tl.where(better, logit, top)
    highest = tl.max(top)
    chosen = tl.min(tl.where(top == highest, best, _HIGHEST))
    if (tl.max(broken) > 0) | (tl.max(raw_top) == float("-inf")) | (highest == float("inf")):
        chosen = chosen * 0 + _NOT_A_NUMBER
    elif highest == float("-inf"):
        chosen = chosen * 0 + _ALL_BANNED
    elif drawn:
        tl.debug_barrier()
        chosen = _drawn(
            own,
            vocab,
            highest + 0.0,
            temperature,
            number,
            top_k,
            top_p,
            min_p,
            BITS,
            TILE,
            CANDIDATES,
        )
    tl.store(tokens + row, chosen.to(tl.int64))


@jit
def _drawn(
    own: tl.tensor,
    vocab: tl.tensor,
    highest: tl.tensor,
    temperature: tl.tensor,
    number: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    BITS: tl.constexpr,
    TILE: tl.constexpr,
    CANDIDATES: tl.constexpr,
) -> tl.tensor:
    """Draws from the adjusted logits in `own`, which become distances. highest: not -0.0, so that
    no distance is."""
    spot = tl.arange(0, TILE)
    cuts = top_p < 1.0
    filters = cuts | (top_k > 0)
    weights = tl.zeros((TILE,), tl.int64)
    bins = tl.zeros((_BINS,), tl.int32)
    for start in range(0, vocab, TILE):
        token = start + spot
        inside = token < vocab
        # What is beyond the row counts as infinitely far.
        logit = tl.load(own + token, mask=inside, other=float("-inf"))
        distance = tl.div_rn(highest - logit, temperature)
        tl.store(own + token, distance, mask=inside)
        weights += tl.where(inside, _weigh(distance, BITS), 0)
        if filters:
            bins += tl.histogram(_bin(distance), _BINS)
    tl.debug_barrier()
    total = tl.sum(weights)
    listed = own
    count = vocab * 1
    gathered = count * 0
    if filters:
        # As many whole bins of the likeliest tokens as there is room for, but the last.
        upto = tl.cumsum(bins, 0)
        room = upto <= CANDIDATES
        held = tl.max(tl.where(room & (tl.arange(0, _BINS) < _BINS - 1), upto, 0))
        bound = tl.minimum(tl.sum(room.to(tl.int32)), _BINS - 1)
        if (held > 0) & (top_k <= held):
            mass = total * 0
            for start in range(0, vocab, TILE):
                token = start + spot
                distance = tl.load(own + token, mask=token < vocab, other=float("inf"))
                near = _bin(distance) < bound
                here = tl.sum(near.to(tl.int32))
                if here > 0:
                    place = vocab + gathered + tl.cumsum(near.to(tl.int32), 0) - 1
                    tl.store(own + place, distance, mask=near)
                    binary = token.to(tl.float32, bitcast=True)
                    tl.store(own + CANDIDATES + place, binary, mask=near)
                    mass += tl.sum(tl.where(near, _weigh(distance, BITS), 0))
                    gathered += here
            tl.debug_barrier()
            if (top_k > 0) | (mass >= _ceiling(top_p * total.to(tl.float64))):
                listed = own + vocab
                count = gathered
            else:
                gathered = gathered * 0
    last = count * 0 + _HIGHEST
    end = count * 1
    least = total * 0
    if top_k > 0:
        last, end = _head(listed, count, last, end, top_k.to(tl.int64), False, BITS, TILE // 2)
        total = _mass(listed, count, last, end, least, BITS, TILE)
    if cuts:
        limit = _ceiling(top_p * total.to(tl.float64))
        last, end = _head(listed, count, last, end, limit, True, BITS, TILE // 2)
    if min_p > 0.0:
        least = _ceiling(min_p * 2.0**BITS)
    if cuts | (min_p > 0.0):
        total = _mass(listed, count, last, end, least, BITS, TILE)
    target = tl.minimum((number * total.to(tl.float64)).to(tl.int64), total - 1)
    before = total * 0
    found = count * 0 - 1
    start = count * 0
    while (found < 0) & (start < count):
        place = start + spot
        distance = tl.load(listed + place, mask=place < count, other=0.0)
        kept = _kept(distance.to(tl.int32, bitcast=True), place, count, last, end)
        weight = _weigh(distance, BITS)
        weight = tl.where(kept & (weight >= least), weight, 0)
        here = tl.sum(weight)
        if target < before + here:
            found = start + tl.sum((before + tl.cumsum(weight, 0) <= target).to(tl.int32))
        before += here
        start += TILE
    if gathered > 0:
        found = tl.load(own + vocab + CANDIDATES + found).to(tl.int32, bitcast=True)
    return found


@jit_of_any("vocab")
def _sum(
    logits: tl.tensor,
    best: tl.tensor,
    total: tl.tensor,
    logits_stride: tl.tensor,
    vocab: tl.tensor,
    BITS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Program r: the best logit of row r, and the sum of its weights."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    spot = tl.arange(0, TILE)
    top = tl.full((TILE,), float("-inf"), tl.float32)
    broken = tl.zeros((TILE,), tl.int32)
    for start in range(0, vocab, TILE):
        logit = tl.load(logits + start + spot, mask=start + spot < vocab, other=float("-inf"))
        broken |= ((logit != logit) | (logit == float("inf"))).to(tl.int32)
        top = tl.maximum(top, logit)
    highest = tl.max(top) + 0.0
    whole = tl.max(broken) == 0
    whole = whole & (highest != float("-inf"))
    weights = tl.zeros((TILE,), tl.int64)
    if whole:
        for start in range(0, vocab, TILE):
            logit = tl.load(logits + start + spot, mask=start + spot < vocab, other=float("-inf"))
            weights += _weigh(highest - logit, BITS)
    tl.store(best + row, tl.where(whole, highest, float("nan")))
    tl.store(total + row, tl.where(whole, tl.sum(weights), 1))
