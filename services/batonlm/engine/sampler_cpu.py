"""Draws one row's token on the host: the definition that the kernel of GPUs equals bit for bit.

The tokens of a row are ordered by rising distance from the best logit, in units of temperature,
then by id. Every filter keeps a head of that order: top-k, then top-p over what top-k left, then
min-p, as transformers' processors do. The draw is an inverse transform over what is left, by id.

A token's weight is a *whole number*, small enough that sums of them are exact in any order. It is
made of IEEE additions and multiplications that are rounded one by one: no exponential function of
a library, whose last bit differs from one processor to the next.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from batonlm.engine.sampler_rows import ALL_BANNED, NOT_A_NUMBER, RowInputs

Floats = npt.NDArray[np.float32]
Numbers = npt.NDArray[np.float64]
Places = npt.NDArray[np.int64]

LOG2_E = 1.4426950408889634
# 2**f for f in [-0.5, 0.5] to 1e-7: 1 + f * p(f), where p interpolates (2**f - 1) / f at the
# Chebyshev nodes of that interval. Lowest power first, each of them a float32.
EXP2 = (
    1.0,
    float.fromhex("0x1.62e430p-1"),
    float.fromhex("0x1.ebfa4ap-3"),
    float.fromhex("0x1.c6af6cp-5"),
    float.fromhex("0x1.3cbf6cp-7"),
    float.fromhex("0x1.5f0896p-10"),
)
# Elements of a row that are weighed together, so that their parts stay in a core's cache.
_TOGETHER = 32768
# A float32 that is not negative orders like its bits: 31 of them, looked at from the top.
_DIGITS = ((20, 2048), (10, 1024), (0, 1024))


def scale_bits(vocab: int) -> int:
    """The best token weighs 2 to this power, so that a row's weights add up to at most 2**52,
    below which float64 holds every whole number."""
    return 52 - (vocab - 1).bit_length()


def weigh(distance: Floats, bits: int) -> Numbers:
    """Whole numbers proportional to exp(-distance), [n]; 2**bits for a distance of 0.

    distance: float32 [n], not negative; infinity weighs nothing, as does what is less likely than
    the best token by 2**-bits.
    """
    weights = np.empty(len(distance))
    size = min(len(distance), _TOGETHER)
    buffers = np.empty((3, size), np.float32)
    exponents = np.empty(size, np.int32)
    scale = np.float32(2.0**bits)
    factors = [np.float32(factor) * scale for factor in EXP2]
    for first in range(0, len(distance), _TOGETHER):
        part = distance[first : first + _TOGETHER]
        scaled, whole, power = buffers[:, : len(part)]
        exponent = exponents[: len(part)]
        np.multiply(part, np.float32(LOG2_E), out=scaled)
        np.minimum(scaled, np.float32(bits + 3), out=scaled)
        np.rint(scaled, out=whole)
        np.subtract(whole, scaled, out=scaled)
        np.multiply(scaled, factors[-1], out=power)
        for factor in factors[-2:0:-1]:
            np.add(power, factor, out=power)
            np.multiply(power, scaled, out=power)
        np.add(power, factors[0], out=power)
        # Division by 2**whole, in the exponent's bits.
        np.multiply(whole, np.float32(1 << 23), out=whole)
        exponent[:] = whole
        binary = power.view(np.int32)
        np.subtract(binary, exponent, out=binary)
        np.trunc(power, out=power)
        weights[first : first + len(part)] = power
    return weights


def nearest(distance: Floats, count: int) -> Places:
    """The `count` first places of the order by distance, then by place; rising."""
    bits = distance.view(np.int32)
    last = np.partition(bits, count - 1)[count - 1]
    kept = bits <= last
    ties = np.flatnonzero(bits == last)
    spare = np.count_nonzero(kept) - count
    if spare:
        kept[ties[len(ties) - spare :]] = False
    return np.flatnonzero(kept)


def likeliest(distance: Floats, weights: Numbers, limit: float) -> Places:
    """The places before which, by distance and then by place, less weight than `limit` has come;
    rising. limit: above 0, at most the sum of the weights. Radix select: the last place's bits are
    found digit by digit, and what is equal to it is counted."""
    whole = bits = distance.view(np.int32)
    inside: Places | None = None
    before = 0.0
    last = 0
    for shift, size in _DIGITS:
        digits = (bits >> shift) & (size - 1)
        sums = np.bincount(digits, weights, size)
        starts = before + np.cumsum(sums) - sums
        found = int(np.flatnonzero((starts < limit) & (sums > 0))[-1])
        before = float(starts[found])
        last = last * size + found
        left = np.flatnonzero(digits == found)
        bits, weights = bits[left], weights[left]
        inside = left if inside is None else inside[left]
    assert inside is not None
    ties = int(np.ceil((limit - before) / weights[0]))
    kept = whole < last
    kept[inside[:ties]] = True
    return np.flatnonzero(kept)


def keep(distance: Floats, top_k: int, top_p: float, min_p: float) -> tuple[Places | None, Numbers]:
    """The ids of the tokens that survive the filters, rising, or None for all of a row; and their
    weights, 0 for what min-p takes away.

    distance: float32 [vocab], 0 for the best. top_k: 0 keeps all; top_p: a share of what top-k
    left; min_p: relative to the likeliest token.
    """
    bits = scale_bits(len(distance))
    ids: Places | None = None
    if top_k:
        ids = nearest(distance, top_k)
        distance = distance[ids]
    weights = weigh(distance, bits)
    if top_p < 1.0:
        left = likeliest(distance, weights, top_p * float(weights.sum()))
        ids = left if ids is None else ids[left]
        weights = weights[left]
    if min_p > 0.0:
        weights[weights < min_p * 2.0**bits] = 0.0
    return ids, weights


def draw(weights: Numbers, number: float) -> int:
    """A place, each with its share of the weights [n]. number: in [0, 1)."""
    size = 1024
    sums = np.add.reduceat(weights, np.arange(0, len(weights), size)).cumsum()
    total = float(sums[-1])
    target = min(np.floor(number * total), total - 1)
    group = int(np.searchsorted(sums, target, "right"))
    first = group * size
    before = float(sums[group - 1]) if group else 0.0
    cumulative = before + weights[first : first + size].cumsum()
    return first + int(np.searchsorted(cumulative, target, "right"))


def penalize(
    logits: Floats,
    tokens: Places,
    used: Floats,
    repetition: float,
    presence: float,
    frequency: float,
) -> None:
    """Changes the logits [vocab] of the tokens that prompt or output have, in place.

    used: float32, how often the output has each of them. Repetition is transformers'; presence and
    frequency follow OpenAI's definition and count output tokens only.
    """
    factor = np.float32(repetition)
    own = logits[tokens]
    repeated = np.where(own < 0, own * factor, own / factor)
    spent = np.float32(presence) * (used > 0).astype(np.float32) + np.float32(frequency) * used
    logits[tokens] = repeated - spent


# What overflows becomes an infinite distance, which weighs nothing, as in the kernel.
_overflowing = np.errstate(over="ignore")


@_overflowing
def draw_row(logits: Floats, inputs: RowInputs, row: int, counts: npt.NDArray[np.int32]) -> int:
    """The token of a row, or the number of its failure.

    logits: float32 [vocab], of the row, not changed. counts: int32 [slots, vocab], see
    `TokenCounts`; the row's newest token is added.
    """
    wish, numbers = inputs.settings[row], inputs.numbers[row]
    best = int(logits.argmax())
    # Not a number counts as the highest.
    if not np.isfinite(logits[best]):
        return NOT_A_NUMBER
    if inputs.adjusts(row):
        logits = _adjusted(logits.copy(), inputs, row, counts)
        best = int(logits.argmax())
        if logits[best] == -np.inf:
            return ALL_BANNED
        if not np.isfinite(logits[best]):
            return NOT_A_NUMBER
    if numbers["number"] < 0:
        return best
    # A best logit of -0.0 would make distances of -0.0, whose bits do not order like the number.
    distance = (logits[best] + np.float32(0) - logits) / np.float32(numbers["temperature"])
    filters = (float(numbers[name]) for name in ("top_p", "min_p"))
    ids, weights = keep(distance, int(wish["top_k"]), *filters)
    place = draw(weights, float(numbers["number"]))
    return place if ids is None else int(ids[place])


@_overflowing
def sum_row(logits: Floats) -> tuple[float, int]:
    """A row's best logit, and the sum of its tokens' weights at temperature 1; not a number, and 1,
    where the row holds what is not a number or is infinite."""
    # Zero of either sign becomes 0.0.
    best = logits.max() + np.float32(0)
    if not np.isfinite(best):
        return np.nan, 1
    return float(best), int(weigh(best - logits, scale_bits(len(logits))).sum())


def _adjusted(logits: Floats, inputs: RowInputs, row: int, counts: npt.NDArray[np.int32]) -> Floats:
    """logits with penalties, biases and bans, and all but what is allowed left out."""
    wish, numbers = inputs.settings[row], inputs.numbers[row]
    if wish["slot"] >= 0:
        own = counts[wish["slot"]]
        if wish["latest"] >= 0:
            own[wish["latest"]] += 2
        tokens = np.flatnonzero(own)
        penalties = (float(numbers[name]) for name in ("repetition", "presence", "frequency"))
        penalize(logits, tokens, (own[tokens] >> 1).astype(np.float32), *penalties)
    own_biases = slice(wish["first_bias"], wish["end_bias"])
    logits[inputs.bias_tokens[own_biases]] += inputs.biases[own_biases]
    if wish["mask"] >= 0:
        allowed = np.unpackbits(inputs.masks[wish["mask"]], bitorder="little")[: len(logits)]
        logits[allowed == 0] = -np.inf
    logits[inputs.banned[wish["first_banned"] : wish["end_banned"]]] = -np.inf
    return logits
