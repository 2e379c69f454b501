"""Runs one attempt: places it, starts its phases, and frees what they hold when it is over.

Tells the request state whatever happens; the request state says when the attempt is over and who
still holds something for it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Collection, Coroutine
from contextlib import ExitStack
from dataclasses import replace
from typing import Protocol

from baton.core.errors import BatonError, DeadlineExceeded, Reason, Unavailable
from baton.core.handover.table import HANDOVER_ID_BYTES
from baton.core.observe.stages import Stage
from baton.core.request.attempt import Attempt, AttemptState, ChoiceTokens, Phase, SequenceKey
from baton.core.request.prompt_logprobs import PromptLogprobs
from baton.core.request.request_state import AttemptRun, RequestState
from baton.router.observe.metrics import RouterMetrics
from baton.router.observe.stage_timer import StageTimer
from baton.router.request.dispatcher import Placement, Placer
from baton.router.workers.clients import PrefillClient
from baton.router.workers.decode_session import Migration
from baton.router.workers.fleet import Worker
from baton.rpc.convert import choice_tokens_from_proto, prompt_logprobs_from_proto
from baton.rpc.logs import named
from baton.rpc.tracing import NO_SPAN, Span, error_type
from baton.v1.decode_pb2 import SequenceStarted

log = logging.getLogger(__name__)


PREFILL_TELLS_S = 0.25
"""How long decode's word that a hand-over failed waits for prefill's own, which may be its death:
decode often is the first to see that, and only that tells who may have caused it."""


class Owner(Protocol):
    """The request that an attempt belongs to. All calls return at once."""

    request_state: RequestState
    placement: Placer
    deadline: float
    max_unconfirmed: int
    background: Callable[[Coroutine[None, None, None]], None]
    metrics: RouterMetrics
    stages: StageTimer

    def tokens_came(self, choice: int) -> None:
        """The choice's log has grown or ended."""

    def kv_complete(self, run: AttemptRun, cached_tokens: int) -> None:
        """How many input tokens the attempt's KV had in a prefix cache."""

    def scored(self, prompt_logprobs: PromptLogprobs) -> None:
        """How likely the prompt's tokens are."""

    def migrate_out(self, move: Migration) -> None:
        """A choice left its attempt; the one that goes on with it takes the move over."""

    def take_over(self, choice: int) -> Migration:
        """The move by which a choice comes."""

    def turn(self) -> None:
        """Something happened that may have ended an attempt or the request."""

    def cancel(self) -> None:
        """The request ends from outside."""

    def forget(self, run: AttemptRun) -> None:
        """The attempt's runner is done."""


class AttemptRunner:
    """One attempt on its workers. It is the decode session's sink for it."""

    def __init__(self, owner: Owner, run: AttemptRun) -> None:
        self._owner = owner
        self._run = run
        self._number = run.attempt.attempt
        self._over = asyncio.Event()
        self._place: Placement | None = None
        self._leaving: dict[int, Migration] = {}
        """Choices that their worker is asked to give away."""
        self._taking: Migration | None = None
        """How the attempt's KV comes, if it moves here."""
        self._prefilling: asyncio.Task[None] | None = None
        self._hearing: asyncio.Task[None] | None = None
        """Waits for prefill's word before decode's counts."""
        self._proved = False
        """Whether decode was seen to compute."""
        self._began: float | None = None
        """On the loop's clock, until the first token came."""
        self._lost: BatonError | None = None
        """What went wrong with it last."""
        self._span: Span = NO_SPAN

    async def run(self) -> None:
        """Returns when the attempt is over. Raises BatonError when no worker can be had."""
        try:
            if self._run.moved:
                self._place = self._take_over()
            else:
                if self._number:
                    self._owner.stages.reached(Stage.TURN)
                self._place = await self._owner.placement.find(self._run)
            if self._place is not None:
                await self._run_on(self._place)
        finally:
            if self._taking is not None:
                self._give_back(self._taking)
            self._owner.forget(self._run)

    def _give_back(self, move: Migration) -> None:
        """Without effect when it has arrived."""
        if self._run.state is AttemptState.FAILED and self._owner.request_state.failure is None:
            move.failed()
        else:
            move.dropped()

    def _take_over(self) -> Placement | None:
        """Where the KV is meant to go. Without that worker there is no such attempt."""
        (choice,) = self._run.attempt.choices
        self._taking = self._owner.take_over(choice)
        tokens = len(self._run.attempt.token_ids)
        place = self._owner.placement.at(self._taking.receiver, tokens)
        if place is None:
            error = Unavailable("The worker that was to take this request is gone.")
            self._owner.request_state.attempt_failed(self._number, error)
            self._owner.turn()
        return place

    def notice(self) -> None:
        """The attempt may be over."""
        if self._run.over:
            self._over.set()

    async def _run_on(self, place: Placement) -> None:
        with ExitStack() as placed:
            placed.callback(place.release)
            self._span = self._owner.stages.trace.attempt(self._run, place)
            placed.push(self._end_span)
            attempt = self._final_attempt()
            self._owner.request_state.placed(self._number, place.phases)
            if log.isEnabledFor(logging.DEBUG):
                for line in place.decision.lines():
                    self._log(logging.DEBUG, f"attempt {self._number}: {line}")
            try:
                self._start(place, attempt)
                await self._over.wait()
            finally:
                if not self._run.over:
                    self._owner.cancel()
                await self._free(place, attempt)

    def _final_attempt(self) -> Attempt:
        """The attempt as its workers get it, now that it has a place."""
        remaining_s = self._owner.deadline - asyncio.get_running_loop().time()
        if remaining_s <= 0:
            raise DeadlineExceeded("The request ran out of time.")
        attempt = self._run.attempt
        choices = tuple(choice for choice in attempt.choices if choice in self._run.running)
        traceparent = self._span.context.traceparent
        return replace(attempt, choices=choices, remaining_s=remaining_s, traceparent=traceparent)

    def _end_span(self, _: object, failure: BaseException | None, __: object) -> None:
        well = self._run.state is AttemptState.ENDED
        lost = failure or self._lost or self._owner.request_state.failure
        self._span.end("" if well else error_type(lost) or "internal")
        self._owner.stages.attempt_over(self._run, well=well)

    def _start(self, place: Placement, attempt: Attempt) -> None:
        """Both phases at once. The id binds them and is never used again."""
        self._began = asyncio.get_running_loop().time()
        prefill, decode = place.prefill, place.decode
        self._owner.stages.started(self._run, place)
        handover_id, sender = b"", prefill.identity if prefill else None
        if self._taking is not None:
            handover_id, sender = self._taking.handover_id, self._taking.sender
        elif prefill and decode:
            handover_id = secrets.token_bytes(HANDOVER_ID_BYTES)
        # Prefill first: the first token waits for it.
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
                max_unconfirmed=self._owner.max_unconfirmed,
            )

    async def _prefill(
        self,
        worker: Worker[PrefillClient],
        attempt: Attempt,
        handover_id: bytes,
        decode_instance_id: str,
    ) -> None:
        request_state = self._owner.request_state
        try:
            answer = await worker.client.prefill(
                attempt, handover_id=handover_id, decode_instance_id=decode_instance_id
            )
        except BatonError as error:
            self._blame(Phase.PREFILL, error)
            request_state.phase_failed(self._number, Phase.PREFILL, error)
        else:
            worker.success()
            if self._place is not None:
                self._place.answered(answer.queue_us / 1e6, answer.prefill_us / 1e6)
            self._owner.stages.prefill_answered(self._run, answer)
            self._owner.kv_complete(self._run, answer.cached_tokens)
            if answer.HasField("prompt_logprobs"):
                self._owner.scored(prompt_logprobs_from_proto(answer.prompt_logprobs))
            keys = attempt.keys()
            for tokens in map(choice_tokens_from_proto, answer.choices):
                if tokens.key in keys:
                    self._accept(Phase.PREFILL, tokens)
            request_state.prefill_answered(self._number)
            if self._place is not None and self._place.decode is None:
                self._owner.metrics.prefilled(remotely=True)
        finally:
            if self._place is not None:
                self._place.prefilled()
        self._owner.turn()

    def on_tokens(self, tokens: ChoiceTokens) -> None:
        self._accept(Phase.DECODE, tokens)
        if self._run.over:
            self._owner.turn()

    def on_kv_complete(self, started: SequenceStarted) -> None:
        if self._place is not None:
            self._place.answered()
        if started.HasField("prompt_logprobs"):
            self._owner.scored(prompt_logprobs_from_proto(started.prompt_logprobs))
        self._owner.metrics.kv_bytes.inc(started.received_bytes)
        if self._place is not None:
            self._place.prefilled()
        remotely = self._place is not None and self._place.prefill is not None
        here = self._taking is None and not remotely
        self._owner.stages.kv_complete(self._run, started, computed=here)
        if self._taking is not None:
            self._taking.moved()
        else:
            self._owner.metrics.prefilled(remotely=remotely)
            if here:
                self._owner.kv_complete(self._run, started.cached_tokens)
        self._owner.request_state.kv_complete(self._number)

    def on_failed(self, error: BatonError, choices: Collection[int]) -> None:
        unheard = self._prefilling is not None and not self._prefilling.done()
        paired = self._run.state is AttemptState.PAIRED
        if unheard and paired and error.reason is Reason.HANDOVER_FAILED and self._hearing is None:
            self._hearing = asyncio.create_task(self._hear_prefill(error, choices))
        else:
            self._decode_failed(error, choices)

    async def _hear_prefill(self, error: BatonError, choices: Collection[int]) -> None:
        assert self._prefilling is not None
        await asyncio.wait([self._prefilling], timeout=PREFILL_TELLS_S)
        self._decode_failed(error, choices)

    def _decode_failed(self, error: BatonError, choices: Collection[int]) -> None:
        self._blame(Phase.DECODE, error)
        self._owner.request_state.phase_failed(self._number, Phase.DECODE, error, choices)
        self._forget_ended()
        self._owner.turn()

    def movable(self) -> dict[SequenceKey, int]:
        if self._run.state is not AttemptState.DECODING:
            return {}
        request_state, staying = self._owner.request_state, self._run.running - self._leaving.keys()
        return {
            SequenceKey(request_state.request_id, choice, self._number): len(request_state.prompt)
            + len(request_state.logs[choice])
            for choice in staying
            if len(request_state.logs[choice])
        }

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
        elif self._owner.request_state.migrated_out(self._number, choice, position):
            self._owner.migrate_out(move)
        else:
            move.failed()
        self._owner.turn()

    def next_positions(self) -> dict[SequenceKey, int]:
        request_state = self._owner.request_state
        return {
            SequenceKey(request_state.request_id, choice, self._number): len(
                request_state.logs[choice]
            )
            for choice in self._run.running
        }

    def cancel_choice(self, choice: int) -> None:
        """The choice has ended by a stop string; the attempt's others go on."""
        self._forget_ended()
        if self._place is not None and self._place.decode is not None:
            self._place.decode.client.cancel(self._run.attempt.key, choice)

    def confirm(self, choice: int, position: int) -> None:
        """No stop string ends below this position of the choice."""
        if self._place is not None and self._place.decode is not None:
            key = SequenceKey(self._owner.request_state.request_id, choice, self._number)
            self._place.decode.client.confirm(key, position)

    def _accept(self, phase: Phase, tokens: ChoiceTokens) -> None:
        if self._owner.request_state.tokens(phase, tokens):
            self._note_first_token()
            self._owner.tokens_came(tokens.key.choice)
            self._forget_ended()
            self._prove()

    def _prove(self) -> None:
        """Decode is told once that it computed."""
        place = self._place
        if self._proved or place is None or place.decode is None:
            return
        if self._owner.request_state.gained(self._run, Phase.DECODE):
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
            self._owner.metrics.predicted(predicted_s, took_s, remotely=remotely)

    def _forget_ended(self) -> None:
        """Whoever ended here while it was asked for does not leave."""
        if self._leaving:
            for choice in self._leaving.keys() - self._run.running:
                self._leaving.pop(choice).stayed()

    def _blame(self, phase: Phase, error: BatonError) -> None:
        """Tells the workers at fault, and keeps them out of this request's next placement."""
        placement, place, state = self._owner.placement, self._place, self._run.state
        if place is None:
            return
        self._lost = error
        self._owner.stages.lost(self._run, phase, error)
        at = phase.name.lower()
        self._log(
            logging.INFO,
            f"attempt {self._number}: {at} failed: {error.message}",
            lost_at=at,
            reason=error.reason.name,
        )
        if phase is Phase.PREFILL and place.prefill is not None:
            placement.blame_prefill(place.prefill, error)
        if phase is Phase.DECODE and place.decode is not None:
            # While KV is on its way, decode may only be reporting what became of the sender.
            handing_over = state in (AttemptState.PAIRED, AttemptState.HANDING_OVER)
            if place.prefill is not None and handing_over and error.reason is not Reason.OVERLOADED:
                placement.blame_prefill(place.prefill, error)
            # Two that do not fit are parted by keeping prefill out; decode can prefill by itself.
            if error.reason not in (Reason.HANDOVER_FAILED, Reason.INCOMPATIBLE):
                placement.blame_decode(place.decode, error)

    def _log(self, level: int, text: str, **extra: str) -> None:
        about = named(self._owner.request_state.request_id, self._span.context.trace_id)
        log.log(level, text, extra={**about, **extra})

    async def _free(self, place: Placement, attempt: Attempt) -> None:
        """Everyone who holds something is told, whether anyone listens or not."""
        holders = self._run.to_cancel
        for move in self._leaving.values():
            move.stayed()
        if place.decode is not None:
            place.decode.client.release(attempt.key, cancel=Phase.DECODE in holders)
        if place.prefill is not None and Phase.PREFILL in holders:
            self._owner.background(place.prefill.client.cancel(attempt.key))
        for task in (self._hearing, self._prefilling):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
