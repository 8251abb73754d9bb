"""Counters and histograms of the request path, with prometheus_client doing the rest of the page.

Its own cost 0.35 and 1.3 µs a call (labels, a lock, a value object), twenty times a request; these a tenth. They are
written on the event loop only and read by whoever renders the page: a number is then at most one request old.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

from router.observe.registered import Registered
from router.observe.tally import Tally


class Counter:
    """One number. `name` is without `_total`."""

    __slots__ = ("_name", "_text", "_value")

    def __init__(self, name: str, text: str, *, registry: CollectorRegistry) -> None:
        self._name = name
        self._text = text
        self._value = 0.0
        registry.register(Registered(self))

    def inc(self, by: float = 1) -> None:
        self._value += by

    def describe(self) -> Iterable[Metric]:
        return [CounterMetricFamily(self._name, self._text)]

    def collect(self) -> Iterable[Metric]:
        yield CounterMetricFamily(self._name, self._text, self._value)


class TallyCounter:
    """A number that is counted in `tally` anyway, under `field`."""

    __slots__ = ("_field", "_name", "_tally", "_text")

    def __init__(self, name: str, text: str, tally: Tally, field: str, *, registry: CollectorRegistry) -> None:
        self._name = name
        self._text = text
        self._tally = tally
        self._field = field
        registry.register(Registered(self))

    def describe(self) -> Iterable[Metric]:
        return [CounterMetricFamily(self._name, self._text)]

    def collect(self) -> Iterable[Metric]:
        yield CounterMetricFamily(self._name, self._text, float(getattr(self._tally, self._field)))


class Children:
    """A number for each combination of label values. Only for label values from closed sets."""

    def __init__(self, name: str, text: str, labels: Sequence[str], *, registry: CollectorRegistry) -> None:
        self._name = name
        self._text = text
        self._labels = tuple(labels)
        self._values: dict[tuple[str, ...], float] = {}
        registry.register(Registered(self))

    def inc(self, *values: str, by: float = 1) -> None:
        self._values[values] = self._values.get(values, 0.0) + by

    def remove(self, *leading: str) -> None:
        """Ends every series whose label values begin with `leading`."""
        for values in [v for v in self._values if v[: len(leading)] == leading]:
            del self._values[values]

    def describe(self) -> Iterable[Metric]:
        return [CounterMetricFamily(self._name, self._text, labels=self._labels)]

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for values, value in list(self._values.items()):
            family.add_metric(values, value)
        yield family


class _Series:
    """Observations by bucket, the last one without an end, and their sum."""

    __slots__ = ("counts", "sum")

    def __init__(self, buckets: int) -> None:
        self.counts = [0] * buckets
        self.sum = 0.0


class HistogramChildren:
    """Observations in seconds by bucket, for each combination of label values (none: `labels` is empty)."""

    def __init__(
        self, name: str, text: str, labels: Sequence[str], *, registry: CollectorRegistry, buckets: Sequence[float]
    ) -> None:
        self._name = name
        self._text = text
        self._labels = tuple(labels)
        self._bounds = tuple(buckets)
        self._written = (*(repr(float(bound)) for bound in buckets), "+Inf")
        self._series: dict[tuple[str, ...], _Series] = {}
        if not labels:
            self._begin(())
        registry.register(Registered(self))

    def observe(self, seconds: float, *values: str) -> None:
        series = self._series.get(values) or self._begin(values)
        series.counts[bisect_left(self._bounds, seconds)] += 1
        series.sum += seconds

    def _begin(self, values: tuple[str, ...]) -> _Series:
        made = self._series[values] = _Series(len(self._bounds) + 1)
        return made

    def describe(self) -> Iterable[Metric]:
        return [HistogramMetricFamily(self._name, self._text, labels=self._labels)]

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        for values, series in list(self._series.items()):
            total, buckets = 0, []
            for bound, count in zip(self._written, list(series.counts), strict=True):
                total += count
                buckets.append((bound, total))
            family.add_metric(values, buckets, series.sum)
        yield family
