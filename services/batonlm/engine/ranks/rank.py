"""One rank: a TorchRunner over its part of the network that does what messages say.

Ranks run the same steps in the same order, which is all the order that what they exchange needs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache

import torch

from batonlm.core.errors import BatonError, Internal, InvalidArgument, Unavailable
from batonlm.core.request.model import KvLayout
from batonlm.core.scheduler.plan import PENDING, StepPlan
from batonlm.engine.config import EngineConfig
from batonlm.engine.cuda import OpenedMemory
from batonlm.engine.device import choose_device
from batonlm.engine.exact import MOST
from batonlm.engine.footprint import foresee, free_bytes, total_bytes
from batonlm.engine.kv.cache import Heads, as_tensor
from batonlm.engine.kv.staging import LeafHasher, tensor_at
from batonlm.engine.loader import load
from batonlm.engine.ranks.group import LOOPBACK, Group, Store, part_of
from batonlm.engine.ranks.link import Link, LinkLost
from batonlm.engine.ranks.runner import (
    FIELD,
    LOAD_S,
    STEP_S,
    Answer,
    HashLeaves,
    LeavesHashed,
    Loading,
    MemoryOpened,
    Open,
    Opened,
    OpenMemory,
    Place,
    RankRefused,
    Request,
    Step,
    Stepped,
    Transfer,
    Transferred,
    encode,
    layers_of,
    sampler,
    to_request,
)
from batonlm.engine.ranks.shards import cutting, kv_heads_of, shard_builder
from batonlm.engine.ranks.shared import GpuMemory, MemoryFile, SharedPlace
from batonlm.engine.runner import Alone, TorchRunner
from batonlm.engine.sampler import LastTokens

log = logging.getLogger(__name__)

_PROGRESS_S = 0.2


class PassedOnTokens(LastTokens):
    """The sampling rank's last tokens, which it passes on to the others with each step that needs
    them: the token ids of that step go over the world's group, whole."""

    def __init__(self, device: torch.device, place: Place, world: Group):
        super().__init__(device, *(() if place.samples else (1,)))
        self._samples, self._source = place.samples, sampler(place.tensor, place.stages)
        self._world = world

    def fill(self, plan: StepPlan, token_ids: torch.Tensor) -> None:
        if not any(chunk.token_ids[0] == PENDING for chunk in plan.chunks):
            return
        if self._samples:
            super().fill(plan, token_ids)
        self._world.pass_on(token_ids, self._source)


class Together(Alone):
    """One of several runners that compute a network together."""

    def __init__(self, place: Place, world: Group):
        self.samples = place.samples
        self._place, self._world = place, world

    def last_tokens(self, device: torch.device) -> LastTokens:
        return PassedOnTokens(device, self._place, self._world)

    def least(self, number: int) -> int:
        return self._world.least(number)

    def common(self, numbers: frozenset[int]) -> frozenset[int]:
        return self._world.common(numbers, MOST)


class Rank:
    """store: through which the ranks find each other. neighbours: ranks on this machine, this one
    among them, which share its memory. host: this machine's address for the other ranks."""

    def __init__(
        self,
        place: Place,
        store: Store,
        *,
        neighbours: int,
        host: str = LOOPBACK,
    ):
        self._place, self._store, self._host = place, store, host
        self._neighbours = neighbours
        self._groups: list[Group] = []
        # Two: the staging pool, and what payloads that lie elsewhere are copied through.
        self._files = lru_cache(maxsize=2)(_mapped)
        self._opened: dict[GpuMemory, tuple[OpenedMemory, torch.Tensor]] = {}
        self._loaded = threading.Event()

    def serve(self, steps: Link, copies: Link) -> None:
        """Answers what comes over both links until the worker closes them."""
        copier = threading.Thread(target=self._serve, args=(copies,), name="copies", daemon=True)
        copier.start()
        self._serve(steps)
        copier.join()
        if self._loaded.is_set():
            self._runner.close()

    def _serve(self, link: Link) -> None:
        def tell(answer: Answer) -> None:
            link.send(encode(answer), STEP_S)

        with suppress(LinkLost):
            while True:
                tell(self._try(to_request(link.receive(None)), tell))

    def _try(self, request: Request, tell: Callable[[Answer], None]) -> Answer:
        """An error is an answer, too; then the ranks are out of step."""
        try:
            with torch.inference_mode():
                return self._do(request, tell)
        except InvalidArgument as error:
            return RankRefused(error.message, error.field or FIELD)
        except BatonError as error:
            return RankRefused(error.message)
        except LinkLost:
            raise
        except Exception:
            log.exception("rank %d failed", self._place.rank)
            return RankRefused(f"rank {self._place.rank} failed")

    def _do(self, request: Request, tell: Callable[[Answer], None]) -> Answer:
        match request:
            case Open(config):
                return self._open(config, tell)
            case Step(plan):
                self._runner.submit(plan)
                return Stepped(self._runner.collect())
            case Transfer():
                self._loaded.wait(LOAD_S)
                self._transfer(request)
                return Transferred()
            case OpenMemory(memories):
                self._loaded.wait(LOAD_S)
                return MemoryOpened(self._open_memory(memories))
            case HashLeaves(place, points):
                return LeavesHashed(self._hashes(self._bytes(place), points))

    def _open(self, config: EngineConfig, tell: Callable[[Answer], None]) -> Opened:
        place = self._place
        device = choose_device(config.device)
        if config.threads:
            torch.set_num_threads(config.threads)
        world = self._group("world", place.rank, place.size, device)
        stage = self._group(f"stage{place.stage}", place.part, place.tensor, device)
        # Read before any of them takes some, and the same for all: so are their pools.
        sharing = self._neighbours if device.type == "cpu" else 1
        free = world.least(free_bytes(device) // sharing)
        # What does not split or fit is refused before gigabytes are read.
        foresee(config, free, total=total_bytes(device), cut=cutting(place))
        loaded = load(
            config, _seldom(tell), build=shard_builder(place, stage, world, device), device=device
        )
        self._runner = TorchRunner.over(loaded, config, free, Together(place, world))
        self._layout = self._whole_layout(loaded.settings)
        self._hashes = LeafHasher(device)
        self._loaded.set()
        return Opened(
            self._runner.model,
            self._layout,
            self._runner.num_blocks,
            self._runner.num_swap_blocks,
            self._runner.not_exact_because,
            self._runner.on_device,
        )

    def _group(self, name: str, rank: int, size: int, device: torch.device) -> Group:
        """Kept as long as the rank: one that is refused must not look dead to the others, whose
        complaints would come first."""
        group = Group(part_of(self._store, name), rank, size, device, self._host)
        self._groups.append(group)
        return group

    def _whole_layout(self, settings: object) -> KvLayout:
        """Of payloads over all heads and layers; notes which of them are this rank's. Raises
        InvalidArgument when attention is not split as planned."""
        text = settings.get_text_config()  # type: ignore[attr-defined]
        own, place = self._runner.layout, self._place
        layers = int(text.num_hidden_layers)
        latent = not own.value_size
        # Every rank keeps the latents, and has heads that read them.
        self._first_head, past_head = (0, 1) if latent else kv_heads_of(text, place)
        self._layers = layers_of(layers, place)
        planned = replace(
            own,
            num_kv_heads=past_head - self._first_head,
            num_layers=self._layers[1] - self._layers[0],
        )
        if own != planned:
            raise InvalidArgument("its plan does not split attention by heads", field=FIELD)
        heads = int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
        return replace(own, num_layers=layers, num_kv_heads=1 if latent else heads)

    def _transfer(self, request: Transfer) -> None:
        count, (first, last) = request.count, self._layers
        payload = as_tensor(self._layout, count, self._bytes(request.place))
        own = payload.view(self._layout.num_layers, -1)[first:last].view(-1)
        self._runner.memory.transfer(
            request.extents,
            request.first_position,
            count,
            own,
            Heads(self._first_head, self._layout.num_kv_heads),
            packing=request.packing,
        )

    def _bytes(self, place: SharedPlace) -> torch.Tensor:
        """Shared memory as uint8, on this rank's device where it is a GPU's."""
        if isinstance(place.file, MemoryFile):
            memory = self._files(place.file)
        elif place.file in self._opened:
            memory = self._opened[place.file][1]
        else:
            raise Internal("a payload lies in memory that is not mapped")
        return memory.narrow(0, place.offset, place.nbytes)

    def _open_memory(self, memories: tuple[GpuMemory, ...]) -> str:
        """Why it cannot map all of them, or ""."""
        for opened, _ in self._opened.values():
            opened.close()
        self._opened.clear()
        device = self._runner.memory.device
        try:
            for memory in memories:
                opened = OpenedMemory(device.index or 0, memory.handle)
                there = tensor_at(opened.address, memory.num_bytes, device)
                self._opened[memory] = opened, there
        except Unavailable as error:
            return f"rank {self._place.rank} cannot reach rank {memory.rank}'s GPU: {error.message}"
        return ""


def _mapped(file: MemoryFile) -> torch.Tensor:
    return torch.frombuffer(file.map(), dtype=torch.uint8)


def _seldom(tell: Callable[[Answer], None]) -> Callable[[int, int], None]:
    """Reports how far loading has come, a few times a second."""
    last = 0.0

    def report(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _PROGRESS_S:
            last = now
            tell(Loading(done, total))

    return report
