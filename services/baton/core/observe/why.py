"""Why an attempt ran where it did, in one sentence, with the numbers or without; decides nothing.

Where a prefill pool is configured and an attempt was prefilled on decode, the sentence says what
kept the pool out: that is how a pool which is never used is noticed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from baton.core.observe.request_record import AttemptRecord
from baton.core.routing.candidates import Candidate, FilterReason
from baton.core.routing.routing import ALONE, CHEAPER, NO_PREFILL, SHORT, Decision, RoutingPolicy

MAX_DETAIL = 200
"""Characters that are told of what one worker's fate adds."""

_MOVED = "Its KV came from another decode worker: nothing was prefilled."
_ALONE = "Every choice ends at its first token, which prefill makes: no decode is needed."
_LOCAL = "Prefilled on decode"
_APART = "Prefill and decode ran apart"


def outline(attempt: AttemptRecord) -> str:
    """The same without what was known of workers, for those who may not see it."""
    if attempt.moved:
        return _MOVED
    if attempt.decode is None:
        return _ALONE
    return f"{_LOCAL if attempt.prefill is None else _APART}."


def why(decision: Decision, policy: RoutingPolicy, *, split: bool, moved: bool = False) -> str:
    """split: a prefill pool is configured. moved: the attempt goes on with KV that there is."""
    if moved:
        return _MOVED
    match decision.reason:
        case reason if reason == ALONE:
            return _ALONE
        case reason if reason == NO_PREFILL:
            return f"{_LOCAL}: {_nobody(decision.candidates, split=split)}"
        case reason if reason == SHORT:
            return f"{_LOCAL}: {_short(decision.uncached_tokens, policy)}"
        case reason if reason == CHEAPER:
            return (
                f"{_LOCAL}: that is predicted to cost less, "
                f"{_both(decision)}, for {_tokens(decision.uncached_tokens)}."
            )
        case _:
            return f"{_APART}: {_apart(decision, policy)}"


def _both(decision: Decision) -> str:
    return f"{decision.local_s or 0.0:.4f} s against {decision.remote_s or 0.0:.4f} s apart"


def _apart(decision: Decision, policy: RoutingPolicy) -> str:
    if decision.remote_s is not None:
        return (
            f"that is predicted to cost less, {decision.remote_s:.4f} s against "
            f"{decision.local_s or 0.0:.4f} s on decode alone, "
            f"for {_tokens(decision.uncached_tokens)}."
        )
    limit = f"the input has more than {policy.short} tokens that decode has not cached"
    if policy.by_speed:
        return f"{limit}, and not all of these workers had measured their speeds."
    return f"{limit} (local_prefill_tokens)."


def _short(uncached_tokens: int, policy: RoutingPolicy) -> str:
    said = f"{_tokens(uncached_tokens)}, and up to {policy.short} are not worth a hand-over"
    if policy.by_speed:
        return f"{said} while not all of these workers have measured their speeds."
    return f"{said} (local_prefill_tokens)."


def _nobody(candidates: Iterable[Candidate], *, split: bool) -> str:
    """What became of the prefill workers."""
    seen = [c for c in candidates if c.identity.role == "prefill"]
    if not seen:
        if split:
            return "a prefill pool is configured, but this router knows no live worker of it."
        return "this router has no prefill pool."
    fates = Counter((c.filter_reason, c.detail[:MAX_DETAIL]) for c in seen)
    told = "; ".join(_filter_reason(*key, count) for key, count in fates.most_common(4))
    return f"no prefill worker could take it ({told})."


def _filter_reason(filter_reason: FilterReason, detail: str, count: int) -> str:
    which = "1 worker" if count == 1 else f"{count} workers"
    return f"{which}: {filter_reason.value}" + (f", {detail}" if detail else "")


def _tokens(count: int) -> str:
    return f"{count} uncached {'token' if count == 1 else 'tokens'}"
