"""A self-contained HTML page of a run or a search, with figures and plots."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path

from baton_loadtest import report
from baton_loadtest.drive import ANSWERED, REFUSED, Sample
from baton_loadtest.load.summary import Summary
from baton_loadtest.report import Chart, Line, Result, quantile
from batonlm.core.errors import InvalidArgument

PLACES = 100
"""Points of a line over time."""

STEPS = 200
"""Points of a distribution."""

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:1180px;margin:2rem auto;padding:0 1rem;"
    "color:#1f2328}h1{font-size:1.4rem}.note{background:#fff4d6;border-left:4px solid #d4a72c;"
    "padding:.5rem 1rem}svg{width:100%;height:auto}table{border-collapse:collapse}"
    "td,th{padding:.15rem .8rem;border-bottom:1px solid #d0d7de;text-align:left}"
    "td.n{text-align:right;font-variant-numeric:tabular-nums}"
)


def page(
    title: str, figures: Sequence[Result], remarks: Sequence[str], plots: Sequence[Chart]
) -> str:
    """remarks: texts that come first."""
    rows = []
    for result in figures:
        goal = report.goal_text(asdict(result))
        rows.append(
            f"<tr><td>{escape(result.name)}</td><td class=n>{report.number(result.value)}</td>"
            f"<td>{escape(result.unit)}</td><td>{escape(goal)}</td></tr>"
        )
    notes = "".join(f"<p class=note>{escape(text)}</p>" for text in remarks)
    picture = report.svg(plots, columns=2)
    drawn = picture[picture.index("<svg") :]  # without the header of an SVG file
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width'>"
        f"<title>Load test: {escape(title)}</title><style>{_STYLE}</style>"
        f"<h1>Load test: {escape(title)}</h1>{notes}{drawn}"
        f"<h2>Figures</h2><table>{''.join(rows)}</table>"
        "<p>Latencies are of requests that were answered in full, and count from when the request "
        "was due, unless it says otherwise.</p>"
        f"<p>{escape(report.machine())}</p></html>\n"
    )


def of_run(summary: Summary, title: str) -> str:
    return page(title, summary.results(), summary.warnings(), charts(summary))


def of_search(
    tried: Sequence[tuple[float, Summary]], figures: Sequence[Result], remark: str, title: str
) -> str:
    """tried: rates and their results."""
    by_rate = sorted(tried, key=lambda one: one[0])
    rates = [rate for rate, _ in by_rate]
    share = [100 * summary.share_met for _, summary in by_rate]
    plots = [Chart("Within objectives", "rate", "%", (Line("of all due", rates, share),))]
    for name, values in (
        ("First token", [summary.latencies.first for _, summary in by_rate]),
        ("Between tokens", [summary.latencies.between for _, summary in by_rate]),
    ):
        lines = tuple(
            Line(
                f"p{100 * part:g}", rates,
                [1000 * quantile(each, part) for each in values],
            )
            for part in (0.5, 0.99)
        )  # fmt: skip
        plots.append(Chart(name, "rate", "ms", lines))
    return page(title, figures, [remark], plots)


def write(path: Path, text: str) -> None:
    """Raises InvalidArgument (field "html") if the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidArgument(f"{path}: {error.strerror}", field="html") from None


def charts(summary: Summary) -> tuple[Chart, ...]:
    samples, seconds = summary.run.samples, summary.seconds
    good = [sample for sample in samples if sample.end == ANSWERED]
    width = seconds / PLACES
    first = _bins(good, width, lambda one: one.due_s)
    named = {
        f"p{100 * share:g}": [
            (n, 1000 * quantile([one.first_s - one.due_s for one in part], share))
            for n, part in sorted(first.items())
        ]
        for share in (0.5, 0.99)
    }
    lags = _bins([one for one in samples if one.sent], width, lambda one: one.due_s)
    late = [
        (n, 1000 * quantile([one.lag_s for one in part], 0.99)) for n, part in sorted(lags.items())
    ]
    latencies = summary.latencies
    at = "seconds since the beginning"
    return (
        Chart(
            "First token, by when the request was due", at, "ms",
            tuple(_line(name, points, width) for name, points in named.items()),
        ),
        Chart(
            "Rate", at, "requests/s",
            (
                _rate("due", samples, width, lambda one: one.due_s),
                _rate("answered", good, width, lambda one: one.ended_s),
                _rate(
                    "refused", [one for one in samples if one.end == REFUSED], width,
                    lambda one: one.ended_s,
                ),
            ),
        ),
        Chart(
            "Share of requests, first token and end", "ms", "%",
            (
                _distribution("first token", latencies.first),
                _distribution("end to end", latencies.whole),
            ),
        ),
        Chart(
            "Share of gaps between tokens", "ms", "%",
            (_distribution("between tokens", latencies.between),),
        ),
        Chart("How late requests left", at, "ms", (_line("p99", late, width),)),
    )  # fmt: skip


def _bins(
    samples: Sequence[Sample], width: float, at: Callable[[Sample], float]
) -> dict[int, list[Sample]]:
    found: dict[int, list[Sample]] = defaultdict(list)
    for sample in samples:
        found[min(PLACES - 1, int(at(sample) / width))].append(sample)
    return found


def _line(name: str, points: Sequence[tuple[int, float]], width: float) -> Line:
    return Line(name, [(n + 0.5) * width for n, _ in points], [y for _, y in points])


def _rate(
    name: str, samples: Sequence[Sample], width: float, at: Callable[[Sample], float]
) -> Line:
    bins = _bins(samples, width, at)
    return _line(name, [(n, len(bins.get(n, ())) / width) for n in range(PLACES)], width)


def _distribution(name: str, values: Sequence[float]) -> Line:
    """values: seconds in ascending order."""
    if not values:
        return Line(name, [], [])
    shares = [n / STEPS for n in range(STEPS + 1)]
    return Line(
        name,
        [1000 * values[min(len(values) - 1, int(share * len(values)))] for share in shares],
        [100 * share for share in shares],
    )
