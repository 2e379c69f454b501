"""Runs one request on the fleet: attempts on workers, tokens to text, until every choice has ended.

RequestState (core) decides; RequestRunner starts the attempts that it returns, and one
AttemptRunner per attempt reports events to it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import replace

from batonlm.core.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    Reason,
    Unavailable,
)
from batonlm.core.handover.table import HANDOVER_ID_BYTES
from batonlm.core.observe.stages import Stage
from batonlm.core.request.attempt import (
    Attempt,
    AttemptState,
    ChoiceTokens,
    Logprobs,
    Phase,
    SequenceKey,
)
from batonlm.core.request.model import ModelDescription, WorkerIdentity
from batonlm.core.request.prompt_logprobs import PromptLogprobs
from batonlm.core.request.request import Finished
from batonlm.core.request.request_state import AttemptRun, RequestState
from batonlm.core.request.resumption import adoption_id
from batonlm.core.routing.rebalance import Stream
from batonlm.core.routing.routing import Demand
from batonlm.router.request.admission import RequestContext, RouterServices
from batonlm.router.request.dispatcher import Placement
from batonlm.router.request.pacing import TokenCoalescer, TokenGaps
from batonlm.router.request.placer import Placer
from batonlm.router.request.texts import ChoiceOutput, Texts
from batonlm.router.workers.clients import PrefillClient
from batonlm.router.workers.decode_session import Migration
from batonlm.router.workers.fleet import Worker
from batonlm.router.workers.shared_stream import Broadcast
from batonlm.rpc.convert import choice_tokens_from_proto, prompt_logprobs_from_proto
from batonlm.rpc.logs import named
from batonlm.rpc.tracing import NO_SPAN, Span, error_type
from batonlm.v1.decode_pb2 import SequenceStarted
from batonlm.v1.detokenizer_pb2 import OpenText
from batonlm.v1.prefill_pb2 import RunResponse

log = logging.getLogger(__name__)

MAX_UNCONFIRMED = 8
"""Most positions that decode runs ahead of the search for stop strings: enough for a round trip to
the detokenizer at small steps, and the most that are computed in vain when one is found."""


FIND_ORPHANS_S = 1.0
"""How long a request that resumes a stream waits at most until a worker reports its sequences. A
client comes here as soon as the worker notices that its router is gone, or sooner."""

MAX_EARLIER_LOGPROBS = 4096
"""Most tokens whose log-probabilities travel with an attempt: 1 MB with 20 alternatives each."""

TOKEN_AGAIN_S = 0.01
"""It waits no longer than it may take to compute again what the client has, at so much a token."""


class RequestRunner:
    """Runs one request until all its choices have ended, and owns its attempts."""

    def __init__(
        self,
        services: RouterServices,
        context: RequestContext,
        state: RequestState,
        model: ModelDescription,
        opening: OpenText,
        *,
        prefix_hashes: bytes,
        on_placed: Callable[[], None],
        stream_id: str = "",
    ) -> None:
        """opening: how the text of a choice begins at a detokenizer. prefix_hashes: of the prompt's
        units. on_placed: called whenever an attempt gets workers. stream_id: of a stream with which
        its client may go on at another router."""
        self.services = services
        self.context = context
        self.stages = context.stages
        self.state = state
        self.model = model
        self.max_unconfirmed = MAX_UNCONFIRMED if opening.stop_strings else 0
        """Most tokens that decode may be ahead of the search for stop strings; 0: no limit."""
        self.news = Broadcast()
        """Set when there is something for the client."""
        self.cached_tokens = 0
        """Prompt tokens that the first attempt found in a prefix cache."""
        self.prompt_logprobs: PromptLogprobs | None = None
        """Set when the request asks for them and an attempt has answered."""
        self.placer = Placer(services, context, self._demand, on_placed)
        shown = frozenset(context.request.stop_token_ids)
        self.outputs = [ChoiceOutput(log, opening, shown, self._stopped) for log in state.logs]
        self.texts = Texts(
            services, context, self.outputs, model.tokenizer_digest, self._text_progressed
        )
        self.coalescer = TokenCoalescer(
            state.logs,
            self.texts.touch,
            services.load,
            services.deferred_calls,
            searched=bool(opening.stop_strings),
        )
        self.migrations: dict[int, Migration] = {}
        """By choice: migrations that are offered and that no attempt has taken over yet."""
        self.on_adopted: Callable[[], None] = lambda: None
        """Called when another router goes on with a choice, because its client went there."""
        self.leaves = False
        """Whether decode workers keep its sequences for another router."""
        self._stream_id = stream_id
        self._orphans: dict[int, WorkerIdentity] = {}
        """By choice: the decode workers of sequences that are to be adopted."""
        self._gaps = TokenGaps(state.logs, services.metrics.between_tokens[model.name])
        self._prefix_hashes = prefix_hashes
        self._attempts: dict[int | None, AttemptRunner] = {}
        self._turn = asyncio.Event()

    async def run(self) -> None:
        """Returns when every choice has ended and all its text has arrived. Raises BatonError."""
        try:
            async with asyncio.timeout_at(self.context.deadline):
                await self._run()
        except TimeoutError:
            raise DeadlineExceeded("The request ran out of time.") from None
        finally:
            for move in self.migrations.values():
                move.dropped()
            self.stages.reached(Stage.OVER)
            self.news.set()

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.texts.keep())
                await self._run_attempts(group)
        except ExceptionGroup as failures:
            raise self._cause(failures) from failures

    async def _run_attempts(self, group: asyncio.TaskGroup) -> None:
        """Starts the attempts that the request state returns."""
        loop = asyncio.get_running_loop()
        await self._find_orphans()
        while not self.state.done:
            for run in self.state.next_attempts():
                if run.retry and not self.services.budget.take(loop.time()):
                    raise Unavailable("Workers fail too many requests.", retry_after_s=1.0)
                if run.attempt.attempt and not run.moved:
                    self.services.metrics.retried(run.attempt.position)
                runner = self._attempts[run.attempt.attempt] = AttemptRunner(self, run)
                group.create_task(runner.run())
            self._turn.clear()
            await self._turn.wait()
        if self.state.failure is not None:
            raise self.state.failure
        self.stages.reached(Stage.DETOKENIZE)

    def adoption_ids(self, choices: Collection[int]) -> list[bytes]:
        """Returns the ids by which another router may go on with these choices, if their client can
        go to another one."""
        if not self._stream_id:
            return []
        name = self.context.request.tenant.name
        return [adoption_id(name, self._stream_id, choice) for choice in choices]

    def earlier_logprobs(self, attempt: Attempt) -> Sequence[Logprobs]:
        """Returns those of an attempt's input which another router needs to go on with it; the
        choices of an attempt have the same ones."""
        if not self._stream_id or attempt.position > MAX_EARLIER_LOGPROBS:
            return ()
        return self.state.logs[attempt.choices[0]].logprobs(0, attempt.position)

    async def _find_orphans(self) -> None:
        """Looks for the sequences of a stream that another router has begun, where it has not
        ended. What is not found is run again."""
        resumes, fleet = self.context.request.resumes, self.services.fleet
        if resumes is None or not self._stream_id or self.state.done:
            return
        awaited = {n for n, at in enumerate(resumes.choices) if at.tokens and not at.ended}
        choices = range(len(self.state.logs))
        ids = dict(zip(choices, self.adoption_ids(choices), strict=True))
        loop = asyncio.get_running_loop()
        again_s = TOKEN_AGAIN_S * max((resumes.choices[n].tokens for n in awaited), default=0)
        give_up = loop.time() + min(FIND_ORPHANS_S, again_s)
        # Their router may be connected: it hangs, is cut off from its client, or leaves.
        for worker in fleet.decodes.workers() if awaited else ():
            worker.client.want([ids[choice] for choice in awaited])
        while True:
            reports = [
                (worker.identity, worker.load.orphans)
                for worker in fleet.decodes.workers()
                if worker.load is not None and worker.model.digest == self.model.digest
            ]
            self._orphans = {
                choice: identity
                for identity, orphans in reports
                for choice in choices
                if ids[choice] in orphans
            }
            left = give_up - loop.time()
            if awaited <= self._orphans.keys() or left <= 0:
                break
            await fleet.changed.wait(left)
        for choice in sorted(awaited - self._orphans.keys()):
            self.adoption(choice, "none")
        self.state.adopt(self._orphans.keys())

    def adoption(self, choice: int, outcome: str) -> None:
        """Notes what became of a choice that another router has begun; see the metric."""
        self.services.metrics.adoptions.labels(outcome).inc()
        about = named(self.state.request_id, self.stages.trace.context.trace_id)
        log.info(
            "choice %d of another router: %s", choice, outcome, extra={**about, "adoption": outcome}
        )

    def orphan(self, choice: int) -> Placement | None:
        """Returns the placement of an attempt that adopts a choice's sequence, or None when its
        worker is gone."""
        return self.placer.adopted(self._orphans.pop(choice), len(self.state.prompt))

    def tokens_came(self, choice: int) -> None:
        """The log of a choice has grown or ended."""
        self._gaps.came(choice, asyncio.get_running_loop().time())
        self.coalescer.came(choice)

    def turn(self) -> None:
        """An event may have ended an attempt or the request."""
        for runner in list(self._attempts.values()):
            runner.notice()
        self._turn.set()

    def forget(self, run: AttemptRun) -> None:
        """The runner of the attempt is done."""
        self._attempts.pop(run.attempt.attempt, None)

    def kv_complete(self, run: AttemptRun, cached_tokens: int) -> None:
        """The KV of an attempt is complete. cached_tokens: input tokens that were in a prefix
        cache."""
        if run.attempt.attempt == 0:
            self.cached_tokens = min(cached_tokens, len(self.state.prompt))

    def scored(self, prompt_logprobs: PromptLogprobs) -> None:
        """An attempt has the log-probabilities of the prompt's tokens."""
        if len(prompt_logprobs) == len(self.state.prompt) - 1:
            self.prompt_logprobs = prompt_logprobs

    def finished(self, reasoning_tokens: int) -> Finished:
        """Returns the last event of a request that ended well."""
        times = self.stages.times() if self.services.config.timings else None
        if times is not None and not self.context.request.tenant.operator:
            times = times.without_addresses()
        return Finished(
            prompt_tokens=len(self.state.prompt),
            completion_tokens=sum(len(log) for log in self.state.logs),
            cached_tokens=self.cached_tokens,
            reasoning_tokens=reasoning_tokens,
            stages=times,
        )

    def cancel(self) -> None:
        """Ends the request from outside; `run` raises Cancelled."""
        self.fail(Cancelled("The request was cancelled."))

    def leave(self, error: BatonError) -> None:
        """Ends the request because this router ends; `run` raises the error. What its client may go
        on with at another router stays on the decode workers."""
        self.leaves = bool(self._stream_id)
        self.fail(error)

    def fail(self, error: BatonError) -> None:
        """Ends the request from outside; `run` raises the error."""
        self.state.fail(error)
        self.turn()

    def _stopped(self, choice: int, position: int, stop_string: str) -> None:
        """A stop string was found. Raises PositionGap when the detokenizer names a token that does
        not exist."""
        attempt = self.state.stopped(choice, position, stop_string)
        if attempt is not None:
            self._attempts[attempt].cancel_choice(choice)
        self.turn()

    def _text_progressed(self, choice: int) -> None:
        self.news.set()
        if not self.max_unconfirmed:
            return
        runner = self._attempts.get(self.state.logs[choice].attempt)
        if runner is not None:
            runner.confirm(choice, self.outputs[choice].searched_tokens)

    def _demand(self, run: AttemptRun) -> Demand:
        if not self.state.started and len(self._attempts) == 1:
            self.model = self.services.fleet.replacement_model(self.model)
        return Demand(
            request_id=self.state.request_id,
            input_tokens=len(run.attempt.token_ids),
            choices=len(run.attempt.choices),
            needs_decode=self.state.needs_decode(run.attempt),
            model=self.model.name,
            model_digest=self.model.digest,
            tokenizer_digest=self.model.tokenizer_digest,
            adapter=run.attempt.adapter,
            prefix_hashes=self._prefix_hashes,
            output_tokens=max(1, self.state.stop.max_tokens - run.attempt.position),
            scored=run.attempt.prompt_logprobs is not None,
        )

    def _cause(self, failures: ExceptionGroup[Exception]) -> BatonError:
        """Returns the failure for the client: the first BatonError, otherwise Internal."""
        for failure in failures.exceptions:
            if isinstance(failure, BatonError):
                return failure
        about = named(self.state.request_id, self.stages.trace.context.trace_id)
        log.error("a request failed by a fault of the router", exc_info=failures, extra=about)
        return Internal("The router failed.")


PREFILL_REPORT_S = 0.25
"""Seconds to wait for prefill's own report after decode reports a failed hand-over. Decode often
detects prefill's death first, but only prefill's failure shows which request may have caused it."""


class AttemptRunner:
    """Runs one attempt: places it, starts its phases, and frees their resources when it is over.

    It is the attempt's sink at the decode session. RequestState decides when the attempt is over
    and which workers still hold resources for it.
    """

    def __init__(self, request: RequestRunner, run: AttemptRun) -> None:
        self._request = request
        self._state = request.state
        self._stages = request.stages
        self._metrics = request.services.metrics
        self._run = run
        self._number = run.attempt.attempt
        self._over = asyncio.Event()
        self._place: Placement | None = None
        self._leaving: dict[int, Migration] = {}
        """Migrations of choices that their worker is asked to give up."""
        self._taking: Migration | None = None
        """The source of the attempt's KV, if it migrates here and has not turned back."""
        self._prefilling: asyncio.Task[None] | None = None
        self._waiting: asyncio.Task[None] | None = None
        """Waits for prefill's report before decode's counts."""
        self._proved = False
        """Whether decode has computed something."""
        self._began: float | None = None
        """Start on the loop's clock, until the first token arrives."""
        self._lost: BatonError | None = None
        """The last failure of the attempt."""
        self._span: Span = NO_SPAN

    async def run(self) -> None:
        """Returns when the attempt is over. Raises BatonError when no worker is available."""
        try:
            if self._run.adopts:
                self._place = self._adopt()
            elif self._run.moved:
                self._place = self._take_over()
            else:
                if self._number:
                    self._stages.reached(Stage.TURN)
                self._place = await self._request.placer.find(self._run)
            if self._place is not None:
                await self._run_on(self._place)
        finally:
            if self._taking is not None:
                self._give_back(self._taking)
            self._request.forget(self._run)

    def _give_back(self, move: Migration) -> None:
        """Ends a migration that has not arrived; no effect when it has."""
        if self._run.state is AttemptState.FAILED and self._state.failure is None:
            move.failed()
        else:
            move.dropped()

    def _adopt(self) -> Placement | None:
        """Returns the placement at the worker that has the sequence, or None when it is gone."""
        (choice,) = self._run.attempt.choices
        place = self._request.orphan(choice)
        if place is None:
            self._request.adoption(choice, "failed")
            error = Unavailable("The worker of this request is gone.")
            self._state.attempt_failed(self._number, error)
            self._request.turn()
        return place

    def _take_over(self) -> Placement | None:
        """Returns the placement at the receiver of the KV, or None when that worker is gone."""
        (choice,) = self._run.attempt.choices
        self._taking = self._request.migrations.pop(choice)
        tokens = len(self._run.attempt.token_ids)
        place = self._request.placer.at(self._taking, tokens)
        if place is None:
            error = Unavailable("The worker that was to take this request is gone.")
            self._state.attempt_failed(self._number, error)
            self._turn_back()
            self._request.turn()
        return place

    def _turn_back(self) -> None:
        """Called when the attempt may have failed: if its KV did not arrive here, the next one
        continues where the choice was."""
        move = self._taking
        if move is not None and self._state.returns(move.key.choice):
            move.returning = True
            self._request.migrations[move.key.choice] = move
            self._taking = None

    def notice(self) -> None:
        """The attempt may be over."""
        if self._run.over:
            self._over.set()

    async def _run_on(self, place: Placement) -> None:
        with ExitStack() as placed:
            placed.callback(place.release)
            self._span = self._stages.trace.attempt(self._run, place)
            placed.push(self._end_span)
            attempt = self._final_attempt()
            self._state.placed(self._number, place.phases)
            if log.isEnabledFor(logging.DEBUG):
                for line in place.decision.lines():
                    self._log(logging.DEBUG, f"attempt {self._number}: {line}")
            try:
                self._start(place, attempt)
                await self._over.wait()
            finally:
                if not self._run.over:
                    self._request.cancel()
                await self._free(place, attempt)

    def _final_attempt(self) -> Attempt:
        """Returns the attempt as it is sent to its workers, with its remaining time. Raises
        DeadlineExceeded."""
        remaining_s = self._request.context.deadline - asyncio.get_running_loop().time()
        if remaining_s <= 0:
            raise DeadlineExceeded("The request ran out of time.")
        attempt = self._run.attempt
        choices = tuple(choice for choice in attempt.choices if choice in self._run.running)
        traceparent = self._span.context.traceparent
        return replace(attempt, choices=choices, remaining_s=remaining_s, traceparent=traceparent)

    def _end_span(self, _: object, failure: BaseException | None, __: object) -> None:
        well = self._run.state is AttemptState.ENDED
        lost = failure or self._lost or self._state.failure
        self._span.end("" if well else error_type(lost) or "internal")
        self._stages.attempt_over(self._run, well=well)

    def _start(self, place: Placement, attempt: Attempt) -> None:
        """Starts both phases at once. The handover id ties them together and is never reused."""
        self._began = asyncio.get_running_loop().time()
        prefill, decode = place.prefill, place.decode
        self._stages.started(self._run, place)
        handover_id, sender = b"", prefill.identity if prefill else None
        if self._taking is not None:
            handover_id, sender = self._taking.handover_id, self._taking.sender
        elif prefill and decode:
            handover_id = secrets.token_bytes(HANDOVER_ID_BYTES)
        # Prefill first, because the first token depends on it.
        if prefill is not None:
            instance_id = decode.identity.instance_id if decode else ""
            self._prefilling = asyncio.create_task(
                self._prefill(prefill, attempt, handover_id, instance_id)
            )
        if decode is not None:
            decode.client.start(
                attempt,
                self,
                handover_id=handover_id,
                sender=sender,
                max_unconfirmed=self._request.max_unconfirmed,
                plan=place.decision.plan,
                adoption_ids=self._request.adoption_ids(attempt.choices),
                adopts=self._run.adopts,
                logprobs=self._request.earlier_logprobs(attempt),
            )

    async def _prefill(
        self,
        worker: Worker[PrefillClient],
        attempt: Attempt,
        handover_id: bytes,
        decode_instance_id: str,
    ) -> None:
        try:
            answer = await worker.client.prefill(
                attempt,
                handover_id=handover_id,
                decode_instance_id=decode_instance_id,
                plan=None if self._place is None else self._place.decision.plan,
            )
            found, logprobs = _read(answer)
        except BatonError as error:
            self._blame(Phase.PREFILL, error)
            self._state.phase_failed(self._number, Phase.PREFILL, error)
        else:
            worker.success()
            if self._place is not None:
                self._place.answered(answer.queue_us / 1e6, answer.prefill_us / 1e6)
            self._stages.prefill_answered(self._run, answer)
            self._prefix_over(worker.identity, answer)
            self._request.kv_complete(self._run, answer.cached_tokens)
            if logprobs is not None:
                self._request.scored(logprobs)
            keys = attempt.keys()
            for tokens in found:
                if tokens.key in keys:
                    self._accept(Phase.PREFILL, tokens)
            self._state.prefill_answered(self._number)
            if self._place is not None and self._place.decode is None:
                self._metrics.prefilled(remotely=True)
        finally:
            if self._place is not None:
                self._place.prefilled()
        self._request.turn()

    def on_tokens(self, tokens: ChoiceTokens) -> None:
        self._accept(Phase.DECODE, tokens)
        if self._run.over:
            self._request.turn()

    def on_kv_complete(self, started: SequenceStarted) -> None:
        if self._place is not None:
            self._place.answered()
        if started.HasField("prompt_logprobs"):
            self._request.scored(prompt_logprobs_from_proto(started.prompt_logprobs))
        self._metrics.kv_bytes.inc(started.received_bytes)
        if self._place is not None:
            self._place.prefilled()
        remotely = self._place is not None and self._place.prefill is not None
        here = not self._run.moved and not remotely
        if here and self._place is not None and self._place.decode is not None:
            self._prefix_over(self._place.decode.identity, started)
        self._stages.kv_complete(self._run, started, computed=here)
        if self._run.adopts:
            self._request.adoption(self._run.attempt.choices[0], "adopted")
        elif self._taking is not None:
            self._taking.arrived()
        elif not self._run.moved:
            self._metrics.prefilled(remotely=remotely)
            if here:
                self._request.kv_complete(self._run, started.cached_tokens)
        self._state.kv_complete(self._number)

    def _prefix_over(self, receiver: WorkerIdentity, answer: RunResponse | SequenceStarted) -> None:
        """What the computing worker was to collect from another one's cache came, or did not."""
        plan = None if self._place is None else self._place.decision.plan
        if self._place is None or plan is None:
            return
        pauses, now = self._request.services.fleet.prefix_pauses, asyncio.get_running_loop().time()
        if not answer.HasField("prefix"):
            pauses.did_not_collect(receiver.instance_id, now)
            return
        prefix = answer.prefix
        self._metrics.kv_bytes.inc(prefix.received_bytes)
        self._metrics.collected(prefix.num_tokens, self._place.decision.reason_to_collect)
        if prefix.outcome not in ("completed", "cached", "full"):
            pauses.gave_none(plan.sender.instance_id, now)

    def on_adopted(self) -> None:
        self._request.on_adopted()

    def on_failed(self, error: BatonError, choices: Collection[int]) -> None:
        runs = self._prefilling is not None and not self._prefilling.done()
        paired = self._run.state is AttemptState.PAIRED
        if runs and paired and error.reason is Reason.HANDOVER_FAILED and self._waiting is None:
            self._waiting = asyncio.create_task(self._wait_for_prefill(error, choices))
        else:
            self._decode_failed(error, choices)

    async def _wait_for_prefill(self, error: BatonError, choices: Collection[int]) -> None:
        assert self._prefilling is not None
        await asyncio.wait([self._prefilling], timeout=PREFILL_REPORT_S)
        self._decode_failed(error, choices)

    def _decode_failed(self, error: BatonError, choices: Collection[int]) -> None:
        if self._run.adopts and not self._run.has_kv:
            (choice,) = self._run.attempt.choices
            self._request.adoption(choice, "tokens" if len(self._state.logs[choice]) else "failed")
        self._blame(Phase.DECODE, error)
        self._state.phase_failed(self._number, Phase.DECODE, error, choices)
        self._turn_back()
        self._forget_ended()
        self._request.turn()

    def movable(self) -> list[Stream]:
        if self._run.state is not AttemptState.DECODING:
            return []
        prompt, logs = len(self._state.prompt), self._state.logs
        most = min(self._state.stop.max_tokens, self._request.model.max_model_len - prompt)
        if self._run.suspect:
            # Where it runs was chosen so that it meets no other suspect: only a drain moves it.
            most = 0
        return [
            Stream(
                SequenceKey(self._state.request_id, choice, self._number),
                prompt + len(logs[choice]),
                max(0, most - len(logs[choice])),
                self._run.attempt.adapter,
            )
            for choice in self._run.running - self._leaving.keys()
            if len(logs[choice])
        ]

    def move(self, move: Migration) -> None:
        self._leaving[move.key.choice] = move
        move.ask()

    def on_migrated_out(self, choice: int, handover_id: bytes, position: int | None) -> None:
        move = self._leaving.get(choice)
        if move is None or move.handover_id != handover_id:
            return
        del self._leaving[choice]
        if position is None:
            move.stayed()
        elif self._state.migrated_out(self._number, choice, position):
            self._request.migrations[choice] = move
        else:
            move.failed()
        self._request.turn()

    def next_positions(self) -> dict[SequenceKey, int]:
        return {
            SequenceKey(self._state.request_id, choice, self._number): len(self._state.logs[choice])
            for choice in self._run.running
        }

    def cancel_choice(self, choice: int) -> None:
        """The choice has ended by a stop string; the attempt's others continue."""
        self._forget_ended()
        if self._place is not None and self._place.decode is not None:
            self._place.decode.client.cancel(self._run.attempt.key, choice)

    def confirm(self, choice: int, position: int) -> None:
        """No stop string ends below this position of the choice."""
        if self._place is not None and self._place.decode is not None:
            key = SequenceKey(self._state.request_id, choice, self._number)
            self._place.decode.client.confirm(key, position)

    def _accept(self, phase: Phase, tokens: ChoiceTokens) -> None:
        if self._state.tokens(phase, tokens):
            self._note_first_token()
            self._request.tokens_came(tokens.key.choice)
            self._forget_ended()
            self._prove()

    def _prove(self) -> None:
        """Reports once to the decode worker's breaker that it has computed something."""
        place = self._place
        if self._proved or place is None or place.decode is None:
            return
        if self._state.gained(self._run, Phase.DECODE):
            self._proved = True
            place.apart.close()
            place.decode.success()

    def _note_first_token(self) -> None:
        began, self._began = self._began, None
        if began is None or self._place is None:
            return
        predicted_s = self._place.decision.first_token_s
        if predicted_s is not None:
            took_s = asyncio.get_running_loop().time() - began
            remotely = self._place.prefill is not None
            self._metrics.predicted(predicted_s, took_s, remotely=remotely)

    def _forget_ended(self) -> None:
        """Cancels the migrations of choices that have ended here."""
        if self._leaving:
            for choice in self._leaving.keys() - self._run.running:
                self._leaving.pop(choice).stayed()

    def _blame(self, phase: Phase, error: BatonError) -> None:
        """Reports the failure to the breakers of the workers at fault, and keeps them out of this
        request's next placement."""
        placer, place, state = self._request.placer, self._place, self._run.state
        if place is None:
            return
        self._lost = error
        self._stages.lost(self._run, phase, error)
        at = phase.name.lower()
        self._log(
            logging.INFO,
            f"attempt {self._number}: {at} failed: {error.message}",
            lost_at=at,
            reason=error.reason.name,
        )
        if phase is Phase.PREFILL and place.prefill is not None:
            placer.blame_prefill(place.prefill, error)
        if phase is Phase.DECODE and place.decode is not None:
            # During a transfer, decode's failure may only reflect the sender's.
            handing_over = state in (AttemptState.PAIRED, AttemptState.HANDING_OVER)
            if place.prefill is not None and handing_over and error.reason is not Reason.OVERLOADED:
                placer.blame_prefill(place.prefill, error)
            # An incompatible pair is separated by excluding prefill, because decode can prefill by
            # itself.
            if error.reason not in (Reason.HANDOVER_FAILED, Reason.INCOMPATIBLE):
                placer.blame_decode(place.decode, error, moved=self._run.moved)

    def _log(self, level: int, text: str, **extra: str) -> None:
        about = named(self._state.request_id, self._span.context.trace_id)
        log.log(level, text, extra={**about, **extra})

    async def _free(self, place: Placement, attempt: Attempt) -> None:
        """Notifies every worker that holds resources of the attempt."""
        holders = self._run.to_cancel
        for move in self._leaving.values():
            move.stayed()
        if place.decode is not None:
            stays = self._request.leaves and self._run.has_kv
            cancel = Phase.DECODE in holders and not stays
            place.decode.client.release(attempt.key, cancel=cancel)
        if place.prefill is not None and Phase.PREFILL in holders:
            self._request.services.background(place.prefill.client.cancel(attempt.key))
        for task in (self._waiting, self._prefilling):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)


def _read(answer: RunResponse) -> tuple[list[ChoiceTokens], PromptLogprobs | None]:
    """Returns the tokens and prompt log-probabilities that prefill computed. Raises Internal for an
    invalid answer, which is not the request's fault."""
    try:
        tokens = [choice_tokens_from_proto(entry) for entry in answer.choices]
        if not answer.HasField("prompt_logprobs"):
            return tokens, None
        return tokens, prompt_logprobs_from_proto(answer.prompt_logprobs)
    except InvalidArgument as error:
        raise Internal("Prefill answered what cannot be read.") from error
