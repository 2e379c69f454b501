"""What a step's rows ask of the sampler, as arrays; and the counts that penalties need.

Both samplers, of hosts and of GPUs, read the same arrays, which are made once a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from batonlm.core.scheduler.plan import SampleRow
from batonlm.engine.device import upload, upload_bytes

NOT_A_NUMBER = -1
"""In place of a token: the model's output for a row holds what is not a number, or is infinite."""
ALL_BANNED = -2
"""In place of a token: nothing may be drawn."""

SETTINGS = np.dtype(
    [
        ("source", "<i4"),
        ("top_k", "<i4"),
        ("slot", "<i4"),
        ("latest", "<i4"),
        ("first_bias", "<i4"),
        ("end_bias", "<i4"),
        ("first_banned", "<i4"),
        ("end_banned", "<i4"),
        ("mask", "<i4"),
        ("unused", "<i4"),
    ]
)
"""Whole numbers of a row: its row of the logits; how many tokens top-k keeps, 0 for all; where its
tokens are counted and the newest of them, which is not counted yet (-1: none); its parts of the
lists of biases and of bans; and its mask (-1: none). A multiple of 8 bytes."""

NUMBERS = np.dtype(
    [
        ("number", "<f8"),
        ("temperature", "<f8"),
        ("top_p", "<f8"),
        ("min_p", "<f8"),
        ("repetition", "<f8"),
        ("presence", "<f8"),
        ("frequency", "<f8"),
    ]
)
"""Real numbers of a row: the random number in [0, 1), -1 where the best token is taken;
and settings of `SamplingParams` by their names."""


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


class TokenCounts:
    """How often sequences have each token, on the model's device, one slot for each sequence.

    Counts are made of a sequence's history when it first comes, and again only where its history is
    not the one before with a few tokens more: after a fork, or when a slot was lost. The newest
    token, most often the only new one, the sampler adds itself. A slot is taken from the sequence
    that has been away for longest; memory doubles instead of taking one of the last few steps'.

    A row behind drafts is lent a slot for its step: drafts may turn out wrong, so they are never
    added to what is counted of the sequence.
    """

    RECENT = 4
    """Steps in which a sequence keeps its slot without being sampled."""
    FEW = 64
    """New tokens of a history up to which they are added to what is counted."""

    def __init__(self, device: torch.device):
        self.tensor = torch.zeros(0, 0, dtype=torch.int32, device=device)
        """int32 [slots, vocab]: twice how often the output has a token, and 1 more if the prompt
        has it."""
        self.rebuilt = 0
        """How often a sequence's counts were made of its history."""
        self._step = 0
        # By sequence, the one that has been away for longest first. What is lent in this step has
        # ids below 0.
        self._slots: dict[int, _Slot] = {}
        self._num_lent = 0

    def place(
        self, rows: Sequence[SampleRow], vocab: int, drafts: Sequence[Sequence[int]] = ()
    ) -> list[tuple[int, int]]:
        """For each row of one step its slot, and the token to add there or -1; (-1, -1) for those
        without penalties.

        drafts: of each row the drafts behind which it is, or empty where no row has any. The first
        row of the sequence, which has none and has the history, comes before those that have some.
        """
        self._step += 1
        for lent in range(self._num_lent):
            del self._slots[-1 - lent]
        self._num_lent = 0
        places: list[tuple[int, int]] = []
        first = 0
        for i, row in enumerate(rows):
            if not row.params.needs_history:
                places.append((-1, -1))
            elif drafts and drafts[i]:
                places.append((self._lend(*places[first], drafts[i], vocab), -1))
            else:
                first = i
                places.append(self._place(row, vocab))
        return places

    def _place(self, row: SampleRow, vocab: int) -> tuple[int, int]:
        history = row.history
        size = len(history)
        slot = self._slots.pop(row.sequence_id, None)
        if slot is None:
            slot = _Slot(self._free(vocab))
        latest = -1
        if (
            not slot.counted
            or not 0 <= size - slot.counted <= self.FEW
            or (history[slot.counted - 1] != slot.last)
        ):
            self._rebuild(slot.index, row)
        elif size > slot.counted:
            latest = history[-1]
            self._add(slot.index, history[slot.counted : -1])
        slot.counted, slot.step = size, self._step
        slot.last = history[-1] if size else -1
        self._slots[row.sequence_id] = slot
        return slot.index, latest

    def _lend(self, index: int, latest: int, drafts: Sequence[int], vocab: int) -> int:
        """A slot for this step with what a sequence's own has, its newest token and drafts."""
        lent = self._free(vocab)
        self._num_lent += 1
        self._slots[-self._num_lent] = _Slot(lent, step=self._step)
        self.tensor[lent].copy_(self.tensor[index])
        self._add(lent, drafts if latest < 0 else [latest, *drafts])
        return lent

    def _add(self, index: int, tokens: Sequence[int]) -> None:
        """Counts tokens of an output."""
        if tokens:
            places = upload(list(tokens), torch.int64, self.tensor.device)
            twice = torch.full_like(places, 2, dtype=torch.int32)
            self.tensor[index].index_add_(0, places, twice)

    def _free(self, vocab: int) -> int:
        held = len(self.tensor)
        used = len(self._slots)
        if used < held:
            taken = {slot.index for slot in self._slots.values()}
            return next(index for index in range(held) if index not in taken)
        oldest = next(iter(self._slots), None)
        if oldest is not None and self._slots[oldest].step < self._step - self.RECENT:
            return self._slots.pop(oldest).index
        grown = self.tensor.new_zeros(max(4, 2 * held), vocab)
        if held:
            grown[:held] = self.tensor
        self.tensor = grown
        return held

    def _rebuild(self, index: int, row: SampleRow) -> None:
        self.rebuilt += 1
        device = self.tensor.device
        counts = self.tensor[index].zero_()
        tokens = np.fromiter(row.history, np.int64, len(row.history))
        prompt = np.unique(tokens[: row.num_prompt_tokens])
        output, times = np.unique(tokens[row.num_prompt_tokens :], return_counts=True)
        for found, amounts in ((prompt, np.ones_like(prompt)), (output, 2 * times)):
            if len(found):
                places = upload(found.tolist(), torch.int64, device)
                counts.index_add_(0, places, upload(amounts.tolist(), torch.int32, device))


@dataclass(slots=True)
class _Slot:
    """Where a sequence's tokens are counted."""

    index: int
    counted: int = 0
    """Length of the history that is counted, with what the sampler was given to add."""
    last: int = -1
    """Its last token."""
    step: int = 0
    """In which the sequence was last sampled."""


@dataclass(frozen=True, slots=True)
class RowInputs:
    """What the rows of a step ask for."""

    settings: npt.NDArray[np.void]
    """[rows] of SETTINGS."""
    numbers: npt.NDArray[np.void]
    """[rows] of NUMBERS."""
    bias_tokens: npt.NDArray[np.int32]
    biases: npt.NDArray[np.float32]
    """What is added to the logits of bias_tokens."""
    banned: npt.NDArray[np.int32]
    """Tokens that may not be drawn."""
    masks: npt.NDArray[np.uint8]
    """[masks, bytes]: a bit for each token that may be drawn, least significant first."""

    @classmethod
    def of(
        cls,
        rows: Sequence[SampleRow],
        sources: Sequence[int],
        places: Sequence[tuple[int, int]],
        vocab: int,
    ) -> RowInputs:
        """sources: each row's row of the logits. places: see `TokenCounts.place`."""
        settings: list[tuple[int, ...]] = []
        numbers: list[tuple[float, ...]] = []
        masks: list[npt.NDArray[np.uint8]] = []
        bias_tokens: list[int] = []
        biases: list[float] = []
        banned: list[int] = []
        for row, source, (slot, latest) in zip(rows, sources, places, strict=True):
            p = row.params
            first_bias, first_banned = len(biases), len(banned)
            for token, bias in p.logit_bias:
                bias_tokens.append(token)
                biases.append(bias)
            banned += row.banned
            mask = -1
            if row.allowed or p.allowed_token_ids:
                mask = len(masks)
                masks.append(_mask(row, vocab))
            top_k = p.top_k if 0 < p.top_k < vocab else 0
            lists = first_bias, len(biases), first_banned, len(banned)
            settings.append((source, top_k, slot, latest, *lists, mask, 0))
            number = -1.0 if p.greedy else uniform(p.seed, row.choice, row.position)
            penalties = p.repetition_penalty, p.presence_penalty, p.frequency_penalty
            numbers.append((number, p.temperature or 1.0, p.top_p, p.min_p, *penalties))
        return cls(
            np.array(settings, SETTINGS),
            np.array(numbers, NUMBERS),
            np.array(bias_tokens, np.int32),
            np.array(biases, np.float32),
            np.array(banned, np.int32),
            np.array(masks, np.uint8).reshape(len(masks), -(-vocab // 8)),
        )

    def adjusts(self, row: int) -> bool:
        """Whether logits of the row change before anything is drawn."""
        _, _, slot, _, first_bias, end_bias, first_banned, end_banned, mask, _ = self.settings[row]
        return bool(slot >= 0 or mask >= 0 or end_bias > first_bias or end_banned > first_banned)

    def to(self, device: torch.device) -> dict[str, torch.Tensor]:
        """The arrays by name on a device, flat and padded, none of them empty; one copy."""
        arrays = {
            "numbers": (self.numbers, torch.float64),
            "settings": (self.settings, torch.int32),
            "bias_tokens": (self.bias_tokens, torch.int32),
            "biases": (self.biases, torch.float32),
            "banned": (self.banned, torch.int32),
            "masks": (self.masks, torch.uint8),
        }
        data = [_aligned(array.tobytes()) for array, _ in arrays.values()]
        sent = upload_bytes(b"".join(data), device)
        found, first = {}, 0
        for part, (name, (_, kind)) in zip(data, arrays.items(), strict=True):
            found[name] = sent[first : first + len(part)].view(kind)
            first += len(part)
        return found


def _aligned(data: bytes) -> bytes:
    """Padded to where a kernel reads the next array best."""
    return data.ljust(max(16, -(-len(data) // 16) * 16), b"\0")


def _mask(row: SampleRow, vocab: int) -> npt.NDArray[np.uint8]:
    """The bits of a row's mask, of all tokens."""
    mask = np.zeros(-(-vocab // 8), np.uint8)
    if row.allowed:
        given = np.frombuffer(row.allowed, np.uint8)[: len(mask)]
        mask[: len(given)] = given
        if row.params.allowed_token_ids:
            mask &= _bits(row.params.allowed_token_ids, len(mask))
        return mask
    return _bits(row.params.allowed_token_ids, len(mask))


@lru_cache(maxsize=64)
def _bits(tokens: tuple[int, ...], size: int) -> npt.NDArray[np.uint8]:
    """One bit for each token, in `size` bytes."""
    flags = np.zeros(8 * size, np.uint8)
    flags[list(tokens)] = 1
    bits = np.packbits(flags, bitorder="little")
    bits.flags.writeable = False
    return bits
