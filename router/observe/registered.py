"""What prometheus_client asks for its page, apart from what counts: a class with a base of theirs is not compiled."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from prometheus_client.core import Metric
from prometheus_client.registry import Collector


class Source(Protocol):
    def describe(self) -> Iterable[Metric]: ...
    def collect(self) -> Iterable[Metric]: ...


class Registered(Collector):
    def __init__(self, source: Source) -> None:
        self._source = source

    def describe(self) -> Iterable[Metric]:
        return self._source.describe()

    def collect(self) -> Iterable[Metric]:
        return self._source.collect()
