"""Attention of one tile of queries, as functions that the kernels for decode and prefill share.

They see a block table and a tile; the kernels decide which tiles there are. Softmax runs online
(Milakov and Gimelshein, 2018) over `KEYS` positions at a time, all scores being in units of log 2.
Its state is the top score, the total weight and the weighted sum of values, all float32, by row.

A step over positions that a row does not see leaves the row's state bit by bit as it was. So where
a loop begins and ends, which depends on a row's neighbours in its tile, never shows in its result.

Triton's compiler reads these functions: types are `tl.tensor` throughout, capital parameters are
constants, and `if` on a constant is decided when compiling.
"""

from __future__ import annotations

import triton.language as tl

from batonlm.engine.attention.triton import shapes
from batonlm.engine.attention.triton.jit import jit
from batonlm.engine.attention.triton.scaled import widened

PART = tl.constexpr(shapes.PART)
LOG2_E = tl.constexpr(1.4426950408889634)


@jit
def first_seen(position: tl.tensor, WINDOW: tl.constexpr) -> tl.tensor:
    """The first position that `position` sees."""
    if WINDOW > 0:
        return tl.maximum(position - (WINDOW - 1), 0)
    else:
        return position * 0


@jit
def part_size(
    position: tl.tensor, POSITIONS: tl.constexpr, PARTS: tl.constexpr, WINDOW: tl.constexpr
) -> tl.tensor:
    """Positions in a part of what `position` sees: the same for all of a tile's positions."""
    span = (position // POSITIONS + 1) * POSITIONS
    if WINDOW > 0:
        span = tl.minimum(span, WINDOW)
    size = PART
    while size * (PARTS - 1) < span:
        size *= 2
    return size


@jit
def unseen(ROWS: tl.constexpr, VALUE_PADDED: tl.constexpr) -> tl.tuple:
    """The state of rows that have seen nothing."""
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    return top, tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS, VALUE_PADDED), tl.float32)


@jit
def load_queries(
    query: tl.tensor,
    spots: tl.tensor,
    live: tl.tensor,
    KEY_SIZE: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    LATENT: tl.constexpr,
) -> tl.tuple:
    """A tile's queries, as `attend` takes them. spots: where each begins, [ROWS]."""
    element = tl.arange(0, KEY_PADDED)
    rows = query + spots[:, None]
    if LATENT:
        rest: tl.constexpr = KEY_SIZE - VALUE_SIZE
        latent_element = tl.arange(0, VALUE_PADDED)
        mask = live[:, None] & (latent_element < VALUE_SIZE)[None, :]
        latent = tl.load(rows + latent_element[None, :], mask=mask, other=0.0)
        mask = live[:, None] & (element < rest)[None, :]
        return latent, tl.load(rows + VALUE_SIZE + element[None, :], mask=mask, other=0.0)
    else:
        mask = live[:, None] & (element < KEY_SIZE)[None, :]
        whole = tl.load(rows + element[None, :], mask=mask, other=0.0)
        return whole, whole


@jit
def head_memory(
    table: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    kv_head: tl.tensor,
    kv_heads: tl.tensor,
    block_stride: tl.tensor,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
) -> tl.tuple:
    """What `attend` reads: a sequence's block table, where in a block keys and values of the head
    begin, and where their scales do if they are codes, from block to block, and the constants of
    `shapes.memory_constants` that are not padded."""
    key_scales = keys + kv_heads * BLOCK_SIZE * (KEY_SIZE + VALUE_SIZE) + kv_head * BLOCK_SIZE
    return (
        table,
        keys + kv_head * BLOCK_SIZE * KEY_SIZE,
        values + kv_head * BLOCK_SIZE * VALUE_SIZE,
        key_scales,
        key_scales + kv_heads * BLOCK_SIZE,
        block_stride,
        (KEY_SIZE, VALUE_SIZE, BLOCK_SIZE),
    )


@jit
def attend(
    state: tl.tuple,
    queries: tl.tuple,
    position: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    end: tl.tensor,
    memory: tl.tuple,
    scoring: tl.tuple,
    KEYS: tl.constexpr,
    LATENT: tl.constexpr,
    ALL_SEEN: tl.constexpr,
) -> tl.tuple:
    """Goes on from a state over the positions low (a multiple of KEYS) to high: the new state.

    queries: two of [ROWS, KEY_PADDED], which are the same; of latents (LATENT), whose values are
    the starts of their keys and read once, what meets a value [ROWS, VALUE_PADDED] and what meets
    the rest of a key [ROWS, KEY_PADDED]. position [ROWS]. Nothing at `end` or after is read.
    memory: of `head_memory`. scoring: `LayerArguments.score_factor`, window and soft cap, 0 for
    none. ALL_SEEN: every row sees every one of these positions.
    """
    top, total, output = state
    query, query_rest = queries
    table, keys, values, key_scales, value_scales, block_stride, sizes = memory
    KEY_SIZE, VALUE_SIZE, BLOCK_SIZE = sizes
    scale, WINDOW, SOFTCAP = scoring
    KEY_PADDED: tl.constexpr = query_rest.shape[1]
    VALUE_PADDED: tl.constexpr = output.shape[1]
    key_element = tl.arange(0, KEY_PADDED)
    value_element = tl.arange(0, VALUE_PADDED)
    for start in range(low, high, KEYS):
        spot = start + tl.arange(0, KEYS)
        written = spot < end
        block = tl.load(table + spot // BLOCK_SIZE, mask=written, other=0).to(tl.int64)
        base = (block * block_stride)[:, None]
        offset = (spot % BLOCK_SIZE)[:, None]
        if LATENT:
            value = tl.load(
                keys + base + offset * KEY_SIZE + value_element[None, :],
                mask=written[:, None] & (value_element < VALUE_SIZE)[None, :],
                other=0.0,
            )
            rest = tl.load(
                keys + base + offset * KEY_SIZE + VALUE_SIZE + key_element[None, :],
                mask=written[:, None] & (key_element < KEY_SIZE - VALUE_SIZE)[None, :],
                other=0.0,
            )
            scores = tl.dot(query, tl.trans(value), input_precision="ieee")
            scores = tl.dot(query_rest, tl.trans(rest), scores, input_precision="ieee") * scale
        else:
            key = tl.load(
                keys + base + offset * KEY_SIZE + key_element[None, :],
                mask=written[:, None] & (key_element < KEY_SIZE)[None, :],
                other=0.0,
            )
            if keys.dtype.element_ty.primitive_bitwidth == 8:
                scale_spot = block * block_stride + spot % BLOCK_SIZE
                key_scale = tl.load(key_scales + scale_spot, mask=written, other=0)
                key = widened(key, key_scale[:, None]).to(query.dtype)
            scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        if SOFTCAP > 0:
            # tanh(x) is 1 - 2 / (1 + exp(2 x)), which has the right limits on both sides.
            scores = (1.0 - 2.0 / (1.0 + tl.exp2(scores))) * (SOFTCAP * LOG2_E)
        if not ALL_SEEN:
            seen = spot[None, :] <= position[:, None]
            if WINDOW > 0:
                seen = seen & (spot[None, :] > (position - WINDOW)[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        # A row that has seen nothing yet would compute -inf - -inf.
        finite = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(scores - finite[:, None])
        fade = tl.exp2(top - finite)
        if not LATENT:
            value = tl.load(
                values + base + offset * VALUE_SIZE + value_element[None, :],
                mask=written[:, None] & (value_element < VALUE_SIZE)[None, :],
                other=0.0,
            )
            if keys.dtype.element_ty.primitive_bitwidth == 8:
                value_scale = tl.load(value_scales + scale_spot, mask=written, other=0)
                value = widened(value, value_scale[:, None]).to(query.dtype)
        total = tl.fma(total, fade, tl.sum(weight, 1))
        output = output * fade[:, None]
        output = tl.dot(weight.to(value.dtype), value, output, input_precision="ieee")
        top = new_top
    return top, total, output


@jit
def fold(state: tl.tuple, part: tl.tuple) -> tl.tuple:
    """The state over a sequence's parts so far and its next part.

    Explicit fma: what a compiler makes of a sum of products could differ from kernel to kernel.
    """
    top, total, output = state
    part_top, part_total, part_output = part
    new_top = tl.maximum(top, part_top)
    finite = tl.where(new_top == float("-inf"), 0.0, new_top)
    fade = tl.exp2(top - finite)
    share = tl.exp2(part_top - finite)
    total = tl.fma(total, fade, part_total * share)
    output = tl.fma(output, fade[:, None], part_output * share[:, None])
    return new_top, total, output


@jit
def finish(
    state: tl.tuple,
    sinks: tl.tensor,
    head: tl.tensor,
    live: tl.tensor,
    SINKS: tl.constexpr,
) -> tl.tensor:
    """Attention's output from the state over all positions. head [ROWS]: each row's query head.

    A sink is a score that takes weight and gives no value.
    """
    top, total, output = state
    if SINKS:
        sink = tl.load(sinks + head, mask=live, other=0.0).to(tl.float32) * LOG2_E
        new_top = tl.maximum(top, sink)
        fade = tl.exp2(top - new_top)
        total = tl.fma(total, fade, tl.exp2(sink - new_top))
        output = output * fade[:, None]
    return output / tl.where(total == 0.0, 1.0, total)[:, None]
