"""Says where the time of a call went and who served it, to clients that ask for it.

Knows the words; what a stage is, `core.stages` says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from baton.core.observe.stages import StageTimes
from baton.core.request.model import WorkerIdentity
from baton.core.request.request import Finished
from baton.router.api.http.respond import Header, Json

ASK = b"x-baton-timings"


def asked_for(headers: Mapping[bytes, bytes]) -> bool:
    return headers.get(ASK, b"").strip().lower() in (b"true", b"1")


def described(finished: Sequence[Finished]) -> list[Json]:
    """One entry a prompt; none when the operator wants it not told."""
    return [_entry(each.stages) for each in finished if each.stages is not None]


def headers_of(finished: Sequence[Finished]) -> list[Header]:
    """`Server-Timing`, which browsers show: milliseconds, of a call with one prompt only."""
    times = finished[0].stages if len(finished) == 1 else None
    if times is None:
        return []
    spent = times.spent() | {"total": times.total_s}
    entries = [f"{stage};dur={seconds * 1e3:.3f}" for stage, seconds in spent.items()]
    return [(b"server-timing", ", ".join(entries).encode())]


def _entry(times: StageTimes) -> Json:
    """Seconds, rounded to microseconds."""
    return {
        "stages": {f"{stage}_s": round(seconds, 6) for stage, seconds in times.spent().items()},
        "first_token_s": round(times.first_token_s, 6),
        "total_s": round(times.total_s, 6),
        "cached_tokens": {
            "prefill": times.prefill_cached_tokens,
            "decode": times.decode_cached_tokens,
        },
        "kv_bytes": times.kv_bytes,
        "attempts": times.attempts,
        "moves": times.moves,
        "workers": [worker_words(worker) for worker in times.workers],
    }


def worker_words(worker: WorkerIdentity) -> Json:
    """address: "" for clients that are no operators."""
    return {"role": worker.role, "instance_id": worker.short, "address": worker.address}
