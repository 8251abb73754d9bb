from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest

from router.contract.events import Tier
from router.fleet.observer import NullObserver
from router.fleet.rank import LOG_EVERY_S, NO_SLOT, Rank
from router.fleet.worker import Worker
from router.hashing import Namespace, pack_ids, prompt_keys
from router.index.prefix import PrefixIndex
from router.index.scheme import WorkerScheme
from tests.fleet.helpers import settings
from tests.support.built import interpreted
from tests.support.engine import stored

URL = "http://127.0.0.1:30000"


class Recorder(NullObserver):
    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    def rank_state(self, worker: str, rank: int, state: str) -> None:
        self.seen.append(("state", rank, state))

    def events(self, worker: str, rank: int, kind: str, count: int) -> None:
        self.seen.append((kind, rank, count))

    def event_lag(self, lag_s: float) -> None:
        self.seen.append(("lag", lag_s))

    def rejected(self, worker: str, rank: int, kind: str) -> None:
        self.seen.append(("rejected", rank, kind))

    def batches_lost(self, worker: str, rank: int, batches: int) -> None:
        self.seen.append(("lost", rank, batches))

    def gap(self, worker: str, rank: int) -> None:
        self.seen.append(("gap", rank))

    def restart(self, worker: str, rank: int) -> None:
        self.seen.append(("restart", rank))

    def replay(self, worker: str, rank: int, outcome: str) -> None:
        self.seen.append(("replay", rank, outcome))

    def drift(self, worker: str, kind: str, active: bool) -> None:
        self.seen.append(("drift", kind, active))


class Bench:
    """One rank with everything around it, and time in the hand of the test."""

    def __init__(self, *, number: int = 0, off: str | None = None, width: int = 4) -> None:
        self.now_s = 100.0
        self.wall_s = 1_000_000.0
        self.index = PrefixIndex()
        self.observer = Recorder()
        self.worker = Worker(
            settings(URL), authorization=None, unhealthy_after=3, clock=lambda: self.now_s, observer=self.observer
        )
        self.worker.scheme = WorkerScheme(width, "sglang")
        self.rank = Rank(
            self.worker,
            number,
            pin=None,
            off=off,
            index=self.index,
            clock=lambda: self.now_s,
            wall_clock=lambda: self.wall_s,
            observer=self.observer,
        )
        self.worker.ranks = (self.rank,)
        self.seq = 0

    def live(self) -> Bench:
        self.rank.state_changed("live", "", "complete")
        self.observer.seen.clear()
        return self

    def apply(self, *events: dict[str, Any], rank: int | None = 0, age_s: float = 0.5) -> None:
        self.raw(msgspec.msgpack.encode([self.wall_s - age_s, list(events), rank]))

    def raw(self, payload: bytes) -> None:
        self.seq += 1
        self.rank.apply(self.seq, payload)
        self.rank.rested()

    def blocks(self) -> int:
        return self.rank.blocks().get("GPU", 0)


def chain(first: int = 1, blocks: int = 2, width: int = 4) -> dict[str, Any]:
    """A root store whose hashes are SGLang's."""
    assert first > 0
    tokens = list(range(first, first + blocks * width))
    scheme = WorkerScheme(width, "sglang").scheme
    keys = prompt_keys(scheme, pack_ids(tokens), Namespace())
    assert keys is not None
    return stored(keys, tokens, width)


def test_batches_are_folded_into_the_ranks_slot_and_counted_by_type() -> None:
    bench = Bench().live()
    event = chain()
    bench.apply(event)
    assert bench.rank.blocks() == {"GPU": 2}
    bench.apply({"type": "BlockRemoved", "block_hashes": event["block_hashes"][1:]})
    assert bench.rank.blocks() == {"GPU": 1}
    bench.apply({"type": "AllBlocksCleared"}, {"type": "BlockMoved"})
    assert bench.rank.blocks() == {}
    assert [seen for seen in bench.observer.seen if seen[0] not in ("lag",)] == [
        ("stored", 0, 1),
        ("removed", 0, 1),
        ("cleared", 0, 1),
        ("skipped", 0, 1),
    ]
    assert (bench.rank.last_seq, bench.rank.last_event_s) == (3, 100.0)


def test_only_live_batches_tell_the_lag_and_never_a_negative_one() -> None:
    bench = Bench()
    bench.apply(chain())
    assert not [seen for seen in bench.observer.seen if seen[0] == "lag"], "replayed batches are old by nature"
    bench.live()
    bench.apply(chain(100), age_s=0.25)
    bench.apply(chain(200), age_s=-5.0)
    assert [seen[1] for seen in bench.observer.seen if seen[0] == "lag"] == [pytest.approx(0.25), 0.0]


def test_batches_of_one_turn_are_told_together_with_the_oldest_ones_lag() -> None:
    bench = Bench().live()
    for first, age_s in ((1, 0.75), (100, 0.25)):
        bench.rank.apply(first, msgspec.msgpack.encode([bench.wall_s - age_s, [chain(first)], 0]))
    assert (bench.blocks(), bench.observer.seen, bench.rank.last_event_s) == (4, [], None)
    bench.rank.rested()
    assert bench.observer.seen == [("lag", pytest.approx(0.75)), ("stored", 0, 2)]
    assert bench.rank.last_event_s == 100.0
    bench.rank.rested()
    assert len(bench.observer.seen) == 2


@pytest.mark.parametrize(("says", "counted"), [(3, 0), (None, 0), (0, 1), (99, 1)])
def test_a_batch_that_names_another_rank_is_counted_and_applied_to_the_sockets_rank(
    says: int | None, counted: int
) -> None:
    """Case 12."""
    bench = Bench(number=3).live()
    bench.apply(chain(), rank=says)
    assert bench.blocks() == 2
    assert bench.rank.rejects["rank"] == counted
    assert len(bench.worker.ranks) == 1, "no phantom rank"


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x93\x01", b"\xdd\xff\xff\xff\xff", b"\x91" * 5000], ids=repr)
def test_an_unusable_message_is_counted_and_the_stream_goes_on(payload: bytes) -> None:
    """Cases 7 and 9."""
    bench = Bench().live()
    bench.apply(chain())
    bench.raw(payload)
    assert (bench.rank.rejects["payload"], bench.blocks()) == (1, 2)
    assert bench.rank.describe()["degraded"] is True, "a removal may have been in it"
    bench.apply(chain(100))
    assert (bench.blocks(), bench.rank.last_seq, bench.rank.trusted) == (4, 3, True)


@interpreted
def test_a_fault_of_the_router_itself_costs_one_batch_not_the_stream(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench().live()

    def broken(batch: object) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patched:
        patched.setattr(type(bench.rank.ledger), "apply", lambda self, batch: broken(batch))
        with caplog.at_level(logging.WARNING, "router.fleet"):
            bench.apply(chain())
    assert bench.rank.rejects["error"] == 1
    assert "ZeroDivisionError" in caplog.text
    bench.apply(chain())
    assert bench.blocks() == 2


def test_a_flood_of_faults_is_counted_in_full_and_logged_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench().live()
    with caplog.at_level(logging.WARNING, "router.fleet"):
        for _ in range(1000):
            bench.raw(b"\xc1")
        assert len(caplog.records) == 1
        bench.now_s += LOG_EVERY_S
        bench.raw(b"\xc1")
        assert len(caplog.records) == 2
    assert bench.rank.rejects["payload"] == 1001


@pytest.mark.parametrize(
    "state", ["connecting", "replaying", "gapped", "silent", "drifted", "duplicated", "unreachable"]
)
def test_only_a_live_rank_is_trusted(state: str) -> None:
    """Design, section 5: no trust, no credit."""
    bench = Bench().live()
    assert bench.rank.trusted
    bench.rank.state_changed(state, "because", "partial")
    assert not bench.rank.trusted
    assert (bench.rank.state, bench.rank.reason, bench.rank.history) == (state, "because", "partial")


def test_a_reset_voids_what_the_rank_held() -> None:
    bench = Bench().live()
    bench.apply(chain())
    bench.rank.reset("gap")
    assert (bench.blocks(), bench.rank.last_seq) == (0, None)


def test_what_the_stream_reports_is_counted_and_passed_on() -> None:
    bench = Bench().live()
    anomalies: list[int] = []
    bench.worker.on_anomaly = lambda: anomalies.append(1)
    rank = bench.rank
    rank.gap()
    rank.lost(7)
    rank.restarted()
    rank.replayed("filled")
    rank.rejected("frames")
    shown = rank.describe()
    assert (shown["gaps"], shown["batches_lost"], shown["restarts"]) == (1, 7, 1)
    assert (shown["replays"], shown["rejected"]) == ({"filled": 1}, {"frames": 1})
    assert bench.observer.seen == [
        ("gap", 0),
        ("lost", 0, 7),
        ("restart", 0),
        ("replay", 0, "filled"),
        ("rejected", 0, "frames"),
    ]
    assert anomalies == [1], "a restart has /server_info read at once"


def test_a_state_is_told_when_it_changes_not_when_its_reason_does() -> None:
    bench = Bench().live()
    bench.rank.state_changed("live", "another reason", "complete")
    assert bench.observer.seen == []
    bench.rank.state_changed("gapped", "hole at 7", "complete")
    assert bench.observer.seen == [("state", 0, "gapped")]


def test_whatever_reaches_a_retired_rank_changes_nothing() -> None:
    """Design, section 3: everything queued for an older incarnation is dropped."""
    bench = Bench().live()
    bench.apply(chain())
    rank = bench.rank
    slot = rank.slot
    assert bench.index.total_blocks == 2
    assert rank.retire() == []
    bench.index.sweep(1 << 30)
    assert bench.index.total_blocks == 0
    bench.observer.seen.clear()
    anomalies: list[int] = []
    bench.worker.on_anomaly = lambda: anomalies.append(1)
    bench.apply(chain(100))
    bench.raw(b"\xc1")
    rank.reset("gap")
    rank.state_changed("live", "", "complete")
    rank.gap()
    rank.lost(1)
    rank.restarted()
    rank.replayed("filled")
    rank.rejected("frames")
    rank.load(load_report(1, 1))
    assert (bench.observer.seen, anomalies, bench.index.total_blocks) == ([], [], 0)
    assert (rank.trusted, rank.blocks(), rank.slot, rank.account.report) == (False, {}, NO_SLOT, None)
    assert slot not in bench.index.match(chain()["block_hashes"])


def test_a_rank_without_a_stream_is_off_holds_nothing_and_takes_no_slot() -> None:
    bench = Bench(off="kv_events is null")
    rank = bench.rank
    bench.apply(chain())
    assert (rank.slot, rank.trusted, rank.blocks()) == (NO_SLOT, False, {})
    shown = rank.describe()
    assert (shown["state"], shown["reason"], shown["last_seq"]) == ("off", "kv_events is null", None)


# ---- load


def load_report(tokens: int, busy_us: int, running: int = 2) -> bytes:
    return msgspec.msgpack.encode(["LoadStat", running, 3, 100, 1000, 0, 50, 160, 64, tokens, busy_us])


def test_load_reports_reach_the_account_and_measure_the_prefill_speed() -> None:
    bench = Bench().live()
    bench.rank.load(load_report(0, 0))
    bench.now_s += 1
    bench.rank.load(load_report(10_000, 2_000_000, running=5))
    report = bench.rank.account.report
    assert report is not None
    assert (report.received_s, report.running, report.waiting, report.waiting_uncached_tokens) == (101.0, 5, 3, 50)
    bench.now_s += 2
    shown = bench.rank.describe()
    assert (shown["prefill_tokens_per_s"], shown["load_report_age_s"]) == (5000.0, 2.0)


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", msgspec.msgpack.encode(["LoadStat", -1, 0, 0, 0, 0]), msgspec.msgpack.encode({"a": 1})],
    ids=repr,
)
def test_an_unusable_load_report_is_counted_and_the_last_good_one_kept(payload: bytes) -> None:
    bench = Bench().live()
    bench.rank.load(load_report(1, 1))
    before = bench.rank.account.report
    bench.rank.load(payload)
    assert bench.rank.account.report is before
    assert bench.rank.rejects["load"] == 1


def test_a_short_load_report_of_an_older_engine_is_enough() -> None:
    bench = Bench().live()
    bench.rank.load(msgspec.msgpack.encode(["LoadStat", 1, 0, 0, 0, 0]))
    assert bench.rank.account.report is not None
    assert bench.rank.account.report.prefill_total is None


# ---- drift


def test_a_width_the_engine_did_not_advertise_is_shown_with_its_cure() -> None:
    """Cases 11 and 46."""
    bench = Bench(width=2).live()
    for n in range(8):
        bench.apply(chain(1 + 100 * n, blocks=1))
    bench.now_s += 3
    shown = bench.worker.describe()
    assert shown["block_size"] == 4
    (drift,) = shown["drift"]
    assert (drift["kind"], drift["advertised"], drift["observed"], drift["since_s"]) == ("block_size", 2, 4, 3.0)
    assert "upgrade" in drift["advice"]
    assert ("drift", "block_size", True) in bench.observer.seen
    bench.worker.forget()
    assert bench.observer.seen[-1] == ("drift", "block_size", False)
    assert bench.worker.describe()["drift"] == []


def test_a_finding_that_was_withdrawn_is_no_longer_shown() -> None:
    bench = Bench().live()
    bench.apply(stored([12345], [1, 2, 3, 4], 4))
    assert [d["kind"] for d in bench.worker.describe()["drift"]] == ["hash"]
    assert bench.worker.describe()["hash"] == "xxh3"
    bench.apply(chain(100))
    assert (bench.worker.describe()["drift"], bench.worker.describe()["hash"]) == ([], "sglang-sha256")
    assert [seen for seen in bench.observer.seen if seen[0] == "drift"] == [
        ("drift", "hash", True),
        ("drift", "hash", False),
    ]


def test_blocks_are_shown_by_tier_without_the_empty_ones() -> None:
    bench = Bench().live()
    event = chain()
    bench.apply(event, event | {"medium": "CPU_PINNED"})
    assert bench.rank.blocks() == {"GPU": 2, "CPU_PINNED": 2}
    assert set(bench.rank.blocks()) <= {tier.name for tier in Tier}
