"""Rates, quantiles and what `baton top` makes of them, from made-up readings; asks no process."""

from __future__ import annotations

import argparse
import asyncio
import io
import json
from collections import Counter
from contextlib import closing
from math import inf
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from rich.console import Console

from batonlm.cli import top
from batonlm.cli.top import (
    NAMES,
    STARTED,
    MetricsSource,
    MetricsWindow,
    View,
    Watch,
    document,
    drawn,
    quantile,
    view,
)
from batonlm.core.errors import InvalidArgument
from batonlm.router.api.http.access import HttpAccess
from batonlm.router.api.http.server import serve_http
from batonlm.rpc.metrics import PROCESS, gauge
from tests.deploy.test_dashboards import exported, unknown
from tests.services.router.test_keys import Kept
from tests.services.router_http.scripted import Scripted, http_app


def window(
    *readings: dict[str, float], every_s: float = 1.0, length_s: float = 10.0
) -> MetricsWindow:
    made = MetricsWindow(length_s)
    for number, samples in enumerate(readings):
        made.add(number * every_s, samples)
    return made


def test_a_rate_is_growth_by_time() -> None:
    read = window({"a": 5.0}, {"a": 7.0}, {"a": 11.0}, every_s=2.0)
    assert (read.increase("a"), read.seconds, read.rate("a")) == (6, 4, 1.5)


def test_a_counter_that_begins_anew_loses_nothing_that_it_counted() -> None:
    assert window({"a": 90.0}, {"a": 100.0}, {"a": 3.0}, {"a": 4.0}).increase("a") == 14


def test_a_process_started_anew_counts_from_nothing_even_where_it_counted_more() -> None:
    before, after = {STARTED: 1.0, "a": 10.0}, {STARTED: 2.0, "a": 50.0}
    assert window(before, after).increase("a") == 50


def test_what_was_never_counted_before_began_at_nothing() -> None:
    first, then = 'a{outcome="x"}', 'a{outcome="y"}'
    read = window({first: 5.0}, {first: 5.0, then: 2.0})
    assert read.increase("a") == read.increase("a", 'outcome="y"') == 2
    assert read.increase("a", 'outcome="x"') == 0


def test_names_are_whole_names() -> None:
    read = window({"a": 0.0, "a_b": 0.0}, {"a": 1.0, "a_b": 5.0})
    assert read.increase("a") == 1


async def test_an_operators_key_reads_a_routers_metrics(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "keys.json")
    tenants, staff = kept.new("acme"), kept.new("staff", operator=True)
    registry = CollectorRegistry()
    labels = ("router", "1")
    forget = gauge(PROCESS, lambda: {labels: 1}, registry)
    app = http_app(Scripted(), registry, HttpAccess(kept.authenticator()))
    server = await serve_http(app, "127.0.0.1:0")
    url = f"http://{server.address}/metrics"
    try:
        for key, away in (("", True), (tenants, True), (staff, False)):
            with closing(Watch(lambda key=key: [MetricsSource(url, key=key)])) as watch:  # type: ignore[misc]
                seen = await asyncio.to_thread(watch.look)
            assert seen.away == ({url: "asks for an operator's API key"} if away else {})
    finally:
        forget()
        await server.close()


def test_only_the_last_seconds_count() -> None:
    read = window(*({"a": float(number**2)} for number in range(30)), length_s=10.0)
    assert read.seconds == 10
    assert read.increase("a") == 29**2 - 19**2


def test_one_reading_has_no_rate() -> None:
    for read in (window(), window({"a": 5.0})):
        assert (read.rate("a"), read.seconds) == (0, 0)


def test_quantiles_are_prometheus() -> None:
    """By hand: ten values up to 1, ten more up to 2, and twenty beyond the last bound."""
    counts = Counter({1.0: 10, 2.0: 20, inf: 40})
    assert quantile([counts], 0.125) == 0.5
    assert quantile([counts], 0.375) == 1.5
    assert quantile([counts], 0.99) == 2.0
    assert quantile([counts, counts], 0.375) == 1.5
    assert quantile([], 0.5) is None
    assert quantile([Counter({1.0: 0, inf: 0})], 0.5) is None


@given(st.lists(st.integers(0, 50), min_size=4, max_size=4), st.floats(0.0, 1.0))
def test_a_quantile_lies_in_the_bucket_of_its_rank(counts: list[int], share: float) -> None:
    bounds, total = (0.5, 1.0, 4.0, inf), 0
    buckets = Counter[float]()
    for bound, count in zip(bounds, counts, strict=True):
        total += count
        buckets[bound] = total
    found = quantile([buckets], share)
    if total == 0:
        assert found is None
        return
    assert found is not None
    if found < 4.0:
        assert buckets[min(b for b in bounds if b >= found)] >= share * total - 1e-9


def test_buckets_are_of_the_last_seconds() -> None:
    low, high = 'h_bucket{le="0.5"}', 'h_bucket{le="+Inf"}'
    read = window({low: 100.0, high: 100.0}, {low: 100.0, high: 104.0})
    assert read.buckets("h") == {0.5: 0, inf: 4}


def router(requests: float, serving: float) -> MetricsWindow:
    name = "baton_time_to_first_token_seconds_bucket"
    reads = [
        {
            'baton_requests_total{outcome="finished"}': n,
            f'{name}{{le="0.1"}}': n,
            f'{name}{{le="+Inf"}}': n,
            'baton_workers{role="decode",state="serving"}': serving,
            "baton_requests_open": 3.0,
            "baton_queued_requests": 1.0,
        }
        for n in (0.0, requests)
    ]
    return window(*reads, every_s=2.0)


def engine(computed: float, cached: float) -> MetricsWindow:
    reads = [
        {
            "baton_prefill_tokens_total": computed * n,
            "baton_cached_tokens_total": cached * n,
            'baton_blocks{state="used"}': 25.0,
            'baton_blocks{state="free"}': 75.0,
            "baton_step_seconds_count": 10.0 * n,
            "baton_step_seconds_sum": 0.5 * n,
        }
        for n in (0.0, 1.0)
    ]
    return window(*reads, every_s=2.0)


def made() -> View:
    windows = {
        "router": [router(10.0, 1.0), router(30.0, 2.0)],
        "decode": [engine(100.0, 0.0), engine(0.0, 300.0)],
    }
    return view(windows, {"http://127.0.0.1:1/metrics": "does not answer"})


def test_routers_are_added_up_and_workers_seen_by_either_count_once() -> None:
    found = made()
    assert found.overall.requests_per_s == 20
    assert found.overall.open_requests == 6
    assert found.overall.first_token_p50_s == 0.05
    assert found.overall.inter_token_p50_s is None
    assert found.overall.prefix_hit_rate == 0.75
    pools = {pool.role: pool for pool in found.pools}
    assert pools["decode"].workers == {"serving": 2}
    assert (pools["decode"].kv_use, pools["decode"].step_s) == (0.25, 0.05)
    assert (pools["router"].queue, pools["router"].running) == (2, 4)


def test_nothing_is_made_up_of_pools_that_nobody_asked() -> None:
    pools = {pool.role: pool for pool in view({"router": [router(1.0, 2.0)]}, {}).pools}
    assert pools["decode"].workers == {"serving": 2}
    assert (pools["decode"].asked, pools["decode"].kv_use, pools["decode"].queue) == (0, None, None)


def test_every_metric_that_it_looks_at_exists() -> None:
    assert not unknown(" ".join(NAMES - {STARTED}), exported())


@pytest.mark.parametrize("width", [20, 60, 200])
def test_it_fits_any_width(width: int) -> None:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(drawn(made()))
    text = str(console.file.getvalue())  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= width
    if width == 200:
        assert "2 serving" in text and "does not answer" in text and "75%" in text


def test_json_says_what_is_not_known() -> None:
    told = json.loads(json.dumps(document(made())))
    assert told["overall"]["inter_token_p50_s"] is None
    assert told["away"] == {"http://127.0.0.1:1/metrics": "does not answer"}


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["--interval", "0"], "interval"),
        (["--interval", "nan"], "interval"),
        (["--workers", "nowhere"], "workers"),
        (["--http", "nowhere"], "http"),
        (["--http", "example.com:80", "--api-key", "k"], "api_key"),
        ([], ""),
    ],
)
def test_bad_input_is_named(
    words: list[str], field: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    parser = argparse.ArgumentParser()
    top.add_parser(parser.add_subparsers())
    with pytest.raises(InvalidArgument) as refused:
        top.run(parser.parse_args(["top", *words]))
    assert refused.value.field == field
