"""What every source of discovery shares: what it finds, how that becomes the fleet, and whom it tells."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from router.config import WorkerConfig
from router.fleet.registry import Fleet
from router.fleet.worker import Hold, Worker

log = logging.getLogger("router.discovery")


@dataclass(frozen=True, slots=True)
class Found:
    """One engine as a source sees it now.

    Another `identity` at the same URL is another process (case 110). `hold`: it is there and gets no new requests.
    """

    settings: WorkerConfig
    identity: str
    hold: Hold | None = None

    @property
    def url(self) -> str:
        return self.settings.url.text


class DiscoveryObserver(Protocol):
    """Called from the event loop; must be quick and must not raise. `source`: kubernetes, dns."""

    def discovery_synced(self, source: str, workers: int) -> None:
        """The source confirmed its whole view, or that it is alive; it has so many workers in the fleet."""

    def discovery_failed(self, source: str) -> None:
        """The source could not be read; what it said last stays."""


class Membership:
    """Makes the fleet follow one source. All its state is `_mine`: what it put into the fleet.

    A worker that the configuration or POST /workers brought belongs to whoever brought it, whatever a source says. One
    that was deleted by hand stays away until its source names another process there.
    """

    def __init__(self, fleet: Fleet, source: str, observer: DiscoveryObserver) -> None:
        self.source = source
        self._fleet = fleet
        self._observer = observer
        self._mine: dict[str, tuple[Found, Worker]] = {}
        self._foreign: set[str] = set()

    def update(self, found: Iterable[Found]) -> None:
        """`found` is the source's whole view, with one entry a URL. What is not in it leaves: it gets no new request
        from here on, and its open streams finish (case 111)."""
        wanted = {each.url: each for each in found}
        for url in [url for url in self._mine if url not in wanted]:
            _, worker = self._mine.pop(url)
            if self._fleet.worker(url) is worker:
                self._fleet.remove(url)
        self._foreign &= wanted.keys()
        for url, each in wanted.items():
            self._settle(url, each)

    def synced(self) -> None:
        """Tells that what the fleet was last given is still so."""
        self._observer.discovery_synced(self.source, len(self._mine))

    def failed(self, why: str) -> None:
        log.warning("%s discovery: %s; the workers known stay", self.source, why)
        self._observer.discovery_failed(self.source)

    def _settle(self, url: str, found: Found) -> None:
        mine = self._mine.get(url)
        if mine is not None and (mine[0].identity, mine[0].settings) == (found.identity, found.settings):
            worker = mine[1]
        else:
            present = self._fleet.worker(url)
            if present is not None and (mine is None or present is not mine[1]):
                self._leave_alone(url)
                return
            self._foreign.discard(url)
            log.info("%s discovery: %s is %s", self.source, url, found.identity)
            worker = self._fleet.replace(found.settings, identity=found.identity)
        if worker.hold != found.hold:
            self._fleet.hold(worker, found.hold)
        self._mine[url] = (found, worker)

    def _leave_alone(self, url: str) -> None:
        self._mine.pop(url, None)
        if url not in self._foreign:
            self._foreign.add(url)
            log.warning("%s discovery: %s is in the fleet already and is not followed", self.source, url)
