"""Whether KV of one worker fits another, and the difference in words.

The router pairs by this rule and both workers check it again when they meet.
"""

from __future__ import annotations

from batonlm.core.errors import Incompatible
from batonlm.core.request.model import KvLayout, WorkerIdentity


def difference(
    layout: KvLayout | None,
    transports: tuple[str, ...],
    other_layout: KvLayout | None,
    other_transports: tuple[str, ...],
) -> str:
    """What keeps KV from moving, as "name: ours against theirs; ..."; "" when nothing does.

    No transports named: not known here, and left to the handshake.
    """
    found = []
    if layout is None or other_layout is None:
        found.append(f"KV layout: {_has(layout)} against {_has(other_layout)}")
    elif layouts := layout.difference(other_layout):
        found.append(layouts)
    if transports and other_transports and not set(transports) & set(other_transports):
        ours, theirs = ", ".join(transports), ", ".join(other_transports)
        found.append(f"transports: {ours} against {theirs}")
    return "; ".join(found)


def refusal(worker: WorkerIdentity, other: WorkerIdentity, difference: str) -> Incompatible:
    """The error for a pair that does not fit. difference: as above, `worker` being "ours"."""
    return Incompatible(
        f"KV does not fit between {short_name(worker)} and {short_name(other)}: {difference}"
    )


def short_name(worker: WorkerIdentity) -> str:
    """As the logs of all processes call a worker; no address, because it may reach a client."""
    return f"{worker.role or 'a worker'} {worker.instance_id[:8]}"


def _has(layout: KvLayout | None) -> str:
    return "none" if layout is None else "one"
