"""The four kinds of worker process, made of the real services and servicers.

Only engines (`engine`), hand-overs (`kv`) and encoding are simulated.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from batonlm.core.request.model import ModelDescription, WorkerIdentity
from batonlm.core.request.request import TokenPrompt
from batonlm.core.routing.load import WorkerDescription, WorkerLoad, WorkerSpeed, WorkerState
from batonlm.core.scheduler.events import Event
from batonlm.core.scheduler.policy import SchedulerPolicy
from batonlm.decode.service import DecodeService
from batonlm.decode.servicer import DecodeServicer
from batonlm.detokenizer.servicer import DetokenizerServicer
from batonlm.detokenizer.vocabulary import Vocabulary
from batonlm.grammar.book import GrammarBook
from batonlm.prefill.service import PrefillService, PrefillServicer
from batonlm.rpc.lifecycle import new_instance_id
from batonlm.rpc.worker import WorkerServicer
from batonlm.tokenizer.encoder import Asked, Encoded
from batonlm.tokenizer.grammar_checker import Checker
from batonlm.tokenizer.servicer import BatchExecutor, TokenizerServicer
from batonlm.v1 import decode_pb2_grpc, detokenizer_pb2_grpc, prefill_pb2_grpc, tokenizer_pb2_grpc
from batonlm.v1.worker_pb2_grpc import add_WorkerServicer_to_server
from batonlm.worker.report import describe
from tests.core.attempts import VOCAB_SIZE, decode_loop, prefill_loop
from tests.sim.engine import SimEngine
from tests.sim.hosts import Host
from tests.sim.kv import KvNetwork, SimReceiver, SimSender

NUM_BLOCKS = 64
HANDOVER_S = 20.0
RESUME_S = 1.2
ORPHAN_S = 2.0


@dataclass
class Worker:
    """What runs on a host. held: what it holds for requests, by kind; all 0 when none is here."""

    held: Callable[[], dict[str, int]]
    drain: Callable[[], Any]
    check: Callable[[], None] = lambda: None
    extra: list[Any] = field(default_factory=list)


Start = Callable[[Host, KvNetwork, float], Worker]


def start_tokenizer(host: Host, kv: KvNetwork, step_s: float) -> Worker:
    identity = WorkerIdentity("tokenizer", new_instance_id(), host.address)
    model = ModelDescription("fake", "", 0, 0, ())
    servicer = TokenizerServicer(
        _Encoder(),  # type: ignore[arg-type]
        model,
        lambda: identity,
        BatchExecutor(_AtOnce(), 1, cores=1),
        Checker(Path(), (), cpu_s=1.0, num_processes=1),
        max_waiting_bytes=1 << 20,
        tracer=host.tracer,
    )
    tokenizer_pb2_grpc.add_TokenizerServicer_to_server(servicer, host.handlers)
    _watched(
        host,
        WorkerDescription(identity, model),
        lambda: WorkerLoad(servicer.inputs.state, running_sequences=servicer.inputs.num),
    )
    return Worker(lambda: {"inputs": servicer.inputs.num}, servicer.inputs.drain)


def start_detokenizer(host: Host, kv: KvNetwork, step_s: float) -> Worker:
    identity = WorkerIdentity("detokenizer", new_instance_id(), host.address)
    model = ModelDescription("fake", "", 0, 0, ())
    servicer = DetokenizerServicer(
        vocabulary(), max_texts=64, max_unsent_bytes=1 << 20, tracer=host.tracer
    )
    detokenizer_pb2_grpc.add_DetokenizerServicer_to_server(servicer, host.handlers)
    _watched(
        host,
        WorkerDescription(identity, model),
        lambda: WorkerLoad(_state(servicer.draining), running_sequences=servicer.num_texts),
    )
    return Worker(lambda: {"texts": servicer.num_texts}, servicer.drain)


def start_prefill(host: Host, kv: KvNetwork, step_s: float) -> Worker:
    loop = prefill_loop(NUM_BLOCKS)
    made: list[PrefillService] = []
    engine: Any = SimEngine(host, loop, lambda events: made[0].deliver(events), step_s)
    sender: Any = SimSender(host, kv)
    receiver: Any = SimReceiver(host, kv)
    service = PrefillService(
        engine,
        sender,
        receiver,
        GrammarBook(None),
        handover_timeout_s=HANDOVER_S,
        tracer=host.tracer,
    )
    made.append(service)
    identity = WorkerIdentity("prefill", new_instance_id(), host.address)
    servicer = PrefillServicer(service, identity.instance_id)
    prefill_pb2_grpc.add_PrefillServicer_to_server(servicer, host.handlers)
    _watch_engine(host, identity, engine, service)
    return Worker(lambda: _held(engine, service), service.drain, loop.idle_check)


def start_decode(host: Host, kv: KvNetwork, step_s: float) -> Worker:
    loop = decode_loop(NUM_BLOCKS, SchedulerPolicy(max_sequences=16, headroom=8))
    made: list[DecodeService] = []

    def deliver(events: list[Event]) -> None:
        made[0].deliver(events)

    engine: Any = SimEngine(host, loop, deliver, step_s)
    receiver: Any = SimReceiver(host, kv)
    sender: Any = SimSender(host, kv)
    service = DecodeService(
        engine,
        sender,
        receiver,
        GrammarBook(None),
        handover_timeout_s=HANDOVER_S,
        resume_window_s=RESUME_S,
        orphan_s=ORPHAN_S,
        tracer=host.tracer,
    )
    made.append(service)
    identity = WorkerIdentity("decode", new_instance_id(), host.address)
    servicer = DecodeServicer(service, engine, identity)
    decode_pb2_grpc.add_DecodeServicer_to_server(servicer, host.handlers)
    _watch_engine(host, identity, engine, service)

    def held() -> dict[str, int]:
        logs = sum(len(session.keys) for session in service.sessions.values())
        return {**_held(engine, service), "logs": logs, "orphans": service.num_orphans}

    return Worker(held, service.drain, loop.idle_check)


START: dict[str, Start] = {
    "tokenizer": start_tokenizer,
    "prefill": start_prefill,
    "decode": start_decode,
    "detokenizer": start_detokenizer,
}


@cache
def vocabulary() -> Vocabulary:
    """The bundled model's."""
    return Vocabulary.load(Path(str(files("batonlm"))) / "models" / "baton-tiny")


def _watch_engine(
    host: Host, identity: WorkerIdentity, engine: Any, service: PrefillService | DecodeService
) -> None:
    def load() -> WorkerLoad:
        now = engine.load
        return WorkerLoad(
            service.state,
            now.waiting_sequences,
            now.waiting_tokens,
            now.running_sequences,
            now.free_blocks,
            round(engine.step_age_s * 1e6),
            round(engine.step_predicted_s * 1e6),
            speed=WorkerSpeed(prefill_step_tokens=64),
            orphans=service.orphans,
        )

    _watched(host, describe(engine.loop.runner, identity, ("sim",), 16), load)


def _watched(host: Host, description: WorkerDescription, load: Callable[[], WorkerLoad]) -> None:
    servicer = WorkerServicer(lambda: description, load, None)
    add_WorkerServicer_to_server(servicer, host.handlers)


def _held(engine: Any, service: PrefillService | DecodeService) -> dict[str, int]:
    load = engine.load
    return {
        "blocks": NUM_BLOCKS - load.free_blocks,
        "sequences": load.waiting_sequences + load.running_sequences,
        "attempts": service.num_attempts,
        **service.holdings,
    }


def _state(draining: bool) -> WorkerState:
    return WorkerState.DRAINING if draining else WorkerState.SERVING


class _Encoder:
    """Ids as they are."""

    vocab_size = VOCAB_SIZE
    has_chat_template = False

    def encode(self, asked: Sequence[Asked]) -> list[Encoded]:
        prompts = [each.prompt for each in asked]
        return [
            Encoded(array("i", prompt.token_ids), b"")
            for prompt in prompts
            if isinstance(prompt, TokenPrompt)
        ]


class _AtOnce(Executor):
    """No threads."""

    def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(function(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done
