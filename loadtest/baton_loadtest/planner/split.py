"""Whether to split workers into prefill and decode: looks for what each set-up of as many workers
carries, in the simulator; reads no files and prints nothing.

A set-up's goodput is the highest rate of the traffic at which 99 of 100 requests have their first
token in time, 99 of 100 times between tokens are short enough, and at most 1 of 100 is refused. Who
asks may be content with 90 of 100 in time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from baton.core.errors import InvalidArgument
from baton.core.routing.routing import RoutingPolicy
from baton_loadtest.load.search import Range, Verdict, highest
from baton_loadtest.planner.asked import Targets
from baton_loadtest.planner.curves import MeasuredDecode, MeasuredPrefill, duration
from baton_loadtest.simulator.calibration import Calibration
from baton_loadtest.simulator.requests import Request
from baton_loadtest.simulator.settings import FleetFacts, RouterFacts, WorkerFacts
from baton_loadtest.simulator.simulation import simulate
from baton_loadtest.simulator.summary import Summary, summary

SHARE = 0.99
LEAST_REQUESTS = 100
"""Fewer have no 99th percentile, and of 90 of 100 they say little."""

RESOLUTION = 0.05
MOST_TIMES = 1024.0
"""So many times faster than the traffic came, or slower, is tried at most."""

ALONE_S = 60.0
"""Between two requests where they are to be alone."""


class Answer(StrEnum):
    PAYS = "Splitting pays"
    DOES_NOT = "Splitting does not pay"
    WITHIN_ERROR = "The difference is less than the error of the model"


@dataclass(frozen=True, slots=True)
class Setup:
    """prefills 0: aggregated. step_tokens: of a prompt that a decode step computes at most."""

    prefills: int
    decodes: int
    step_tokens: int

    @property
    def name(self) -> str:
        if self.prefills:
            return f"{self.prefills}P{self.decodes}D"
        return f"{self.decodes} aggregated, chunks of {self.step_tokens}"


@dataclass(frozen=True, slots=True)
class Carried:
    """goodput: requests a second; None: not even at next to no rate are they in time. found: at
    that rate, or then. is_bounded: nothing faster was tried."""

    setup: Setup
    goodput: float | None
    found: Summary
    is_bounded: bool = False


@dataclass(frozen=True, slots=True)
class Advice:
    """split, aggregated: the best of each. error: of the model, a share. share: of requests, and of
    times between tokens, that had to be in time."""

    carried: tuple[Carried, ...]
    split: Carried
    aggregated: Carried
    error: float
    share: float

    @property
    def quantile(self) -> str:
        return f"p{100 * self.share:.0f}"

    @property
    def ratio(self) -> float:
        """Of the best split's goodput to the best aggregated one's. Infinite where only a split
        can be in time."""
        split, whole = self.split.goodput or 0.0, self.aggregated.goodput or 0.0
        return split / whole if whole else float("inf")

    @property
    def answer(self) -> Answer:
        return self.answer_of(self.ratio)

    def answer_of(self, ratio: float) -> Answer:
        """What another ratio would have said."""
        if ratio > 1 + self.error:
            return Answer.PAYS
        return Answer.DOES_NOT if ratio < 1 / (1 + self.error) else Answer.WITHIN_ERROR


def setups(workers: int, decode: WorkerFacts, targets: Targets) -> list[Setup]:
    """Aggregated ones first: with decode steps as they are set, and with chunks of prompts that
    leave a step within the target, beside few rows and beside many, as `inter_token_ms` would.
    Raises InvalidArgument for too few workers."""
    if workers < 2:
        raise InvalidArgument("must be at least 2, to be split", field="workers")
    most = chunk(decode, targets.between_tokens_s)
    chunks = sorted({decode.step_tokens, most, _blocks(most // 2, decode.block_size)})
    return [
        *(Setup(0, workers, tokens) for tokens in chunks),
        *(Setup(prefills, workers - prefills, most) for prefills in range(1, workers)),
    ]


def chunk(decode: WorkerFacts, within_s: float) -> int:
    """Tokens of a prompt, in whole blocks, that a decode step of one sequence can compute within
    a time: at least one block, at most what it computes now."""
    speed = decode.speed
    left_s = within_s - speed.decode_s(1, 0) - speed.prefill_step_s
    fit = decode.step_tokens
    if speed.prefill_position_s:
        fit = min(fit, int(left_s / speed.prefill_position_s))
    return _blocks(fit, decode.block_size)


def _blocks(tokens: int, block_size: int) -> int:
    return block_size * max(1, tokens // block_size)


def of_100(share: float) -> str:
    return f"{100 * share:.0f} of 100"


class Splitting:
    """known: prefill workers need curves of their own. requests: in order of arrival from 0 on.
    tried: told after each run. share: of requests, and of times between tokens, that has to be in
    time, 0.9 or SHARE."""

    def __init__(
        self,
        known: Calibration,
        requests: Sequence[Request],
        targets: Targets,
        policy: RoutingPolicy,
        tried: Callable[[Setup, float, Summary], None] = lambda setup, rate, found: None,
        share: float = SHARE,
    ) -> None:
        """Raises InvalidArgument for too few requests."""
        if len(requests) < LEAST_REQUESTS:
            raise InvalidArgument(
                f"has {len(requests)} requests: it takes {LEAST_REQUESTS} to tell what "
                f"{of_100(share)} wait",
                field="trace",
            )
        self._known, self._requests, self._targets = known, requests, targets
        self._policy, self._tried, self._share = policy, tried, share
        span_s = requests[-1].arrival - requests[0].arrival
        if not span_s:
            raise InvalidArgument("all requests come at once", field="trace")
        self.rate = (len(requests) - 1) / span_s

    def span_s(self, rate: float) -> float:
        """How long the traffic lasts at a rate."""
        return (len(self._requests) - 1) / rate

    def advise(self, workers: int, error: float) -> Advice:
        """error: of the model, as a share of goodput. Raises InvalidArgument, naming the target
        that no set-up meets."""
        carried: list[Carried] = []
        first = self.rate
        for setup in setups(workers, self._known.decode, self._targets):
            found = self._carried(setup, first)
            carried.append(found)
            # Others are likely to be near: a search that begins there is short.
            first = found.goodput or first
        if all(one.goodput is None for one in carried):
            raise self._refusal(carried)

        def best(of: Iterator[Carried]) -> Carried:
            return max(of, key=lambda one: one.goodput or 0.0)

        return Advice(
            tuple(carried),
            best(one for one in carried if one.setup.prefills),
            best(one for one in carried if not one.setup.prefills),
            error,
            self._share,
        )

    def _carried(self, setup: Setup, first: float) -> Carried:
        apart = (
            replace(one, arrival=ALONE_S * number) for number, one in enumerate(self._requests)
        )
        found = self._run(setup, 1 / ALONE_S, apart)
        if not self._is_good(found):
            return Carried(setup, None, found)
        runs: dict[float, Summary] = {}

        async def probe(rate: float) -> Verdict:
            times = self.rate / rate
            faster = (replace(one, arrival=one.arrival * times) for one in self._requests)
            runs[rate] = self._run(setup, rate, faster)
            return Verdict.WELL if self._is_good(runs[rate]) else Verdict.BADLY

        least, most = self.rate / MOST_TIMES, self.rate * MOST_TIMES
        bounds = Range(least, most, RESOLUTION, min(max(first, least), most))
        result = asyncio.run(highest(bounds, probe))
        if result.rate is None:
            # Requests that come at one moment do so at any rate.
            return Carried(setup, None, runs[least])
        return Carried(setup, result.rate, runs[result.rate], result.above is None)

    def _run(self, setup: Setup, rate: float, requests: Iterator[Request]) -> Summary:
        known = self._known
        facts = FleetFacts(
            known.prefill,
            replace(known.decode, step_tokens=setup.step_tokens),
            setup.prefills,
            setup.decodes,
            known.kv_bytes,
            known.max_model_len,
            RouterFacts(self._policy),
        )
        found = summary(facts, simulate(facts, requests))
        self._tried(setup, rate, found)
        return found

    def _is_good(self, found: Summary) -> bool:
        return (
            found.answered >= SHARE * found.requests
            and found.first_token_s[self._share] <= self._targets.first_token_s
            and found.token_s[self._share] <= self._targets.between_tokens_s
        )

    def _refusal(self, carried: Sequence[Carried]) -> InvalidArgument:
        """What the nearest set-up reaches at next to no rate, and what that is made of."""
        targets, known, of = self._targets, self._known, of_100(self._share)
        first_s, token_s = (
            min(getattr(one.found, name)[self._share] for one in carried)
            for name in ("first_token_s", "token_s")
        )
        if all(one.found.answered < SHARE * one.found.requests for one in carried):
            why = max(carried[0].found.refused, key=lambda name: carried[0].found.refused[name])
            return InvalidArgument(f"no set-up answers 99 of 100 requests: {why}", field="trace")
        if first_s > targets.first_token_s:
            lengths = sorted(one.input_tokens for one in self._requests)
            long = lengths[int(self._share * (len(lengths) - 1))]
            curve = MeasuredPrefill(known.prefill.told)
            return InvalidArgument(
                f"cannot be met by any set-up: with next to no traffic, {of} first tokens "
                f"come within {duration(first_s)} at best. The prompt of {of}, {long} tokens, "
                f"takes {duration(curve.alone_s(0, long))} if nothing of it is cached",
                field="first_token_ms",
            )
        alone_s = MeasuredDecode(known.decode.speed).step_s(1, 0)
        return InvalidArgument(
            f"cannot be met by any set-up: with next to no traffic, {of} times between tokens "
            f"are within {duration(token_s)} at best. A step of one sequence takes "
            f"{duration(alone_s)} without any context",
            field="between_tokens_ms",
        )
