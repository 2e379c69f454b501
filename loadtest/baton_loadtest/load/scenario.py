"""Reads a scenario's TOML file and says which field is wrong; draws nothing.

[arrivals]  kind, rate, seconds; to_rate of a ramp; burst_rate, burst_s, period_s of bursts
[trace]     file, speed, seconds; instead of [arrivals]
[lengths]   of: a name, or prompt_tokens and output_tokens; scale; most_tokens
[prompts]   shared_tokens, shared_groups, turns, pause_s
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from baton.core.errors import InvalidArgument
from baton_loadtest import traces
from baton_loadtest.load import lengths
from baton_loadtest.load.arrivals import Arrivals, Kind
from baton_loadtest.load.workload import Drawn, Replay, Source

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
    """What flags say instead of the file; None: nothing. rate: the average one."""

    trace: Path | None = None
    rate: float | None = None
    seconds: float | None = None
    speed: float | None = None
    scale: float | None = None
    most_tokens: int | None = None
    skip_broken: bool = False


def read(path: Path | None, changes: Changes) -> Source:
    """Raises InvalidArgument naming the field."""
    table = _Table(_load(path) if path is not None else {})
    for section, name, value in (
        ("lengths", "scale", changes.scale),
        ("lengths", "most_tokens", changes.most_tokens),
        ("trace" if "trace" in table.said or changes.trace else "arrivals", "seconds",
         changes.seconds),
    ):  # fmt: skip
        if value is not None:
            table.said.setdefault(section, {})[name] = value
    if changes.trace is not None:
        table.said.pop("arrivals", None)
        table.said.setdefault("trace", {})["file"] = str(changes.trace.absolute())
        # What prompts share, and what follows what, is the trace's to say.
        table.said.pop("prompts", None)
        for name in ("of", "prompt_tokens", "output_tokens"):
            table.said.get("lengths", {}).pop(name, None)
    if changes.speed is not None:
        if "trace" not in table.said:
            raise InvalidArgument("is for traces", field="speed")
        table.said["trace"]["speed"] = changes.speed
    folder = path.parent if path is not None else Path()
    source = _replay(table, folder, changes) if "trace" in table.said else _drawn(table)
    if changes.rate is not None:
        if not 0 < changes.rate < math.inf:
            raise InvalidArgument("must be a number above 0", field="rate")
        source = source.scaled(changes.rate / source.mean_rate)
    return source


def _load(path: Path) -> dict[str, Any]:
    try:
        said = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidArgument(f"{path}: {error.strerror}", field="scenario") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        where = str(error) if isinstance(error, tomllib.TOMLDecodeError) else "is no text"
        raise InvalidArgument(f"{path}: {where}", field="scenario") from None
    for section, fields in said.items():
        if section not in _FIELDS:
            raise InvalidArgument(f"is none of {', '.join(_FIELDS)}", field=section)
        if not isinstance(fields, dict):
            raise InvalidArgument("must be a table", field=section)
        for name in fields:
            if name not in _FIELDS[section]:
                known = ", ".join(sorted(_FIELDS[section]))
                raise InvalidArgument(f"is none of {known}", field=f"{section}.{name}")
    if "trace" in said and (other := {"arrivals", "prompts"} & set(said)):
        raise InvalidArgument("cannot be had with a trace", field=other.pop())
    return said


def _drawn(table: _Table) -> Drawn:
    if "arrivals" not in table.said:
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
        if name in table.said.get("lengths", {}):
            raise InvalidArgument("cannot be had with a trace", field=f"lengths.{name}")
    replay = Replay(
        traces.read(folder / file, skip_broken=changes.skip_broken),
        scale=_scale(table),
        most_tokens=_most_tokens(table),
        speed=table.number("trace", "speed", 1.0, 0.0, 1e9),
    )
    if "seconds" in table.said["trace"]:
        seconds = table.number("trace", "seconds", 0.0, 0.001, _LONGEST_S)
        replay = replace(replay, seconds=seconds)
    return replay


def _lengths(table: _Table) -> lengths.Lengths:
    name = table.get("lengths", "of", None)
    if name is not None:
        return lengths.named(str(name))
    return lengths.fixed(
        table.count("lengths", "prompt_tokens", None, 1),
        table.count("lengths", "output_tokens", None, 1),
    )


def _scale(table: _Table) -> float:
    return table.number("lengths", "scale", 1.0, 1e-6, 1e6)


def _most_tokens(table: _Table) -> int | None:
    if "most_tokens" not in table.said.get("lengths", {}):
        return None
    return table.count("lengths", "most_tokens", None, 2)


class _Table:
    """The file's sections, whose fields have known names."""

    def __init__(self, said: dict[str, Any]) -> None:
        self.said = said

    def get(self, section: str, name: str, default: object) -> object:
        found: object = self.said.get(section, {}).get(name, default)
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
    """Broken lines of its trace, in words; the first few, and how many more."""
    broken = source.trace.broken if isinstance(source, Replay) else ()
    more = (f"and {len(broken) - traces.SAID} more",) if len(broken) > traces.SAID else ()
    return (*broken[: traces.SAID], *more)
