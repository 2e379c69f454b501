"""How large the tiles of the attention kernels are.

There is no tuning at run time: it would cost minutes at start, differ from start to start, and with
it the last bits of logits. The figures follow from two bounds: keys and values that are read ahead
must fit into the 99 to 227 KiB of shared memory of a multiprocessor, and a tile's output, in
float32, into its registers. That they do is seen by compiling, for which no GPU is needed. On
compute capability 9.0 none of these shapes spills more than two registers, on 8.0 and 8.9 none more
than twenty.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

PART = 256
"""Positions that are attended to before results are merged: a multiple of every `keys` below."""

_FEWEST_ROWS = 16
_STAGE_BYTES = 36 * 1024
# Of Triton's stages, the look-up in the block table takes half: 5 read the next keys and values
# while these are computed on, 3 hold one tile of them at a time.
_READ_AHEAD = 5
_READ_ONE = 3
_PARTS_IN_ALL = 256


@dataclass(frozen=True, slots=True)
class TileShape:
    rows: int
    """Queries of a tile, over positions and the query heads of one KV head."""
    keys: int
    """Positions that are read at a time."""
    warps: int
    """Of Triton's compiler, as `stages`."""
    stages: int

    def positions(self, per_head: int) -> int:
        """Positions in a tile when per_head query heads share a KV head."""
        return self.rows // per_head


def padded(size: int) -> int:
    """The power of two, at least 16, that a head of this size is padded to in registers."""
    return max(16, 1 << (size - 1).bit_length())


def memory_constants(
    keys: torch.Tensor, values: torch.Tensor, *, latent: bool = False
) -> dict[str, int]:
    """What kernels are compiled for of block-major memory, [.., block_size, D] and [.., Dv].

    latent: values are the starts of keys, and what is padded is the rest of a key.
    """
    rest = keys.shape[-1] - (values.shape[-1] if latent else 0)
    return {
        "KEY_SIZE": keys.shape[-1],
        "KEY_PADDED": padded(rest),
        "VALUE_SIZE": values.shape[-1],
        "VALUE_PADDED": padded(values.shape[-1]),
        "BLOCK_SIZE": keys.shape[-2],
    }


def latent_heads(
    per_head: int, key_size: int, value_size: int, item_bytes: int, shared_bytes: int
) -> int:
    """How many of the query heads over a latent make a tile. Every tile reads the latents anew, but
    its outputs are as wide as they are."""
    most = _latent_rows(key_size, value_size, item_bytes, shared_bytes)
    return max(count for count in range(1, most + 1) if per_head % count == 0)


def _latent_bytes(key_size: int, value_size: int, item_bytes: int) -> int:
    """Of a query, or of a key that is a latent and more, as padded."""
    return (padded(key_size - value_size) + padded(value_size)) * item_bytes


def _latent_rows(key_size: int, value_size: int, item_bytes: int, shared_bytes: int) -> int:
    """Most rows of a tile over latents, so that queries and two tiles of keys fit."""
    row = _latent_bytes(key_size, value_size, item_bytes)
    rows = 2 * _FEWEST_ROWS if item_bytes == 2 else _FEWEST_ROWS
    while rows > _FEWEST_ROWS and (rows + 2 * _keys(row, most=64)) * row > shared_bytes:
        rows //= 2
    return rows


def _latent_shape(rows: int, row: int, value_size: int, shared_bytes: int) -> TileShape:
    """row: bytes of a key in registers."""
    keys = _keys(row, most=64)
    narrow = rows <= _FEWEST_ROWS
    # Two programs of narrow tiles should fit a multiprocessor.
    ahead = narrow and 2 * (rows + 2 * keys) * row <= shared_bytes
    return TileShape(rows, keys, 4 if narrow else 8, _READ_AHEAD if ahead else _READ_ONE)


def decode_shape(
    per_head: int,
    key_size: int,
    value_size: int,
    item_bytes: int,
    shared_bytes: int,
    *,
    latent: bool = False,
) -> TileShape:
    """One position's queries; 16 rows are the fewest that a matrix unit takes.

    Two programs should fit a multiprocessor, each reading ahead while it computes. latent: values
    are the starts of keys.
    """
    rows = max(_FEWEST_ROWS, 1 << (per_head - 1).bit_length())
    if latent:
        row = _latent_bytes(key_size, value_size, item_bytes)
        return _latent_shape(rows, row, value_size, shared_bytes)
    pair = (padded(key_size) + padded(value_size)) * item_bytes
    keys = _keys(pair, most=64)
    ahead = 2 * 2 * keys * pair <= shared_bytes
    return TileShape(rows, keys, 4, _READ_AHEAD if ahead else _READ_ONE)


def prefill_shape(
    per_head: int,
    key_size: int,
    value_size: int,
    item_bytes: int,
    shared_bytes: int,
    *,
    latent: bool = False,
    scaled: bool = False,
) -> TileShape:
    """As many rows as registers allow, because keys and values are read once for all of them.

    scaled: keys and values are codes, which are widened in registers.
    """
    if latent:
        rows = _latent_rows(key_size, value_size, item_bytes, shared_bytes)
        row = _latent_bytes(key_size, value_size, item_bytes)
        return _latent_shape(rows, row, value_size, shared_bytes)
    widest = max(padded(key_size), padded(value_size))
    pair = (padded(key_size) + padded(value_size)) * item_bytes
    fewest = max(_FEWEST_ROWS, 1 << (per_head - 1).bit_length())
    if item_bytes == 4:
        # Exact float32 products do not run on matrix units and want registers for both operands.
        return TileShape(max(32, fewest), 16, 8, 2)
    rows = max(128 if widest <= 128 and not scaled else 64, fewest)
    keys = _keys(pair, most=64)
    # On Hopper a matrix unit reads from a stage while two more are filled.
    ahead = rows * padded(key_size) * item_bytes + 3 * keys * pair <= shared_bytes
    return TileShape(rows, keys, 8, _READ_AHEAD if ahead else _READ_ONE)


def most_parts(kv_heads: int, max_model_len: int) -> int:
    """Into how many parts a sequence is cut at most: enough to fill a GPU with one sequence.

    A part has PART positions, or as many times twice that as it takes to stay below this number.
    It is fixed for a model, so that the cuts depend on a sequence's own length alone.
    """
    wanted = -(-max_model_len // PART)
    return 1 + min(wanted, max(16, min(64, _PARTS_IN_ALL // kv_heads)))


def _keys(pair_bytes: int, most: int) -> int:
    keys = most
    while keys > 16 and keys * pair_bytes > _STAGE_BYTES:
        keys //= 2
    return keys
