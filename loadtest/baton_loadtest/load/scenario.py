"""Reads a scenario's TOML file, reports faulty fields, and draws its workload.

[arrivals]  kind, rate, seconds; to_rate of a ramp; burst_rate, burst_s, period_s of bursts
[trace]     file, speed, seconds; instead of [arrivals]
[lengths]   of: a name, or prompt_tokens and output_tokens; scale; most_tokens
[prompts]   shared_tokens, shared_groups, turns, pause_s
"""

from __future__ import annotations

import math
import random
import tomllib
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from baton_loadtest import traces
from baton_loadtest.drive import Piece, Session, Turn, Workload
from baton_loadtest.traces import BLOCK, Recorded, Trace
from batonlm.core.errors import InvalidArgument

MOST = 10_000_000
"""Maximum arrivals of one run, whose records must fit into memory."""


class Kind(StrEnum):
    CONSTANT = "constant"
    POISSON = "poisson"
    BURSTS = "bursts"
    RAMP = "ramp"


@dataclass(frozen=True, slots=True)
class Arrivals:
    """When requests are due. Times are seconds from the start, rates are per second. All kinds but
    constant are Poisson processes.

    Raises InvalidArgument with the field.
    """

    kind: Kind
    rate: float
    """At the start, and outside bursts."""
    seconds: float
    to_rate: float = 0.0
    """At the end of a ramp."""
    burst_rate: float = 0.0
    """During the first burst_s of every period_s."""
    burst_s: float = 0.0
    period_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("rate", "seconds", *_NEEDS[self.kind]):
            if not 0 < getattr(self, name) < float("inf"):
                raise InvalidArgument("must be a number above 0", field=f"arrivals.{name}")
        if self.kind is Kind.BURSTS and self.burst_s > self.period_s:
            raise InvalidArgument("must be at most period_s", field="arrivals.burst_s")
        if self.mean_rate * self.seconds > MOST:
            raise InvalidArgument(f"would be more than {MOST:,} arrivals", field="arrivals.rate")

    @property
    def mean_rate(self) -> float:
        """The mean over the whole time."""
        if self.kind is Kind.RAMP:
            return (self.rate + self.to_rate) / 2
        if self.kind is Kind.BURSTS:
            periods, rest = divmod(self.seconds, self.period_s)
            burst = (periods * self.burst_s + min(rest, self.burst_s)) / self.seconds
            return self.rate + (self.burst_rate - self.rate) * burst
        return self.rate

    @property
    def highest_rate(self) -> float:
        return max(self.rate, self.to_rate, self.burst_rate)

    def scaled(self, factor: float) -> Arrivals:
        """Returns arrivals at `factor` times the rate, in the same time and shape."""
        return replace(
            self,
            rate=self.rate * factor,
            to_rate=self.to_rate * factor,
            burst_rate=self.burst_rate * factor,
        )

    def rate_at(self, at: float) -> float:
        if self.kind is Kind.RAMP:
            return self.rate + (self.to_rate - self.rate) * at / self.seconds
        if self.kind is Kind.BURSTS and at % self.period_s < self.burst_s:
            return self.burst_rate
        return self.rate

    def times(self, draw: random.Random) -> list[float]:
        """Draws times in ascending order, at least 0 and below `seconds`."""
        if self.kind is Kind.CONSTANT:
            count = int(self.rate * self.seconds)
            return [at for n in range(count + 1) if (at := n / self.rate) < self.seconds]
        found = []
        highest = self.highest_rate
        at = draw.expovariate(highest)
        while at < self.seconds:
            # Thinning: arrivals of a process of the highest rate, each kept with a probability.
            if self.rate_at(at) >= highest * draw.random():
                found.append(at)
            at += draw.expovariate(highest)
        return found


_NEEDS: dict[Kind, tuple[str, ...]] = {
    Kind.CONSTANT: (),
    Kind.POISSON: (),
    Kind.RAMP: ("to_rate",),
    Kind.BURSTS: ("burst_rate", "burst_s", "period_s"),
}


def replayed(times: Iterable[float], speed: float) -> list[float]:
    """Returns a trace's times in order, from its first one, `speed` times as fast."""
    ordered = sorted(times)
    return [(at - ordered[0]) / speed for at in ordered]


SHARES = (0.0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)


@dataclass(frozen=True, slots=True)
class Quantiles:
    """A distribution of lengths, with linear interpolation."""

    tokens: tuple[float, ...]
    """The length that each of SHARES does not exceed."""

    def at(self, share: float) -> float:
        """Returns the length at a share from 0 to 1."""
        place = min(bisect_right(SHARES, share), len(SHARES) - 1)
        low, high = SHARES[place - 1], SHARES[place]
        here, there = self.tokens[place - 1], self.tokens[place]
        return here + (there - here) * (share - low) / (high - low)

    def draw(self, draw: random.Random, scale: float) -> int:
        """Draws a length of at least one token."""
        return max(1, round(self.at(draw.random()) * scale))


@dataclass(frozen=True, slots=True)
class Lengths:
    prompt: Quantiles
    output: Quantiles


def _quantiles(*tokens: float) -> Quantiles:
    return Quantiles(tokens)


NAMED = {
    "chat": Lengths(
        _quantiles(2, 29, 181, 207, 387, 403, 703, 1020, 1071, 1130, 1315, 2735, 4083, 4142, 14050),
        _quantiles(7, 16, 41, 54, 77, 91, 103, 129, 177, 384, 400, 424, 451, 601, 1000),
    ),
    "code": Lengths(
        _quantiles(3, 17, 75, 147, 385, 770, 1075, 1469, 1909, 2433, 3193, 5194, 7315, 7436, 7437),
        _quantiles(6, 6, 6, 7, 8, 9, 11, 13, 16, 20, 29, 55, 90, 252, 1899),
    ),
    "rag": Lengths(
        _quantiles(
            *(891, 894, 897, 905, 1092, 1756, 3914, 5264, 7417, 10775),
            *(15871, 25561, 38538, 89869, 126195),
        ),
        _quantiles(1, 3, 9, 22, 97, 214, 293, 351, 398, 445, 499, 585, 674, 1019, 2000),
    ),
    "agent": Lengths(
        _quantiles(1, 4, 6, 8, 11, 16, 25, 46, 135, 463, 2218, 5059, 7907, 19077, 91467),
        _quantiles(1, 3, 13, 29, 104, 212, 287, 349, 401, 453, 513, 618, 739, 1338, 2000),
    ),
}


def named(name: str) -> Lengths:
    """Returns the lengths of real traffic, as quantiles of published traces (which are not part of
    Baton). Prompt and answer are drawn independently; only traces have their correlation.

    chat: all 19 366 requests of the conversation part of the Azure LLM inference trace 2023 (of the
    Splitwise paper, CC-BY 4.0).
    code: all 8 819 requests of its code part.
    rag: the 7 373 requests of Mooncake's conversation trace (12 031 requests, FAST 2025,
    Apache-2.0) whose blocks, except for the first, were in no earlier request: questions about a
    long text. This is a stand-in: the trace does not say which requests were retrieval.
    agent: its other 4 658 requests, which continue an earlier one: the tokens that a turn adds to
    the prompt (the 3 780 turns that add any), and those of its answer. A stand-in likewise.

    Raises InvalidArgument for an unknown name.
    """
    if name not in NAMED:
        raise InvalidArgument(f"{name!r} is none of {', '.join(NAMED)}", field="lengths.of")
    return NAMED[name]


def fixed(prompt_tokens: int, output_tokens: int) -> Lengths:
    """Returns lengths that are always the same."""
    each = len(SHARES)
    return Lengths(Quantiles((prompt_tokens,) * each), Quantiles((output_tokens,) * each))


@dataclass(frozen=True, slots=True)
class Drawn:
    """Random sessions of turns, drawn before the first request is sent. Lengths are in tokens.

    The first turn of a session is due at its own time, and each later one a pause after the answer
    before it. Its prompt begins with the previous prompt and answer.
    """

    arrivals: Arrivals
    lengths: Lengths
    scale: float = 1.0
    most_tokens: int | None = None
    shared_tokens: int = 0
    """Prefix that all sessions of a group share, before the prompt's own tokens."""
    shared_groups: int = 1
    turns: int = 1
    pause_s: float = 0.0
    """Mean of an exponential distribution."""

    @property
    def mean_rate(self) -> float:
        """Sessions per second."""
        return self.arrivals.mean_rate

    def scaled(self, factor: float) -> Drawn:
        return replace(self, arrivals=self.arrivals.scaled(factor))

    def workload(self, seed: int) -> Workload:
        draw = random.Random(f"workload {seed}")
        sessions, shortened = [], 0
        for number, due_s in enumerate(self.arrivals.times(draw)):
            turns, left_out = self._turns(draw, number)
            sessions.append(Session(due_s, turns))
            shortened += left_out
        return Workload(tuple(sessions), self.arrivals.seconds, shortened)

    def _turns(self, draw: random.Random, number: int) -> tuple[tuple[Turn, ...], int]:
        context, shortened = 0, 0
        turns: list[Turn] = []
        for index in range(self.turns):
            prompt = self.lengths.prompt.draw(draw, self.scale)
            output = self.lengths.output.draw(draw, self.scale)
            pause_s = draw.expovariate(1 / self.pause_s) if index and self.pause_s else 0.0
            pieces = []
            if not index and self.shared_tokens:
                group = draw.randrange(self.shared_groups)
                pieces.append(Piece(f"shared {group}", self.shared_tokens))
            pieces.append(Piece(f"own {number} {index}", prompt))
            turn = Turn(tuple(pieces), output, pause_s)
            if index and self.most_tokens is not None:
                if context + turn.prompt_tokens + output > self.most_tokens:
                    return tuple(turns), shortened + self.turns - index
            else:
                turn, cut = _fitted(turn, self.most_tokens)
                shortened += cut
            turns.append(turn)
            context += turn.prompt_tokens + turn.output_tokens
        return tuple(turns), shortened


@dataclass(frozen=True, slots=True)
class Replay:
    """The requests of a trace."""

    trace: Trace
    speed: float = 1.0
    """How many times as fast as recorded."""
    scale: float = 1.0
    most_tokens: int | None = None
    seconds: float | None = None
    """Of the replay; None: all of it."""
    own_s: float = field(default=0.0, init=False)
    """The trace's own duration, up to its last request."""

    def __post_init__(self) -> None:
        if not 0 < self.speed < float("inf"):
            raise InvalidArgument("must be a number above 0", field="trace.speed")
        times = [request.at_s for request in self.trace.requests]
        object.__setattr__(self, "own_s", max(times) - min(times))

    @property
    def mean_rate(self) -> float:
        """Requests per second over the whole trace."""
        return len(self.trace.requests) * self.speed / self.own_s if self.own_s else 1.0

    def scaled(self, factor: float) -> Replay:
        """Keeps the duration, if one is given."""
        return replace(self, speed=self.speed * factor)

    def workload(self, seed: int) -> Workload:
        """seed: not used, a replay is not random."""
        requests = sorted(self.trace.requests, key=lambda one: one.at_s)
        times = replayed((one.at_s for one in requests), self.speed)
        sessions, shortened = [], 0
        for number, (due_s, request) in enumerate(zip(times, requests, strict=True)):
            if self.seconds is not None and due_s >= self.seconds:
                break
            output = max(1, round(request.output_tokens * self.scale))
            pieces = tuple(pieces_of(request, number, self.scale))
            turn, cut = _fitted(Turn(pieces, output), self.most_tokens)
            sessions.append(Session(due_s, (turn,)))
            shortened += cut
        seconds = self.own_s / self.speed
        if self.seconds is not None:
            seconds = min(seconds, self.seconds)
        return Workload(tuple(sessions), seconds, shortened)


Source = Drawn | Replay


def pieces_of(request: Recorded, number: int, scale: float) -> Iterator[Piece]:
    """A block remains one block when scaled: equal ids have equal tokens."""
    left = max(1, round(request.prompt_tokens * scale))
    if not request.blocks:
        yield Piece(f"own {number} 0", left)
        return
    size = max(1, round(BLOCK * scale))
    for place, block in enumerate(request.blocks, 1):
        # The last block absorbs rounding.
        tokens = left if place == len(request.blocks) else min(size, left)
        if tokens:
            yield Piece(f"block {block}", tokens)
        left -= tokens


def _fitted(turn: Turn, most_tokens: int | None) -> tuple[Turn, bool]:
    """Returns a turn of at most so many tokens, including the answer, and whether it was longer.
    The answer is shortened only if it has more than half of the tokens."""
    if most_tokens is None or turn.prompt_tokens + turn.output_tokens <= most_tokens:
        return turn, False
    output = min(turn.output_tokens, most_tokens // 2)
    left = most_tokens - output
    pieces = []
    for piece in turn.pieces:
        if taken := min(left, piece.tokens):
            pieces.append(Piece(piece.key, taken))
        left -= taken
    return Turn(tuple(pieces), output, turn.pause_s), True


_FIELDS = {
    "arrivals": {"kind", "rate", "seconds", "to_rate", "burst_rate", "burst_s", "period_s"},
    "trace": {"file", "speed", "seconds"},
    "lengths": {"of", "prompt_tokens", "output_tokens", "scale", "most_tokens"},
    "prompts": {"shared_tokens", "shared_groups", "turns", "pause_s"},
}
_LONGEST_S = 7 * 86400.0
_TOKENS = 10_000_000


@dataclass(frozen=True, slots=True)
class Changes:
    """Values of flags that replace those of the file; None: not given."""

    trace: Path | None = None
    rate: float | None = None
    """The mean rate."""
    seconds: float | None = None
    speed: float | None = None
    scale: float | None = None
    most_tokens: int | None = None
    skip_broken: bool = False


def read(path: Path | None, changes: Changes) -> Source:
    """Reads a scenario. Raises InvalidArgument with the field."""
    table = _Table(_load(path) if path is not None else {})
    for section, name, value in (
        ("lengths", "scale", changes.scale),
        ("lengths", "most_tokens", changes.most_tokens),
        ("trace" if "trace" in table.values or changes.trace else "arrivals", "seconds",
         changes.seconds),
    ):  # fmt: skip
        if value is not None:
            table.values.setdefault(section, {})[name] = value
    if changes.trace is not None:
        table.values.pop("arrivals", None)
        table.values.setdefault("trace", {})["file"] = str(changes.trace.absolute())
        # A trace defines itself what prompts share and which requests follow each other.
        table.values.pop("prompts", None)
        for name in ("of", "prompt_tokens", "output_tokens"):
            table.values.get("lengths", {}).pop(name, None)
    if changes.speed is not None:
        if "trace" not in table.values:
            raise InvalidArgument("is for traces", field="speed")
        table.values["trace"]["speed"] = changes.speed
    folder = path.parent if path is not None else Path()
    source = _replay(table, folder, changes) if "trace" in table.values else _drawn(table)
    if changes.rate is not None:
        if not 0 < changes.rate < math.inf:
            raise InvalidArgument("must be a number above 0", field="rate")
        source = source.scaled(changes.rate / source.mean_rate)
    return source


def _load(path: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidArgument(f"{path}: {error.strerror}", field="scenario") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        where = str(error) if isinstance(error, tomllib.TOMLDecodeError) else "is no text"
        raise InvalidArgument(f"{path}: {where}", field="scenario") from None
    for section, fields in values.items():
        if section not in _FIELDS:
            raise InvalidArgument(f"is none of {', '.join(_FIELDS)}", field=section)
        if not isinstance(fields, dict):
            raise InvalidArgument("must be a table", field=section)
        for name in fields:
            if name not in _FIELDS[section]:
                known = ", ".join(sorted(_FIELDS[section]))
                raise InvalidArgument(f"is none of {known}", field=f"{section}.{name}")
    if "trace" in values and (other := {"arrivals", "prompts"} & set(values)):
        raise InvalidArgument("cannot be had with a trace", field=other.pop())
    return values


def _drawn(table: _Table) -> Drawn:
    if "arrivals" not in table.values:
        raise InvalidArgument("is missing; or name a trace", field="arrivals")
    kind = table.get("arrivals", "kind", Kind.POISSON.value)
    if kind not in list(Kind):
        raise InvalidArgument(f"is none of {', '.join(Kind)}", field="arrivals.kind")
    rates = {
        name: table.number("arrivals", name, 0.0, 0.0, _LONGEST_S)
        for name in ("rate", "seconds", "to_rate", "burst_rate", "burst_s", "period_s")
    }
    return Drawn(
        Arrivals(Kind(str(kind)), **rates),
        _lengths(table),
        scale=_scale(table),
        most_tokens=_most_tokens(table),
        shared_tokens=table.count("prompts", "shared_tokens", 0, 0),
        shared_groups=table.count("prompts", "shared_groups", 1, 1),
        turns=table.count("prompts", "turns", 1, 1, most=1000),
        pause_s=table.number("prompts", "pause_s", 0.0, 0.0, _LONGEST_S),
    )


def _replay(table: _Table, folder: Path, changes: Changes) -> Replay:
    file = table.get("trace", "file", "")
    if not isinstance(file, str) or not file:
        raise InvalidArgument("must be the name of a file", field="trace.file")
    for name in ("of", "prompt_tokens", "output_tokens"):
        if name in table.values.get("lengths", {}):
            raise InvalidArgument("cannot be had with a trace", field=f"lengths.{name}")
    replay = Replay(
        traces.read(folder / file, skip_broken=changes.skip_broken),
        scale=_scale(table),
        most_tokens=_most_tokens(table),
        speed=table.number("trace", "speed", 1.0, 0.0, 1e9),
    )
    if "seconds" in table.values["trace"]:
        seconds = table.number("trace", "seconds", 0.0, 0.001, _LONGEST_S)
        replay = replace(replay, seconds=seconds)
    return replay


def _lengths(table: _Table) -> Lengths:
    name = table.get("lengths", "of", None)
    if name is not None:
        return named(str(name))
    return fixed(
        table.count("lengths", "prompt_tokens", None, 1),
        table.count("lengths", "output_tokens", None, 1),
    )


def _scale(table: _Table) -> float:
    return table.number("lengths", "scale", 1.0, 1e-6, 1e6)


def _most_tokens(table: _Table) -> int | None:
    if "most_tokens" not in table.values.get("lengths", {}):
        return None
    return table.count("lengths", "most_tokens", None, 2)


class _Table:
    """The file's sections, whose fields must have known names."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def get(self, section: str, name: str, default: object) -> object:
        found: object = self.values.get(section, {}).get(name, default)
        return found

    def number(self, section: str, name: str, default: float, least: float, most: float) -> float:
        found = self.get(section, name, default)
        if (
            isinstance(found, bool)
            or not isinstance(found, int | float)
            or not least <= found <= most
        ):
            raise InvalidArgument(
                f"must be a number from {least:g} to {most:g}", field=f"{section}.{name}"
            )
        return float(found)

    def count(
        self, section: str, name: str, default: int | None, least: int, most: int = _TOKENS
    ) -> int:
        found = self.get(section, name, default)
        if type(found) is not int or not least <= found <= most:
            raise InvalidArgument(
                f"must be a whole number from {least} to {most}", field=f"{section}.{name}"
            )
        return found


def skipped(source: Source) -> tuple[str, ...]:
    """Describes broken lines of the trace: the first few, and the number of others."""
    broken = source.trace.broken if isinstance(source, Replay) else ()
    more = (f"and {len(broken) - traces.SAID} more",) if len(broken) > traces.SAID else ()
    return (*broken[: traces.SAID], *more)
