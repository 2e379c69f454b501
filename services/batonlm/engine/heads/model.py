"""A head over memory of its own, and what it keeps of each sequence."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence as Many
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from batonlm.core.errors import Internal
from batonlm.core.scheduler.model_drafts import Guess
from batonlm.core.scheduler.plan import Chunk, StepPlan
from batonlm.engine.attention.backends import open_backend
from batonlm.engine.attention.interface import INTERFACE, ForwardPass, LayerArguments
from batonlm.engine.attention.own import OwnBackend
from batonlm.engine.checkpoint import UnsupportedModel
from batonlm.engine.config import TILE, EngineConfig
from batonlm.engine.heads.load import WINDOW
from batonlm.engine.latent import keep_latents
from batonlm.engine.lean import without_compiler
from batonlm.engine.linear import swap
from batonlm.engine.loader import AttentionShape, LoadedModel

MOST_WAITING = 64
"""Positions of a sequence that the network has computed and its head has not, at most: of more, the
oldest are left out, and its KV begin anew behind them."""


class Past:
    """What a head knows of one sequence."""

    __slots__ = ("blocks", "end", "first", "last", "own", "rows")

    def __init__(self, blocks: list[int]) -> None:
        self.blocks = blocks
        """Of the head's memory, in the order of their positions."""
        self.first = 0
        """The position whose KV are in the first place of these."""
        self.end = 0
        """The KV of all positions from `first` up to here are those of the sequence's tokens."""
        self.rows: list[tuple[int, torch.Tensor]] = []
        """What the network computed for positions that the head needs yet, without gaps: the first
        position and [n, hidden size]."""
        self.own: torch.Tensor | None = None
        """[1, hidden size], the head's last output for the sequence."""
        self.last = 0
        """The position of that."""

    def note(self, first: int, rows: torch.Tensor) -> None:
        """The network has computed positions from `first` on; what it computed there before was
        behind drafts that were wrong."""
        while self.rows and self.rows[-1][0] >= first:
            self.rows.pop()
        if self.rows:
            start, before = self.rows[-1]
            self.rows[-1] = start, before[: first - start]
            if start + len(before) < first:
                self.rows.clear()
        self.rows.append((first, rows))
        while len(self.rows) > 1 and first + len(rows) - self.rows[0][0] > MOST_WAITING:
            del self.rows[0]

    def take(self, first: int, end: int, *, whole: bool) -> torch.Tensor:
        """What the layer is given for positions [first, end): of each the row of the one before.
        whole: the last of them is the sequence's last token, so that all rows behind are those of
        drafts that were wrong."""
        if not self.rows:
            if self.own is None or self.last != first - 1 or end != first + 1:
                raise Internal("a head is to compute positions that the network did not")
            return self.own
        start = self.rows[0][0]
        rows = torch.cat([rows for _, rows in self.rows])
        if start > first - 1 or start + len(rows) < end - 1:
            raise Internal("a head is to compute positions that the network did not")
        self.rows = [] if whole else [(end - 1, rows[end - 1 - start :])]
        if not self.first <= first <= self.end:
            self.first = first
        self.end = end
        return rows[first - 1 - start : end - 1 - start]

    def place(self, first: int, end: int) -> Chunk:
        """The chunk of the head's memory in which positions [first, end) are, of which it holds
        the newest ones."""
        while end - self.first > len(self.blocks) * TILE:
            self.blocks.append(self.blocks.pop(0))
            self.first += TILE
        if self.first > first:
            raise Internal("a head is to compute more positions than it has room for")
        extents = tuple((block, 1) for block in self.blocks)
        return Chunk(0, (0,) * (end - first), first - self.first, extents)


class HeadModel:
    """A DraftModel: the head of a network, over memory of its own. It is given what the network
    computes in each step."""

    def __init__(self, config: EngineConfig, loaded: LoadedModel, shape: AttentionShape):
        """loaded: wired, with a head. shape: of its network's attention. Raises UnsupportedModel
        where the head attends otherwise."""
        self.max_positions = loaded.description.max_model_len
        self._head = loaded.head
        self._head.set_attn_implementation(INTERFACE)
        keep_latents(self._head)
        if loaded.device.type == "cpu":
            self._head.set_experts_implementation("eager")
        _check(self._head, loaded, shape)
        own = replace(shape, layout=replace(shape.layout, num_layers=1))
        sequences, blocks = config.max_batch, WINDOW // TILE
        given = replace(config, exact=False, block_size=TILE, graphs=False)
        backend = open_backend(given, loaded, own, sequences * blocks)
        if isinstance(backend, OwnBackend):
            raise UnsupportedModel("a model that attends by code of its own has no head here")
        self._backend = backend
        self._free = [list(range(i * blocks, (i + 1) * blocks)) for i in range(sequences)]
        self._pasts: dict[int, Past] = {}
        """The least recently used first."""
        if loaded.device.type == "cpu":
            swap(self._head.layers, exact=False, max_batch=sequences)
        self._product: nn.Module = nn.Identity()
        self._given: torch.Tensor | None = None
        """What the product into logits was given last, row by row."""
        self._recorded: torch.Tensor | None = None
        """The same of the CUDA graph that ran last, which runs no code of Python's."""

    def watch(self, network: Any, recorded_rows: int) -> None:
        """network: with its layers as they stay. recorded_rows: most of a step that is about to be
        recorded; 0: none is."""
        self._product = network.get_output_embeddings()
        self._product.register_forward_pre_hook(self._take)
        if recorded_rows:
            weight = self._head.layers[0].eh_proj.weight
            self._recorded = weight.new_empty(recorded_rows, len(weight))

    def clear(self) -> None:
        """A step is about to be put in the device's queue."""
        self._given = None

    def note(self, plan: StepPlan) -> None:
        """It was."""
        given, recorded = self._given, self._given is None
        if given is None:
            if self._recorded is None:
                return
            # The next step writes over it. All tokens are rows of a graph, wanted or not.
            given = self._recorded[: plan.num_tokens].clone()
        row = 0
        for chunk in plan.chunks:
            if chunk.samples:
                count = chunk.num_drafts + 1
                scored = 0 if chunk.scored is None else len(chunk.scored.tokens)
                rows = given[row + scored : row + scored + count]
                self._past(chunk.sequence_id).note(chunk.end_position - count, rows)
            row += len(chunk.token_ids if recorded else chunk.wanted)

    def start(self, sequence_id: int, computed: int) -> int | None:
        """Positions that were computed with its own output are computed again with the
        network's."""
        past = self._pasts.get(sequence_id)
        return past.rows[0][0] + 1 if past is not None and past.rows else None

    @torch.inference_mode()
    def compute(self, chunks: Many[Chunk]) -> tuple[list[Guess], float]:
        began = time.perf_counter()
        places, rows = [], []
        positions: list[int] = []
        pasts = [self._past(chunk.sequence_id) for chunk in chunks]
        for chunk, past in zip(chunks, pasts, strict=True):
            first, end = chunk.first_position, chunk.end_position
            rows.append(past.take(first, end, whole=bool(chunk.samples)))
            places.append(past.place(first, end)._replace(token_ids=chunk.token_ids))
            positions += range(first, end)
        inputs = self._backend.begin(StepPlan(0, tuple(places)))
        at = torch.tensor([positions], device=inputs.positions.device)
        hidden = _forward(self._head, replace(inputs, positions=at), torch.cat(rows))
        ends = [end - 1 for end in accumulate(len(chunk.token_ids) for chunk in chunks)]
        wanted = [end for end, chunk in zip(ends, chunks, strict=True) if chunk.samples]
        last = hidden[wanted]
        for i, (chunk, past) in enumerate(
            (chunk, past) for chunk, past in zip(chunks, pasts, strict=True) if chunk.samples
        ):
            past.own, past.last = last[i : i + 1], chunk.end_position - 1
        sure, likeliest = self._product(last).float().softmax(-1).max(-1)
        # One copy for both, which waits for the device.
        found = torch.stack((likeliest.double(), sure.double())).tolist()
        guesses = [
            Guess(int(token), 0.0 if math.isnan(each) else each)
            for token, each in zip(*found, strict=True)
        ]
        return guesses, time.perf_counter() - began

    def _past(self, sequence_id: int) -> Past:
        past = self._pasts.pop(sequence_id, None)
        if past is None:
            if not self._free:
                self._free.append(self._pasts.pop(next(iter(self._pasts))).blocks)
            past = Past(self._free.pop())
        self._pasts[sequence_id] = past
        return past

    def _take(self, module: nn.Module, given: tuple[Any, ...]) -> None:
        """Runs ahead of the product into logits."""
        rows = given[0].flatten(0, -2)
        if self._recorded is not None and torch.cuda.is_current_stream_capturing():
            self._recorded[: len(rows)].copy_(rows)
        else:
            self._given = rows


def _forward(head: Any, inputs: ForwardPass, hidden: torch.Tensor) -> torch.Tensor:
    """The head's output [T, hidden size] for the tokens of inputs. hidden: [T, hidden size], of the
    positions before these."""
    output: torch.Tensor = head.forward_layer(
        0,
        hidden[None],
        inputs.positions,
        None,
        input_ids=inputs.token_ids,
        baton_context=inputs.context,
    )
    return output[0]


@without_compiler()
def _check(head: Any, loaded: LoadedModel, shape: AttentionShape) -> None:
    """Raises UnsupportedModel for a head whose layer does not attend once, as the network's do."""
    found: list[tuple[int, int, int]] = []

    def note(
        arguments: LayerArguments, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        found.append((key.shape[0], key.shape[-1], value.shape[-1]))
        return query.new_zeros(query.shape[1], query.shape[0], value.shape[-1])

    layout = shape.layout
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=loaded.device)
    positions = torch.arange(2, device=loaded.device)[None]
    weight = head.layers[0].hnorm.weight
    hidden = weight.new_zeros(2, len(weight))
    _forward(head, ForwardPass(tokens, positions, tokens[0, :1], note), hidden)
    if found != [(layout.num_kv_heads, layout.key_size, shape.value_size)]:
        raise UnsupportedModel(
            f"{loaded.settings.model_type}: its head does not attend as its layers do"
        )
