"""Would a forecast of the load help the autoscaler?  A back-test on the traces of examples/traces.

    bench/load_forecast.py

At each row every method says the requests per second one start of a worker ahead, from the rows up
to then; the day is repeated for seven days with other noise, since a season wants a day before. The
last value is what the autoscaler goes by today. Holt-Winters runs where statsmodels is installed.
"""

import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

import make_traces

DAYS = 7
START_SECONDS = 300  # of a worker: two minutes to start, and the rounds until it has its part
REFIT = 12  # rows between two fits of Holt-Winters
HOLT_WINTERS = "statsmodels.tsa.holtwinters"
Forecast = Callable[[Sequence[float], int], float]


@dataclass(frozen=True)
class Series:
    """rows_ahead: between a forecast and what it forecasts; season: rows of a day, 0 = none"""

    name: str
    rates: tuple[float, ...]
    rows_ahead: int
    season: int


def last_value(rates: Sequence[float], ahead: int) -> float:
    return rates[-1]


def seasonal(season: int) -> Forecast:
    """The rate of the same time a day before, scaled by how this hour compares with that one's."""

    def forecast(rates: Sequence[float], ahead: int) -> float:
        if len(rates) < season + 12:
            return rates[-1]
        now, then = sum(rates[-12:]), sum(rates[-season - 12 : -season])
        return rates[-season - 1 + ahead] * (now / then if then else 1.0)

    return forecast


def seasonal_naive(season: int) -> Forecast:
    def forecast(rates: Sequence[float], ahead: int) -> float:
        return rates[-season - 1 + ahead] if len(rates) > season else rates[-1]

    return forecast


def holt(level_share: float, trend_share: float, damping: float) -> Forecast:
    """A level and a damped trend, both smoothed exponentially."""

    def forecast(rates: Sequence[float], ahead: int) -> float:
        level, trend = rates[0], 0.0
        for rate in rates[-200:]:
            before = level
            level = level_share * rate + (1.0 - level_share) * (level + damping * trend)
            trend = trend_share * (level - before) + (1.0 - trend_share) * damping * trend
        return level + trend * sum(damping**step for step in range(1, ahead + 1))

    return forecast


class HoltWinters:
    """Additive trend and season by statsmodels, fitted again every `REFIT` rows."""

    def __init__(self, season: int) -> None:
        self.season = season
        self._smoothing = import_module(HOLT_WINTERS).ExponentialSmoothing
        self._at, self._ahead = -REFIT, list[float]()

    def __call__(self, rates: Sequence[float], ahead: int) -> float:
        if len(rates) < 2 * self.season:
            return rates[-1]
        if len(rates) - self._at >= REFIT:
            model = self._smoothing(
                list(rates),
                trend="add",
                damped_trend=True,
                seasonal="add",
                seasonal_periods=self.season,
            )
            self._at, self._ahead = len(rates), list(model.fit().forecast(REFIT + ahead))
        return float(self._ahead[len(rates) - self._at + ahead - 1])


def series() -> list[Series]:
    found = []
    for name, rows in make_traces.TRACES.items():
        times = [(row[0], row[1]) for row in rows()]
        step = times[1][0] - times[0][0]
        rates = tuple(rate for _, rate in times)
        found.append(Series(name, rates, max(1, START_SECONDS // step), 0))
    rates = found[0].rates
    noise = random.Random(make_traces.SEED)
    week = tuple(
        rate * noise.uniform(0.9, 1.1) * daily
        for daily in (noise.uniform(0.85, 1.15) for _ in range(DAYS))
        for rate in rates
    )
    return [*found, Series(f"day-curve, {DAYS} days", week, found[0].rows_ahead, len(rates))]


def error(each: Series, forecast: Forecast) -> tuple[float, float]:
    """Root of the mean square error over the mean rate, and the share of rows that came out more
    than a tenth above the forecast.  A season's first two days teach alone.
    """
    first, late, squares = max(24, 2 * each.season), 0, 0.0
    if first >= len(each.rates) - each.rows_ahead:
        first = len(each.rates) // 4
    targets = range(first, len(each.rates) - each.rows_ahead)
    for now in targets:
        true = each.rates[now + each.rows_ahead]
        said = forecast(each.rates[: now + 1], each.rows_ahead)
        squares += (true - said) ** 2
        late += true > 1.1 * said
    mean = sum(each.rates[first:]) / len(each.rates[first:])
    return math.sqrt(squares / len(targets)) / mean, late / len(targets)


def methods(each: Series) -> dict[str, Forecast]:
    found: dict[str, Forecast] = {
        "last value": last_value,
        "Holt, damped": holt(0.5, 0.2, 0.9),
    }
    if each.season:
        found["seasonal naive"] = seasonal_naive(each.season)
        found["seasonal, scaled by the last hour"] = seasonal(each.season)
        if find_spec("statsmodels") is not None:
            found["Holt-Winters"] = HoltWinters(each.season)
    return found


def table() -> Iterator[str]:
    yield from ("| trace | method | error | late |", "|---|---|---|---|")
    for each in series():
        for name, forecast in methods(each).items():
            size, late = error(each, forecast)
            yield f"| {each.name} | {name} | {size:.1%} | {late:.1%} |"


def main() -> int:
    for line in table():
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
