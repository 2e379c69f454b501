"""All pools of one router, with the clients it needs to each role."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict

import grpc

from baton.core.handover.fit import refusal
from baton.core.request.model import AnswerFormat, ModelDescription, WorkerIdentity
from baton.core.routing.load import WorkerDescription
from baton.core.routing.model_choice import model_for, models_of, replacement_model
from baton.core.routing.prefix_index import MAX_ENTRIES, PrefixIndex
from baton.core.routing.routing import Decision, FilterReason
from baton.router.workers.broadcast import Broadcast
from baton.router.workers.decode_session import DecodeSession
from baton.router.workers.detokenizer_session import DetokenizerSession
from baton.router.workers.discovery import Discovery
from baton.router.workers.pools import Pool
from baton.router.workers.prefill_client import PrefillClient
from baton.router.workers.tokenizer_client import TokenizerClient
from baton.rpc.awake import AwakeClock
from baton.rpc.channels import Channels

# Tells the log, once a pair, which workers cannot be paired and why; decides nothing.

log = logging.getLogger(__name__)

MAX_TOLD = 4096


class IncompatiblePairs:
    """An operator's mistake that costs no request: decode prefills by itself, only slower."""

    def __init__(self) -> None:
        self._told: OrderedDict[tuple[str, str], None] = OrderedDict()

    def note(self, decision: Decision) -> None:
        """Looks through the candidates of a decision."""
        if decision.decode is None:
            return
        for candidate in decision.candidates:
            if candidate.filter_reason is FilterReason.OTHER_LAYOUT:
                pair = candidate.identity.instance_id, decision.decode.instance_id
                if pair not in self._told:
                    error = refusal(candidate.identity, decision.decode, candidate.detail)
                    log.warning("%s (they are not paired)", error.message)
                self._told[pair] = None
                self._told.move_to_end(pair)
        while len(self._told) > MAX_TOLD:
            self._told.popitem(last=False)


class Fleet:
    """Four pools and one notice that any of them changed."""

    def __init__(
        self,
        discovery: Discovery,
        channels: Channels,
        router: WorkerIdentity,
        *,
        index_entries: int = MAX_ENTRIES,
    ) -> None:
        self.changed = Broadcast()
        self.awake = AwakeClock(asyncio.get_running_loop().time)
        """What silence of workers is measured with."""
        self.incompatible_pairs = IncompatiblePairs()
        self.tokenizers = Pool(
            "tokenizer",
            discovery,
            channels,
            router,
            _tokenizer_client,
            self.changed,
            self.awake,
        )
        self.prefills = Pool(
            "prefill",
            discovery,
            channels,
            router,
            lambda channel, worker: PrefillClient(channel, worker.identity, router),
            self.changed,
            self.awake,
            PrefixIndex(index_entries),
        )
        self.decodes = Pool(
            "decode",
            discovery,
            channels,
            router,
            lambda channel, worker: DecodeSession(
                channel, worker.identity, router, self.changed, self.awake
            ),
            self.changed,
            self.awake,
            PrefixIndex(index_entries),
        )
        self.detokenizers = Pool(
            "detokenizer",
            discovery,
            channels,
            router,
            lambda channel, worker: DetokenizerSession(channel, self.changed, self.awake),
            self.changed,
            self.awake,
        )
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self.awake.start()
        self._tasks = [
            asyncio.create_task(self.tokenizers.run()),
            asyncio.create_task(self.prefills.run()),
            asyncio.create_task(self.decodes.run()),
            asyncio.create_task(self.detokenizers.run()),
        ]

    async def close(self) -> None:
        self.awake.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def models(self) -> list[ModelDescription]:
        """Models that a live decode worker serves."""
        return models_of(self.decodes.snapshots())

    def model_for(self, request_id: str, name: str) -> ModelDescription | None:
        """The model that a new request which names it runs on."""
        tokenizers, detokenizers = (
            {worker.model.tokenizer_digest for worker in pool.serving()}
            for pool in (self.tokenizers, self.detokenizers)
        )
        return model_for(request_id, name, self.decodes.snapshots(), tokenizers, detokenizers)

    def replacement_model(self, model: ModelDescription) -> ModelDescription:
        """The model, or who may take its place in a request that has no token yet."""
        return replacement_model(model, self.decodes.each_snapshot())

    @property
    def ready(self) -> bool:
        """Whether a text could be answered now. A prefill worker is not needed for it."""
        return all(pool.serving() for pool in (self.tokenizers, self.decodes, self.detokenizers))


def _tokenizer_client(channel: grpc.aio.Channel, worker: WorkerDescription) -> TokenizerClient:
    model = worker.model
    return TokenizerClient(channel, model.answer_format if model else AnswerFormat())
