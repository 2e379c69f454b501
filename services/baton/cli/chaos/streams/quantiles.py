"""Quantiles of what may be empty."""

from __future__ import annotations

from collections.abc import Sequence

from baton.cli.bench.stalls import percentile


def quantile(values: Sequence[float], share: float) -> float:
    """The value that this share of all is at most; 0 of none."""
    return percentile(values, share) if values else 0.0
