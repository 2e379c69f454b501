"""Forecasts: of a day that resembles the last one, of a trend, and of what is constant."""

from __future__ import annotations

from math import pi, sin

from hypothesis import given
from hypothesis import strategies as st

from baton_loadtest.autoscale.forecast import BUCKET_S, DAY_S, Forecast


def day(time_s: float) -> float:
    """Requests per second, between 1 and 9."""
    return 5.0 + 4.0 * sin(2 * pi * time_s / DAY_S)


def followed(forecast: Forecast, until_s: float, scale: float = 1.0) -> Forecast:
    for bucket in range(int(until_s / BUCKET_S)):
        start = bucket * BUCKET_S
        forecast.see(start, day(start) * (scale if start >= DAY_S else 1.0))
    return forecast


def test_a_day_like_the_last_is_foreseen_hours_ahead() -> None:
    forecast = followed(Forecast(600.0), DAY_S + 4 * 3600.0)
    now = DAY_S + 4 * 3600.0 - BUCKET_S
    for ahead in (600.0, 3600.0, 6 * 3600.0):
        assert abs(forecast.at(now, ahead) - day(now + ahead)) < 0.2


def test_a_busier_day_has_the_same_form() -> None:
    forecast = followed(Forecast(600.0), DAY_S + 4 * 3600.0, scale=1.5)
    now = DAY_S + 4 * 3600.0 - BUCKET_S
    assert abs(forecast.at(now, 3600.0) - 1.5 * day(now + 3600.0)) < 0.6


def test_without_a_season_a_trend_goes_on_for_a_while() -> None:
    forecast = Forecast(300.0)
    for bucket in range(60):
        forecast.see(bucket * BUCKET_S, 1.0 + bucket / 10)
    now = 59 * BUCKET_S
    soon, later = forecast.at(now, 120.0), forecast.at(now, 86400.0)
    assert 6.7 < soon < 7.3 and soon < later < 8.0


def test_the_error_is_what_was_missed() -> None:
    steady = Forecast(120.0)
    for bucket in range(100):
        steady.see(bucket * BUCKET_S, 3.0)
    assert steady.error == 0.0 and abs(steady.most(0.0, 600.0) - 3.0) < 1e-9
    wild = Forecast(120.0)
    for bucket in range(100):
        wild.see(bucket * BUCKET_S, 6.0 * (bucket % 2))
    assert wild.error > 2.0 and wild.most(0.0, 600.0) > 5.0


@given(st.lists(st.floats(0.0, 1e4), max_size=50), st.floats(0.0, 1e6))
def test_no_forecast_is_below_nothing(rates: list[float], ahead: float) -> None:
    forecast = Forecast(300.0)
    for bucket, rate in enumerate(rates):
        forecast.see(bucket * BUCKET_S, rate)
    found = forecast.at(len(rates) * BUCKET_S, ahead)
    assert 0.0 <= found < 1e6 and forecast.most(0.0, 600.0) >= 0.0
