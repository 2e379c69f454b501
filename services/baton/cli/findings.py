"""What a check of `baton doctor` answers, and how answers are shown; checks nothing."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from rich.console import Console


class Status(Enum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """advice: what to do about it; empty when all is well."""

    status: Status
    detail: str
    advice: str = ""


def ok(detail: str) -> Finding:
    return Finding(Status.OK, detail)


def warn(detail: str, advice: str) -> Finding:
    return Finding(Status.WARN, detail, advice)


def fail(detail: str, advice: str) -> Finding:
    return Finding(Status.FAIL, detail, advice)


_COLOURS = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "red"}


def failed(findings: Mapping[str, Finding]) -> bool:
    return any(finding.status is Status.FAIL for finding in findings.values())


def show(console: Console, name: str, finding: Finding) -> None:
    status = finding.status.value
    console.print(f"{status:<5}", style=_COLOURS[finding.status], end="")
    console.print(f" {name:<14} {finding.detail}", markup=False)
    if finding.advice:
        console.print(f"{'':<6}{'':<14} -> {finding.advice}", markup=False)
    sys.stdout.flush()


def document(findings: Mapping[str, Finding]) -> dict[str, Any]:
    """The findings as they go into JSON."""
    return {
        "ok": not failed(findings),
        "checks": [
            {
                "name": name,
                "status": finding.status.value,
                "detail": finding.detail,
                "advice": finding.advice,
            }
            for name, finding in findings.items()
        ],
    }
