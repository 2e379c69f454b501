"""`baton top`: shows live what a running Baton does, from the metrics of its processes.

Threads scrape the metrics, windows hold those of the last seconds, and tables or JSON show them.
"""

from __future__ import annotations

import argparse
import json
import re
import ssl
import sys
import time
import urllib.error
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import pairwise
from time import monotonic
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from batonlm.cli import access, state
from batonlm.cli.http_client import scrape, total, trust
from batonlm.core.errors import InvalidArgument
from batonlm.rpc.address import split

Samples = Mapping[str, float]
"""Values by name and labels, as in /metrics."""

STARTED = "process_start_time_seconds"


class MetricsWindow:
    """Readings of one process over at least the last `length_s` seconds, once there are enough.

    A counter that is lower than before has restarted from 0, and so have all counters of a process
    that was restarted.
    """

    def __init__(self, length_s: float, model: str = "") -> None:
        """model: the name of the process's model; empty: it serves all, or it is not known."""
        self.model = model
        self._length_s = length_s
        self._readings: deque[tuple[float, Samples]] = deque()

    def add(self, at: float, samples: Samples) -> None:
        """Adds a reading. at: seconds of a monotonic clock."""
        self._readings.append((at, samples))
        while len(self._readings) > 2 and at - self._readings[1][0] >= self._length_s:
            self._readings.popleft()

    @property
    def seconds(self) -> float:
        """The time between the first and the last reading."""
        return self._readings[-1][0] - self._readings[0][0] if self._readings else 0.0

    def value(self, name: str, *labels: str) -> float:
        """Returns the last sum of a gauge's samples with these labels; 0 if there are none."""
        return total(self._readings[-1][1], name, *labels) if self._readings else 0.0

    def increase(self, name: str, *labels: str) -> float:
        """Returns the increase of the sum of a counter's samples with these labels."""
        return sum(
            grown
            for sample, grown in self._grown(name).items()
            if all(label in sample for label in labels)
        )

    def rate(self, name: str, *labels: str) -> float:
        """Returns the increase per second."""
        return self.increase(name, *labels) / self.seconds if self.seconds > 0 else 0.0

    def buckets(self, name: str) -> Counter[float]:
        """Returns the increase of each bucket of a histogram, by its upper bound."""
        found = Counter[float]()
        for sample, grown in self._grown(f"{name}_bucket").items():
            bound = sample.partition('le="')[2].partition('"')[0]
            found[float(bound)] += round(grown)
        return found

    def _grown(self, name: str) -> dict[str, float]:
        grown: dict[str, float] = {}
        for (_, before), (_, after) in pairwise(self._readings):
            anew = before.get(STARTED) != after.get(STARTED)
            for sample, value in after.items():
                if sample.partition("{")[0] == name:
                    # A sample that was absent counts as 0.
                    was = 0.0 if anew else before.get(sample, 0.0)
                    grown[sample] = grown.get(sample, 0.0) + value - (was if was <= value else 0.0)
        return grown


def quantile(buckets: Sequence[Counter[float]], share: float) -> float | None:
    """Returns a quantile of several histograms together, with linear interpolation within a bucket
    as in Prometheus. None without observations; values above the last bound count as that bound."""
    together = Counter[float]()
    for each in buckets:
        together.update(each)
    bounds = sorted(together)
    if not bounds or together[bounds[-1]] <= 0:
        return None
    rank = share * together[bounds[-1]]
    below, lower = 0.0, 0.0
    for bound in bounds:
        count = together[bound]
        if count >= rank and count > below:
            if bound == float("inf"):
                break
            return lower + (bound - lower) * (rank - below) / (count - below)
        below = count
        lower = bound if bound != float("inf") else lower
    return lower


ROLES = ("router", "tokenizer", "prefill", "decode", "detokenizer", "encode")

_TOKENS = {
    "tokenizer": "baton_encoded_tokens_total",
    "prefill": "baton_prefill_tokens_total",
    "decode": "baton_decode_tokens_total",
    "encode": "baton_vector_tokens_total",
}
NAMES = frozenset(
    {
        *_TOKENS.values(), STARTED,
        "baton_requests_total", "baton_requests_open", "baton_queued_requests",
        "baton_queued_tokens", "baton_time_to_first_token_seconds_bucket",
        "baton_inter_token_seconds_bucket", "baton_kv_bytes_total", "baton_refusals_total",
        "baton_migrations_total", "baton_workers", "baton_cached_tokens_total", "baton_blocks",
        "baton_sequences", "baton_waiting_tokens", "baton_step_seconds_sum",
        "baton_step_seconds_count",
    }
)  # fmt: skip
"""The metrics in use; others are discarded."""

_STATES = ("serving", "starting", "draining", "kv_only", "silent", "gone")


@dataclass(frozen=True, slots=True)
class PoolRow:
    """One role, or one model's part of it. None: the role has no such value, or no process that
    reports it was scraped."""

    role: str
    model: str
    """Empty: of all models, or not known."""
    workers: dict[str, int]
    """Number of workers in each state, as the routers see them; states without workers are left
    out, and where a role has several models all are."""
    asked: int
    """Number of processes that were scraped."""
    queue: float | None
    """Waiting sequences; for routers, requests."""
    waiting_tokens: float | None
    """Prompt tokens that are not computed yet."""
    running: float | None
    """Running sequences; for routers, requests."""
    kv_use: float | None
    """Share of the KV blocks in use."""
    tokens_per_s: float | None
    step_s: float | None
    """Mean over the last seconds."""


@dataclass(frozen=True, slots=True)
class Overall:
    """Figures as clients see them. None: no observations in the last seconds, or no process that
    reports them was scraped."""

    requests_per_s: float
    open_requests: float
    first_token_p50_s: float | None
    first_token_p99_s: float | None
    inter_token_p50_s: float | None
    inter_token_p99_s: float | None
    output_tokens_per_s: float | None
    handover_bytes_per_s: float
    prefix_hit_rate: float | None
    refusals_per_s: float
    migrations_per_s: float


@dataclass(frozen=True, slots=True)
class View:
    """All that is shown."""

    seconds: float
    """The period of rates and quantiles."""
    overall: Overall
    pools: tuple[PoolRow, ...]
    away: dict[str, str]
    """Why a process could not be scraped, by its address."""


def view(windows: Mapping[str, Sequence[MetricsWindow]], away: Mapping[str, str]) -> View:
    """Builds the view. windows: by role, of the processes that were just scraped."""
    routers = windows.get("router", ())
    every = [window for found in windows.values() for window in found]
    return View(
        max((window.seconds for window in every), default=0.0),
        _overall(windows),
        # Encode workers are there only where somebody wants vectors.
        tuple(
            _pool(role, model, group, routers if len(groups) == 1 else ())
            for role in ROLES
            if role != "encode" or windows.get(role)
            for groups in [_by_model(windows.get(role, ()))]
            for model, group in groups.items()
        ),
        dict(away),
    )


def _by_model(windows: Sequence[MetricsWindow]) -> dict[str, list[MetricsWindow]]:
    """One group at least."""
    found: dict[str, list[MetricsWindow]] = {} if windows else {"": []}
    for window in windows:
        found.setdefault(window.model, []).append(window)
    return found


def _overall(windows: Mapping[str, Sequence[MetricsWindow]]) -> Overall:
    routers = windows.get("router", ())
    engines = [*windows.get("prefill", ()), *windows.get("decode", ())]
    first = [w.buckets("baton_time_to_first_token_seconds") for w in routers]
    between = [w.buckets("baton_inter_token_seconds") for w in routers]
    found = _increase(engines, "baton_cached_tokens_total")
    looked_up = found + _increase(engines, "baton_prefill_tokens_total")
    decodes = windows.get("decode", ())
    return Overall(
        requests_per_s=_rate(routers, "baton_requests_total"),
        open_requests=_value(routers, "baton_requests_open"),
        first_token_p50_s=quantile(first, 0.5),
        first_token_p99_s=quantile(first, 0.99),
        inter_token_p50_s=quantile(between, 0.5),
        inter_token_p99_s=quantile(between, 0.99),
        output_tokens_per_s=_rate(decodes, _TOKENS["decode"]) if decodes else None,
        handover_bytes_per_s=_rate(routers, "baton_kv_bytes_total"),
        prefix_hit_rate=found / looked_up if looked_up else None,
        refusals_per_s=_rate(routers, "baton_refusals_total"),
        migrations_per_s=_rate(routers, "baton_migrations_total"),
    )


def _pool(
    role: str, model: str, asked: Sequence[MetricsWindow], routers: Sequence[MetricsWindow]
) -> PoolRow:
    if role == "router":
        states = {"serving": len(asked)} if asked else {}
    else:
        # Each router sees all workers, except that one which has just started sees fewer.
        seen = {
            state: max(
                (
                    int(w.value("baton_workers", f'role="{role}"', f'state="{state}"'))
                    for w in routers
                ),
                default=0,
            )
            for state in _STATES
        }
        states = {state: number for state, number in seen.items() if number}
    if not asked:
        return PoolRow(role, model, states, 0, None, None, None, None, None, None)
    if role == "router":
        queue = _value(asked, "baton_queued_requests")
        running = _value(asked, "baton_requests_open") - queue
        waiting_tokens: float | None = _value(asked, "baton_queued_tokens")
    else:
        queue = _value(asked, "baton_sequences", 'state="waiting"')
        running = _value(asked, "baton_sequences", 'state="running"')
        waiting_tokens = (
            _value(asked, "baton_waiting_tokens") if role in ("prefill", "decode") else None
        )
    blocks = _value(asked, "baton_blocks")
    steps = _increase(asked, "baton_step_seconds_count")
    return PoolRow(
        role,
        model,
        states,
        len(asked),
        queue,
        waiting_tokens,
        running,
        _value(asked, "baton_blocks", 'state="used"') / blocks if blocks else None,
        _rate(asked, _TOKENS[role]) if role in _TOKENS else None,
        _increase(asked, "baton_step_seconds_sum") / steps if steps else None,
    )


def _value(windows: Sequence[MetricsWindow], name: str, *labels: str) -> float:
    return sum(window.value(name, *labels) for window in windows)


def _rate(windows: Sequence[MetricsWindow], name: str) -> float:
    return sum(window.rate(name) for window in windows)


def _increase(windows: Sequence[MetricsWindow], name: str) -> float:
    return sum(window.increase(name) for window in windows)


WINDOW_S = 10.0
"""The period of rates and quantiles."""
TIMEOUT_S = 2.0
MAX_PROCESSES = 1024
_THREADS = 16
_ROLE = re.compile(r'baton_process_info\{role="(\w+)",')


@dataclass(frozen=True, slots=True)
class MetricsSource:
    """The address of one process's metrics, the CA to trust there and the key to send."""

    url: str
    trust: ssl.SSLContext | None = None
    key: str = ""
    model: str = ""
    """See `MetricsWindow`."""


class Watch:
    """Scrapes processes repeatedly. sources: called before every round. Close it."""

    def __init__(self, sources: Callable[[], Sequence[MetricsSource]]) -> None:
        self._sources = sources
        self._windows: dict[str, MetricsWindow] = {}
        self._pool = ThreadPoolExecutor(_THREADS, "top")

    def look(self) -> View:
        """Scrapes all processes once, as many at a time as there are threads. Blocks."""
        sources = list(self._sources())[:MAX_PROCESSES]
        windows: dict[str, list[MetricsWindow]] = {}
        away: dict[str, str] = {}
        for source, (found, fault) in zip(sources, self._pool.map(_read, sources), strict=True):
            role = "" if found is None else _role(found)
            if found is None or role not in ROLES:
                away[source.url] = fault or "is no process of a Baton"
                continue
            window = self._windows.setdefault(source.url, MetricsWindow(WINDOW_S, source.model))
            window.add(monotonic(), _kept(found))
            windows.setdefault(role, []).append(window)
        gone = self._windows.keys() - {source.url for source in sources}
        for url in gone:
            del self._windows[url]
        return view(windows, away)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def _read(source: MetricsSource) -> tuple[Mapping[str, float] | None, str]:
    """Returns the samples, or None and the reason why there are none."""
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


NOTHING = "-"


def document(shown: View) -> dict[str, Any]:
    """Returns the view as JSON values: seconds, shares and counts; None for unknown values."""
    return asdict(shown)


def drawn(shown: View) -> RenderableType:
    """Returns the view as tables that fit the width: a column without room is cut."""
    lines: list[RenderableType] = [_overall_table(shown.overall), _pools(shown)]
    lines += [Text(f"{url} {why}", style="red") for url, why in sorted(shown.away.items())]
    lines.append(Text(f"over the last {shown.seconds:.0f} s", style="dim"))
    return Group(*lines)


def _overall_table(overall: Overall) -> Table:
    table = Table.grid(padding=(0, 2))
    for _ in range(6):
        table.add_column(no_wrap=True)
    fields = [
        ("requests/s", _number(overall.requests_per_s)),
        ("open", _number(overall.open_requests)),
        ("output tokens/s", _number(overall.output_tokens_per_s)),
        ("first token p50", _time(overall.first_token_p50_s)),
        ("p99", _time(overall.first_token_p99_s)),
        ("prefix hits", _share(overall.prefix_hit_rate)),
        ("between tokens p50", _time(overall.inter_token_p50_s)),
        ("p99", _time(overall.inter_token_p99_s)),
        ("hand-over", f"{_bytes(overall.handover_bytes_per_s)}/s"),
        ("refusals/s", _number(overall.refusals_per_s)),
        ("migrations/s", _number(overall.migrations_per_s)),
    ]
    for start in range(0, len(fields), 3):
        cells: list[RenderableType] = []
        for name, value in fields[start : start + 3]:
            cells += [Text(name, style="dim"), Text(value, style="bold")]
        table.add_row(*cells)
    return table


def _pools(shown: View) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    several = len({pool.role for pool in shown.pools}) < len(shown.pools)
    table.add_column("pool", no_wrap=True, min_width=11)
    if several:
        table.add_column("model", overflow="ellipsis")
    table.add_column("workers")
    for name in ("queue", "tokens", "running", "KV", "tokens/s", "step"):
        table.add_column(name, justify="right", no_wrap=True)
    for pool in shown.pools:
        table.add_row(
            pool.role,
            *([pool.model] if several else []),
            _workers(pool),
            _number(pool.queue),
            _number(pool.waiting_tokens),
            _number(pool.running),
            _share(pool.kv_use),
            _number(pool.tokens_per_s),
            _time(pool.step_s),
        )
    return table


def _workers(pool: PoolRow) -> str:
    states = ", ".join(f"{number} {state}" for state, number in pool.workers.items())
    return states or (f"{pool.asked} asked" if pool.asked else NOTHING)


def _number(value: float | None) -> str:
    if value is None:
        return NOTHING
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def _share(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.0%}"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return NOTHING
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"


def _bytes(value: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} GiB"


SHORTEST_S, LONGEST_S = 0.1, 60.0


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("top")
    parser.add_argument(
        "--http", metavar="HOST:PORT",
        help="a router's HTTP address (default: where `baton up` runs, with all its processes)",
    )  # fmt: skip
    parser.add_argument(
        "--workers", metavar="HOST:PORT,…", default="",
        help="where workers, or routers, have --metrics-listen",
    )  # fmt: skip
    access.add_arguments(parser)
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="S",
        help="seconds between two looks (default %(default)g)",
    )  # fmt: skip
    parser.add_argument(
        "--once", action="store_true",
        help="show what one interval has to tell and end; so without a terminal",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="as --once, and print JSON")


def run(args: argparse.Namespace) -> int:
    """Returns 1 if no process answers, else 0."""
    if not SHORTEST_S <= args.interval <= LONGEST_S:
        raise InvalidArgument(f"must be {SHORTEST_S:g} to {LONGEST_S:g}", field="interval")
    with closing(Watch(_sources(args))) as watch:
        if args.once or args.json or not sys.stdout.isatty():
            return _once(watch, args)
        try:
            _live(watch, args.interval)
        except KeyboardInterrupt:
            return 0
    return 0


def _once(watch: Watch, args: argparse.Namespace) -> int:
    watch.look()
    time.sleep(args.interval)
    found = watch.look()
    if args.json:
        print(json.dumps(document(found), indent=2))
    else:
        Console(highlight=False).print(drawn(found))
    return int(not any(pool.asked for pool in found.pools))


def _live(watch: Watch, interval_s: float) -> None:
    """Draws until Ctrl-C. The terminal's size is read at each drawing."""
    console = Console(highlight=False)
    with Live(drawn(watch.look()), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval_s)
            live.update(drawn(watch.look()), refresh=True)


def _sources(args: argparse.Namespace) -> Callable[[], Sequence[MetricsSource]]:
    """Raises InvalidArgument if there is no process to scrape."""
    named = [part.strip() for part in args.workers.split(",") if part.strip()]
    for address in named:
        split(address, "workers")
    there = access.access_of(args, "", face="http")
    trusted = trust(there.ca)
    if args.http or named:
        fixed = [MetricsSource(f"http://{address}/metrics") for address in named]
        if args.http:
            scheme = "http" if there.ca is None else "https"
            fixed.insert(0, MetricsSource(f"{scheme}://{args.http}/metrics", trusted, there.key))
        return lambda: fixed
    if state.read() is None:
        raise InvalidArgument("no Baton runs here: --http names a router, --workers the others")

    def running() -> list[MetricsSource]:
        """Ports stay the same when a process restarts; the state file is removed when all ended."""
        said = state.read() or {}
        return [
            MetricsSource(each["metrics"], trusted, said.get("token", ""))
            if each["role"] == "router"
            else MetricsSource(each["metrics"], model=each.get("model", ""))
            for each in said.get("processes", ())
        ]

    return running
