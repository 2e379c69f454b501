"""What tokenizers do for this router's requests, by another one when one fails; knows no request's
life."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from baton.core.grammar import Grammar
from baton.core.model import ModelDescription, WorkerIdentity
from baton.core.request import Prompt
from baton.core.retry_budget import RetryBudget
from baton.core.trace_context import UNTRACED, TraceContext
from baton.router.config import RouterConfig
from baton.router.fleet import Fleet
from baton.router.tokenize import ask
from baton.router.tokenizer_client import Encoded, TokenizerClient

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Tokenizers:
    """deadline: everywhere on the running loop's clock. All raise BatonError, naming the field when
    the input is at fault; that is not tried again."""

    fleet: Fleet
    config: RouterConfig
    budget: RetryBudget

    async def encode(
        self,
        prompt: Prompt,
        cache_salt: bytes,
        model: ModelDescription,
        request_id: str,
        deadline: float,
        *,
        grammar: Grammar | None = None,
        with_token_strings: bool = False,
        on_served: Callable[[WorkerIdentity], None] | None = None,
        trace: TraceContext = UNTRACED,
    ) -> Encoded:
        """grammar: tried first. on_served: told which tokenizer did it. trace: what this is a part
        of."""
        return await self._ask(
            request_id,
            model,
            deadline,
            lambda client, remaining_s: client.encode(
                prompt,
                cache_salt,
                request_id,
                remaining_s,
                grammar=grammar,
                with_token_strings=with_token_strings,
                trace=trace,
            ),
            trace,
            on_served,
        )

    async def decode(
        self,
        token_ids: tuple[int, ...],
        model: ModelDescription,
        request_id: str,
        deadline: float,
        *,
        skip_special_tokens: bool,
        trace: TraceContext = UNTRACED,
    ) -> str:
        """The whole text of these ids."""
        return await self._ask(
            request_id,
            model,
            deadline,
            lambda client, remaining_s: client.decode(
                token_ids,
                request_id,
                remaining_s,
                skip_special_tokens=skip_special_tokens,
                trace=trace,
            ),
            trace,
        )

    async def _ask(
        self,
        request_id: str,
        model: ModelDescription,
        deadline: float,
        work: Callable[[TokenizerClient, float], Awaitable[T]],
        trace: TraceContext,
        on_served: Callable[[WorkerIdentity], None] | None = None,
    ) -> T:
        return await ask(
            self.fleet.tokenizers,
            self.fleet.changed,
            request_id,
            model,
            self.budget,
            work,
            deadline=deadline,
            max_attempts=self.config.max_attempts,
            wait_timeout_s=self.config.wait_timeout_s,
            on_served=on_served,
            trace=trace,
        )
