"""Reads a process's /metrics."""

from __future__ import annotations

import re
import ssl
import urllib.request
from collections import Counter
from collections.abc import Mapping
from http.client import HTTPException

TIMEOUT_S = 10.0
MAX_BYTES = 64 << 20


def scrape(
    url: str,
    *,
    trust: ssl.SSLContext | None = None,
    key: str = "",
    timeout_s: float = TIMEOUT_S,
) -> dict[str, float]:
    """All samples by name and labels, as they are written there. Blocks. Raises OSError, and
    ValueError for what is no metrics.

    key: an API key, the token of Baton's own processes, or "".
    """
    asked = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    with urllib.request.urlopen(asked, timeout=timeout_s, context=trust) as answer:
        lines = answer.read(MAX_BYTES).decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
    return {sample: float(value) for sample, value in pairs}


def total(found: Mapping[str, float], name: str, *labels: str) -> float:
    """The sum of a metric's samples that have these labels, each as `key="value"`."""
    return sum(
        value
        for sample, value in found.items()
        if sample.partition("{")[0] == name and all(label in sample for label in labels)
    )


def met(url: str, trust: ssl.SSLContext | None, key: str = "") -> Counter[str]:
    """How many workers of each role a router knows; none while it does not answer. Blocks."""
    try:
        found = scrape(url, trust=trust, key=key, timeout_s=2.0)
    except (OSError, HTTPException, ValueError):
        return Counter()
    serving = (_SERVING.fullmatch(sample) for sample in found)
    return Counter({one[1]: int(found[one[0]]) for one in serving if one and found[one[0]]})


_SERVING = re.compile(r'baton_workers\{role="(\w+)",state="serving"\}')
