"""Logs of one process to stderr, readable lines or JSON lines.

Every line carries role, instance id, and the fields of `extra`; `named` makes those of a request.
"""

from __future__ import annotations

import json as json_module
import logging
import sys
import time

_STANDARD = frozenset(vars(logging.LogRecord("", 0, "", 0, "", None, None))) | {
    "message",
    "asctime",
    "taskName",
}


def setup(role: str, level: str, json: bool = False, *, instance_id: str = "") -> None:
    """Logs everything at `level` (debug, info, warning, error) or above to stderr.

    Replaces an earlier setup.
    """
    handler = logging.StreamHandler(sys.stderr)
    formatter = JsonFormatter if json else LineFormatter
    handler.setFormatter(formatter(role, instance_id))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def named(request_id: str, trace_id: str = "") -> dict[str, str]:
    """The ids of a request and of its trace, without empty ones, as `extra` of a log line."""
    names = {"request_id": request_id, "trace_id": trace_id}
    return {name: value for name, value in names.items() if value}


class LineFormatter(logging.Formatter):
    """Formats `10:15:04.123 INFO decode 3f2a19c0 batonlm.decode.service: text request_id=r1`."""

    def __init__(self, role: str, instance_id: str) -> None:
        super().__init__()
        self._who = f"{role} {instance_id[:8]}".strip()

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        # Line breaks in a client's values are escaped, so that one event is one line.
        text = _printable(record.getMessage())
        extras = "".join(f" {name}={_printable(str(v))}" for name, v in _extras(record).items())
        line = (
            f"{clock}.{int(record.msecs):03d} {record.levelname} {self._who} {record.name}: "
            f"{text}{extras}"
        )
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """Formats one JSON object per line; time is RFC 3339 in UTC."""

    def __init__(self, role: str, instance_id: str) -> None:
        super().__init__()
        self._who = {"role": role, "instance_id": instance_id}

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields = {
            "time": f"{clock}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            **self._who,
            "logger": record.name,
            "message": record.getMessage(),
            **_extras(record),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json_module.dumps(fields, default=str)


def _extras(record: logging.LogRecord) -> dict[str, object]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


def _printable(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
