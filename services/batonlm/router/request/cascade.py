"""Runs requests of a name that has a large model for what its small one is not sure of.

By a classifier the model is chosen before anything is asked. By log-probabilities the small model
begins, and its answer is held until enough tokens of every choice are there: then it goes on to the
client, or ends and the large model is asked. Where that cannot be asked, the small one answers.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from batonlm.core.admission.admission import Holding
from batonlm.core.admission.tenant_budgets import Refusal
from batonlm.core.errors import BatonError, Reason
from batonlm.core.request.model import ModelDescription
from batonlm.core.request.request import Request
from batonlm.core.routing.aliases import Alias
from batonlm.core.routing.cascade import Cascade
from batonlm.router.observe.metrics import CascadeMetrics
from batonlm.router.request.shadow import names_tokens
from batonlm.router.request.upstream import can_forward

if TYPE_CHECKING:
    from batonlm.router.request.pipeline import EventStream, Pipeline

log = logging.getLogger(__name__)

_NO_SMALL_MODEL = frozenset(
    (Reason.UNAVAILABLE, Reason.OVERLOADED, Reason.INTERNAL, Reason.CONTEXT_LENGTH_EXCEEDED)
)
"""Why the small model does not begin, though the large one might."""
_NOT_OF_CLIENTS = frozenset((Reason.UNAUTHENTICATED, Reason.MODEL_NOT_FOUND))
"""Why the large model cannot be asked, where it is the operator who chose its name, and its key."""


class Cascades:
    """The requests of one router that have two stages."""

    def __init__(self, pipeline: Pipeline, metrics: CascadeMetrics) -> None:
        self._pipeline = pipeline
        self._metrics = metrics

    async def open(
        self, name: str, alias: Alias, request: Request, holding: Holding | None, arrival: float
    ) -> EventStream:
        """See `Pipeline.open`. name: of the alias, which has a cascade. arrival: of the request, on
        the running loop's clock."""
        cascade = alias.cascade
        assert cascade is not None
        policy = cascade.policy
        if policy.asks_first:
            return await self._ask_first(name, cascade, request, holding, arrival)
        confidence = policy.of_prompt(request.prompt)
        if confidence is not None:
            self._metrics.confidence(name, confidence)
            small = self._pipeline.described(alias.models[0])
            if not policy.suffices(confidence) and self._fits(request, small, cascade):
                try:
                    stream = await self._large(name, cascade, request, holding, arrival)
                except BatonError as error:
                    if error.reason is Reason.CANCELLED:
                        raise
                    self._alone(name, error)
                    # Its room was released with the request that failed.
                    holding = None
                else:
                    self._metrics.answered(name, "large")
                    return stream
        stream = await self._pipeline.run_here(request, holding, arrival)
        self._metrics.answered(name, "small")
        return stream

    async def _ask_first(
        self,
        name: str,
        cascade: Cascade,
        request: Request,
        holding: Holding | None,
        arrival: float,
    ) -> EventStream:
        policy, sampling = cascade.policy, request.sampling
        top = max(sampling.top_logprobs or 0, policy.top_logprobs)
        begun = replace(request, sampling=replace(sampling, top_logprobs=top))
        try:
            first = await self._pipeline.run_here(begun, holding, arrival, asked=request)
        except BatonError as error:
            if isinstance(error, Refusal) or error.reason not in _NO_SMALL_MODEL:
                raise
            if not self._fits(request, None, cascade):
                raise
            try:
                stream = await self._large(name, cascade, request, None, arrival)
            except BatonError as failure:
                if failure.reason not in _NOT_OF_CLIENTS:
                    raise
                log.warning("%s: its large model cannot be asked: %s", name, failure.message)
                raise error from failure
            self._metrics.answered(name, "large")
            return stream
        try:
            confidence = policy.of_answers(await first.begun(policy.tokens))
            if confidence is not None:
                self._metrics.confidence(name, confidence)
            sure = confidence is None or policy.suffices(confidence)
            if (sure and not first.failed) or not self._fits(request, first.model, cascade):
                self._metrics.answered(name, "small")
                return first
            try:
                stream = await self._large(name, cascade, request, None, arrival)
            except BatonError as error:
                self._alone(name, error)
                self._metrics.answered(name, "small")
                return first
        except BaseException:
            await first.aclose()
            raise
        try:
            await first.aclose()
        except asyncio.CancelledError:
            await stream.aclose()
            raise
        stream.tried_tokens = first.num_tokens
        self._metrics.answered(name, "large")
        return stream

    async def _large(
        self, name: str, cascade: Cascade, request: Request, holding: Holding | None, arrival: float
    ) -> EventStream:
        request = replace(request, model=cascade.model)
        if cascade.upstream is not None:
            return await self._pipeline.forward(cascade, request, holding, arrival, name)
        return await self._pipeline.run_here(request, holding, arrival, alias=name)

    def _fits(self, request: Request, small: ModelDescription | None, cascade: Cascade) -> bool:
        """Whether the large model can be asked the same. small: the model that was meant; None: it
        is not known."""
        if cascade.upstream is not None:
            return can_forward(request)
        if not names_tokens(request):
            return True
        large = self._pipeline.described(cascade.model)
        return bool(small and large and small.tokenizer_digest == large.tokenizer_digest)

    def _alone(self, name: str, error: BatonError) -> None:
        """The large model was wanted and could not be asked."""
        self._metrics.alone(name, error)
        log.info("%s: its small model answers alone: %s", name, error.message)
