"""Whether a model that was given more of a name's conversations does worse than the others, so that
the name's former weights count again.

Conversations are shared out by a hash, so the models of a name get the same kinds of requests, and
the newest requests of each can be compared as they are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from statistics import median

from batonlm.core.routing.aliases import Alias, Weights

NEWEST = 100
"""Requests of each model that are looked at."""
LEAST = 20
"""Fewer say nothing."""
MORE_FAILED = 0.1
"""By how much more of its requests the model fails."""
TIMES_SLOWER = 2.0
SLOWER_S = 0.25
"""How much longer half of its first tokens take, at least: both must be exceeded."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A request that ended by itself: neither its client nor its content ended it."""

    failed: bool
    first_token_s: float | None
    """None: it had none."""


class _Trial:
    """What was seen of an alias since it has its weights."""

    def __init__(self, alias: Alias) -> None:
        self.alias = alias
        self.gone_back = False
        """Whether the former weights count instead."""
        self.seen: dict[str, deque[Outcome]] = {}

    def is_of(self, alias: Alias) -> bool:
        """Whether the alias has these weights still, and these former ones."""
        return (self.alias.weights, self.alias.former) == (alias.weights, alias.former)


class StepBack:
    """Follows the requests of aliases whose weights changed, on one router."""

    def __init__(self) -> None:
        self._trials: dict[str, _Trial] = {}

    def now(self, name: str, alias: Alias) -> Alias:
        """Returns the alias as it counts now. alias: what the operator's file says; another value
        than before begins anew."""
        trial = self._trials.get(name)
        if trial is None or not trial.is_of(alias):
            trial = self._trials[name] = _Trial(alias)
        return alias.went_back() if trial.gone_back else alias

    def has_gone_back(self, name: str, alias: Alias) -> bool:
        """Whether the former weights of the alias count now. Changes nothing."""
        trial = self._trials.get(name)
        return trial is not None and trial.gone_back and trial.is_of(alias)

    def keep(self, names: Collection[str]) -> None:
        """Forgets all others: they stand for nothing any more."""
        self._trials = {name: trial for name, trial in self._trials.items() if name in names}

    def ended(self, name: str, model: str, outcome: Outcome) -> str:
        """Takes a request's end. Returns why the former weights count from now on, or ""."""
        trial = self._trials.get(name)
        if trial is None or trial.gone_back or not trial.alias.former:
            return ""
        if model not in dict(trial.alias.weights):
            # The large model of a cascade.
            return ""
        trial.seen.setdefault(model, deque(maxlen=NEWEST)).append(outcome)
        grown = _grown(trial.alias)
        if model not in grown:
            return ""
        others = [one for other, seen in trial.seen.items() if other not in grown for one in seen]
        why = _worse(trial.seen[model], others)
        if why:
            trial.gone_back = True
            trial.seen.clear()
        return why and f"{model} {why}"


def _grown(alias: Alias) -> set[str]:
    """Returns the models that have a larger part than before."""
    before, now = _parts(alias.former), _parts(alias.weights)
    return {model for model, part in now.items() if part > before.get(model, 0.0)}


def _parts(weights: Weights) -> dict[str, float]:
    total = sum(weight for _, weight in weights)
    return {model: weight / total for model, weight in weights}


def _worse(model: deque[Outcome], others: list[Outcome]) -> str:
    if len(model) < LEAST:
        return ""
    # Where all conversations moved at once there is nothing to compare with.
    known = others if len(others) >= LEAST else []
    failed, usual = _failed(model), _failed(known)
    if failed - usual >= MORE_FAILED:
        return f"fails {failed:.0%} of its requests, and others {usual:.0%}"
    own, theirs = _first_tokens(model), _first_tokens(known)
    if len(own) >= LEAST and len(theirs) >= LEAST:
        took, takes = median(own), median(theirs)
        if took > TIMES_SLOWER * takes and took - takes > SLOWER_S:
            return f"takes {took:.3g} s to the first token, and others {takes:.3g} s"
    return ""


def _failed(outcomes: Iterable[Outcome]) -> float:
    found = [outcome.failed for outcome in outcomes]
    return sum(found) / len(found) if found else 0.0


def _first_tokens(outcomes: Iterable[Outcome]) -> list[float]:
    return [one.first_token_s for one in outcomes if one.first_token_s is not None]
