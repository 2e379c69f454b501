"""What routers measure, read from their /metrics over HTTP."""

from __future__ import annotations

import urllib.request
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.client import HTTPException

from prometheus_client.parser import text_string_to_metric_families

TARGETS = "baton_pool_target_workers"
READ_S = 3.0
MAX_BYTES = 8 << 20
AT_ONCE = 16
_COUNTED = ("baton_requests_total", "baton_requests_open")


@dataclass(frozen=True, slots=True)
class Reading:
    """What the routers of a release said at one moment."""

    routers: int
    """That answered."""
    targets: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """The workers that they ask for, by model and role: the most that one of them does."""
    requests: float = 0.0
    """Requests that came so far, to the routers that answered."""

    def target(self, role: str, model: str = "", others: Collection[str] = ()) -> float | None:
        """Returns the workers of a role for one model, or without one for all but `others`; None
        when no router says a number."""
        found = [
            value
            for (name, each), value in self.targets.items()
            if each == role and (name == model if model else name not in others)
        ]
        return sum(found) if found else None


def read(addresses: Sequence[str]) -> Reading:
    """Reads every router, "host:port" of /metrics, within READ_S each; one that does not answer is
    left out."""
    if not addresses:
        return Reading(0)
    with ThreadPoolExecutor(min(AT_ONCE, len(addresses))) as pool:
        answers = [text for text in pool.map(_get, addresses) if text is not None]
    return reading_of(answers)


def reading_of(answers: Iterable[str]) -> Reading:
    """answers: the text of each router's /metrics; one that cannot be parsed is left out."""
    routers, requests = 0, 0.0
    targets: dict[tuple[str, str], float] = {}
    for text in answers:
        try:
            samples = [
                sample
                for family in text_string_to_metric_families(text)
                for sample in family.samples
                if sample.name == TARGETS or sample.name in _COUNTED
            ]
            asked = {
                (s.labels["model"], s.labels["role"]): s.value for s in samples if s.name == TARGETS
            }
        except (ValueError, KeyError):
            continue
        routers += 1
        requests += sum(sample.value for sample in samples if sample.name in _COUNTED)
        for key, value in asked.items():
            targets[key] = max(value, targets.get(key, 0.0))
    return Reading(routers, targets, requests)


def _get(address: str) -> str | None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://{address}/metrics", timeout=READ_S) as answer:
            return str(answer.read(MAX_BYTES).decode(errors="replace"))
    except (OSError, HTTPException):
        return None
