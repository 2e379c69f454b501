"""TorchRunner, the ModelRunner port over a transformers model; knows plans, memory and sampling."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import replace

import torch
from torch import nn

from baton.core.errors import Internal, InvalidArgument
from baton.core.model import KvLayout, ModelDescription
from baton.core.plan import Extents, SampledToken, StepPlan, StepResult
from baton.engine import selfcheck
from baton.engine.attention import PagedAttention
from baton.engine.check import check_plan
from baton.engine.config import EngineConfig
from baton.engine.exact import confine
from baton.engine.inputs import build_inputs
from baton.engine.kernels import choose_kernel, fewest_rows, flash_cpu
from baton.engine.kv_cache import KvCache
from baton.engine.linear import swap
from baton.engine.loader import LoadedModel, load, run_network, wire
from baton.engine.probe import AttentionShape, probe_attention
from baton.engine.products import NotExact
from baton.engine.progress import Progress
from baton.engine.sampler import SamplingFailed, sample

log = logging.getLogger(__name__)


class TorchRunner:
    """Runs steps synchronously: `submit` computes, `collect` hands the result out.

    Made by `load`. Not thread-safe; called by the engine thread only.
    """

    def __init__(
        self,
        network: nn.Module,
        model: ModelDescription,
        cache: KvCache,
        attention: PagedAttention,
    ):
        self._network = network
        self._model = model
        self._cache = cache
        self._attention = attention
        self._results: deque[StepResult] = deque()
        self.not_exact_because = "exact mode is off"

    @classmethod
    @torch.inference_mode()
    def load(cls, config: EngineConfig, progress: Progress | None = None) -> TorchRunner:
        """Loads, wires, sizes and checks a model. progress(done_bytes, total_bytes).

        Raises UnsupportedModel for what cannot be served correctly and InvalidArgument, with the
        field, for a configuration that does not fit the model. An exact mode that this model or
        machine cannot have is given up, not refused: see `exact` and `not_exact_because`.
        """
        if config.threads:
            torch.set_num_threads(config.threads)
        loaded = load(config, progress)
        texts = selfcheck.prompts(loaded.description.vocab_size, loaded.description.max_model_len)
        expected = [_eager_logits(loaded, text) for text in texts]
        wire(loaded.network)
        shape = probe_attention(loaded)
        cache, attention = _memory(config, loaded, shape)
        fits = min(loaded.description.max_model_len, cache.num_blocks * cache.block_size)
        model = replace(loaded.description, max_model_len=fits)
        runner = cls(loaded.network, model, cache, attention)
        runner._prepare(config.exact, texts, expected)
        return runner

    @property
    def model(self) -> ModelDescription:
        return self._model

    @property
    def layout(self) -> KvLayout:
        return self._cache.layout

    @property
    def num_blocks(self) -> int:
        return self._cache.num_blocks

    @property
    def block_size(self) -> int:
        return self._cache.block_size

    @property
    def num_swap_blocks(self) -> tuple[int, int]:
        return 0, 0

    @property
    def depth(self) -> int:
        return 1

    @property
    def exact(self) -> bool:
        """Whether a row's logits are bit-equal whatever else is in the batch, however it is cut,
        and wherever its KV came from. `not_exact_because` says why not."""
        return not self.not_exact_because

    def submit(self, plan: StepPlan) -> None:
        check_plan(
            plan,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            vocab_size=self._model.vocab_size,
            max_model_len=self._model.max_model_len,
        )
        self._results.append(self._sample(plan, self.forward(plan)))

    def collect(self) -> StepResult:
        if not self._results:
            raise Internal("no step was submitted")
        return self._results.popleft()

    @torch.inference_mode()
    def pack(self, extents: Extents, first_position: int, count: int, out: memoryview) -> None:
        self._cache.pack(extents, first_position, count, out)

    @torch.inference_mode()
    def unpack(
        self, extents: Extents, first_position: int, count: int, payload: memoryview
    ) -> None:
        self._cache.unpack(extents, first_position, count, payload)

    def close(self) -> None:
        """Drops weights and KV; the runner is not used after."""
        self._results.clear()
        self.__dict__.pop("_network", None)
        self.__dict__.pop("_attention", None)
        self.__dict__.pop("_cache", None)

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> torch.Tensor:
        """Does a plan's copies and forward pass: logits [chunks with samples, vocab]."""
        for copy in plan.copies:
            self._cache.copy(copy)
        if not plan.chunks:
            return torch.empty(0, self._model.vocab_size)
        device = self._cache.keys.device
        lone_rows = self._attention.lone_rows is not None
        inputs = build_inputs(plan, self.block_size, device, lone_rows=lone_rows)
        context = self._attention.step(inputs)
        return run_network(
            self._network, inputs.token_ids, inputs.positions, inputs.sampled, context
        )

    @torch.inference_mode()
    def _sample(self, plan: StepPlan, logits: torch.Tensor) -> StepResult:
        tokens: list[SampledToken] = []
        failed: list[tuple[int, str]] = []
        sampled = (chunk for chunk in plan.chunks if chunk.samples)
        for row_logits, chunk in zip(logits, sampled, strict=True):
            for row in chunk.samples:
                try:
                    tokens.append(sample(row_logits, row))
                except SamplingFailed as error:
                    failed.append((row.sequence_id, str(error)))
        return StepResult(plan.step, tuple(tokens), tuple(failed))

    def _prepare(self, exact: bool, texts: list[list[int]], expected: list[torch.Tensor]) -> None:
        """Packs the weights, checks against the model's own attention, and settles exactness.

        What cannot be made exact stays as it is: right, but not bit-equal.
        """
        blocks = -(-max(map(len, texts)) // self.block_size)
        tables: list[Extents] = [((i * blocks, blocks),) for i in range(len(texts))]
        try:
            swap(self._network, exact=exact)
            if exact:
                confine(self._network, lambda: selfcheck.whole(self.forward, tables, texts))
                selfcheck.check_exact(self.forward, tables, texts)
                self.not_exact_because = ""
        except NotExact as error:
            self.not_exact_because = str(error)
            log.warning("exact mode cannot be had: %s", error)
            swap(self._network, exact=False)
        selfcheck.check_parity(self.forward, tables, texts, expected)
        # Only what was used: clearing the rest would take its memory before anyone needs it.
        used = len(texts) * blocks * self.block_size
        self._cache.clear(torch.arange(used, device=self._cache.keys.device))


def _eager_logits(loaded: LoadedModel, text: list[int]) -> torch.Tensor:
    """The last position's logits [vocab] from the model's own attention."""
    tokens = torch.tensor([text], device=loaded.device)
    positions = torch.arange(len(text), device=loaded.device)[None]
    return run_network(loaded.network, tokens, positions, positions[0, -1:], None)[0]


def _memory(
    config: EngineConfig, loaded: LoadedModel, shape: AttentionShape
) -> tuple[KvCache, PagedAttention]:
    """The block pool's memory and the attention over it. Raises InvalidArgument when too small."""
    layout, device = shape.layout, loaded.device
    max_model_len = loaded.description.max_model_len
    block_bytes = layout.bytes_per_position * config.block_size
    wanted = config.max_batch * -(-max_model_len // config.block_size)
    num_blocks = config.num_blocks or min(wanted, config.kv_memory_bytes // block_bytes)
    if num_blocks * config.block_size < min(max_model_len, 128):
        raise InvalidArgument(
            f"a block of {config.block_size} positions takes {block_bytes} bytes: "
            f"{num_blocks} of them are too few",
            field="num_blocks" if config.num_blocks else "kv_memory_bytes",
        )
    kernel = choose_kernel(
        config.attention, device, layout.key_size, layout.value_size, softcap=shape.softcap
    )
    even = kernel is flash_cpu
    cache = KvCache(layout, num_blocks, config.block_size, device, even=even)
    lone_rows: int | None = shape.per_head
    if config.exact:
        size, dtype = layout.key_size, cache.keys.dtype
        lone_rows = fewest_rows(kernel, layout.num_kv_heads, shape.per_head, size, dtype, device)
    return cache, PagedAttention(cache, kernel, exact=config.exact, lone_rows=lone_rows)
