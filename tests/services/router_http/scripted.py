"""A pipeline without workers: a deterministic function from request to text, one token a byte.

It keeps the protocol's promises for real (order of events, whole characters, truncation at stop
strings, limits, closing) and counts what is open, so that tests can see that nothing stays open.
"""

from __future__ import annotations

import asyncio
import itertools
import ssl
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from typing import Any, cast

import openai
from prometheus_client.registry import Collector
from starlette.routing import BaseRoute

from batonlm.core.admission.admission import Admission, AdmissionLimits, FleetState, Holding
from batonlm.core.admission.fair_queue import DrainRate, FairQueue
from batonlm.core.admission.tenant_budgets import Refusal
from batonlm.core.admission.tenants import Tenant
from batonlm.core.errors import BatonError, ContextLengthExceeded, ModelNotFound, NotFound
from batonlm.core.observe.request_record import RequestRecord
from batonlm.core.observe.stages import StageTimes
from batonlm.core.request.model import AdapterDescription, ModelDescription
from batonlm.core.request.request import (
    Accepted,
    ChatPrompt,
    Delta,
    Event,
    Finished,
    FinishReason,
    Request,
    TextLogprob,
    TextPrompt,
    TokenLogprobs,
    TokenPrompt,
    join_deltas,
)
from batonlm.core.request.validation import validate
from batonlm.router.api.access import OpenAuthenticator
from batonlm.router.api.grpc.access import KeyInterceptor
from batonlm.router.api.grpc.inference import InferenceServicer
from batonlm.router.api.http.access import HttpAccess
from batonlm.router.api.http.app import HttpApp
from batonlm.router.request.kept import KeptStreams
from batonlm.router.request.pipeline import Pipeline, left
from batonlm.router.request.response_store import ResponseStore
from batonlm.router.workers.tokenizers import EncodedPrompt
from batonlm.rpc.server import ProcessServer

ANYONE = HttpAccess(OpenAuthenticator())

MODEL = ModelDescription(
    name="org/scripted", digest="00", max_model_len=4096, vocab_size=257, eos_token_ids=(256,)
)


ADAPTER = AdapterDescription("org/adapter", "01", 8, 100)


@dataclass
class Scripted:
    """hold: if set, every answer stops after its first character until `release`.

    refusal: raised by open. away: by turn_away. failure: raised after the first character.
    together: how many characters a delta has. admission: has room for what is received. kept: by
    default it keeps no streams.
    """

    hold: bool = False
    together: int = 1
    refusal: BatonError | None = None
    away: BatonError | None = None
    failure: Exception | None = None
    is_ready: bool = True
    thinks: bool = False
    """Whether its model has a format of reasoning."""
    request_timeout_s: float = 600.0
    asked: list[tuple[str, int]] = field(default_factory=list)
    """Tenants and priorities that turn_away was asked about."""
    faults: list[str] = field(default_factory=list)
    """Tenants whose requests could not be read."""
    admission: Admission = field(
        default_factory=lambda: Admission(
            AdmissionLimits(max_requests=10_000, max_tokens=0, max_queue_s=10.0),
            FairQueue(max_tokens=1 << 20, max_entries=1024),
            DrainRate(),
            jitter=lambda: 0.0,
        )
    )
    stages: StageTimes | None = None
    record: RequestRecord | None = None
    """The only one that explain knows."""
    seen: list[Request] = field(default_factory=list)
    open_streams: int = 0
    release: asyncio.Event = field(default_factory=asyncio.Event)
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    started: asyncio.Event = field(default_factory=asyncio.Event)
    kept: KeptStreams = field(init=False)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.keep(most_of_tenant=0)

    def keep(self, **bounds: Any) -> None:
        """Has streams kept from now on. bounds: see KeptStreams."""

        async def start(request: Request, holding: Holding | None) -> Any:
            return await self.open(request, holding)

        self.kept = KeptStreams(start, self._background, left, **bounds)

    def _background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def explain(self, request_id: str, tenant: Tenant) -> RequestRecord:
        if self.record is None or (request_id, tenant.name) != (
            self.record.request_id,
            self.record.tenant,
        ):
            raise NotFound("no such request", field="request_id")
        return self.record

    def reasons(self, model: ModelDescription) -> bool:
        return self.thinks

    def models(self) -> list[ModelDescription]:
        return [MODEL]

    def aliased(self) -> dict[str, ModelDescription]:
        return {}

    def all_models(self) -> list[ModelDescription]:
        return self.models()

    def adapters(self) -> list[tuple[ModelDescription, AdapterDescription]]:
        return [(MODEL, ADAPTER)]

    def ready(self) -> bool:
        return self.is_ready

    def turn_away(self, tenant: Tenant, priority: int) -> None:
        self.asked.append((tenant.name, priority))
        if self.away is not None:
            raise self.away

    def receive(self, tenant: Tenant, size: int) -> Holding:
        return self.admission.receive(tenant, size, FleetState(), 0.0)

    @contextmanager
    def reading(self, tenant: Tenant) -> Iterator[None]:
        try:
            yield
        except Refusal:
            raise
        except Exception:
            self.faults.append(tenant.name)
            raise

    async def tokenize(
        self,
        request: Request,
        holding: Holding | None = None,
        on_names: Callable[[Sequence[str]], None] | None = None,
    ) -> tuple[EncodedPrompt, ModelDescription]:
        self.seen.append(validate(request))
        ids = prompt_ids(request)
        if on_names is not None:
            for token_id in ids:
                on_names([f"<{token_id}>"])
        return EncodedPrompt(ids, b""), MODEL

    async def detokenize(self, request: Request, holding: Holding | None = None) -> str:
        self.seen.append(validate(request))
        return prompt_text(request)

    async def open(
        self, request: Request, holding: Holding | None = None
    ) -> AsyncGenerator[Event, None]:
        with self.reading(request.tenant):
            self.seen.append(validate(request))
        if holding is not None:
            holding.release()
        if self.refusal is not None:
            raise self.refusal
        if request.model not in ("", MODEL.name):
            raise ModelNotFound("there is no such model", field="model")
        if len(prompt_ids(request)) > MODEL.max_model_len:
            raise ContextLengthExceeded("prompt is too long for the model", field="prompt")
        return self._events(request)

    async def _events(self, request: Request) -> AsyncGenerator[Event, None]:
        self.open_streams += 1
        try:
            ids = prompt_ids(request)
            yield Accepted(
                request_id=f"{len(self.seen):0{32 if request.resumable else 8}x}",
                model=MODEL.name,
                prompt_tokens=len(ids),
                seed=7 if request.seed is None else request.seed,
                prompt_token_ids=ids if request.return_token_ids else (),
                prompt_text=prompt_text(request) if request.echo else "",
                prompt_logprobs=entries_of(ids, request.prompt_logprobs),
                trace_id="a" * 32,
            )
            self.started.set()
            parts = [
                joined(choice, choice_deltas(request, choice), self.together)
                for choice in range(request.n)
            ]
            tokens = 0
            for column in itertools.zip_longest(*parts):
                for delta in column:
                    if delta is not None:
                        tokens += len(delta.token_ids)
                        yield delta
                if self.failure is not None:
                    # The traceback of the one that is kept here would keep the server's objects,
                    # which it waits for when it closes.
                    raise copy(self.failure)
                if self.hold:
                    await self.release.wait()
            yield Finished(len(ids), tokens, len(ids) // 2, self.stages)
        finally:
            self.open_streams -= 1
            self.closed.set()


def prompt_text(request: Request) -> str:
    match request.prompt:
        case ChatPrompt(messages=messages):
            return "".join(f"<{message.role}>{message.content}" for message in messages)
        case TextPrompt(text=text):
            return text
        case TokenPrompt(token_ids=ids):
            return bytes(token_id % 256 for token_id in ids).decode(errors="replace")
        case _:
            raise AssertionError("nothing is generated of it")


def prompt_ids(request: Request) -> tuple[int, ...]:
    return tuple(prompt_text(request).encode())


def whole_answer(prompt: str, choice: int) -> str:
    """What a choice says if nothing stops it."""
    return f"{choice}:{prompt[::-1]} é世🎉"


def choice_deltas(request: Request, choice: int) -> list[Delta]:
    """One Delta a character, with the tokens (bytes) of that character."""
    text = whole_answer(prompt_text(request), choice)
    stop = min((s for s in request.stop_strings if s in text), key=text.index, default=None)
    if stop is not None:
        text = text[: text.index(stop) + (len(stop) if request.include_stop_string else 0)]
    reason, deltas, left = FinishReason.STOP, [], request.max_tokens
    for character in text:
        ids = tuple(character.encode())
        if left is not None:
            ids, left = ids[:left], left - len(ids[:left])
            if len(ids) < len(character.encode()):
                character = "\ufffd" if ids else ""
        if ids:
            deltas.append(Delta(choice, character, ids, logprobs_of(request, ids)))
        if left == 0:
            reason = FinishReason.LENGTH
            break
    return [*deltas, Delta(choice, finish_reason=reason, stop_string=stop)]


def joined(choice: int, deltas: list[Delta], together: int) -> list[Delta]:
    starts = range(0, len(deltas), together)
    return [join_deltas(choice, deltas[start : start + together]) for start in starts]


def logprobs_of(request: Request, ids: tuple[int, ...]) -> tuple[TokenLogprobs, ...]:
    """Token b has log-probability -b / 100; the alternatives are the bytes from "A" on."""
    return entries_of(ids, request.sampling.top_logprobs)


def entries_of(ids: tuple[int, ...], top: int | None) -> tuple[TokenLogprobs, ...]:
    if top is None:
        return ()
    best = tuple(TextLogprob(65 + i, bytes([65 + i]), -0.5 - i) for i in range(top))
    return tuple(TokenLogprobs(TextLogprob(b, bytes([b]), -b / 100), best) for b in ids)


def http_app(
    frontend: Scripted,
    registry: Collector,
    access: HttpAccess = ANYONE,
    pages: Sequence[BaseRoute] = (),
    store: ResponseStore | None = None,
) -> HttpApp:
    """The router's HTTP API over scripted answers."""
    return HttpApp(cast(Pipeline, frontend), registry, access, pages, store=store)


def grpc_server(frontend: Scripted) -> ProcessServer:
    """The router's gRPC face over scripted answers; not started."""
    servicer = InferenceServicer(cast(Pipeline, frontend), stall_timeout_s=30.0)
    return ProcessServer(
        listen="127.0.0.1:0",
        services=[servicer.service()],
        interceptors=[KeyInterceptor(OpenAuthenticator())],
    )


NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Of clients that speak none: each would read all certificates when it is made, in 20 ms."""


def openai_client(address: str) -> openai.AsyncOpenAI:
    """Of a server at an address. Close it, or use it as a context manager."""
    return openai.AsyncOpenAI(
        base_url=f"http://{address}/v1",
        api_key="x",
        max_retries=0,
        timeout=120,
        http_client=openai.DefaultAsyncHttpxClient(trust_env=False, verify=NO_TLS),
    )
