"""Words one request's use as a JSON line, for whoever bills; knows no file."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec

from baton.core.observe.request_record import RequestRecord

_encoder = msgspec.json.Encoder()


def usage_line(record: RequestRecord, router: str) -> bytes:
    """One line with its end, of a request that is over. router: the instance id that served it.

    Times are seconds. first_token_s is null for one that told no token, error for one that ended
    well; finish_reasons has one entry a choice, null for one that was cut off.
    """
    times = record.so_far(0.0)
    ended = datetime.fromtimestamp(record.arrived_at + times.total_s, UTC)
    ends = [choice.finish_reason for choice in record.choices]
    failure = record.failure
    return (
        _encoder.encode(
            {
                "time": ended.isoformat(timespec="milliseconds"),
                "request_id": record.request_id,
                "tenant": record.tenant,
                "model": record.model,
                "asked": record.asked,
                "priority": record.priority,
                "input_tokens": record.prompt_tokens,
                "cached_tokens": record.cached_tokens,
                "output_tokens": record.output_tokens,
                "choices": len(ends),
                "finish_reasons": [None if end is None else end.name.lower() for end in ends],
                "error": None if failure is None else failure.reason.name.lower(),
                "duration_s": round(times.total_s, 6),
                "first_token_s": round(times.first_token_s, 6) if record.output_tokens else None,
                "router": router,
            }
        )
        + b"\n"
    )
