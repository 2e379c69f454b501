"""The whole journey of one request, top to bottom; the only place that starts one.

validate → is it let in → which model → encode → does it fit → resolve what the client left open →
is it still let in → relay (its turn, attempts on prefill and decode, tokens to text) → events.
Knows neither HTTP nor gRPC.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine
from dataclasses import replace

from baton.core.errors import (
    BatonError,
    Cancelled,
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidArgument,
    ModelNotFound,
    Unavailable,
)
from baton.core.journey import Journey
from baton.core.model import ModelDescription
from baton.core.pace import Pace
from baton.core.refusal import Refusal
from baton.core.request import Accepted, Request, StopParams
from baton.core.routing import RoutingPolicy
from baton.core.validation import validate
from baton.router.choice_text import PROMPT_TAIL, TextOptions
from baton.router.config import RouterConfig
from baton.router.event_stream import EventStream
from baton.router.fleet import Fleet
from baton.router.gate import Gate, Pass
from baton.router.guards import Guards
from baton.router.metrics import RouterMetrics
from baton.router.placement import Standing
from baton.router.relay import Relay, RelayLimits
from baton.router.tokenize import encode

SEED_BITS = 53
"""Of the seeds drawn here: every JSON reader keeps them exact."""


class Pipeline:
    """Runs requests on a fleet. The fleet is started and closed by whoever made it.

    live_replicas: routers that share tenants' limits, this one among them.
    """

    def __init__(
        self,
        fleet: Fleet,
        config: RouterConfig,
        metrics: RouterMetrics,
        live_replicas: Callable[[], int] = lambda: 1,
    ) -> None:
        self._fleet = fleet
        self._config = config
        self._metrics = metrics
        self.gate = Gate(fleet, config, metrics, live_replicas)
        self._limits = RelayLimits(
            routing=RoutingPolicy(config.local_prefill_tokens, config.slow_start_s),
            max_attempts=config.max_attempts,
            wait_timeout_s=config.wait_timeout_s,
            max_unconfirmed=config.max_unconfirmed,
        )
        self._guards = Guards.of(config)
        self.pace = Pace(config.coalesce_above_cores)
        self._num_requests = 0
        self._leaving = False
        self._draining = False
        self._cut = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._preparing: set[asyncio.Timeout] = set()
        self._relays: set[Relay] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_requests(self) -> int:
        """Requests that were admitted and have not ended."""
        return self._num_requests

    def models(self) -> list[ModelDescription]:
        """The models that can be asked for now."""
        wanted = self._config.model
        return [model for model in self._fleet.models() if wanted in ("", model.name)]

    def ready(self) -> bool:
        """Whether requests should be sent here: they would be taken and could be answered now."""
        return not self._leaving and self._fleet.ready

    async def open(self, request: Request) -> EventStream:
        """Starts a request; returns when its first attempt has workers. Raises BatonError when it
        is refused or fails before; nothing then remains of it.

        The caller closes the stream, also when the client is gone.
        """
        loop = asyncio.get_running_loop()
        arrival = loop.time()
        deadline = arrival + (validate(request).deadline_s or self._config.request_timeout_s)
        held = self._admit(request, deadline)
        try:
            async with asyncio.timeout_at(deadline) as preparing:
                self._preparing.add(preparing)
                try:
                    relay, accepted = await self._prepare(request, held)
                finally:
                    self._preparing.discard(preparing)
        except TimeoutError:
            error = _left() if self._cut else DeadlineExceeded("The request ran out of time.")
            self._end(held, 0, error)
            raise error from None
        except BaseException as failure:
            self._end(held, 0, failure)
            raise

        def observe_first_token() -> None:
            self._metrics.first_token_s.observe(loop.time() - arrival)

        def ended(task: asyncio.Task[None]) -> None:
            self._relays.discard(relay)
            self._metrics.request_s.observe(loop.time() - arrival)
            error = asyncio.CancelledError() if task.cancelled() else task.exception()
            self._end(held, sum(len(log) for log in relay.journey.logs), error)

        task = self._keep(relay.run())
        self._relays.add(relay)
        task.add_done_callback(ended)
        if self._cut:
            relay.fail(_left())
        stream = EventStream(relay, task, accepted, observe_first_token, self.pace)
        try:
            await held.placed.wait()
            if not held.was_placed and task.cancelled():
                raise Cancelled("The request was cancelled.")
            if not held.was_placed:
                task.result()
        except BaseException as failure:
            if isinstance(failure, Refusal):
                self._metrics.refused(failure.limit)
            await stream.aclose()
            raise
        return stream

    def leave(self) -> None:
        """Not ready from now on; requests are still taken, for not everybody knows it yet."""
        self._leaving = True

    async def drain(self) -> None:
        """Takes no new requests; returns when the running ones have ended."""
        self._leaving = self._draining = True
        await self._idle.wait()

    def cut(self) -> None:
        """Ends what still runs, with an error that says to try again elsewhere."""
        self._leaving = self._draining = self._cut = True
        for preparing in self._preparing:
            preparing.reschedule(asyncio.get_running_loop().time())
        for relay in self._relays:
            relay.fail(_left())

    async def close(self) -> None:
        """Cancels what still runs."""
        self._leaving = self._draining = True
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)
        await self.gate.close()

    def _admit(self, request: Request, deadline: float) -> Pass:
        if self._draining:
            raise _left()
        try:
            held = self.gate.open(request, deadline)
        except BatonError as error:
            self._metrics.ended(error)
            raise
        self._num_requests += 1
        self._idle.clear()
        return held

    def _end(self, held: Pass, output: int, error: BaseException | None) -> None:
        held.release(output, finished=error is None)
        self._num_requests -= 1
        if self._num_requests == 0:
            self._idle.set()
        self._metrics.ended(error)

    def _keep(self, coroutine: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _background(self, coroutine: Coroutine[None, None, None]) -> None:
        self._keep(coroutine)

    async def _prepare(self, request: Request, held: Pass) -> tuple[Relay, Accepted]:
        request_id = secrets.token_hex(12)
        self._guards.budget.started()
        model = await self._model(request.model)
        encoded = await encode(
            self._fleet.tokenizers,
            self._fleet.changed,
            request,
            request_id,
            model,
            self._guards.budget,
            deadline=held.deadline,
            max_attempts=self._config.max_attempts,
            wait_timeout_s=self._config.wait_timeout_s,
        )
        prompt = encoded.token_ids
        stop = _resolve_stop(request, len(prompt), model)
        _check_vocabulary(request, model)
        held.settle(len(prompt), stop)
        seed = secrets.randbits(SEED_BITS) if request.seed is None else request.seed
        journey = Journey(
            request_id,
            prompt,
            n=request.n,
            sampling=replace(request.sampling, seed=seed),
            stop=stop,
            max_barren=self._config.max_attempts,
            priority=request.priority,
            cache_salt=request.cache_salt,
            tenant=request.tenant,
        )
        standing = Standing(
            tenant=request.tenant,
            priority=request.priority,
            cost=held.grant.cost,
            since=asyncio.get_running_loop().time(),
            deadline=held.deadline,
            on_placed=held.on_placed,
        )
        relay = Relay(
            self._fleet,
            journey,
            model,
            TextOptions(
                stop_strings=request.stop_strings,
                include_stop_string=request.include_stop_string,
                skip_special_tokens=request.skip_special_tokens,
                prompt_tail_ids=prompt[-PROMPT_TAIL:],
                min_tokens=request.min_tokens,
                shown_stop_token_ids=frozenset(request.stop_token_ids),
            ),
            self._limits,
            self.gate.turnstile,
            standing,
            self._guards,
            deadline=held.deadline,
            prefix_hashes=encoded.prefix_hashes,
            background=self._background,
            metrics=self._metrics,
        )
        self._metrics.prompt_tokens.inc(len(prompt))
        shown_ids = prompt if request.return_token_ids else ()
        return relay, Accepted(request_id, model.name, len(prompt), seed, shown_ids)

    async def _model(self, name: str) -> ModelDescription:
        """The model to use; waits while no worker is there to ask."""
        if name and self._config.model and name != self._config.model:
            raise ModelNotFound("There is no such model here.", field="model")
        loop = asyncio.get_running_loop()
        give_up = loop.time() + self._config.wait_timeout_s
        while True:
            models = self.models()
            for model in models:
                if name in ("", model.name):
                    return model
            if models:
                raise ModelNotFound("There is no such model here.", field="model")
            left = give_up - loop.time()
            if left <= 0:
                raise Unavailable("No worker is ready.", retry_after_s=1.0)
            await self._fleet.changed.wait(left)


def _left() -> BatonError:
    return Unavailable("This router is leaving.", retry_after_s=1.0)


def _resolve_stop(request: Request, num_prompt: int, model: ModelDescription) -> StopParams:
    """Checks that prompt and output fit the model, and fills in the longest output."""
    if num_prompt == 0:
        raise InvalidArgument("The prompt has no tokens.", field="prompt")
    room = model.max_model_len - num_prompt
    if room < max(1, request.max_tokens or 0):
        raise ContextLengthExceeded(
            f"This model's context is {model.max_model_len} tokens: {num_prompt} of prompt and "
            f"{request.max_tokens or 'at least 1'} of output do not fit.",
            field="prompt" if room < 1 else "max_tokens",
        )
    max_tokens = room if request.max_tokens is None else request.max_tokens
    if request.min_tokens > max_tokens:
        raise InvalidArgument(
            f"min_tokens must be at most {max_tokens}, the longest output.", field="min_tokens"
        )
    return StopParams(
        max_tokens=max_tokens,
        min_tokens=request.min_tokens,
        stop_token_ids=request.stop_token_ids,
        ignore_eos=request.ignore_eos,
        stop_strings=request.stop_strings,
        include_stop_string=request.include_stop_string,
    )


def _check_vocabulary(request: Request, model: ModelDescription) -> None:
    """Token ids that a worker would index with."""
    fields = {
        "stop_token_ids": request.stop_token_ids,
        "logit_bias": tuple(token_id for token_id, _ in request.sampling.logit_bias),
    }
    for field, token_ids in fields.items():
        if any(token_id >= model.vocab_size for token_id in token_ids):
            raise InvalidArgument(
                f"{field} must hold token ids below {model.vocab_size}.", field=field
            )
