"""One data-parallel rank of one worker incarnation: the sink of its streams and everything known about it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Protocol

from router.contract.descriptor import RankEndpoints
from router.contract.events import BlockStored, EventBatch, Tier, WireError, decode_batch
from router.contract.load import LoadReport, decode_load
from router.errors import ContractError
from router.fleet.doubt import SILENT_BLOCKS, UNUSABLE_STORES, Doubt, RankView, Silence, Strays, UnusableStores
from router.fleet.observer import FleetObserver
from router.index.ledger import LedgerCounters, RankLedger
from router.index.outcome import OutcomeWatch
from router.index.prefix import PrefixIndex
from router.index.vouch import Chains
from router.observe.logs import RateLimit
from router.observe.tally import Tally
from router.policy.consistent import anchor
from router.policy.decide import NO_SLOT as NO_SLOT
from router.policy.load import RankLoad, Report

if TYPE_CHECKING:
    from router.fleet.worker import Worker

log = logging.getLogger("router.fleet")

EVENT_KINDS = ("stored", "removed", "cleared", "skipped")
LOG_EVERY_S = 10.0
"""Faults of one rank are logged at most this often; all of them are counted."""
STATE_LOG_EVERY_S = 30.0
"""A change to the same bad state is logged at most this often."""
BAD_STATES = frozenset({"gapped", "silent", "drifted", "duplicated", "unreachable"})
UNCONNECTED = ("connecting", "unreachable")


class Tap(Protocol):
    """Looks on at a rank's stream while its blocks are told to a sibling or learnt from one (router.siblings)."""

    def takes(self, seq: int, payload: bytes) -> bool:
        """True: the batch is kept by the tap, which applies it later. False: it is applied now."""

    def broken(self) -> None:
        """The run of batches ended (reset, retire): what the tap holds is void."""


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
        endpoints: RankEndpoints | None = None,
        chains: Chains | None = None,
    ) -> None:
        """`off` says why this rank has no event stream; None when it will have one. `endpoints` are for show; `chains`
        are the fleet's."""
        self.worker = worker
        self.number = number
        self.anchor = anchor(worker.url.text, number)
        self.pin = pin
        self.account = RankLoad()
        self.tally = Tally()
        self.outcome = OutcomeWatch()
        self.load_report: LoadReport | None = None
        self.load_report_s: float | None = None
        """Clock time `load_report` came."""
        self.endpoints = endpoints
        self.stream_state = "connecting" if off is None else "off"
        """What the stream itself says; `state` is that or, while a live stream is doubted, the doubt's."""
        self.state = self.stream_state
        self.reason = "not connected yet" if off is None else off
        self.history = "partial"
        self.state_since_s = clock()
        self.last_seq: int | None = None
        self.last_event_s: float | None = None
        self.gaps = 0
        self.restarts = 0
        self.batches_lost = 0
        self.replays: Counter[str] = Counter()
        self.rejects: Counter[str] = Counter()
        self.streams: list[Closable] = []
        self.tap: Tap | None = None
        self.last_payload = b""
        """Of the batch `last_seq`."""
        self.restored_from: str | None = None
        """The sibling whose blocks of this rank were taken over, until the next reset."""
        self.dead = False
        self._url = worker.url.text
        self._index = index
        self._clock = clock
        self._wall_clock = wall_clock
        self._observer = observer
        self._logged_s: float | None = None
        self._state_log = RateLimit(STATE_LOG_EVERY_S, clock)
        self._stream_reason = self.reason
        self._connected_before = False
        self._doubts: dict[str, Doubt] = {}
        self._silence = Silence()
        self._unusable = UnusableStores()
        self._strays = Strays()
        self._reported = (0, 0, 0, 0)
        self._is_fresh = False  # batches came since the last rest
        self._oldest_ts_s: float | None = None  # of the live ones among them: the engine's timestamp of the first
        self.slot = NO_SLOT
        self.credit_slot = NO_SLOT
        """`slot` while the rank may earn credit (`trusted`), else NO_SLOT: every decision reads it of every rank."""
        self.ledger: RankLedger | None = None
        if off is None and worker.scheme is not None:
            self.slot = index.open_slot()
            self.ledger = RankLedger(index, self.slot, worker.scheme, chains)
            self.ledger.set_history(complete=False)
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
        self.credit_slot = NO_SLOT
        self._break_tap()
        if self.ledger is not None:
            self.ledger.close()
            self._index.close_slot(self.slot)
            self.slot = NO_SLOT
        streams, self.streams = self.streams, []
        return streams

    # ---- RankSink: the event stream

    def apply(self, seq: int, payload: bytes) -> None:
        ledger = self.ledger
        if self.dead or ledger is None or (self.tap is not None and self.tap.takes(seq, payload)):
            return
        self.last_seq = seq
        self.last_payload = payload
        try:
            batch = decode_batch(payload)
            if batch.rank is not None and batch.rank != self.number:
                self._strays.saw(batch.rank, self._clock())
                self._reject("rank", f"batch {seq} names rank {batch.rank}; the socket's rank is believed (case 12)")
            ledger.apply(batch)
            counters = ledger.counters
            unusable = counters.odd_widths + counters.unknown_media
            if unusable != self._unusable.known or self._doubts:
                self._check_stores(batch, unusable)
        except WireError as error:
            ledger.degraded = True  # what was dropped may have been a removal (case 10)
            self._reject("payload", f"batch {seq} was dropped: {error}")
        except Exception:  # one batch must never end the stream
            ledger.degraded = True
            self._reject("error", f"batch {seq} could not be applied", exc_info=True)
        else:
            if self._oldest_ts_s is None and self.stream_state == "live":
                self._oldest_ts_s = batch.ts_s
        self._is_fresh = True

    def rested(self) -> None:
        """What is the same for one batch and for many is done here, once a turn."""
        if self.dead or self.ledger is None or not self._is_fresh:
            return
        self._is_fresh = False
        self.last_event_s = self._clock()
        self._heard()
        if self._oldest_ts_s is not None:
            self._observer.event_lag(max(0.0, self._wall_clock() - self._oldest_ts_s))
            self._oldest_ts_s = None
        self._report(self.ledger.counters)
        self.worker.check_drift()

    def reset(self, reason: str) -> None:
        if self.dead or self.ledger is None:
            return
        self._break_tap()
        self.ledger.reset()
        self.last_seq = None
        self.restored_from = None

    def _break_tap(self) -> None:
        tap, self.tap = self.tap, None
        if tap is not None:
            tap.broken()

    def state_changed(self, state: str, reason: str, history: str) -> None:
        if self.dead:
            return
        before, self.stream_state = self.stream_state, state
        self._stream_reason, self.history = reason, history
        if self.ledger is not None:
            self.ledger.set_history(complete=history == "complete")
        if before in UNCONNECTED and state not in UNCONNECTED:
            if self._connected_before:
                self.worker.anomaly()  # whoever accepted the connection may be another process
            self._connected_before = True
        if state != "live":
            self._heard()  # what is served while nothing can be heard says nothing
        self._settle()

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
        """`why` is a label of router.stream.sink: frames, seq, topic, duplicate, late, replay."""
        if not self.dead:
            self._reject(why, f"a message was dropped ({why})")

    # ---- doubts: a live stream that is not believed

    def doubt(self, cause: str, state: str, reason: str) -> None:
        """Until `believe(cause)` a live stream is shown as `state` (silent, drifted) and earns no credit."""
        if not self.dead and self._doubts.get(cause) != (state, reason):
            self._doubts[cause] = Doubt(state, reason)
            self._settle()

    def believe(self, cause: str) -> None:
        """Ends that doubt; without one nothing happens."""
        if self._doubts.pop(cause, None) is not None and not self.dead:
            self._settle()

    def served(self, new_tokens: int, *, exact: bool) -> None:
        """A request was answered here that left `new_tokens` prompt tokens to be cached: reported by the engine when
        `exact`, else by the router's own view, which a partial history makes too high."""
        scheme = self.worker.scheme
        if self.dead or self.stream_state != "live" or scheme is None:
            return
        if new_tokens < SILENT_BLOCKS * scheme.scheme.width:
            return
        if exact or self.history == "complete" or self.last_event_s is None:
            self._silence.served(new_tokens, self._clock())
            self.watch()

    def watch(self) -> None:
        """Time passed."""
        silence = self._silence
        if not self.dead and self.stream_state == "live" and silence.lasts(self._clock()):
            descriptor = self.worker.descriptor
            topic = descriptor.topic if descriptor is not None else ""
            self.doubt(
                "silence",
                "silent",
                f"{silence.requests} requests with {silence.new_tokens} new prompt tokens were served and no event "
                f"came here: is the engine's topic {topic!r}, does its publisher bind (endpoint tcp://*:PORT), is its "
                "prefix cache on? `kv-router doctor` finds which",
            )

    def view(self) -> RankView:
        """For the judgement of all ranks together."""
        endpoint = self.endpoints.events if self.endpoints is not None else None
        return RankView(self.number, self.state, endpoint, self._strays.named(self._clock()))

    def _heard(self) -> None:
        self._silence.heard()
        if self._doubts:
            self.believe("silence")

    def _check_stores(self, batch: EventBatch, unusable: int) -> None:
        """Stores that are all skipped would be a silent zero: nothing of the rank is believed then (case 11)."""
        assert self.ledger is not None
        worker = self.worker
        in_a_row = self._unusable.in_a_row(self.ledger.counters.stored_blocks, unusable)
        if in_a_row < UNUSABLE_STORES or worker.scheme is None:
            if "stores" in self._doubts:
                self.believe("stores")
                worker.drift_over("block_size")
            return
        stores = [event for event in batch.events if isinstance(event, BlockStored)]
        if stores and "stores" not in self._doubts:
            width, seen = worker.scheme.scheme.width, stores[-1].block_size
            at = f"{seen} tokens a block in {stores[-1].medium or 'GPU'}"
            what = (
                f"{in_a_row} stores in a row could not be used: {width} tokens a block are expected, the last has {at}"
            )
            advice = "set kv_events.block_size of this worker to what the engine really pages by, or upgrade the engine"
            self.doubt("stores", "drifted", f"{what}; {advice}")
            worker.drifted("block_size", worker.scheme.advertised_width, seen, f"{what}; {advice}")
            worker.anomaly()

    def _settle(self) -> None:
        state, reason = self.stream_state, self._stream_reason
        if state == "live" and self._doubts:
            state, reason = next(iter(self._doubts.values()))
        if state in ("unreachable", "silent") and self.worker.descriptor is not None:
            reason = ". ".join((reason, *self.worker.descriptor.notes))
        changed = state != self.state
        before, self.state, self.reason = self.state, state, reason
        if not changed:
            return
        self.credit_slot = self.slot if self.trusted else NO_SLOT
        self.state_since_s = self._clock()
        self._observer.rank_state(self._url, self.number, state)
        if state in BAD_STATES and self._state_log.allows(state):
            log.warning("%s rank %d: %s: %s", self._url, self.number, state, reason)
        elif state == "live" and before in BAD_STATES and self._state_log.allows(state):
            log.info("%s rank %d: live again after %s: %s", self._url, self.number, before, reason)
        self.worker.check_ranks()

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
        at = self.endpoints
        return {
            "rank": self.number,
            "state": self.state,
            "reason": self.reason,
            "state_age_s": round(now_s - self.state_since_s, 3),
            "stream": self.stream_state,
            "trusted": self.trusted,
            "endpoint": at.events if at is not None else None,
            "replay_endpoint": at.replay if at is not None else None,
            "load_endpoint": at.load if at is not None else None,
            "history": self.history if self.restored_from is None else "complete",
            "restored_from": self.restored_from,
            "blocks": self.blocks(),
            "last_seq": self.last_seq,
            "last_event_age_s": None if self.last_event_s is None else round(now_s - self.last_event_s, 3),
            "gaps": self.gaps,
            "restarts": self.restarts,
            "batches_lost": self.batches_lost,
            "replays": dict(self.replays),
            "rejected": dict(self.rejects),
            "names_ranks": {str(name): count for name, count in self._strays.names.items()},
            "degraded": self.ledger is not None and self.ledger.degraded,
            "ledger": {} if self.ledger is None else _nonzero(self.ledger.counters),
            "outcome": self.outcome.verdict or "ok",
            "credit_share": self.outcome.credit,
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
    return {field.name: count for field in fields(counters) if (count := getattr(counters, field.name))}


def _policy_report(report: LoadReport, now_s: float) -> Report:
    tokens, busy_us = report.total_prefill_uncached_tokens, report.total_prefill_busy_us
    return Report(
        received_s=now_s,
        running=report.running_requests,
        waiting=report.waiting_requests,
        waiting_uncached_tokens=report.waiting_uncached_tokens,
        prefill_total=None if tokens is None or busy_us is None else (tokens, busy_us),
    )
