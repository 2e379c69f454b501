"""Reads what an operator wants to go wrong from one line of text; makes nothing go wrong itself.

    seed=7; corrupt@sender.sealed:rate=0.01; freeze@receiver.reading:at=3;
    drop@sender.told:every=100

Each rule is KIND@POINT with settings after a colon:
- rate: the probability at each time the point is reached;
- at: the first time (counted from 1) that it happens, and the only one without `every` or `rate`;
- every: each so-many-th time, from `at` on when that is given;
- times: how often at most;
- seconds: how long a delay, or a read that is not told as done, lasts (for ever without);
- part: header or payload, for what damages a KV chunk.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from baton.core.errors import InvalidArgument
from baton.transfer.faults import MESSAGE_POINTS, POINTS, TRANSPORT_READ

FIELD = "kv_faults"


class Kind(Enum):
    """What goes wrong. Values are the words of a spec."""

    DELAY = "delay"
    DROP = "drop"
    FREEZE = "freeze"
    KILL = "kill"
    CORRUPT = "corrupt"
    STALE = "stale"
    REPLAY = "replay"
    LENGTH = "length"
    LAYOUT = "layout"
    SWAP = "swap"
    TRUNCATE = "truncate"


_DAMAGE = frozenset({Kind.STALE, Kind.REPLAY, Kind.LENGTH, Kind.LAYOUT})
_ANYWHERE = frozenset({Kind.DELAY, Kind.FREEZE, Kind.KILL})
_EXTRA: Mapping[str, frozenset[Kind]] = {
    "sender.told": _DAMAGE | {Kind.SWAP},
    "sender.sealed": _DAMAGE | {Kind.CORRUPT},
    "receiver.read": frozenset({Kind.CORRUPT}),
    TRANSPORT_READ: frozenset({Kind.DROP, Kind.TRUNCATE, Kind.SWAP}),
}


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing to go wrong. See the module for what the settings mean; every 0: not repeated."""

    kind: Kind
    point: str
    rate: float = 1.0
    at: int = 1
    every: int = 1
    times: int | None = None
    seconds: float = math.inf
    part: str = ""

    @property
    def name(self) -> str:
        return f"{self.kind.value}@{self.point}"

    def reaches(self, count: int) -> bool:
        """Whether it may happen the count-th time that its point is reached."""
        after = count - self.at
        return after == 0 or (after > 0 and self.every > 0 and after % self.every == 0)


@dataclass(frozen=True, slots=True)
class FaultSpec:
    """All rules and the seed of what is drawn."""

    rules: tuple[Rule, ...] = ()
    seed: int = 0


def kinds_at(point: str) -> frozenset[Kind]:
    """What can go wrong at a point."""
    drops = frozenset({Kind.DROP}) if point in MESSAGE_POINTS else frozenset()
    return _ANYWHERE | drops | _EXTRA.get(point, frozenset())


def parse(text: str) -> FaultSpec:
    """Raises InvalidArgument that names the rule and what is allowed."""
    rules, seed = [], 0
    for item in filter(None, (part.strip() for part in text.split(";"))):
        if item.startswith("seed="):
            seed = _whole(item, "seed", item.removeprefix("seed="), least=0)
        else:
            rules.append(_rule(item))
    return FaultSpec(tuple(rules), seed)


def _rule(item: str) -> Rule:
    head, _, settings = item.partition(":")
    word, _, point = head.partition("@")
    if point not in POINTS:
        raise _refused(item, f"{point!r} is not a point; points are {', '.join(POINTS)}")
    allowed = sorted(kind.value for kind in kinds_at(point))
    if word not in allowed:
        raise _refused(item, f"what can go wrong at {point} is {', '.join(allowed)}")
    given: dict[str, str] = {}
    for setting in filter(None, settings.split(",")):
        key, separator, value = setting.partition("=")
        if not separator or key.strip() in given:
            raise _refused(item, f"{setting!r} is not a setting, or is given twice")
        given[key.strip()] = value.strip()
    return _with_settings(item, Kind(word), point, given)


def _with_settings(item: str, kind: Kind, point: str, given: dict[str, str]) -> Rule:
    known = {"rate", "at", "every", "times"}
    if kind is Kind.DELAY or (kind is Kind.DROP and point == TRANSPORT_READ):
        known.add("seconds")
    if kind in (Kind.CORRUPT, Kind.REPLAY) and point != "sender.told":
        known.add("part")
    for key in given.keys() - known:
        raise _refused(
            item, f"{key!r} is no setting of it; settings are {', '.join(sorted(known))}"
        )
    if kind is Kind.DELAY and "seconds" not in given:
        raise _refused(item, "a delay needs seconds")
    part = given.get("part", "")
    if part not in ("", "header", "payload"):
        raise _refused(item, "part must be header or payload")
    once = "at" in given and not given.keys() & {"every", "rate"}
    return Rule(
        kind,
        point,
        rate=_number(item, "rate", given.get("rate", "1"), most=1.0),
        at=_whole(item, "at", given.get("at", given.get("every", "1"))),
        every=0 if once else _whole(item, "every", given.get("every", "1")),
        times=_whole(item, "times", given["times"]) if "times" in given else None,
        seconds=_number(item, "seconds", given.get("seconds", "inf")),
        part=part,
    )


def _whole(item: str, key: str, text: str, least: int = 1) -> int:
    if not text.isdecimal() or int(text) < least:
        raise _refused(item, f"{key} must be a whole number from {least}")
    return int(text)


def _number(item: str, key: str, text: str, most: float = math.inf) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= most:
        raise _refused(item, f"{key} must be a number above 0, at most {most:g}")
    return value


def _refused(item: str, why: str) -> InvalidArgument:
    return InvalidArgument(f"{item!r}: {why}", field=FIELD)
