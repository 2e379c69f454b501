"""How much of a hand-over in `baton bench kv` overlaps with prefill.

A real prefill worker in its own process computes prompts in chunks; a decode worker in another
process receives their KV, with its own engine. There is no router. All times are of the machine's
monotonic clock, which both processes share.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from typing import Any

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
from batonlm.core.errors import BatonError
from batonlm.core.request.model import KvLayout, WorkerIdentity
from batonlm.core.scheduler.events import Event, NewTokens
from batonlm.core.scheduler.loop import EngineLoop
from batonlm.core.scheduler.plan import StepPlan
from batonlm.core.scheduler.policy import PREFILL, SchedulerPolicy
from batonlm.decode.service import DecodeService
from batonlm.decode.sessions import RouterSession
from batonlm.engine.thread import EngineThread
from batonlm.grammar.book import GrammarBook
from batonlm.prefill.service import PrefillService
from batonlm.rpc.channels import Channels
from batonlm.rpc.loop import Loop
from batonlm.transfer.kv_chunk import Unpack
from batonlm.transfer.peers import SenderConnection
from batonlm.transfer.receiver import Collected, KvReceiver, Reserve, TransferRequest
from batonlm.transfer.sender import KvSender

OUTPUT_TOKENS = 3
HANDOVER_S = 120.0
PATIENCE_S = 120.0
WARM_TOKENS = 64


def run_overlap(job: dict[str, Any]) -> dict[str, Any]:
    """job: model, vocab, threads, prompt (tokens), chunk, rounds, seed, transport, digest,
    num_buffers, buffer_bytes, sender_core (None: not pinned).

    Returns for each round, under "behind" (the prompt is handed over while it is computed), "alone"
    (it was computed before), "half" (alone, and decode already has its first half): the seconds
    from the end of the last chunk to the last byte in decode's pool, and to the start of decode's
    first step, and the bytes sent. Raises BatonError if tokens differ between them.
    """
    with asyncio.Runner(loop_factory=Loop) as runner:
        return runner.run(_measure(job))


async def _measure(job: dict[str, Any]) -> dict[str, Any]:
    positions = 3 * (job["prompt"] + GROWTH)
    async with AsyncExitStack() as ends:
        prefill = await ends.enter_async_context(peer(serve_prefill, job["sender_core"]))
        starting = asyncio.create_task(prefill.ask(job=job, positions=positions))
        decode = await _DecodeEnd.open(ends, job, positions)
        decode.sender = WorkerIdentity(**await starting)
        draw = random.Random(job["seed"])
        found: dict[str, list[Any]] = {"behind": [], "alone": [], "half": []}
        for number in range(job["rounds"] + 1):
            length = job["prompt"] if number else WARM_TOKENS
            prompt = [draw.randrange(FIRST_TOKEN, job["vocab"]) for _ in range(length)]
            figures = await _round(prefill, decode, prompt, str(number))
            if number:
                for kind, figure in figures.items():
                    found[kind].append(figure)
                progress(f"chunks of {job['chunk']}, round {number} of {job['rounds']}")
        return found


async def _round(
    prefill: Peer, decode: _DecodeEnd, prompt: Sequence[int], name: str
) -> dict[str, Any]:
    """Hands one prompt over in different ways, each under its own salt, so that decode does not
    find KV of an earlier way in its cache."""

    async def hand_over(way: str, salt: str, tokens: Sequence[int]) -> tuple[int, dict[str, float]]:
        """Returns the token after token 0, and the figures."""
        handover_id = secrets.token_bytes(16)
        decode.start(f"{name} {way}", tokens, salt, handover_id)
        computed = await prefill.ask(
            run=list(tokens),
            name=f"{name} {way}",
            handover=handover_id.hex(),
            receiver=decode.identity.instance_id,
        )
        try:
            async with asyncio.timeout(PATIENCE_S):
                await decode.ended.wait()
        except TimeoutError:
            raise BatonError("decode did not get the KV or did not go on from it") from None
        return decode.tokens[0], {
            "landed_s": decode.landed_at - computed["at"],
            "first_step_s": decode.stepped_at - computed["at"],
            "bytes": decode.received_bytes,
        }

    behind = await hand_over("behind", "", prompt)
    alone = await hand_over("alone", "whole", prompt)
    await hand_over("first half", "half", prompt[: len(prompt) // 2])
    rest = await hand_over("half", "half", prompt)
    if not behind[0] == alone[0] == rest[0]:
        raise BatonError("a hand-over changed the tokens that follow it")
    return {"behind": behind[1], "alone": alone[1], "half": rest[1]}


async def _start_engine(
    ends: AsyncExitStack,
    job: dict[str, Any],
    positions: int,
    rules: SchedulerPolicy,
    deliver: Callable[[list[Event]], None],
    on_step: Callable[[StepPlan, float], None],
) -> tuple[EngineThread, KvLayout]:
    """Starts a worker's engine thread. Returns it and the layout of its KV."""
    loops: list[EngineLoop] = []

    def make_loop() -> EngineLoop:
        runner = open_runner(job["model"], job["threads"], positions)
        loops.append(engine_loop(runner, rules))
        return loops[0]

    engine = EngineThread(make_loop, deliver, on_step=on_step)
    await engine.start()
    ends.push_async_callback(engine.stop)
    return engine, loops[0].runner.layout


class _NotingReceiver(KvReceiver):
    """Records at `end` when the last byte of a hand-over was unpacked."""

    end: _DecodeEnd

    async def collect(self, ticket: TransferRequest, reserve: Reserve, unpack: Unpack) -> Collected:
        collected = await super().collect(ticket, reserve, unpack)
        self.end.landed_at = time.monotonic()
        self.end.received_bytes = collected.received_bytes
        return collected


class _DecodeEnd:
    """A decode worker without a gRPC server: its service is called directly."""

    sender: WorkerIdentity
    service: DecodeService
    _session: RouterSession

    def __init__(self) -> None:
        self.identity = identity("decode")
        self.tokens: list[int] = []
        """Tokens of the newest request, from token 1 on."""
        self.ended = asyncio.Event()
        self.landed_at = self.stepped_at = 0.0
        """When its last byte was unpacked, and when its first step after that began."""
        self.received_bytes = 0

    @classmethod
    async def open(cls, ends: AsyncExitStack, job: dict[str, Any], positions: int) -> _DecodeEnd:
        made = cls()
        engine, layout = await _start_engine(
            ends, job, positions, policy(4, 512), made._deliver, made._note_step
        )
        staging = await open_staging(ends, job, made.identity.instance_id)
        channels = Channels()
        ends.push_async_callback(channels.close)
        receiver = _NotingReceiver(
            made.identity,
            layout,
            staging,
            lambda peer: SenderConnection(channels.get(peer.address)),
        )
        receiver.end = made
        made.service = DecodeService(
            engine,
            KvSender(made.identity, layout, staging),
            receiver,
            GrammarBook(None),
            handover_timeout_s=HANDOVER_S,
            resume_window_s=2.0,
        )
        ends.push_async_callback(made.service.close)
        made._session = made.service.session("bench")
        return made

    def start(self, name: str, prompt: Sequence[int], salt: str, handover_id: bytes) -> None:
        """Starts receiving a prompt's KV, and decoding after it."""
        self.tokens, self.ended = [], asyncio.Event()
        self.landed_at = self.stepped_at = 0.0
        request = TransferRequest(handover_id, self.sender, len(prompt), HANDOVER_S)
        wanted = replace(attempt(name, prompt, OUTPUT_TOKENS), cache_salt=salt.encode())
        self.service.start(self._session, wanted, request, 0)

    def _note_step(self, _plan: StepPlan, seconds: float) -> None:
        """Called on the engine thread after a step."""
        if self.landed_at and not self.stepped_at:
            self.stepped_at = time.monotonic() - seconds

    def _deliver(self, events: list[Event]) -> None:
        self.service.deliver(events)
        for tokens in (one for e in events if isinstance(e, NewTokens) for one in e.tokens):
            if tokens.position > 0:
                self.tokens.extend(tokens.token_ids)
            if tokens.finish_reason is not None:
                self.ended.set()


async def serve_prefill() -> None:
    """The prefill worker.

    The first command has job and positions, and is answered with the worker's identity. Each later
    one computes a prompt, from its prefix cache as far as possible, and offers its KV: run (token
    ids), name (of the request), handover (id) and receiver (instance id). It is answered at token 0
    with the time at which the last chunk was computed.
    """
    async with AsyncExitStack() as ends:
        services: list[PrefillService] = []
        stepped_at = 0.0

        def note_step(_plan: StepPlan, _seconds: float) -> None:
            nonlocal stepped_at
            stepped_at = time.monotonic()

        async def begin(job: dict[str, Any], positions: int) -> dict[str, Any]:
            rules = replace(
                PREFILL, token_budget=job["chunk"], batch_window_s=0.0, limit=EVERYTHING
            )
            engine, layout = await _start_engine(
                ends, job, positions, rules, lambda e: services[0].deliver(e), note_step
            )
            me = identity("prefill")
            staging = await open_staging(ends, job, me.instance_id)
            sender = KvSender(me, layout, staging)
            channels = Channels()
            ends.push_async_callback(channels.close)
            receiver = KvReceiver(
                me, layout, staging, lambda peer: SenderConnection(channels.get(peer.address))
            )
            services.append(
                PrefillService(
                    engine,
                    sender,
                    receiver,
                    GrammarBook(None),
                    handover_timeout_s=HANDOVER_S,
                )
            )
            ends.push_async_callback(services[0].close)
            await add_sender(ends, me, sender)
            return asdict(me)

        async def handle(command: dict[str, Any]) -> dict[str, Any]:
            if not services:
                return await begin(**command)
            wanted = attempt(command["name"], command["run"], OUTPUT_TOKENS)
            handover_id = bytes.fromhex(command["handover"])
            await services[0].run(wanted, handover_id, command["receiver"])
            return {"at": stepped_at}

        await answer(handle)
