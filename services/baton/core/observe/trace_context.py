"""Where in a trace something belongs, as W3C Trace Context writes it."""

from __future__ import annotations

import re
from typing import NamedTuple

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")


class TraceContext(NamedTuple):
    """The two headers of those names. Both are empty where nothing is traced.

    They may be a stranger's: whoever goes on with a trace parses them first.
    """

    traceparent: str = ""
    tracestate: str = ""

    @property
    def trace_id(self) -> str:
        """32 hex digits, or "" where there is none. Fit for a log, whoever wrote the header."""
        found = _TRACEPARENT.fullmatch(self.traceparent)
        return found[1] if found else ""


UNTRACED = TraceContext()
