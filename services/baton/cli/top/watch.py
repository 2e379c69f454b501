"""Reads all processes' metrics again and again."""

from __future__ import annotations

import re
import ssl
import urllib.error
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from time import monotonic

from baton.cli.scrape import scrape
from baton.cli.top.view import NAMES, ROLES, View, view
from baton.cli.top.window import Window

WINDOW_S = 10.0
"""That rates and quantiles are of."""
TIMEOUT_S = 2.0
MAX_PROCESSES = 1024
_THREADS = 16
_ROLE = re.compile(r'baton_process_info\{role="(\w+)",')


@dataclass(frozen=True, slots=True)
class Source:
    """Where one process's metrics are, whom to trust there and what key to show."""

    url: str
    trust: ssl.SSLContext | None = None
    key: str = ""


class Watch:
    """sources: whose metrics are to be read, asked before every round. Close it."""

    def __init__(self, sources: Callable[[], Sequence[Source]]) -> None:
        self._sources = sources
        self._windows: dict[str, Window] = {}
        self._pool = ThreadPoolExecutor(_THREADS, "top")

    def look(self) -> View:
        """Reads them all once, as many at a time as there are threads. Blocks."""
        sources = list(self._sources())[:MAX_PROCESSES]
        told: dict[str, list[Window]] = {}
        away: dict[str, str] = {}
        for source, (found, fault) in zip(sources, self._pool.map(_read, sources), strict=True):
            role = "" if found is None else _role(found)
            if found is None or role not in ROLES:
                away[source.url] = fault or "is no process of a Baton"
                continue
            window = self._windows.setdefault(source.url, Window(WINDOW_S))
            window.add(monotonic(), _kept(found))
            told.setdefault(role, []).append(window)
        gone = self._windows.keys() - {source.url for source in sources}
        for url in gone:
            del self._windows[url]
        return view(told, away)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def _read(source: Source) -> tuple[Mapping[str, float] | None, str]:
    """What it tells, or why it tells nothing."""
    try:
        return scrape(source.url, trust=source.trust, key=source.key, timeout_s=TIMEOUT_S), ""
    except urllib.error.HTTPError as error:
        error.close()
        keyless = error.code in (401, 403)
        return None, "asks for an operator's API key" if keyless else f"answers {error.code}"
    except (OSError, ValueError):
        return None, "does not answer"


def _kept(samples: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in samples.items() if name.partition("{")[0] in NAMES}


def _role(samples: Mapping[str, float]) -> str:
    return next((found[1] for sample in samples if (found := _ROLE.match(sample))), "")
