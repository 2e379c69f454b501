"""How much of a hand-over hides behind prefill: a decode worker that collects; runs as a job.

A real prefill worker in a process of its own computes prompts chunk by chunk; this process is the
decode worker, with an engine of its own. All times are of the machine's monotonic clock, which both
processes read.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from baton.core.errors import BatonError
from baton.core.request.model import WorkerIdentity
from baton.core.scheduler.events import Event
from baton.core.scheduler.events import NewTokens as TokensEvent
from baton.core.scheduler.loop import EngineLoop
from baton.core.scheduler.plan import StepPlan
from baton.decode.service import DecodeService
from baton.decode.sessions import RouterSession
from baton.engine.thread import EngineThread
from baton.grammar.book import GrammarBook
from baton.rpc.channels import Channels
from baton.rpc.loop import Loop
from baton.transfer.grpc import GrpcSenderConnection
from baton.transfer.kv_chunk import Unpack
from baton.transfer.receiver import Collected, KvReceiver, Reserve, TransferRequest
from baton.transfer.sender import KvSender
from baton.transfer.transports import Staging
from baton_loadtest.bench.beside import Beside
from baton_loadtest.bench.child import progress
from baton_loadtest.bench.kv_ends import identity
from baton_loadtest.bench.kv_prefill import HANDOVER_S, OUTPUT_TOKENS
from baton_loadtest.bench.serving import GROWTH, attempt, open_loop, open_runner, policy
from baton_loadtest.bench.workload import FIRST_TOKEN

PATIENCE_S = 120.0
WARM_TOKENS = 64


def run(job: dict[str, Any]) -> dict[str, Any]:
    """job: model, vocab, threads, prompt (tokens), chunk, rounds, seed, transport, num_buffers,
    buffer_bytes, sender_core (None: not pinned).

    Returns for each round, under "behind" (the prompt is handed over while it is computed), "alone"
    (all of it was computed before), "half" (alone, and decode holds its first half): seconds from
    the end of the last chunk to the last byte in decode's pool, and to the beginning of decode's
    first step, and the bytes that were sent. Raises BatonError when tokens differ between them.
    """
    with asyncio.Runner(loop_factory=Loop) as runner:
        return runner.run(_measure(job))


@dataclass(slots=True)
class _Stamps:
    """One request at decode."""

    ended: asyncio.Event = field(default_factory=asyncio.Event)
    landed_at: float = 0.0
    stepped_at: float = 0.0
    received_bytes: int = 0


class _StampingReceiver(KvReceiver):
    """Says when a hand-over's last byte was unpacked."""

    stamps: _Stamps

    async def collect(self, ticket: TransferRequest, reserve: Reserve, unpack: Unpack) -> Collected:
        collected = await super().collect(ticket, reserve, unpack)
        self.stamps.landed_at = time.monotonic()
        self.stamps.received_bytes = collected.received_bytes
        return collected


async def _measure(job: dict[str, Any]) -> dict[str, Any]:
    positions = 3 * (job["prompt"] + GROWTH)
    shared = {
        key: job[key] for key in ("model", "threads", "transport", "num_buffers", "buffer_bytes")
    }
    async with AsyncExitStack() as ends:
        prefill = await Beside.start("kv_prefill", job["sender_core"])
        ends.push_async_callback(prefill.close)
        asked = asyncio.create_task(prefill.ask(positions=positions, chunk=job["chunk"], **shared))
        decode = await _Decode.open(ends, job, positions)
        decode.sender = WorkerIdentity(**await asked)
        draw = random.Random(job["seed"])
        found: dict[str, list[Any]] = {"behind": [], "alone": [], "half": []}
        for number in range(job["rounds"] + 1):
            length = job["prompt"] if number else WARM_TOKENS
            prompt = [draw.randrange(FIRST_TOKEN, job["vocab"]) for _ in range(length)]
            round_ = _Round(prefill, decode, prompt, str(number))
            figures = await round_.run()
            if number:
                for kind, figure in figures.items():
                    found[kind].append(figure)
                progress(f"chunks of {job['chunk']}, round {number} of {job['rounds']}")
        return found


class _Round:
    """One prompt, handed over in different ways. Decode knows each under another salt, and so does
    not find there what an earlier way has brought."""

    def __init__(self, prefill: Beside, decode: _Decode, prompt: Sequence[int], name: str) -> None:
        self._prefill, self._decode, self._prompt, self._name = prefill, decode, prompt, name

    async def run(self) -> dict[str, Any]:
        half = len(self._prompt) // 2
        behind = await self._hand_over("behind", "", self._prompt)
        alone = await self._hand_over("alone", "whole", self._prompt)
        await self._hand_over("first half", "half", self._prompt[:half])
        rest = await self._hand_over("half", "half", self._prompt)
        if not behind[0] == alone[0] == rest[0]:
            raise BatonError("a hand-over changed the tokens that follow it")
        return {"behind": behind[1], "alone": alone[1], "half": rest[1]}

    async def _hand_over(
        self, way: str, salt: str, prompt: Sequence[int]
    ) -> tuple[int, dict[str, float]]:
        """Returns the token after token 0, and the figures."""
        name, handover_id = f"{self._name} {way}", secrets.token_bytes(16)
        stamps, second = self._decode.start(name, prompt, salt, handover_id)
        said = await self._prefill.ask(
            run=list(prompt),
            name=name,
            handover=handover_id.hex(),
            receiver=self._decode.identity.instance_id,
        )
        try:
            async with asyncio.timeout(PATIENCE_S):
                await stamps.ended.wait()
        except TimeoutError:
            raise BatonError("decode did not get the KV or did not go on from it") from None
        computed_at = said["computed_at"]
        return second[0], {
            "landed_s": stamps.landed_at - computed_at,
            "first_step_s": stamps.stepped_at - computed_at,
            "bytes": stamps.received_bytes,
        }


class _Decode:
    """A decode worker without gRPC of its own: what a router would ask, it is asked directly."""

    sender: WorkerIdentity
    service: DecodeService
    _receiver: _StampingReceiver
    _session: RouterSession

    def __init__(self, identity: WorkerIdentity) -> None:
        self.identity = identity
        self._stamps: _Stamps | None = None
        self._tokens: list[int] = []

    @classmethod
    async def open(cls, ends: AsyncExitStack, job: dict[str, Any], positions: int) -> _Decode:
        made = cls(identity("decode"))
        loops: list[EngineLoop] = []

        def make_loop() -> EngineLoop:
            runner = open_runner(job["model"], job["threads"], positions, exact=True)
            loops.append(open_loop(runner, policy(4, 512)))
            return loops[0]

        engine: EngineThread = EngineThread(make_loop, made._deliver, on_step=made._note_step)
        await engine.start()
        ends.push_async_callback(engine.stop)
        staging = await Staging.open(
            made.identity.instance_id,
            transport=job["transport"],
            num_buffers=job["num_buffers"],
            buffer_bytes=job["buffer_bytes"],
        )
        ends.push_async_callback(staging.close)
        channels = Channels()
        ends.push_async_callback(channels.close)
        made._receiver = _StampingReceiver(
            made.identity,
            loops[0].runner.layout,
            staging,
            lambda peer: GrpcSenderConnection(channels.get(peer.address)),
        )
        made.service = DecodeService(
            engine,
            KvSender(made.identity, loops[0].runner.layout, staging),
            made._receiver,
            GrammarBook(None),
            handover_timeout_s=HANDOVER_S,
            resume_window_s=2.0,
        )
        ends.push_async_callback(made.service.close)
        made._session = made.service.session("bench")
        return made

    def start(
        self, name: str, prompt: Sequence[int], salt: str, handover_id: bytes
    ) -> tuple[_Stamps, list[int]]:
        """Begins to collect a prompt and to decode from there. The list gets tokens 1 and on."""
        self._stamps = _Stamps()
        self._receiver.stamps, self._tokens = self._stamps, []
        asked = replace(attempt(name, prompt, OUTPUT_TOKENS), cache_salt=salt.encode())
        self.service.start(
            self._session,
            asked,
            TransferRequest(handover_id, self.sender, len(prompt), HANDOVER_S),
            0,
        )
        return self._stamps, self._tokens

    def _note_step(self, _plan: StepPlan, seconds: float) -> None:
        """On the engine thread, after a step."""
        stamps = self._stamps
        if stamps is not None and stamps.landed_at and not stamps.stepped_at:
            stamps.stepped_at = time.monotonic() - seconds

    def _deliver(self, events: list[Event]) -> None:
        self.service.deliver(events)
        for event in events:
            for tokens in event.tokens if isinstance(event, TokensEvent) else ():
                if tokens.position > 0:
                    self._tokens.extend(tokens.token_ids)
                if tokens.finish_reason is not None and self._stamps is not None:
                    self._stamps.ended.set()
