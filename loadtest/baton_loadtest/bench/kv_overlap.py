"""How much of a hand-over of `baton bench kv` hides behind prefill.

A real prefill worker in a process of its own computes prompts chunk by chunk; a decode worker in
another process receives their KV, with an engine of its own. There is no router. All times are of
the machine's monotonic clock, which both processes read.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from baton.core.errors import BatonError
from baton.core.kvcache.block_pool import BlockPool
from baton.core.request.model import WorkerIdentity
from baton.core.scheduler.events import Event
from baton.core.scheduler.events import NewTokens as TokensEvent
from baton.core.scheduler.loop import EngineLoop
from baton.core.scheduler.plan import StepPlan
from baton.core.scheduler.policy import PREFILL
from baton.core.scheduler.scheduler import Scheduler
from baton.decode.service import DecodeService
from baton.decode.sessions import RouterSession
from baton.engine.thread import EngineThread
from baton.grammar.book import GrammarBook
from baton.prefill.service import PrefillService
from baton.rpc.channels import Channels
from baton.rpc.loop import Loop
from baton.transfer.kv_chunk import Unpack
from baton.transfer.peers import SenderConnection
from baton.transfer.receiver import Collected, KvReceiver, Reserve, TransferRequest
from baton.transfer.sender import KvSender
from baton_loadtest.bench.engines import (
    EVERYTHING,
    FIRST_TOKEN,
    GROWTH,
    attempt,
    engine_loop,
    open_runner,
    policy,
)
from baton_loadtest.bench.kv_moves import add_sender, identity, open_staging
from baton_loadtest.child import answer, progress
from baton_loadtest.launch import Peer, peer

OUTPUT_TOKENS = 3
HANDOVER_S = 120.0
PATIENCE_S = 120.0
WARM_TOKENS = 64


def run_overlap(job: dict[str, Any]) -> dict[str, Any]:
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
    async with AsyncExitStack() as ends:
        prefill = await ends.enter_async_context(peer(serve_prefill, job["sender_core"]))
        asked = asyncio.create_task(prefill.ask(job=job, positions=positions))
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

    def __init__(self, prefill: Peer, decode: _Decode, prompt: Sequence[int], name: str) -> None:
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
            runner = open_runner(job["model"], job["threads"], positions)
            loops.append(engine_loop(runner, policy(4, 512)))
            return loops[0]

        engine: EngineThread = EngineThread(make_loop, made._deliver, on_step=made._note_step)
        await engine.start()
        ends.push_async_callback(engine.stop)
        staging = await open_staging(ends, job, made.identity.instance_id)
        channels = Channels()
        ends.push_async_callback(channels.close)
        made._receiver = _StampingReceiver(
            made.identity,
            loops[0].runner.layout,
            staging,
            lambda peer: SenderConnection(channels.get(peer.address)),
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


async def serve_prefill() -> None:
    """The prefill worker.

    The first command is job and positions, and is answered with the worker's identity. Each further
    one computes a prompt, from its prefix cache as far as it can, and offers its KV: run (token
    ids), name (of the request), handover (id) and receiver (instance id). It is answered at token 0
    when the last chunk was computed.
    """
    async with AsyncExitStack() as ends:
        await answer(_Prefill(ends).handle)


class _Prefill:
    """Everything behind the commands. `open` is the first one."""

    def __init__(self, ends: AsyncExitStack) -> None:
        self._ends = ends
        self._service: PrefillService | None = None
        self._last_step_at = 0.0

    async def handle(self, command: dict[str, Any]) -> dict[str, Any]:
        if self._service is None:
            return await self._begin(**command)
        first = await self._service.run(
            attempt(command["name"], command["run"], OUTPUT_TOKENS),
            bytes.fromhex(command["handover"]),
            command["receiver"],
        )
        return {
            "computed_at": self._last_step_at,
            "cached": first.cached_tokens,
            "token": first.tokens[0].token_ids[0],
        }

    async def _begin(self, job: dict[str, Any], positions: int) -> dict[str, Any]:
        ends = self._ends
        policy = replace(PREFILL, token_budget=job["chunk"], batch_window_s=0.0, limit=EVERYTHING)

        def make_loop() -> EngineLoop:
            runner = open_runner(job["model"], job["threads"], positions)
            pool = BlockPool(runner.num_blocks, runner.block_size)
            made.append(EngineLoop(runner, Scheduler(pool, policy, runner.model)))
            return made[0]

        made: list[EngineLoop] = []
        engine: EngineThread = EngineThread(
            make_loop, lambda events: service.deliver(events), on_step=self._note_step
        )
        await engine.start()
        ends.push_async_callback(engine.stop)
        me = identity("prefill")
        staging = await open_staging(ends, job, me.instance_id)
        sender = KvSender(me, made[0].runner.layout, staging)
        service = self._service = PrefillService(
            engine, sender, GrammarBook(None), handover_timeout_s=HANDOVER_S
        )
        ends.push_async_callback(service.close)
        await add_sender(ends, me, sender)
        return asdict(me)

    def _note_step(self, _plan: StepPlan, _seconds: float) -> None:
        self._last_step_at = time.monotonic()
