"""One rank: a TorchRunner over its heads that does what messages say.

Ranks run the same messages in the same order, which is all the order their sums need.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch

from baton.core.errors import BatonError, InvalidArgument
from baton.engine.config import EngineConfig
from baton.engine.device import choose_device
from baton.engine.exact import MOST
from baton.engine.footprint import free_bytes
from baton.engine.kv.cache import KeysAndValues, KvCache, as_tensor, keys_and_values
from baton.engine.loader import load
from baton.engine.ranks.runner import (
    FIELD,
    Answer,
    Open,
    Opened,
    Refused,
    Request,
    Step,
    Stepped,
    Transfer,
    Transferred,
    encode,
    to_request,
)
from baton.engine.ranks.shards import Group, shard_builder
from baton.engine.ranks.shared import MemoryFile
from baton.engine.runner import TorchRunner

log = logging.getLogger(__name__)


class Rank:
    """store: see `Group`. `answer` is called by one thread at a time; the first message is Open."""

    def __init__(self, rank: int, size: int, store: Path):
        self._rank, self._size, self._store = rank, size, store
        # Two: the ring, and what payloads that lie elsewhere are copied through.
        self._memory = lru_cache(maxsize=2)(MemoryFile.map)

    def answer(self, request: bytes) -> bytes:
        """Serves a request. An error is an answer too; then the ranks are out of step."""
        return encode(self._try(to_request(request)))

    def _try(self, request: Request) -> Answer:
        try:
            with torch.inference_mode():
                return self._do(request)
        except InvalidArgument as error:
            return Refused(error.message, error.field or FIELD)
        except BatonError as error:
            return Refused(error.message)
        except Exception:
            log.exception("rank %d failed", self._rank)
            return Refused(f"rank {self._rank} failed")

    def _do(self, request: Request) -> Answer:
        match request:
            case Open(config):
                return self._open(config)
            case Step(plan):
                self._runner.submit(plan)
                return Stepped(self._runner.collect())
            case Transfer(extents, first, packing=packing):
                wire = self._own_heads(request)
                self._cache.transfer(extents, first, wire, packing=packing)
                return Transferred()

    def _open(self, config: EngineConfig) -> Opened:
        device = choose_device(config.device)
        if device.type != "cpu":
            raise InvalidArgument("several ranks compute on CPUs only", field=FIELD)
        if config.threads:
            torch.set_num_threads(config.threads)
        group = Group(self._rank, self._size, self._store)
        # Read before any of them takes some, and the same for all: so are their pools.
        free = group.least(free_bytes(device)) // self._size
        loaded = load(config, build=shard_builder(group))
        self._runner = TorchRunner.over(
            loaded, config, free, agree=lambda counts: group.common(counts, MOST)
        )
        memory, text = self._runner.memory, loaded.network.config.get_text_config()  # type: ignore[union-attr,operator]
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        if not isinstance(memory, KvCache) or memory.layout.num_kv_heads * self._size != heads:
            raise InvalidArgument("its plan does not split attention by heads", field=FIELD)
        self._cache = memory
        self._whole_layout = replace(memory.layout, num_kv_heads=heads)
        return Opened(
            self._runner.model,
            memory.layout,
            memory.num_blocks,
            self._runner.not_exact_because,
        )

    def _own_heads(self, request: Transfer) -> KeysAndValues:
        """This rank's part of a payload over all heads, as views of its bytes."""
        layout, place = self._whole_layout, request.place
        payload = memoryview(self._memory(place.file))[place.offset : place.offset + place.size]
        whole = keys_and_values(layout, request.count, as_tensor(layout, request.count, payload))
        own = self._cache.layout.num_kv_heads
        keys, values = (part.narrow(2, self._rank * own, own) for part in whole)
        return keys, values
