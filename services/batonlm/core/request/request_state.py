"""The state of one request: its choices, the attempts that run them, and what a failure means.

The module is pure: its caller reports events and starts the attempts that it returns.

An attempt runs choices that share all accepted tokens. Its input is the prompt and those tokens, so
an accepted position is never sampled again. `batonlm.core.request.attempt` has the states of an
attempt.

A decode worker may migrate a choice out, with its KV. The choice leaves its attempt, which has not
failed, and continues in an attempt of its own, which is MOVING until its KV is complete. The input
of that attempt ends before the newest accepted token, which the sender sends again; losing such an
attempt does not count against the request. Lost before its KV was complete, the choice returns: one
more such attempt continues it on the sender, which still has the KV unless it is gone, too. Events
of an attempt that is over are dropped.

A choice whose sequence another router has begun, and left, is adopted: its first attempt goes on
with that sequence and gets its tokens from the first one on. If it fails, the choice runs as if
there had been none.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from batonlm.core.errors import BatonError, Internal, Quarantined, Reason, WorkerLost
from batonlm.core.request.attempt import (
    HOLDERS,
    LOST,
    OVER,
    TRANSITIONS,
    Attempt,
    AttemptEvent,
    AttemptState,
    ChoiceTokens,
    Phase,
    PositionGap,
    TokenLog,
)
from batonlm.core.request.request import FinishReason
from batonlm.core.routing.failures import Suspicion


class FailureAction(Enum):
    """What a phase's failure means for the request."""

    FATAL = auto()
    ELSEWHERE = auto()
    """Start another attempt. It counts as a failed attempt, and against the retry budget if no
    token was accepted yet."""
    LATER = auto()
    """Start another attempt after a pause. It does not count; the deadline bounds it."""


VERDICTS: dict[Reason, FailureAction] = {
    Reason.INVALID_ARGUMENT: FailureAction.FATAL,
    Reason.CONTEXT_LENGTH_EXCEEDED: FailureAction.FATAL,
    Reason.DEADLINE_EXCEEDED: FailureAction.FATAL,
    Reason.UNIMPLEMENTED: FailureAction.FATAL,
    Reason.QUARANTINED: FailureAction.FATAL,
    Reason.OVERLOADED: FailureAction.LATER,
    Reason.UNAVAILABLE: FailureAction.ELSEWHERE,
    Reason.HANDOVER_FAILED: FailureAction.ELSEWHERE,
    Reason.INCOMPATIBLE: FailureAction.ELSEWHERE,
    Reason.CANCELLED: FailureAction.ELSEWHERE,
    Reason.INTERNAL: FailureAction.ELSEWHERE,
    Reason.NOT_FOUND: FailureAction.ELSEWHERE,
    Reason.MODEL_NOT_FOUND: FailureAction.ELSEWHERE,
    Reason.UNAUTHENTICATED: FailureAction.ELSEWHERE,
}

_FAULTS = frozenset(
    {
        Reason.HANDOVER_FAILED,
        Reason.INTERNAL,
        Reason.NOT_FOUND,
        Reason.MODEL_NOT_FOUND,
        Reason.UNAUTHENTICATED,
    }
)


def is_fault(error: BatonError) -> bool:
    """Whether a failure counts against the worker. Failures that the request, the load or a drain
    causes do not."""
    return isinstance(error, WorkerLost) or error.reason in _FAULTS


def leaves(error: BatonError | None) -> bool:
    """Whether the worker reports that it accepts no more work, as opposed to being lost."""
    return (
        error is not None
        and error.reason is Reason.UNAVAILABLE
        and not isinstance(error, WorkerLost)
    )


@dataclass(slots=True)
class AttemptRun:
    """The progress of one attempt."""

    attempt: Attempt
    running: set[int]
    """Its choices that have neither ended nor left it."""
    moved: bool = False
    """Whether it continues with KV from another decode worker, or of the same one."""
    returned: bool = False
    """Whether it continues on the worker that offered the KV, because that arrived nowhere."""
    has_kv: bool = False
    """Whether decode has all its KV."""
    adopts: bool = False
    """Whether it continues where another router's run of the request was: it `moved`, and does not
    return."""
    suspect: bool = False
    """Whether the request is a suspect: no worker may run it together with another suspect
    (`batonlm.core.routing.failures`)."""
    retry: bool = False
    """Whether a worker lost the request before any token of it was accepted."""
    phases: frozenset[Phase] = frozenset()
    """Set once it is placed."""
    state: AttemptState = AttemptState.PLACING
    to_cancel: frozenset[Phase] = frozenset()
    """Set once it is over: the phases that may still hold resources for it."""
    freed_by_decode: set[int] = field(default_factory=set)
    """Choices that decode has ended, failed or migrated out. It frees their resources without a
    cancel."""

    @property
    def over(self) -> bool:
        return self.state in OVER


class RequestState:
    """All choices of one request and the attempts that run them."""

    def __init__(self, first: Attempt, max_fruitless_attempts: int) -> None:
        """first: the first attempt, with all choices and the prompt; later attempts differ in their
        choices and their input. max_fruitless_attempts: how many attempts in a row a choice may
        lose without a second token in any of them. The first token may come from prefill; only the
        second shows that decode works."""
        self.request_id = first.request_id
        self.prompt = tuple(first.token_ids)
        self.stop = first.stop
        self.logs = tuple(TokenLog(choice) for choice in first.choices)
        if not first.stop.max_tokens:
            for log in self.logs:
                log.finish_reason = FinishReason.LENGTH
        self.failure: BatonError | None = None
        self.num_attempts = 0
        self._first = first
        self._max_fruitless_attempts = max_fruitless_attempts
        self._runs: dict[int, AttemptRun] = {}
        self._fruitless_attempts = [0] * len(first.choices)
        self._migrated_out: set[int] = set()
        self._returning: set[int] = set()
        """A part of `_migrated_out`: choices whose KV did not arrive."""
        self._adopting: set[int] = set()
        self._lost: set[int] = set()
        """Choices whose worker was lost and that no attempt runs again yet."""
        self.suspicion = Suspicion()
        """Whether this request may be the cause of its workers' deaths."""

    @property
    def started(self) -> bool:
        """Whether the client may have received a token."""
        return any(len(log) for log in self.logs)

    @property
    def done(self) -> bool:
        """Whether no attempt runs and none is needed any more."""
        return self.failure is not None or all(log.ended for log in self.logs)

    def adopt(self, choices: Collection[int]) -> None:
        """Sequences of these choices, which have not begun here, are on decode workers."""
        self._adopting.update(choices)

    def next_attempts(self) -> list[AttemptRun]:
        """Returns attempts for all waiting choices: one for each choice that is migrated or
        adopted, and one per group of the others with the same accepted tokens."""
        if self.failure is not None:
            return []
        runs = []
        groups: dict[tuple[int, ...], list[int]] = {}
        for log in self.logs:
            if log.attempt is not None or log.ended:
                continue
            if log.choice in self._migrated_out:
                returned = log.choice in self._returning
                output = log.token_ids(0, -1)
                runs.append(self._open(output, [log.choice], moved=True, returned=returned))
            elif log.choice in self._adopting:
                runs.append(self._open((), [log.choice], moved=True, returned=True, adopts=True))
            else:
                groups.setdefault(log.token_ids(), []).append(log.choice)
        self._migrated_out.clear()
        self._returning.clear()
        self._adopting.clear()
        return runs + [self._open(output, choices) for output, choices in groups.items()]

    def returns(self, choice: int) -> bool:
        """Whether the choice is to continue where it was before it migrated."""
        return choice in self._returning

    def _open(
        self,
        output: tuple[int, ...],
        choices: list[int],
        *,
        moved: bool = False,
        returned: bool = False,
        adopts: bool = False,
    ) -> AttemptRun:
        number = self.num_attempts
        self.num_attempts += 1
        attempt = replace(
            self._first, attempt=number, choices=tuple(choices), token_ids=self.prompt + output
        )
        run = self._runs[number] = AttemptRun(
            attempt,
            set(choices),
            moved,
            returned,
            adopts=adopts,
            suspect=self.suspicion.suspect and not moved,
            retry=not self.started and not self._lost.isdisjoint(choices),
        )
        self._lost.difference_update(choices)
        for choice in choices:
            self.logs[choice].attempt = number
        return run

    def needs_decode(self, attempt: Attempt) -> bool:
        """Whether any choice may continue after this attempt's first token."""
        return attempt.position + 1 < self.stop.max_tokens

    def placed(self, number: int, phases: Collection[Phase]) -> None:
        """The workers of the attempt are chosen. Called before they are notified."""
        run = self._runs.get(number)
        if run is not None:
            run.phases = frozenset(phases)
        if run is not None and run.moved:
            event = AttemptEvent.PLACED_TO_MOVE
        elif Phase.DECODE not in phases:
            event = AttemptEvent.PLACED_ON_PREFILL
        elif Phase.PREFILL in phases:
            event = AttemptEvent.PLACED_ON_BOTH
        else:
            event = AttemptEvent.PLACED_ON_DECODE
        self._apply(number, event)

    def tokens(self, phase: Phase, tokens: ChoiceTokens) -> bool:
        """Processes tokens of one choice from a phase; returns whether its log has grown or
        ended."""
        _, choice, number = tokens.key
        run = self._runs.get(number)
        if run is None or choice not in run.running:
            return False
        log = self.logs[choice]
        try:
            accepted = log.accept(tokens)
        except PositionGap:
            self.attempt_failed(number, Internal("Tokens were lost between workers."))
            return False
        if phase is Phase.DECODE and tokens.finish_reason is not None:
            run.freed_by_decode.add(choice)
        if accepted and self.suspicion.suspect and self.gained(run, Phase.DECODE):
            self.suspicion.cleared()
        ended = log.finish_reason is not None
        if ended:
            self._left(run, choice)
        return accepted > 0 or ended

    def gained(self, run: AttemptRun, phase: Phase) -> bool:
        """Whether the phase's worker has computed something for the attempt. Where decode receives
        KV, the first token is the sender's."""
        given = phase is Phase.DECODE and (run.moved or Phase.PREFILL in run.phases)
        least = run.attempt.position + (2 if given else 1)
        return any(len(self.logs[choice]) >= least for choice in run.attempt.choices)

    def prefill_answered(self, number: int) -> None:
        """Prefill has answered. Its tokens were passed to `tokens` before."""
        run = self._apply(number, AttemptEvent.PREFILL_ANSWERED)
        if run is not None and run.over:
            self._judge(run, run.running, Internal("Prefill left a choice unfinished."))

    def kv_complete(self, number: int) -> None:
        """Decode has all KV of the attempt."""
        run = self._apply(number, AttemptEvent.KV_COMPLETE)
        if run is not None:
            run.has_kv = True

    def migrated_out(self, number: int, choice: int, position: int) -> bool:
        """Decode has sent all tokens of a choice below a position and keeps their KV, except that
        of the newest token, for another worker. Returns whether the choice still needs that KV."""
        run = self._runs.get(number)
        if run is None or choice not in run.running:
            return False
        if not 0 < position == len(self.logs[choice]):
            self.attempt_failed(number, Internal("Tokens were lost between workers."))
            return False
        run.freed_by_decode.add(choice)
        self.logs[choice].attempt = None
        self._migrated_out.add(choice)
        self._left(run, choice)
        return True

    def phase_failed(
        self, number: int, phase: Phase, error: BatonError, choices: Collection[int] = ()
    ) -> None:
        """A phase failed, for the given choices only if there are any."""
        run = self._runs.get(number)
        if run is None:
            return
        if isinstance(error, WorkerLost):
            self._suspect(run, phase)
        if phase is Phase.DECODE:
            run.freed_by_decode.update(choices or run.attempt.choices)
        if choices and run.running - set(choices):
            lost = run.running & set(choices)
            run.running -= lost
            self._judge(run, lost, error)
            return
        self._apply(number, LOST[phase])
        if run.over:
            # A worker that counts as lost may still run and hold resources.
            if not isinstance(error, WorkerLost):
                run.to_cancel -= {phase}
            self._judge(run, run.running, error)

    def attempt_failed(self, number: int, error: BatonError) -> None:
        """The attempt cannot continue, regardless of its phases; all of them are to be
        cancelled."""
        run = self._runs.get(number)
        if run is not None:
            self._end(run, AttemptState.FAILED)
            self._judge(run, run.running, error)

    def stopped(self, choice: int, position: int, stop_string: str) -> int | None:
        """A stop string was completed. Returns the attempt in which the choice must be cancelled,
        if that attempt continues without it. Raises PositionGap for a position that was never
        accepted."""
        log = self.logs[choice]
        log.truncate(position, stop_string)
        run = None if log.attempt is None else self._runs.get(log.attempt)
        if run is None or choice not in run.running:
            return None
        self._left(run, choice)
        return None if run.over else run.attempt.attempt

    def fail(self, error: BatonError) -> None:
        """Ends the request with an error: deadline, cancellation, or a failure outside any
        attempt."""
        if self.failure is None:
            self.failure = error
        for run in list(self._runs.values()):
            self._end(run, AttemptState.FAILED)

    def _apply(self, number: int, event: AttemptEvent) -> AttemptRun | None:
        """Returns the attempt after the event, or None when it was over before."""
        run = self._runs.get(number)
        if run is not None:
            state = TRANSITIONS[run.state, event]
            if state in OVER:
                self._end(run, state)
            run.state = state
        return run

    def _end(self, run: AttemptRun, state: AttemptState) -> None:
        run.to_cancel = HOLDERS[run.state]
        if run.freed_by_decode >= set(run.attempt.choices):
            run.to_cancel -= {Phase.DECODE}
        run.state = state
        del self._runs[run.attempt.attempt]

    def _left(self, run: AttemptRun, choice: int) -> None:
        run.running.discard(choice)
        if not run.running:
            self._apply(run.attempt.attempt, AttemptEvent.NOTHING_LEFT)

    def _suspect(self, run: AttemptRun, phase: Phase) -> None:
        """A worker died with the attempt on it."""
        harmless = phase is Phase.PREFILL and run.state is AttemptState.DECODING
        if harmless or run.moved or self.gained(run, phase):
            return
        self.suspicion.died(alone=run.suspect)
        if self.suspicion.guilty:
            self.fail(
                Quarantined(
                    "The workers that ran this request died of it, one after the other; "
                    "it is not tried again."
                )
            )

    def _judge(self, run: AttemptRun, choices: Collection[int], error: BatonError) -> None:
        """The choices lost their attempt: lets them wait for another one, or ends the request."""
        verdict = VERDICTS[error.reason]
        returns = run.moved and not run.returned and not run.has_kv
        for choice in choices:
            log = self.logs[choice]
            log.attempt = None
            if returns:
                self._migrated_out.add(choice)
                self._returning.add(choice)
                continue
            if verdict is FailureAction.ELSEWHERE and not run.adopts:
                self._lost.add(choice)
            if len(log) - run.attempt.position > 1:
                self._fruitless_attempts[choice] = 0
            elif verdict is FailureAction.ELSEWHERE and not run.moved:
                self._fruitless_attempts[choice] += 1
        fatal = verdict is FailureAction.FATAL and not run.moved
        if fatal or any(b >= self._max_fruitless_attempts for b in self._fruitless_attempts):
            self.fail(error)
