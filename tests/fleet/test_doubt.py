"""What makes a rank doubtful although its stream is in order, and how the ranks of a worker are compared."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from router.contract.descriptor import Descriptor, RankEndpoints
from router.fleet.doubt import (
    SILENT_AFTER_S,
    SILENT_REQUESTS,
    STRAY_BATCHES,
    STRAY_S,
    UNUSABLE_STORES,
    RankView,
    judge_ranks,
)
from tests.fleet.test_rank import Bench, chain
from tests.support.engine import stored


def served(bench: Bench, count: int = SILENT_REQUESTS, new_tokens: int = 100, *, exact: bool = True) -> None:
    for _ in range(count):
        bench.rank.served(new_tokens, exact=exact)


def wait(bench: Bench, seconds: float) -> None:
    bench.now_s += seconds
    bench.rank.watch()


# -------------------------------------------------------------------- silence (case 17)


def test_requests_with_new_tokens_and_no_event_make_a_rank_silent_until_one_comes() -> None:
    bench = Bench().live()
    bench.apply(chain())
    served(bench)
    assert bench.rank.state == "live", "events may still be on their way"
    wait(bench, SILENT_AFTER_S)
    assert (bench.rank.state, bench.rank.stream_state, bench.rank.trusted) == ("silent", "live", False)
    assert "3 requests with 300 new prompt tokens" in bench.rank.reason
    bench.apply(chain(100))
    assert (bench.rank.state, bench.rank.trusted, bench.blocks()) == ("live", True, 4)


def test_a_rank_whose_events_come_is_never_silent() -> None:
    bench = Bench().live()
    for turn in range(20):
        served(bench, 5)
        bench.apply(chain(10 + turn * 10))
        wait(bench, SILENT_AFTER_S)
        assert bench.rank.state == "live"


@pytest.mark.parametrize("new_tokens", [0, 7, -100])
def test_requests_that_need_not_have_filled_blocks_say_nothing(new_tokens: int) -> None:
    bench = Bench(width=4).live()
    served(bench, 50, new_tokens)
    wait(bench, SILENT_AFTER_S)
    assert bench.rank.state == "live"


def test_with_a_partial_history_only_what_the_engine_reported_counts() -> None:
    """What the router does not know to be cached may be cached all the same: no event is due then."""
    bench = Bench()
    bench.rank.state_changed("live", "", "partial")
    bench.apply(chain())
    served(bench, 50, exact=False)
    wait(bench, SILENT_AFTER_S)
    assert bench.rank.state == "live"
    served(bench)
    wait(bench, SILENT_AFTER_S)
    assert bench.rank.state == "silent"


def test_what_was_served_while_nothing_could_be_heard_says_nothing() -> None:
    bench = Bench().live()
    served(bench, 2)
    bench.rank.state_changed("connecting", "the connection was lost", "complete")
    served(bench, 50)
    bench.rank.state_changed("live", "", "complete")
    served(bench, 2)
    wait(bench, SILENT_AFTER_S)
    assert bench.rank.state == "live"


# -------------------------------------------------------------------- stores that are of no use (case 11)


def odd(number: int) -> dict[str, Any]:
    return stored([number], range(6), 6)


def test_stores_that_are_all_skipped_make_a_rank_drifted_until_one_is_of_use() -> None:
    bench = Bench().live()
    bench.apply(chain())
    for n in range(UNUSABLE_STORES - 1):
        bench.apply(odd(n))
    assert bench.rank.state == "live"
    bench.apply(odd(99))
    assert (bench.rank.state, bench.rank.trusted) == ("drifted", False)
    assert "4 tokens a block are expected, the last has 6" in bench.rank.reason
    assert (bench.worker.drifts["block_size"].observed, ("drift", "block_size", True) in bench.observer.seen) == (
        6,
        True,
    )
    bench.apply(chain(100))
    assert (bench.rank.state, bench.worker.drifts) == ("live", {})


def test_odd_stores_between_good_ones_are_skipped_and_no_drift() -> None:
    """vllm#51614: another cache group's 4-token hashes."""
    bench = Bench().live()
    for n in range(5 * UNUSABLE_STORES):
        bench.apply(odd(n), chain(1 + 10 * n) if n % 8 == 0 else odd(n + 1000))
    assert (bench.rank.state, bench.worker.drifts) == ("live", {})


# -------------------------------------------------------------------- doubts of others


def test_a_doubt_stands_until_its_cause_is_gone_and_only_shows_on_a_live_stream() -> None:
    bench = Bench().live()
    bench.rank.doubt("outcome", "drifted", "predicts too much")
    bench.rank.doubt("silence", "silent", "nothing came")
    assert (bench.rank.state, bench.rank.reason) == ("drifted", "predicts too much")
    bench.rank.state_changed("gapped", "batch 6 never came", "complete")
    assert (bench.rank.state, bench.rank.reason) == ("gapped", "batch 6 never came")
    bench.rank.state_changed("live", "replay filled it", "complete")
    assert bench.rank.state == "drifted"
    bench.rank.believe("outcome")
    bench.rank.believe("outcome")
    assert (bench.rank.state, bench.rank.trusted) == ("live", True)
    bench.rank.retire()
    bench.rank.doubt("outcome", "drifted", "late")
    assert bench.rank.state == "live"


def test_a_change_to_a_bad_state_is_one_log_line_and_flapping_is_not_many(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "router.fleet")
    bench = Bench().live()
    for _ in range(100):
        bench.rank.state_changed("duplicated", "two publishers speak", "partial")
        bench.rank.state_changed("live", "", "partial")
        bench.now_s += 0.1
    lines = [record.getMessage() for record in caplog.records if "rank 0" in record.getMessage()]
    assert len(lines) == 2
    assert lines[0].endswith("rank 0: duplicated: two publishers speak")
    assert "live again after duplicated" in lines[1]


def test_a_connection_that_is_back_has_server_info_read_at_once() -> None:
    """Whoever accepts it may be another process; the first connection is nobody's return."""
    bench, asked = Bench(), []
    bench.worker.on_anomaly = lambda: asked.append(bench.now_s)
    bench.rank.state_changed("live", "", "partial")
    assert asked == []
    bench.rank.state_changed("connecting", "lost", "complete")
    bench.rank.state_changed("unreachable", "nobody there", "complete")
    assert asked == []
    bench.rank.state_changed("replaying", "reconnected", "complete")
    assert len(asked) == 1


# -------------------------------------------------------------------- all ranks together (cases 12, 16)


def view(number: int, state: str = "live", *, at: str | None = None, names: int | None = None) -> RankView:
    return RankView(number, state, at or f"tcp://h:{5000 + number}", names)


@pytest.mark.parametrize(
    ("ranks", "observed", "advice"),
    [
        ([view(0), view(1, "unreachable")], "rank 1 unreachable", "open the ports base to base + dp_size - 1"),
        ([view(0), *(view(n, "unreachable") for n in (1, 2, 3))], "ranks 1-3 unreachable", "other nodes"),
        ([view(0, "silent"), view(1), view(2, "silent")], "ranks 0, 2 silent", '"bind":true'),
        ([view(0, "duplicated")], "rank 0 duplicated", "one event port a rank"),
        ([view(0), view(1, "off")], "rank 1 off", "see its reason"),
        ([view(0, at="tcp://h:1"), view(1, at="tcp://h:1")], "ranks 0, 1 on one port", "every rank has its own"),
        ([view(0, names=1), view(1, names=0)], "ranks 0 and 1 crossed", "swapped"),
        ([view(0), view(1, names=0)], "rank 1 names rank 0", "several ranks share that port"),
    ],
)
def test_what_is_wrong_with_the_ranks_is_said_with_its_remedy(
    ranks: list[RankView], observed: str, advice: str
) -> None:
    found = judge_ranks(ranks)
    assert found is not None
    assert found.observed == observed
    assert advice in found.advice


def test_ranks_that_are_heard_or_on_their_way_are_no_finding() -> None:
    assert judge_ranks([view(0), view(1, "connecting"), view(2, "replaying"), view(3, "gapped")]) is None


def test_several_faults_are_told_together() -> None:
    found = judge_ranks([view(0, "duplicated"), view(1, "unreachable")])
    assert found is not None
    assert found.observed == "rank 1 unreachable; rank 0 duplicated"


def test_the_rank_a_batch_names_is_told_when_it_lasts_and_forgotten_when_it_stops() -> None:
    bench = Bench(number=1).live()
    for n in range(STRAY_BATCHES - 1):
        bench.apply(chain(1 + n), rank=0)
    assert bench.rank.view().names is None
    bench.apply(chain(50), rank=0)
    assert bench.rank.view().names == 0
    bench.now_s += STRAY_S + 1
    assert bench.rank.view().names is None


def test_an_engine_that_is_away_has_no_ranks_drift() -> None:
    """Its publishers are gone with it; that is no broken promise."""
    bench = Bench()
    endpoints = RankEndpoints(0, "tcp://h:1", None, None, None)
    bench.worker.descriptor = Descriptor(4, 1, "", "load", (endpoints,), ())
    bench.worker.state = "ready"
    bench.rank.state_changed("unreachable", "nobody there", "partial")
    assert bench.worker.drifts["ranks"].observed == "rank 0 unreachable"
    bench.worker.state = "unhealthy"
    bench.worker.watch()
    assert bench.worker.drifts == {}
