"""TorchRunner, the ModelRunner port over a transformers model."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from batonlm.core.errors import Internal, InvalidArgument, NotFound
from batonlm.core.handover.leaf_hash import WORD_BYTES
from batonlm.core.kvcache.block_pool import Extents
from batonlm.core.request.model import SCALED, AdapterDescription, ModelDescription
from batonlm.core.request.request import SamplingParams
from batonlm.core.scheduler.plan import (
    Chunk,
    KvPayload,
    SampleRow,
    StagingMemory,
    StepPlan,
    StepResult,
)
from batonlm.engine import selfcheck
from batonlm.engine.adapters.store import Adapters
from batonlm.engine.attention.backends import open_backend, runs_triton
from batonlm.engine.attention.interface import AttentionContext, Backend, ForwardPass
from batonlm.engine.attention.own import FAULTS, OwnBackend, run_own
from batonlm.engine.checkpoint import UnsupportedModel
from batonlm.engine.config import EngineConfig
from batonlm.engine.device import choose_device, pin
from batonlm.engine.drafting import TorchDraftModel, check_fits, draft_config, refused
from batonlm.engine.exact import NotExact, confine, cuts
from batonlm.engine.footprint import allocate, free_bytes, largest_step, size_pool, total_bytes
from batonlm.engine.fused.decoder import Decoder, Operators, PlainOperators, take_layers
from batonlm.engine.fused.recipe import NotCovered, read_recipe
from batonlm.engine.graphs import DecodeGraphs, NotRecordable, cuda_recorder
from batonlm.engine.heads.model import HeadModel
from batonlm.engine.kept import rounds
from batonlm.engine.kv.cache import DTYPES, KvMemory, is_lossless
from batonlm.engine.kv.extents import Moved, check_plan
from batonlm.engine.kv.staging import DeviceStaging
from batonlm.engine.kv.swap import SwapMemory
from batonlm.engine.linear import loosen, swap
from batonlm.engine.loader import (
    AttentionShape,
    LoadedModel,
    Progress,
    attach,
    load,
    run_network,
)
from batonlm.engine.memory import checked_blocks, give_back_freed
from batonlm.engine.sampler import LastTokens, SampledStep, UnsampledStep
from batonlm.engine.sampler_rows import TokenCounts

log = logging.getLogger(__name__)


class Alone:
    """What a runner has to do with others that compute the same network: nothing.

    Ranks have `ranks.rank.Together` in its place. All of them call the same methods in the same
    order, so what they decide alike is decided by `least` and `common`.
    """

    samples = True
    """Whether this runner draws the tokens of its steps."""

    def last_tokens(self, device: torch.device) -> LastTokens:
        return LastTokens(device)

    def least(self, number: int) -> int:
        """The least of all runners' numbers."""
        return number

    def common(self, numbers: frozenset[int]) -> frozenset[int]:
        """What all runners' sets of numbers have in common."""
        return numbers


class TorchRunner:
    """Puts steps in the device's queue; `collect` waits for the oldest one's tokens.

    On a GPU `submit` waits for nothing, so that the next step is prepared while one runs; on a CPU
    it computes. Made by `load`. Not thread-safe; called by the engine thread only, but for copies
    beside steps.
    """

    def __init__(
        self,
        network: nn.Module,
        model: ModelDescription,
        backend: Backend | OwnBackend,
        swap_memory: SwapMemory,
        peers: Alone | None = None,
    ):
        self.model = model
        self.memory: KvMemory = backend.memory
        """The block pool's."""
        self.layout = self.memory.layout
        self.num_blocks = self.memory.num_blocks
        self.block_size = self.memory.block_size
        self.num_swap_blocks = swap_memory.num_blocks
        self.on_device = self.memory.device.type == "cuda"
        self.depth = 2 if self.on_device else 1
        self.copies_beside_steps = True
        self.not_exact_because = "exact mode is off"
        """Why a row's logits are not bit-equal whatever else is in the batch, however it is cut,
        and wherever its KV came from; "" when they are."""
        self._network = network
        self._backend = backend
        self._swap = swap_memory
        self._peers = peers or Alone()
        self._last = self._peers.last_tokens(self.memory.device)
        self._counts = TokenCounts(self.memory.device)
        self._graphs: DecodeGraphs | None = None
        self._adapters: Adapters | None = None
        self._adapted_graphs: DecodeGraphs | None = None
        """Of steps with adapters."""
        self._row_counts: frozenset[int] = frozenset()
        self._running: deque[tuple[SampledStep | UnsampledStep, Moved]] = deque()
        self.draft_model: TorchDraftModel | HeadModel | None = None
        """What drafts tokens."""
        self._drafting: TorchRunner | None = None
        """Of a small model that does, over KV of its own in the same blocks."""
        self._head: HeadModel | None = None
        """The model's own head, where that does."""

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
        free = free_bytes(choose_device(config.device))
        runner = cls.over(load(config, progress), config, free)
        if config.draft_model:
            runner._take_draft_model(config)
        return runner

    @classmethod
    @torch.inference_mode()
    def over(
        cls, loaded: LoadedModel, config: EngineConfig, free: int, peers: Alone | None = None
    ) -> TorchRunner:
        """Like `load`, of a model that is in memory. free: bytes of its device before it was."""
        peers = peers or Alone()
        if config.exact is None:
            config = replace(config, exact=loaded.device.type == "cpu")
        texts = selfcheck.prompts(loaded.description.vocab_size, loaded.description.max_model_len)
        expected = [_prompt_logits(loaded, text, None) for text in texts]
        shape = attach(loaded, config.kv_wire_dtype, config.kv_cache_dtype)
        rounding = 0.0
        if shape.kept in SCALED:
            run = partial(_prompt_logits, loaded)
            kept = DTYPES[shape.kept]
            expected, rounding = selfcheck.with_scaled_kv(run, texts, expected, kept)
        network = _decoder(config, loaded, shape)
        memory = size_pool(
            config,
            loaded,
            shape,
            free=free,
            total=total_bytes(loaded.device),
            peak=lambda: _peak(config, loaded, network, shape, peers),
        )
        memory = replace(memory, num_blocks=peers.least(memory.num_blocks))
        log.info("memory: %s", "; ".join(f"{name} {text}" for name, text in memory.lines()))
        model = replace(loaded.description, max_model_len=memory.max_model_len)
        backend = allocate(memory, lambda: open_backend(config, loaded, shape, memory.num_blocks))
        swap_memory = SwapMemory(
            backend.memory,
            host_bytes=config.swap_host_bytes,
            disk_bytes=config.swap_disk_bytes,
            folder=config.swap_folder,
        )
        runner = cls(network, model, backend, swap_memory, peers)
        if config.heads:
            runner._head = runner.draft_model = HeadModel(config, loaded, shape)
        runner._prepare(config, loaded, texts, expected, rounding)
        if config.adapter_memory_bytes:
            runner._take_adapters(config, loaded, texts[0])
        if not is_lossless(shape.kept, shape.layout.dtype):
            runner.not_exact_because = (
                f"KV is kept as {shape.kept} and handed over as {shape.layout.dtype}"
            )
            log.warning("%s: tokens after a hand-over may differ", runner.not_exact_because)
        # Weights were packed one by one: malloc keeps most of what the unpacked ones took.
        give_back_freed()
        return runner

    @property
    def exact(self) -> bool:
        return not self.not_exact_because

    @property
    def stepwise(self) -> bool:
        """Whether a state is taken up by single positions only."""
        return isinstance(self._backend, OwnBackend) and self._backend.stepwise

    @torch.inference_mode()
    def load_adapter(self, folder: Path) -> AdapterDescription:
        if self._adapters is None:
            raise InvalidArgument("this worker keeps no memory for adapters", field="adapter")
        return self._adapters.load(folder)

    def unload_adapter(self, digest: str) -> None:
        if self._adapters is None:
            raise NotFound("This worker has no adapters.", field="adapter")
        self._adapters.unload(digest)

    def submit(self, plan: StepPlan) -> None:
        check_plan(plan, self)
        moved = self._swap.move(plan)
        if self._head is not None:
            self._head.clear()
        with torch.inference_mode():
            logits = self.forward(plan)
            step: SampledStep | UnsampledStep = UnsampledStep(plan)
            if self._peers.samples:
                step = SampledStep(plan, logits, self._last, self._counts)
        if self._head is not None:
            self._head.note(plan)
        self._running.append((step, moved))

    def collect(self) -> StepResult:
        if not self._running:
            raise Internal("no step was submitted")
        step, moved = self._running.popleft()
        return moved.applied_to(step.result())

    def staging_memory(self, num_buffers: int, buffer_bytes: int) -> StagingMemory | None:
        # The device's digest is of whole words.
        whole = self.layout.bytes_per_position % WORD_BYTES == 0
        if not self.on_device or not whole:
            return None
        return DeviceStaging(self.memory.device, num_buffers * buffer_bytes)

    def share(self, fd: int, address: int, num_bytes: int) -> Callable[[], None]:
        return pin(address, num_bytes) if self.on_device else lambda: None

    @torch.inference_mode()
    def pack(self, extents: Extents, first_position: int, count: int, out: KvPayload) -> None:
        self.memory.pack(extents, first_position, count, out)

    @torch.inference_mode()
    def unpack(self, extents: Extents, first_position: int, count: int, payload: KvPayload) -> None:
        self.memory.unpack(extents, first_position, count, payload)

    def close(self) -> None:
        """Drops weights and KV; the runner is not used after."""
        self._running.clear()
        self._swap.close()
        # A second call finds nothing left.
        drafting: TorchRunner | None = self.__dict__.pop("_drafting", None)
        if drafting is not None:
            drafting.close()
        for name in (
            *("_graphs", "_adapted_graphs", "_adapters"),
            *("_network", "_backend", "memory"),
            *("draft_model", "_head"),
        ):
            self.__dict__.pop(name, None)

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> torch.Tensor:
        """Does a plan's copies and forward pass: logits [wanted rows, vocab].

        They hold until the next call.
        """
        for copy in plan.copies:
            self.memory.copy(copy)
        if not plan.chunks:
            # On the device, so that collecting the step waits for its copies.
            return torch.empty(0, self.model.vocab_size, device=self.memory.device)
        if not any(chunk.adapter for chunk in plan.chunks):
            if self._graphs is not None and self._graphs.fits(plan):
                return self._graphs.run(plan, self._last)
            return self._compute(plan)
        if self._adapters is None:
            raise Internal("a step has adapters, and none were loaded")
        return self._adapters.forward(plan, self._compute_adapted)

    def _compute_adapted(self, plan: StepPlan) -> torch.Tensor:
        if self._adapted_graphs is not None and self._adapted_graphs.fits(plan):
            return self._adapted_graphs.run(plan, self._last)
        return self._compute(plan)

    def _compute(self, plan: StepPlan) -> torch.Tensor:
        if isinstance(self._backend, OwnBackend):
            return self._backend.forward(self._network, plan, self._last)
        inputs = self._backend.begin(plan)
        self._last.fill(plan, inputs.token_ids[0])
        return run_network(self._network, self._padded(inputs))

    def _prepare(
        self,
        config: EngineConfig,
        loaded: LoadedModel,
        texts: list[list[int]],
        expected: list[torch.Tensor],
        rounding: float,
    ) -> None:
        """Packs the weights, checks against the model's own attention, and settles exactness.

        loaded: its network takes the place of a fused decoder that does not give its logits.

        What cannot be made exact stays as it is: right, but not bit-equal. Weights that packing
        rounds are checked before, because after it logits are the model's no more.
        """
        states = self.layout.state_positions
        blocks = checked_blocks(self.model.max_model_len, self.block_size, states)
        tables: list[Extents] = [((i * blocks, blocks),) for i in range(len(texts))]
        check = selfcheck.SelfCheck(self.forward, tables, texts, expected, rounding)
        own, quantize, max_batch = loaded.network, loaded.quantize, config.max_batch
        on_gpu = self.on_device
        # A GPU's libraries have no packed weights; only exactness and fp8 need layers of our own.
        packs = config.exact or not on_gpu or quantize == "fp8"
        checked = False
        if isinstance(self._backend, OwnBackend):
            self.not_exact_because = "the model attends by code of its own"
            check.parity()
            check.decode()
            if states:
                check.states(self.memory.copy, self.block_size)
            return
        if self._network is not own:
            right = True
            try:
                # What is packed is checked again, and then in full.
                (check.packed_parity if packs else check.parity)()
            except UnsupportedModel as error:
                log.error("the fused decoder is wrong here, and is not used: %s", error)
                right = False
            if self._peers.least(right):
                checked = not packs
                take_layers(own)
            else:
                self._network = own
        changes = quantize != "none" or rounds(self._network)
        if changes:
            check.parity()
        if config.exact:
            because = self._unless_exact(
                lambda: self._pack_weights(quantize, max_batch, exact=True)
            )
            if not because:
                self._row_counts = self._peers.common(self._row_counts)
                because = self._unless_exact(lambda: confine(self._network, check.packed))
            self.not_exact_because = because or self._unless_exact(check.exact)
            if self.not_exact_because:
                self._row_counts = frozenset()
                log.warning("exact mode cannot be had: %s", self.not_exact_because)
                loosen(self._network, quantize=quantize, max_batch=max_batch)
        else:
            if on_gpu:
                self.not_exact_because = "a GPU's products depend on how many rows they have"
            if packs:
                self._pack_weights(quantize, max_batch, exact=False)
                self._row_counts = self._peers.common(self._row_counts)
        if not changes and not checked:
            check.parity()
        records = config.graphs and on_gpu
        if self._head is not None:
            self._head.watch(self._network, max_batch if records else 0)
        if records:
            self._record(max_batch, expected[0].shape[-1])
            if not self._peers.least(self._graphs is not None):
                self._graphs = None
            if self._graphs is not None:
                check.decode()
        # Only what was used: clearing the rest would take its memory before anyone needs it.
        for table in tables:
            self._backend.forget(table)

    def _take_adapters(self, config: EngineConfig, loaded: LoadedModel, text: list[int]) -> None:
        """Has layers add what adapters do. text: a prompt for finding these layers."""
        states = self.layout.state_positions
        blocks = checked_blocks(self.model.max_model_len, self.block_size, states)
        table: Extents = ((0, blocks),)
        row = SampleRow(0, 0, 0, SamplingParams(temperature=0.0))
        self._adapters = Adapters(
            self._network,
            lambda: self.forward(StepPlan(0, (Chunk(0, text, 0, table, (row,)),))),
            config,
            self.memory.device,
            loaded.network.dtype,  # type: ignore[arg-type]
            exact=self.exact,
            alone=isinstance(self._backend, OwnBackend),
        )
        self._backend.forget(table)
        forward = self._adapters.as_recorded(partial(run_network, self._network))
        if self._graphs is not None and forward is not None:
            self._adapted_graphs = self._recorded(partial(self._graphs.beside, forward))

    def _take_draft_model(self, config: EngineConfig) -> None:
        """Raises InvalidArgument, naming draft_model, for one that cannot draft for this model."""
        log.info("draft model: %s", config.draft_model)
        try:
            own = replace(draft_config(config), num_blocks=self.num_blocks)
            self._drafting = TorchRunner.load(own)
            check_fits(self._drafting.model, self.model)
        except InvalidArgument as error:
            raise refused(error) from error
        draft = self._drafting.model
        if draft.max_model_len < self.model.max_model_len:
            log.warning(
                "the draft model has %d positions: beyond, sequences are not drafted by it",
                draft.max_model_len,
            )
        recorded = self._drafting._graphs is not None
        forward = self._drafting.forward
        self.draft_model = TorchDraftModel(forward, draft, self.model, recorded=recorded)

    def _pack_weights(self, quantize: str, max_batch: int, *, exact: bool) -> None:
        """Raises NotExact."""
        counts = swap(self._network, exact=exact, quantize=quantize, max_batch=max_batch)
        self._row_counts = frozenset() if self.on_device else counts

    def _unless_exact(self, attempt: Callable[[], object]) -> str:
        """Why exactness cannot be had after `attempt`, of this runner or of its peers; or ""."""
        because = ""
        try:
            attempt()
        except NotExact as error:
            because = str(error)
        if self._peers.least(not because):
            return ""
        return because or "another rank's logits vary with what else is in the batch"

    def _record(self, max_rows: int, width: int) -> None:
        """Records decode steps where the backend can; a network that cannot runs as usual. width:
        logits of a row.

        Raises InvalidArgument where recording failed in a torch that cannot go on after it.
        """
        fill = self._backend.decode_buffers(max_rows)
        if fill is None:
            return
        memory = self.memory
        shape = max_rows, width
        dtype = next(self._network.parameters()).dtype
        logits = torch.empty(shape, dtype=dtype, device=memory.device)
        run = partial(run_network, self._network)
        self._graphs = self._recorded(lambda: DecodeGraphs(run, fill, logits, cuda_recorder()))

    def _recorded(self, make: Callable[[], DecodeGraphs]) -> DecodeGraphs | None:
        """What `make` records; None where it cannot. Raises as `_record`."""
        try:
            return make()
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            # pytorch#180395: before, the allocator believed for ever that a recording was going on.
            if not isinstance(error, NotRecordable) and torch.__version__ < "2.13":
                raise InvalidArgument(
                    f"recording CUDA graphs failed ({reason}), after which torch "
                    f"{torch.__version__} cannot go on: switch them off, or use torch 2.13",
                    field="graphs",
                ) from error
            log.warning("decode runs without CUDA graphs: %s", reason)
            return None

    def _padded(self, inputs: ForwardPass) -> ForwardPass:
        """With as many rows as all layers compute as they are, so that none of them has to pad."""
        rows = inputs.token_ids.shape[1]
        if not self._row_counts or rows in self._row_counts:
            return inputs
        padding = (0, sum(cuts(rows, self._row_counts)) - rows)
        return replace(
            inputs,
            token_ids=functional.pad(inputs.token_ids, padding),
            positions=functional.pad(inputs.positions, padding),
        )


def _prompt_logits(
    loaded: LoadedModel, text: list[int], context: AttentionContext | None
) -> torch.Tensor:
    """All positions' logits [T, vocab], with this attention or, where it is None, the model's
    own."""
    tokens = torch.tensor([text], device=loaded.device)
    positions = torch.arange(len(text), device=loaded.device)
    if context is None:
        try:
            return run_own(loaded.network, tokens, 0, positions, None)
        except FAULTS as error:
            name = loaded.settings.model_type
            raise UnsupportedModel(f"{name}: it does not run over tokens alone") from error
    return run_network(loaded.network, ForwardPass(tokens, positions[None], positions, context))


def _decoder(config: EngineConfig, loaded: LoadedModel, shape: AttentionShape) -> nn.Module:
    """The fused decoder, or transformers' own where that is configured or no recipe covers it."""
    if config.decoder == "transformers" or shape.own is not None:
        return loaded.network
    try:
        recipe = read_recipe(loaded.network, shape.layers)
    except NotCovered as reason:
        log.info("decoder: transformers' own; %s", reason)
        return loaded.network
    log.info("decoder: fused")
    operators: Operators = PlainOperators(recipe)
    if runs_triton(config.attention, loaded.device):
        # Machines without a GPU need not have Triton.
        from batonlm.engine.fused.kernels import TritonOperators

        operators = TritonOperators(recipe, exact=bool(config.exact))
    return Decoder(loaded.network, recipe, operators).eval()


def _peak(
    config: EngineConfig,
    loaded: LoadedModel,
    network: nn.Module,
    shape: AttentionShape,
    peers: Alone,
) -> int:
    """Bytes that the largest step takes at most on a GPU, beside weights and KV; runs it."""
    states = shape.layout.state_positions
    step = largest_step(config, loaded.description.max_model_len, states)
    blocks = sum(count for chunk in step.chunks for _, count in chunk.extents)
    backend = open_backend(replace(config, exact=False), loaded, shape, blocks)
    trial = TorchRunner(network, loaded.description, backend, SwapMemory(backend.memory))
    torch.cuda.reset_peak_memory_stats(loaded.device)
    before = torch.cuda.memory_allocated(loaded.device)
    logits = trial.forward(step)
    if peers.samples:
        SampledStep(step, logits, trial._last, trial._counts)
    return torch.cuda.max_memory_allocated(loaded.device) - before
