"""TorchRunner, the ModelRunner port over a transformers model; knows plans, memory and sampling."""

from __future__ import annotations

import logging
from collections import deque
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from baton.core.errors import Internal, InvalidArgument
from baton.core.model import KvLayout, ModelDescription
from baton.core.plan import Extents, SampledToken, StepPlan, StepResult
from baton.engine import selfcheck
from baton.engine.attention import PagedAttention, choose_kernel
from baton.engine.check import check_plan
from baton.engine.config import EngineConfig
from baton.engine.exact import ExactMode
from baton.engine.inputs import build_inputs
from baton.engine.kernels import flash_cpu
from baton.engine.kv_cache import KvCache
from baton.engine.linear import swap
from baton.engine.loader import LoadedModel, Progress, load, probe_layout, run_network, wire
from baton.engine.products import NotExact
from baton.engine.sampler import SamplingFailed, sample

log = logging.getLogger(__name__)


class TorchRunner:
    """Runs steps synchronously: `submit` computes, `collect` hands the result out.

    Made by `load`. Not thread-safe; called by the engine thread only.
    """

    def __init__(
        self, network: nn.Module, model: ModelDescription, cache: KvCache, kernel_name: str
    ):
        device = cache.keys.device
        layout = cache.layout
        self._network = network
        self._model = model
        self._cache = cache
        self._kernel = choose_kernel(kernel_name, device, layout.key_size, layout.value_size)
        self._attention = PagedAttention(cache, self._kernel, exact=False)
        self._lone_rows = True
        self._mode: AbstractContextManager[object] = nullcontext()
        self._results: deque[StepResult] = deque()
        self.exact = False
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
        layout = probe_layout(loaded)
        cache, model = _cache(config, loaded, layout)
        runner = cls(loaded.network, model, cache, config.attention)
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
        inputs = build_inputs(plan, self.block_size, device, lone_rows=self._lone_rows)
        context = self._attention.step(inputs)
        with self._mode:
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
        """Packs the weights, checks against the model's own attention, and settles exactness."""
        blocks = -(-max(map(len, texts)) // self.block_size)
        tables: list[Extents] = [((i * blocks, blocks),) for i in range(len(texts))]
        try:
            swap(self._network, exact=exact)
            if exact:
                self._mode = ExactMode()
                self._attention = PagedAttention(self._cache, self._kernel, exact=True)
                self._lone_rows = self._kernel is flash_cpu
        except NotExact as error:
            exact = False
            self._give_up(str(error))
        selfcheck.check_parity(self.forward, tables, texts, expected)
        if exact:
            self._settle_exact(tables, texts)
        self._cache.keys.zero_()
        self._cache.values.zero_()

    def _settle_exact(self, tables: list[Extents], texts: list[list[int]]) -> None:
        try:
            self.exact = selfcheck.is_exact(self.forward, tables, texts)
            if not self.exact and self._lone_rows:
                self._lone_rows = False
                self.exact = selfcheck.is_exact(self.forward, tables, texts)
            self.not_exact_because = "" if self.exact else "logits vary with the batch"
        except NotExact as error:
            self._give_up(str(error))
        if not self.exact:
            log.warning("exact mode cannot be had: %s", self.not_exact_because)

    def _give_up(self, reason: str) -> None:
        self.not_exact_because = reason
        log.warning("exact mode cannot be had: %s", reason)


def _eager_logits(loaded: LoadedModel, text: list[int]) -> torch.Tensor:
    """The last position's logits [vocab] from the model's own attention."""
    tokens = torch.tensor([text], device=loaded.device)
    positions = torch.arange(len(text), device=loaded.device)[None]
    return run_network(loaded.network, tokens, positions, positions[0, -1:], None)[0]


def _cache(
    config: EngineConfig, loaded: LoadedModel, layout: KvLayout
) -> tuple[KvCache, ModelDescription]:
    """The pool's memory, and the model's description with what fits into it."""
    model = loaded.description
    block_bytes = layout.bytes_per_position * config.block_size
    wanted = config.max_batch * -(-model.max_model_len // config.block_size)
    num_blocks = config.num_blocks or min(wanted, config.kv_memory_bytes // block_bytes)
    if num_blocks * config.block_size < min(model.max_model_len, 128):
        raise InvalidArgument(
            f"a block of {config.block_size} positions takes {block_bytes} bytes: "
            f"{num_blocks} of them are too few",
            field="num_blocks" if config.num_blocks else "kv_memory_bytes",
        )
    kernel = choose_kernel(config.attention, loaded.device, layout.key_size, layout.value_size)
    even = kernel is flash_cpu
    cache = KvCache(layout, num_blocks, config.block_size, loaded.device, even=even)
    fits = min(model.max_model_len, num_blocks * config.block_size)
    return cache, ModelDescription(
        name=model.name,
        digest=model.digest,
        max_model_len=fits,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        tokenizer_digest=model.tokenizer_digest,
    )
