"""One data-parallel rank of one worker incarnation: the sink of its streams and everything known about it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

from router.contract.events import Tier, WireError, decode_batch
from router.contract.load import LoadReport, decode_load
from router.errors import ContractError
from router.fleet.observer import FleetObserver
from router.index.ledger import LedgerCounters, RankLedger
from router.index.prefix import PrefixIndex
from router.policy.load import RankLoad, Report

if TYPE_CHECKING:
    from router.fleet.worker import Worker

log = logging.getLogger("router.fleet")

NO_SLOT = -1
"""`Rank.slot` of a rank that holds nothing in the index: it is no key of PrefixIndex.match's answer."""
EVENT_KINDS = ("stored", "removed", "cleared", "skipped")
LOG_EVERY_S = 10.0
"""Faults of one rank are logged at most this often; all of them are counted."""


class Closable(Protocol):
    """A stream: RankStream or LoadStream."""

    def start(self) -> None: ...

    async def close(self) -> None: ...


class Rank:
    """Implements the sinks of router.stream. Lives as long as its worker's incarnation: once `retire` was called every
    call from a stream is ignored, so whatever was queued for an old incarnation changes nothing.

    `account` is this rank's in-flight work, load report and measured prefill speed (tokens, tokens/s).
    `pin` is the rank number to name in a request, None where the worker has a single routing target.
    """

    def __init__(
        self,
        worker: Worker,
        number: int,
        *,
        pin: int | None,
        off: str | None,
        index: PrefixIndex,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        observer: FleetObserver,
    ) -> None:
        """`off` says why this rank has no event stream; None when it will have one."""
        self.worker = worker
        self.number = number
        self.pin = pin
        self.account = RankLoad()
        self.load_report: LoadReport | None = None
        self.load_report_s: float | None = None
        """Clock time `load_report` came."""
        self.state = "connecting" if off is None else "off"
        self.reason = "not connected yet" if off is None else off
        self.history = "partial"
        self.last_seq: int | None = None
        self.last_event_s: float | None = None
        self.gaps = 0
        self.restarts = 0
        self.batches_lost = 0
        self.replays: Counter[str] = Counter()
        self.rejects: Counter[str] = Counter()
        self.streams: list[Closable] = []
        self.dead = False
        self._url = worker.url.text
        self._index = index
        self._clock = clock
        self._wall_clock = wall_clock
        self._observer = observer
        self._logged_s: float | None = None
        self._reported = (0, 0, 0, 0)
        self.slot = NO_SLOT
        self.ledger: RankLedger | None = None
        if off is None and worker.scheme is not None:
            self.slot = index.open_slot()
            self.ledger = RankLedger(index, self.slot, worker.scheme)
        observer.rank_state(self._url, number, self.state)

    @property
    def trusted(self) -> bool:
        """May earn cache credit. A rank that may not is still served by load.

        A degraded ledger is shown but not distrusted: one unreadable event would cost the rank all credit until the
        next clear, which engines hardly ever send; a removal missed over-credits its few blocks.
        """
        return self.state == "live" and not self.dead

    def retire(self) -> list[Closable]:
        """Cuts the rank off from its streams and gives its blocks back. Returns the streams: the caller closes them."""
        self.dead = True
        if self.ledger is not None:
            self.ledger.close()
            self._index.close_slot(self.slot)
            self.slot = NO_SLOT
        streams, self.streams = self.streams, []
        return streams

    # ---- RankSink: the event stream

    def apply(self, seq: int, payload: bytes) -> None:
        if self.dead or self.ledger is None:
            return
        self.last_seq = seq
        self.last_event_s = self._clock()
        try:
            batch = decode_batch(payload)
            if batch.rank is not None and batch.rank != self.number:
                self._reject("rank", f"batch {seq} names rank {batch.rank}; the socket's rank is believed (case 12)")
            self.ledger.apply(batch)
        except WireError as error:
            self.ledger.degraded = True  # what was dropped may have been a removal (case 10)
            self._reject("payload", f"batch {seq} was dropped: {error}")
        except Exception:  # one batch must never end the stream
            self.ledger.degraded = True
            self._reject("error", f"batch {seq} could not be applied", exc_info=True)
        else:
            if self.state == "live":
                self._observer.event_lag(max(0.0, self._wall_clock() - batch.ts_s))
        self._report(self.ledger.counters)
        self.worker.check_drift()

    def reset(self, reason: str) -> None:
        if self.dead or self.ledger is None:
            return
        self.ledger.reset()
        self.last_seq = None

    def state_changed(self, state: str, reason: str, history: str) -> None:
        if self.dead:
            return
        changed = state != self.state
        self.state, self.reason, self.history = state, reason, history
        if changed:
            self._observer.rank_state(self._url, self.number, state)

    def lost(self, batches: int) -> None:
        if not self.dead:
            self.batches_lost += batches
            self._observer.batches_lost(self._url, self.number, batches)

    def gap(self) -> None:
        if not self.dead:
            self.gaps += 1
            self._observer.gap(self._url, self.number)

    def restarted(self) -> None:
        if not self.dead:
            self.restarts += 1
            self._observer.restart(self._url, self.number)
            self.worker.anomaly()

    def replayed(self, outcome: str) -> None:
        if not self.dead:
            self.replays[outcome] += 1
            self._observer.replay(self._url, self.number, outcome)

    def rejected(self, why: str) -> None:
        """`why` is a label of router.stream.sink: frames, seq, topic, duplicate, replay."""
        if not self.dead:
            self._reject(why, f"a message was dropped ({why})")

    # ---- LoadSink: the load stream

    def load(self, payload: bytes) -> None:
        """Takes one LoadStat message. An unusable one is counted; the last good report just ages."""
        if self.dead:
            return
        try:
            report = decode_load(payload)
        except ContractError as error:
            self._reject("load", f"a load report was dropped: {error}")
            return
        now_s = self._clock()
        self.load_report, self.load_report_s = report, now_s
        self.account.reported(_policy_report(report, now_s))

    # ---- views

    def describe(self) -> dict[str, Any]:
        """One item of `ranks` in `GET /workers`."""
        now_s = self._clock()
        rate = self.account.prefill_tokens_per_s
        return {
            "rank": self.number,
            "state": self.state,
            "reason": self.reason,
            "history": self.history,
            "blocks": self.blocks(),
            "last_seq": self.last_seq,
            "last_event_age_s": None if self.last_event_s is None else round(now_s - self.last_event_s, 3),
            "gaps": self.gaps,
            "restarts": self.restarts,
            "batches_lost": self.batches_lost,
            "replays": dict(self.replays),
            "rejected": dict(self.rejects),
            "degraded": self.ledger is not None and self.ledger.degraded,
            "ledger": {} if self.ledger is None else _nonzero(self.ledger.counters),
            "inflight_requests": self.account.requests,
            "inflight_tokens": self.account.tokens,
            "prefill_tokens_per_s": None if rate is None else round(rate, 1),
            "load_report_age_s": None if self.load_report_s is None else round(now_s - self.load_report_s, 3),
        }

    def blocks(self) -> dict[str, int]:
        """Resident blocks by tier name; a tier with none is left out."""
        if self.slot == NO_SLOT:
            return {}
        counts = self._index.blocks(self.slot)
        return {tier.name: counts[tier] for tier in Tier if counts[tier]}

    def _report(self, counters: LedgerCounters) -> None:
        totals = (counters.stored, counters.removed, counters.cleared, counters.skipped)
        for kind, total, before in zip(EVENT_KINDS, totals, self._reported, strict=True):
            if total > before:
                self._observer.events(self._url, self.number, kind, total - before)
        self._reported = totals

    def _reject(self, kind: str, text: str, *, exc_info: bool = False) -> None:
        self.rejects[kind] += 1
        self._observer.rejected(self._url, self.number, kind)
        now_s = self._clock()
        if self._logged_s is None or now_s - self._logged_s >= LOG_EVERY_S:
            self._logged_s = now_s
            log.warning("%s rank %d: %s", self._url, self.number, text, exc_info=exc_info)


def _nonzero(counters: LedgerCounters) -> dict[str, int]:
    return {name: count for name, count in asdict(counters).items() if count}


def _policy_report(report: LoadReport, now_s: float) -> Report:
    tokens, busy_us = report.total_prefill_uncached_tokens, report.total_prefill_busy_us
    return Report(
        received_s=now_s,
        running=report.running_requests,
        waiting=report.waiting_requests,
        waiting_uncached_tokens=report.waiting_uncached_tokens,
        prefill_total=None if tokens is None or busy_us is None else (tokens, busy_us),
    )
