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

from batonlm.core.errors import BatonError, InvalidArgument
from batonlm.core.request.model import KvLayout
from batonlm.core.scheduler.plan import PENDING, StepPlan
from batonlm.engine.config import EngineConfig
from batonlm.engine.device import choose_device
from batonlm.engine.exact import MOST
from batonlm.engine.footprint import foresee, free_bytes, total_bytes
from batonlm.engine.kv.cache import KvCache, Parts, as_tensor, parts_of
from batonlm.engine.loader import load
from batonlm.engine.ranks.group import LOOPBACK, Group, Store, part_of
from batonlm.engine.ranks.link import Link, LinkLost
from batonlm.engine.ranks.runner import (
    FIELD,
    LOAD_S,
    STEP_S,
    Answer,
    Loading,
    Open,
    Opened,
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
from batonlm.engine.ranks.shared import MemoryFile
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
        self._memory = lru_cache(maxsize=2)(MemoryFile.map)
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
                self._transfer(request)
                return Transferred()

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
        self._loaded.set()
        return Opened(
            self._runner.model,
            self._layout,
            self._runner.num_blocks,
            self._runner.num_swap_blocks,
            self._runner.not_exact_because,
        )

    def _group(self, name: str, rank: int, size: int, device: torch.device) -> Group:
        """Kept as long as the rank: one that is refused must not look dead to the others, whose
        complaints would come first."""
        group = Group(part_of(self._store, name), rank, size, device, self._host)
        self._groups.append(group)
        return group

    def _whole_layout(self, settings: object) -> KvLayout:
        """Of payloads over all heads and layers; and which of them are this rank's. Raises
        InvalidArgument when attention is not split as planned."""
        text = settings.get_text_config()  # type: ignore[attr-defined]
        own, place = self._runner.layout, self._place
        layers = int(text.num_hidden_layers)
        latent = not own.value_size
        # Every rank keeps the latents, and has heads that read them.
        self._heads = (0, 1) if latent else kv_heads_of(text, place)
        self._layers = layers_of(layers, place)
        planned = replace(
            own,
            num_kv_heads=self._heads[1] - self._heads[0],
            num_layers=self._layers[1] - self._layers[0],
        )
        if own != planned:
            raise InvalidArgument("its plan does not split attention by heads", field=FIELD)
        heads = int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
        return replace(own, num_layers=layers, num_kv_heads=1 if latent else heads)

    def _transfer(self, request: Transfer) -> None:
        self._loaded.wait(LOAD_S)
        place, count = request.place, request.count
        payload = memoryview(self._memory(place.file))[place.offset : place.offset + place.size]
        own = self._own_part(as_tensor(self._layout, count, payload), count)
        memory, layout = self._runner.memory, self._runner.layout
        if isinstance(memory, KvCache):
            memory.transfer(request.extents, request.first_position, own, packing=request.packing)
            return
        # On a GPU a rank's part crosses in one piece.
        whole = bytearray(count * layout.bytes_per_position)
        parts = parts_of(layout, count, as_tensor(layout, count, memoryview(whole)))
        if request.packing:
            memory.pack(request.extents, request.first_position, count, memoryview(whole))
        for here, there in zip(parts, own, strict=True):
            (there if request.packing else here).copy_(here if request.packing else there)
        if not request.packing:
            memory.unpack(request.extents, request.first_position, count, memoryview(whole))

    def _own_part(self, payload: torch.Tensor, count: int) -> Parts:
        """This rank's layers and heads of a payload over all, as views of it."""
        first_layer, last_layer = self._layers
        first_head, last_head = self._heads
        return tuple(
            part[first_layer:last_layer, :, first_head:last_head]
            for part in parts_of(self._layout, count, payload)
        )


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
