"""What tokenizers do for this router's requests, each in its tenant's turn, and by another one when
one fails.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from baton.core.admission.tenants import Tenant
from baton.core.errors import BatonError, DeadlineExceeded
from baton.core.observe.stages import UNTRACED, TraceContext
from baton.core.request.model import ModelDescription, WorkerIdentity
from baton.core.request.request import ChatPrompt, Grammar, Prompt, TokenPrompt
from baton.core.request.request_state import VERDICTS, FailureAction
from baton.core.routing.retry_budget import RetryBudget
from baton.router.config import RouterConfig
from baton.router.workers.fleet import Fleet
from baton.router.workers.tokenizer_client import TOKEN_ID_BYTES, Encoded, TokenizerClient
from baton.router.workers.tokenizer_turns import LONG_BYTES, Lane, TokenizerTurns, Wanted
from baton.rpc.logs import named

log = logging.getLogger(__name__)

PAUSE_S = 0.1
MAX_KNOWN_GRAMMARS = 4096

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AskedBy:
    """The request that something is done for. deadline: on the running loop's clock. trace: what
    the work is a part of."""

    request_id: str
    tenant: Tenant
    deadline: float
    trace: TraceContext = UNTRACED


class Tokenizers:
    """All raise BatonError, naming the field when the input is at fault; that is not tried again.
    on_turn: called when it is handed to a tokenizer, each time. Sizes are in bytes.
    """

    def __init__(self, fleet: Fleet, config: RouterConfig, budget: RetryBudget) -> None:
        self.turns = TokenizerTurns(fleet.tokenizers, fleet.changed)
        self._config = config
        self._budget = budget
        self._known_grammars: OrderedDict[bytes, None] = OrderedDict()
        """Digests of those that a tokenizer has tried: it remembers what it found."""

    async def encode(
        self,
        prompt: Prompt,
        cache_salt: bytes,
        model: ModelDescription,
        asked_by: AskedBy,
        *,
        size: int,
        grammar: Grammar | None = None,
        most_tokens: int | None = None,
        on_turn: Callable[[], None] = lambda: None,
        on_served: Callable[[WorkerIdentity], None] | None = None,
    ) -> Encoded:
        """grammar: tried first. most_tokens: see TokenizerClient. on_served: told which tokenizer
        did it."""
        digest = grammar.digest if grammar is not None else b""
        if grammar is not None and digest not in self._known_grammars:
            lane = Lane.GRAMMAR
        elif size >= LONG_BYTES or (isinstance(prompt, ChatPrompt) and prompt.template):
            # A stranger's template may take long over any input.
            lane = Lane.LONG
        else:
            lane = Lane.SHORT
        encoded = await self._ask(
            model,
            asked_by,
            lane,
            size,
            lambda client, remaining_s: client.encode(
                prompt,
                cache_salt,
                asked_by.request_id,
                remaining_s,
                grammar=grammar,
                most_tokens=most_tokens,
                trace=asked_by.trace,
            ),
            on_turn,
            on_served,
        )
        if grammar is not None:
            self._known_grammars[digest] = None
            self._known_grammars.move_to_end(digest)
            if len(self._known_grammars) > MAX_KNOWN_GRAMMARS:
                self._known_grammars.popitem(last=False)
        return encoded

    async def names(
        self, token_ids: tuple[int, ...], model: ModelDescription, asked_by: AskedBy
    ) -> tuple[str, ...]:
        """What these tokens are called in the vocabulary."""
        encoded = await self._ask(
            model,
            asked_by,
            *_lane_of_ids(token_ids),
            lambda client, remaining_s: client.encode(
                TokenPrompt(token_ids),
                b"",
                asked_by.request_id,
                remaining_s,
                with_token_strings=True,
                trace=asked_by.trace,
            ),
        )
        return encoded.token_strings

    async def decode(
        self,
        token_ids: tuple[int, ...],
        model: ModelDescription,
        asked_by: AskedBy,
        *,
        skip_special_tokens: bool,
        on_turn: Callable[[], None] = lambda: None,
    ) -> str:
        """The whole text of these ids."""
        return await self._ask(
            model,
            asked_by,
            *_lane_of_ids(token_ids),
            lambda client, remaining_s: client.decode(
                token_ids,
                asked_by.request_id,
                remaining_s,
                skip_special_tokens=skip_special_tokens,
                trace=asked_by.trace,
            ),
            on_turn,
        )

    async def close(self) -> None:
        """Whoever waits is ended by its own request."""
        await self.turns.close()

    async def _ask(
        self,
        model: ModelDescription,
        asked_by: AskedBy,
        lane: Lane,
        size: int,
        work: Callable[[TokenizerClient, float], Awaitable[T]],
        on_turn: Callable[[], None] = lambda: None,
        on_served: Callable[[WorkerIdentity], None] | None = None,
    ) -> T:
        """What `work`, called with a tokenizer of the model and the seconds that are left,
        returns. A fault of the input is not tried again."""
        loop = asyncio.get_running_loop()
        passed_over: set[str] = set()
        failures = 0
        while True:
            wanted = Wanted(
                asked_by.request_id,
                asked_by.tenant,
                lane,
                size,
                model.tokenizer_digest,
                passed_over,
                give_up=loop.time() + self._config.wait_timeout_s,
            )
            try:
                turn = await self.turns.turn(wanted, asked_by.deadline)
            except TimeoutError:
                raise DeadlineExceeded("The request ran out of time.") from None
            try:
                with turn:
                    on_turn()
                    done = await work(turn.worker.client, asked_by.deadline - loop.time())
                turn.worker.gained()
                if on_served is not None:
                    on_served(turn.worker.identity)
                return done
            except BatonError as error:
                turn.worker.blamed(error)
                verdict = VERDICTS[error.reason]
                failures += verdict is FailureAction.ELSEWHERE
                if verdict is FailureAction.FATAL or failures >= self._config.max_attempts:
                    raise
                if verdict is FailureAction.ELSEWHERE and not self._budget.take(loop.time()):
                    raise
                lost = {"lost_at": "tokenizer", "reason": error.reason.name}
                about = {**named(asked_by.request_id, asked_by.trace.trace_id), **lost}
                log.info("a tokenizer failed: %s", error.message, extra=about)
                passed_over.add(turn.worker.identity.instance_id)
                if verdict is FailureAction.LATER:
                    await asyncio.sleep(error.retry_after_s or PAUSE_S)


def _lane_of_ids(token_ids: tuple[int, ...]) -> tuple[Lane, int]:
    size = TOKEN_ID_BYTES * len(token_ids)
    return (Lane.LONG if size >= LONG_BYTES else Lane.SHORT), size
