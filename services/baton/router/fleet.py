"""All pools of one router, with the clients it needs to each role; knows no requests."""

from __future__ import annotations

import asyncio

import grpc

from baton.core.load import WorkerDescription
from baton.core.model import AnswerFormat, ModelDescription, WorkerIdentity
from baton.core.model_choice import heir_of, model_for, models_of
from baton.core.prefix_index import MAX_ENTRIES, PrefixIndex
from baton.router.decode_session import DecodeSession
from baton.router.detokenizer_session import DetokenizerSession
from baton.router.discovery import Discovery
from baton.router.misfits import Misfits
from baton.router.notice import Notice
from baton.router.pools import Pool
from baton.router.prefill_client import PrefillClient
from baton.router.tokenizer_client import TokenizerClient
from baton.rpc.awake import AwakeClock
from baton.rpc.channels import Channels


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
        self.changed = Notice()
        self.awake = AwakeClock(asyncio.get_running_loop().time)
        """What silence of workers is measured with."""
        self.misfits = Misfits()
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

    def heir_of(self, model: ModelDescription) -> ModelDescription:
        """The model, or who may take its place in a request that has no token yet."""
        return heir_of(model, self.decodes.each_snapshot())

    @property
    def ready(self) -> bool:
        """Whether a text could be answered now. A prefill worker is not needed for it."""
        return all(pool.serving() for pool in (self.tokenizers, self.decodes, self.detokenizers))


def _tokenizer_client(channel: grpc.aio.Channel, worker: WorkerDescription) -> TokenizerClient:
    model = worker.model
    return TokenizerClient(channel, model.answer_format if model else AnswerFormat())
