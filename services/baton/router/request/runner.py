"""Carries one request through the fleet: attempts on workers, tokens to text, until all ended.

The request state (core) decides; this starts what it wants and feeds it what happens.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

from baton.core.errors import BatonError, Cancelled, DeadlineExceeded, Internal, Unavailable
from baton.core.observe.stages import Stage
from baton.core.request.model import ModelDescription
from baton.core.request.prompt_logprobs import PromptLogprobs
from baton.core.request.request import Finished
from baton.core.request.request_state import AttemptRun, RequestState
from baton.core.routing.routing import Demand, RoutingPolicy
from baton.router.observe.metrics import RouterMetrics
from baton.router.observe.stage_timer import StageTimer
from baton.router.request.attempt import AttemptRunner
from baton.router.request.dispatcher import Dispatcher, Placer, QueueEntry
from baton.router.request.guards import Guards
from baton.router.request.pacing import DeferredCalls, LoadMonitor, TokenCoalescer, TokenGaps
from baton.router.request.texts import TextOptions, Texts
from baton.router.workers.decode_session import Migration
from baton.router.workers.fleet import Fleet
from baton.router.workers.shared_stream import Broadcast
from baton.rpc.logs import named

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RequestRunnerLimits:
    """How a request is run; see RouterConfig for each."""

    routing: RoutingPolicy
    max_attempts: int
    wait_timeout_s: float
    max_unconfirmed: int
    timings: bool


class RequestRunner:
    """One request on its way, and the owner of its attempts.

    deadline: on the running loop's clock. prefix_hashes: of the prompt's units. background: runs
    what must outlive the request, such as telling a worker that it may free something.
    """

    def __init__(
        self,
        fleet: Fleet,
        request_state: RequestState,
        model: ModelDescription,
        text_options: TextOptions,
        limits: RequestRunnerLimits,
        dispatcher: Dispatcher,
        standing: QueueEntry,
        guards: Guards,
        *,
        deadline: float,
        prefix_hashes: bytes,
        stages: StageTimer,
        background: Callable[[Coroutine[None, None, None]], None],
        metrics: RouterMetrics,
        pace: LoadMonitor,
        later: DeferredCalls,
    ) -> None:
        self._fleet = fleet
        self.request_state = request_state
        self.deadline = deadline
        self.background = background
        self.metrics = metrics
        self._gaps = TokenGaps(request_state.logs, metrics.between_tokens[model.name])
        self.max_unconfirmed = limits.max_unconfirmed if text_options.stop_strings else 0
        self.news = Broadcast()
        """Set when there is something for the client."""
        self.cached_tokens = 0
        """Prompt tokens that the first attempt found in a prefix cache."""
        self.prompt_logprobs: PromptLogprobs | None = None
        """Of the prompt's tokens, when the request state asks for them and an attempt has told."""
        self.stages = stages
        self._tell_stages = limits.timings
        self._tell_addresses = standing.tenant.operator
        self.placement = Placer(
            fleet,
            dispatcher,
            standing,
            guards.quarantine,
            self._demand,
            policy=limits.routing,
            wait_timeout_s=limits.wait_timeout_s,
        )
        self.texts = Texts(
            fleet.detokenizers,
            fleet.changed,
            request_state.logs,
            text_options,
            deadline=deadline,
            request_id=request_state.request_id,
            tokenizer_digest=model.tokenizer_digest,
            max_fruitless_attempts=limits.max_attempts,
            wait_timeout_s=limits.wait_timeout_s,
            stages=stages,
            on_stop=self._stopped,
            on_progress=self._text_progressed,
        )
        searched = bool(text_options.stop_strings)
        self.asking = TokenCoalescer(
            request_state.logs, self.texts.touch, pace, later, searched=searched
        )
        self.model = model
        self._budget = guards.budget
        self._prefix_hashes = prefix_hashes
        self._runners: dict[int | None, AttemptRunner] = {}
        self._moves: dict[int, Migration] = {}
        """Choices on offer that no attempt has taken over yet."""
        self._turn = asyncio.Event()

    async def run(self) -> None:
        """Returns when every choice has ended and all its text is here. Raises BatonError."""
        try:
            async with asyncio.timeout_at(self.deadline):
                await self._run()
        except TimeoutError:
            raise DeadlineExceeded("The request ran out of time.") from None
        finally:
            for move in self._moves.values():
                move.dropped()
            self.stages.reached(Stage.OVER)
            self.news.set()

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.texts.keep())
                await self._attempts(group)
        except ExceptionGroup as failures:
            raise self._cause(failures) from failures

    async def _attempts(self, group: asyncio.TaskGroup) -> None:
        """Starts attempts as the request state wants them."""
        loop = asyncio.get_running_loop()
        while not self.request_state.done:
            for run in self.request_state.next_attempts():
                if run.retry and not self._budget.take(loop.time()):
                    raise Unavailable("Workers fail too many requests.", retry_after_s=1.0)
                if run.attempt.attempt and not run.moved:
                    self.metrics.retried(run.attempt.position)
                runner = self._runners[run.attempt.attempt] = AttemptRunner(self, run)
                group.create_task(runner.run())
            self._turn.clear()
            await self._turn.wait()
        if self.request_state.failure is not None:
            raise self.request_state.failure
        self.stages.reached(Stage.DETOKENIZE)

    def tokens_came(self, choice: int) -> None:
        self._gaps.came(choice, asyncio.get_running_loop().time())
        self.asking.came(choice)

    def turn(self) -> None:
        for runner in list(self._runners.values()):
            runner.notice()
        self._turn.set()

    def forget(self, run: AttemptRun) -> None:
        self._runners.pop(run.attempt.attempt, None)

    def migrate_out(self, move: Migration) -> None:
        self._moves[move.key.choice] = move

    def take_over(self, choice: int) -> Migration:
        return self._moves.pop(choice)

    def kv_complete(self, run: AttemptRun, cached_tokens: int) -> None:
        if run.attempt.attempt == 0:
            self.cached_tokens = min(cached_tokens, len(self.request_state.prompt))

    def scored(self, prompt_logprobs: PromptLogprobs) -> None:
        if len(prompt_logprobs) == len(self.request_state.prompt) - 1:
            self.prompt_logprobs = prompt_logprobs

    def finished(self, reasoning_tokens: int) -> Finished:
        """Of a request that has ended well."""
        times = self.stages.times() if self._tell_stages else None
        if times is not None and not self._tell_addresses:
            times = times.without_addresses()
        return Finished(
            prompt_tokens=len(self.request_state.prompt),
            completion_tokens=sum(len(log) for log in self.request_state.logs),
            cached_tokens=self.cached_tokens,
            reasoning_tokens=reasoning_tokens,
            stages=times,
        )

    def cancel(self) -> None:
        self.fail(Cancelled("The request was cancelled."))

    def fail(self, error: BatonError) -> None:
        """Ends the request from outside; `run` raises the error."""
        self.request_state.fail(error)
        self.turn()

    def _stopped(self, choice: int, position: int, stop_string: str) -> None:
        """Raises PositionGap when the detokenizer names a token that there is not."""
        attempt = self.request_state.stopped(choice, position, stop_string)
        if attempt is not None:
            self._runners[attempt].cancel_choice(choice)
        self.turn()

    def _text_progressed(self, choice: int) -> None:
        self.news.set()
        if not self.max_unconfirmed:
            return
        runner = self._runners.get(self.request_state.logs[choice].attempt)
        if runner is not None:
            runner.confirm(choice, self.texts.choices[choice].searched_tokens)

    def _demand(self, run: AttemptRun) -> Demand:
        if not self.request_state.started and len(self._runners) == 1:
            self.model = self._fleet.replacement_model(self.model)
        return Demand(
            request_id=self.request_state.request_id,
            input_tokens=len(run.attempt.token_ids),
            choices=len(run.attempt.choices),
            needs_decode=self.request_state.needs_decode(run.attempt),
            model=self.model.name,
            model_digest=self.model.digest,
            tokenizer_digest=self.model.tokenizer_digest,
            prefix_hashes=self._prefix_hashes,
            output_tokens=max(1, self.request_state.stop.max_tokens - run.attempt.position),
        )

    def _cause(self, failures: ExceptionGroup[Exception]) -> BatonError:
        """The failure a client is told: the first of ours, else that something of ours is wrong."""
        for failure in failures.exceptions:
            if isinstance(failure, BatonError):
                return failure
        about = named(self.request_state.request_id, self.stages.trace.context.trace_id)
        log.error("a request failed by a fault of the router", exc_info=failures, extra=about)
        return Internal("The router failed.")
