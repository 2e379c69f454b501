"""Sends a share of a name's requests to another model too, whose answers nobody sees.

These requests have a pipeline of their own over the same workers: no tenant pays for them, and they
are in no queue, record or metric of real ones. They have the lowest priority at workers, at most
MAX_SHADOWS run at a time, and all end when a request of this router has to wait for workers.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from batonlm.core.admission.tenant_budgets import Refusal
from batonlm.core.admission.tenants import Tenant
from batonlm.core.errors import BatonError
from batonlm.core.observe.stages import UNTRACED
from batonlm.core.request.request import Delta, Request, TokenPrompt
from batonlm.core.request.validation import INT32_MAX
from batonlm.core.routing.aliases import Shadow
from batonlm.router.observe.metrics import ShadowMetrics, outcome_of

if TYPE_CHECKING:
    from batonlm.core.request.model import ModelDescription
    from batonlm.router.request.pipeline import Pipeline

MAX_SHADOWS = 8
"""Of one router at a time."""

LONGEST_S = 60.0
DROPPED = "dropped"
"""The outcome of one that was not sent, or ended, to keep workers free for real requests, and of
one that the model cannot get: it is not there, or has another tokenizer."""

_TENANT = Tenant("(shadow)")
"""A name that no tenant can have."""

Answer = tuple[tuple[int, ...], ...]
"""The tokens of every choice."""


class ShadowRun:
    """One request's shadow, and what both answers are compared by once both have ended."""

    def __init__(self, compare: Callable[[Answer, Answer], None]) -> None:
        self._compare = compare
        self._answers: list[Answer | None] = []

    def ended(self, answer: Answer | None) -> None:
        """The real request, or its shadow, has ended. None: with no answer to compare."""
        self._answers.append(answer)
        if len(self._answers) == 2:
            one, other = self._answers
            if one is not None and other is not None:
                self._compare(one, other)


class Shadows:
    """The shadow requests of one router."""

    def __init__(
        self, make: Callable[[], Pipeline], metrics: ShadowMetrics, freed: Callable[[], None]
    ) -> None:
        """make: returns a pipeline for them, which this object closes. freed: called when one has
        left its workers."""
        self._make = make
        self._metrics = metrics
        self._freed = freed
        self._pipeline: Pipeline | None = None
        self._running: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._running)

    def begin(
        self, name: str, shadow: Shadow, request: Request, seed: int, model: ModelDescription,
        *, busy: bool,
    ) -> ShadowRun | None:  # fmt: skip
        """Sends a request's shadow, by chance. The caller calls `ended` once when the request is
        over. model: the one that answers the request, and seed: what it samples with. busy: some
        requests wait for workers. Does not wait; None: the request has no shadow."""
        if shadow.model == model.name or random.random() >= shadow.share:
            return None
        if self._pipeline is None:
            self._pipeline = self._make()
        other = self._pipeline.described(shadow.model)
        same_tokens = other is not None and other.tokenizer_digest == model.tokenizer_digest
        if (
            busy
            or other is None
            or len(self._running) >= MAX_SHADOWS
            or (names_tokens(request) and not same_tokens)
        ):
            self._metrics.over(name, shadow.model, DROPPED)
            return None
        sent = replace(
            request,
            model=shadow.model,
            tenant=_TENANT,
            priority=INT32_MAX,
            seed=seed,
            sampling=replace(request.sampling, top_logprobs=None),
            prompt_logprobs=None,
            echo=False,
            trace=UNTRACED,
            deadline_s=min(request.deadline_s or LONGEST_S, LONGEST_S),
        )
        greedy = request.sampling.greedy and same_tokens

        def compare(one: Answer, another: Answer) -> None:
            if greedy:
                self._metrics.compared(name, shadow.model, equal=one == another)

        run = ShadowRun(compare)
        task = asyncio.get_running_loop().create_task(self._run(name, sent, run))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return run

    def drop(self) -> None:
        """Ends all of them."""
        for task in self._running:
            task.cancel()

    async def close(self) -> None:
        while self._running:
            self.drop()
            await asyncio.wait(self._running)
        if self._pipeline is not None:
            await self._pipeline.close()

    async def _run(self, name: str, request: Request, run: ShadowRun) -> None:
        loop = asyncio.get_running_loop()
        began, first_s = loop.time(), None
        tokens: list[list[int]] = [[] for _ in range(request.n)]
        answer: Answer | None = None
        outcome = DROPPED
        assert self._pipeline is not None
        try:
            stream = await self._pipeline.open(request)
            try:
                async for event in stream:
                    if isinstance(event, Delta):
                        if first_s is None:
                            first_s = loop.time() - began
                        tokens[event.choice] += event.token_ids
            finally:
                await stream.aclose()
            answer, outcome = tuple(map(tuple, tokens)), outcome_of(None)
        except asyncio.CancelledError:
            pass
        except Refusal:
            pass
        except BatonError as error:
            outcome = outcome_of(error)
        finally:
            took_s = loop.time() - began if answer is not None else None
            self._metrics.over(name, request.model, outcome, first_s, took_s)
            run.ended(answer)
            self._freed()


def names_tokens(request: Request) -> bool:
    """Whether a request has ids of tokens, which mean something else to another tokenizer."""
    sampling = request.sampling
    return bool(
        isinstance(request.prompt, TokenPrompt)
        or request.stop_token_ids
        or sampling.logit_bias
        or sampling.allowed_token_ids
    )
