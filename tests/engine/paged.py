"""Random sequences over scattered blocks, attended to by TritonBackend and by plain torch."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

from batonlm.core.kvcache.block_pool import Extents
from batonlm.core.request.model import KvLayout
from batonlm.core.scheduler.plan import Chunk, StepPlan
from batonlm.engine.attention.interface import LayerArguments
from batonlm.engine.attention.triton.backend import TritonBackend
from batonlm.engine.kv.cache import DTYPES, block_ids, places_of, recoded
from batonlm.engine.loader import AttentionShape
from gpucheck.definition import attention

NUM_BLOCKS = 96
LAYER = 1


@dataclass(frozen=True)
class Case:
    per_head: int = 2
    kv_heads: int = 1
    key_size: int = 64
    value_size: int = 64
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    dtype: str = "float32"
    block_size: int = 16
    spans: tuple[tuple[int, int], ...] = ((0, 5), (20, 38), (262, 290))
    """Of each sequence, which positions are computed; those before only have their KV."""
    latent: bool = False
    """Whether values are the starts of keys, and not kept."""
    kept: str = ""
    """The type that KV is kept in; "" is dtype."""

    @property
    def longest(self) -> int:
        return max(end for _, end in self.spans)

    @property
    def scale(self) -> float:
        return float(self.key_size**-0.5)

    @property
    def layout(self) -> KvLayout:
        value_size = 0 if self.latent else self.value_size
        kept = self.kept or self.dtype
        return KvLayout("d", kept, 2, self.kv_heads, self.key_size, value_size)


@dataclass
class PagedSequence:
    """One sequence: query [heads, n, D], key [kv_heads, n, D], value [kv_heads, n, Dv]."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    extents: Extents
    start: int
    done: int
    outputs: list[torch.Tensor] = field(default_factory=list)

    @property
    def length(self) -> int:
        return self.key.shape[1]


class Paged:
    """A case's sequences, the same for every instance. Unwritten memory holds NaN, so that reading
    any of it shows."""

    def __init__(
        self, case: Case, device: str, *, exact: bool, shift: int = 0, drafts: bool = False
    ):
        """shift: moves all block tables, so that two instances lay sequences out otherwise. drafts:
        whether all positions of a step but a sequence's first are drafts."""
        self.case = case
        self._drafts = drafts
        self.device = torch.device(device)
        latent_size = case.value_size if case.latent else 0
        shape = AttentionShape(
            case.layout,
            case.dtype,
            case.layout.dtype,
            case.per_head,
            softcap=False,
            latent_size=latent_size,
        )
        where = NUM_BLOCKS, case.block_size, self.device
        self.backend = TritonBackend(shape, *where, max_model_len=640, max_batch=4, exact=exact)
        self.cache = self.backend.memory
        # NaN as floats; codes with a scale of infinity.
        self.cache.storage.view(torch.uint8).fill_(255)
        self.sequences, self.sinks = self._random(shift)
        self.arguments = LayerArguments(LAYER, case.scale, case.window, case.softcap, self.sinks)
        self.arguments = replace(self.arguments, latent=case.latent)
        for sequence in self.sequences:
            self._fill(sequence)

    def _fill(self, sequence: PagedSequence) -> None:
        if sequence.start:
            table = block_ids(sequence.extents)
            places = places_of(table, 0, sequence.start, self.case.block_size)
            key, value = (t[:, : sequence.start] for t in (sequence.key, sequence.value))
            self.cache.write(LAYER, torch.from_numpy(places).to(self.device), key, value)

    def _random(self, shift: int) -> tuple[list[PagedSequence], torch.Tensor | None]:
        case = self.case
        generator = torch.Generator().manual_seed(7)
        dtype = DTYPES[case.dtype]
        heads = case.kv_heads * case.per_head

        def tensor(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(dtype).to(self.device)

        free = list(range(NUM_BLOCKS))
        random.Random(shift).shuffle(free)
        sequences = []
        for start, length in case.spans:
            blocks = [free.pop() for _ in range(-(-length // case.block_size))]
            # As models give them: heads are the second dimension of memory, not the first.
            query = tensor(length, heads, case.key_size).transpose(0, 1)
            key = tensor(length, case.kv_heads, case.key_size).transpose(0, 1)
            value = tensor(length, case.kv_heads, case.value_size).transpose(0, 1)
            if case.latent:
                value = key[..., : case.value_size]
            extents = tuple((block, 1) for block in blocks)
            sequences.append(PagedSequence(query, key, value, extents, start, start))
        return sequences, tensor(heads) if case.sinks else None

    def step(self, ends: dict[int, int]) -> None:
        """Advances sequences to the given ends in one step."""
        chunks, parts = [], []
        for i, end in ends.items():
            sequence = self.sequences[i]
            own = slice(sequence.done, end)
            count = end - sequence.done
            drafts = count - 1 if self._drafts else 0
            chunk = Chunk(i, [1] * count, sequence.done, sequence.extents, num_drafts=drafts)
            chunks.append(chunk)
            parts.append([t[:, own] for t in (sequence.query, sequence.key, sequence.value)])
        context = self.backend.begin(StepPlan(0, tuple(chunks))).context
        assert context is not None
        query, key, value = (torch.cat(list(part), 1) for part in zip(*parts, strict=True))
        output = context(self.arguments, query, key, value)
        counts = [len(chunk.token_ids) for chunk in chunks]
        for chunk, rows in zip(chunks, torch.split(output, counts), strict=True):
            sequence = self.sequences[chunk.sequence_id]
            sequence.outputs.append(rows)
            sequence.done = chunk.end_position

    def run(self, ends: Iterable[int], only: Sequence[int] | None = None) -> list[torch.Tensor]:
        """Steps in which all sequences advance to each of `ends` in turn, as far as they go; their
        outputs [length - start, heads, Dv]."""
        chosen = range(len(self.sequences)) if only is None else only
        for end in [*ends, self.case.longest]:
            limits = {i: min(end, self.sequences[i].length) for i in chosen}
            step = {i: limit for i, limit in limits.items() if limit > self.sequences[i].done}
            if step:
                self.step(step)
        return [torch.cat(self.sequences[i].outputs) for i in chosen]

    def expected(self) -> list[torch.Tensor]:
        """In float64, by the definition."""
        return [self._attention(sequence, sequence.value) for sequence in self.sequences]

    def magnitudes(self) -> list[torch.Tensor]:
        """The same of the values without their signs: an error of every weight by at most its share
        e is one of the output by at most e times this."""
        return [self._attention(sequence, sequence.value.abs()) for sequence in self.sequences]

    def _attention(self, sequence: PagedSequence, value: torch.Tensor) -> torch.Tensor:
        key = sequence.key
        if self.case.kept:
            key, value = recoded(recoded((key, value), DTYPES[self.case.kept]), key.dtype)
        return attention(
            sequence.query[:, sequence.start :],
            key,
            value,
            scale=self.case.scale,
            window=self.case.window,
            softcap=self.case.softcap,
            sinks=self.sinks,
        )
