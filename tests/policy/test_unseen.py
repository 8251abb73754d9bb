"""Requests whose answers nobody sees: charged until the engine's report has them or their time is over, no longer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.policy.load import REPORT_FRESH_S, RankLoad, Report
from router.policy.unseen import READ_REPORTS_EVERY_S, REPORT_LAG_S, Unseen

LATER_S = READ_REPORTS_EVERY_S * 2


class Sent:
    """Requests to one rank."""

    def __init__(self, limit_s: float = 30.0, max_charges: int = 1000) -> None:
        self.load = RankLoad()
        self.unseen = Unseen(limit_s, max_charges)
        self.served = 0

    def send(self, now_s: float, expected_s: float = 5.0, uncached: int = 100) -> None:
        self.unseen.settle(now_s)
        self.unseen.add(self.load.place(2 * uncached, uncached, now_s, 120.0), expected_s, self._served)

    def _served(self) -> None:
        self.served += 1

    def report(self, now_s: float, running: int = 0, waiting_tokens: int | None = 0) -> None:
        self.load.reported(Report(now_s, running, 0, waiting_tokens))

    @property
    def gauges(self) -> tuple[int, int, int, int]:
        load = self.load
        return load.requests, load.tokens, load.queued_uncached_tokens, load.decoding


def test_a_request_is_charged_until_its_first_token_was_due_and_then_taken_as_served() -> None:
    sent = Sent()
    sent.send(0.0, expected_s=2.0)
    sent.unseen.settle(1.99)
    assert (sent.gauges, sent.served) == ((1, 200, 100, 0), 0)
    sent.unseen.settle(2.0)
    assert (sent.gauges, sent.served, len(sent.unseen)) == ((0, 0, 0, 0), 1, 0)


def test_no_charge_outlasts_the_limit_and_a_time_cut_short_says_nothing_of_being_served() -> None:
    """case 55"""
    sent = Sent(limit_s=3.0)
    sent.send(0.0, expected_s=1e9)
    sent.unseen.settle(3.0)
    assert (sent.gauges, sent.served) == ((0, 0, 0, 0), 0)


def test_a_report_takes_the_place_of_what_was_sent_before_it_and_not_of_what_came_with_it() -> None:
    """case 57"""
    sent = Sent()
    sent.send(0.0, expected_s=60.0)
    sent.send(1.0, expected_s=60.0)
    sent.report(1.0 + REPORT_LAG_S / 2, waiting_tokens=70)
    sent.unseen.settle(1.2)
    assert sent.gauges[0] == 1
    assert sent.load.queue_tokens(1.2, 1000.0) == 100.0
    sent.report(1.0 + REPORT_LAG_S, waiting_tokens=170)
    sent.unseen.settle(1.3)
    assert sent.gauges[:3] == (0, 0, 0)
    assert sent.load.queue_tokens(1.3, 1000.0) == 170.0


def test_its_age_is_not_taken_for_a_queue_since_nobody_knows_whether_it_waits() -> None:
    sent = Sent()
    sent.send(0.0, expected_s=20.0)
    assert sent.load.queue_tokens(10.0, 1000.0) == 100.0


def test_what_the_engine_runs_counts_as_decoding_beside_the_requests_seen_to_the_end() -> None:
    sent = Sent()
    seen = sent.load.place(10, 10, 0.0, 120.0)
    seen.first_byte()
    sent.send(0.0, expected_s=0.1)
    sent.report(1.0, running=5)
    sent.unseen.settle(1.0 + LATER_S)
    assert sent.load.decoding == 5
    assert sent.load.outstanding().decoding == 1  # siblings hear of the others from the engine themselves
    seen.finish()
    assert sent.load.decoding == 4
    sent.report(2.0, running=2)
    sent.unseen.settle(2.0 + LATER_S)
    assert sent.load.decoding == 2
    sent.unseen.settle(2.0 + REPORT_FRESH_S + LATER_S)  # the reports have stopped
    assert sent.load.decoding == 0


def test_beyond_the_most_charges_the_one_that_would_end_first_ends() -> None:
    sent = Sent(max_charges=2)
    for expected_s in (9.0, 3.0, 6.0):
        sent.send(0.0, expected_s=expected_s)
    assert (len(sent.unseen), sent.gauges[0]) == (2, 2)
    sent.unseen.settle(6.0)
    assert sent.gauges[0] == 1


Step = tuple[str, float, float]
steps = st.lists(
    st.tuples(st.sampled_from(["send", "report", "settle"]), st.floats(0, 2), st.floats(0, 100)), max_size=60
)


@given(steps, st.floats(0.1, 20))
def test_every_gauge_returns_to_zero_once_the_limit_and_the_reports_freshness_are_over(
    steps: list[Step], limit_s: float
) -> None:
    """case 55"""
    sent, now_s = Sent(limit_s, max_charges=16), 0.0
    for what, later_s, number in steps:
        now_s += later_s
        if what == "send":
            sent.send(now_s, expected_s=number, uncached=int(number))
        elif what == "report":
            sent.report(now_s, running=int(number))
        else:
            sent.unseen.settle(now_s)
        assert min(sent.gauges) >= 0
        assert len(sent.unseen) <= 16
    sent.unseen.settle(now_s + limit_s + REPORT_FRESH_S + 1.0)
    assert (sent.gauges, len(sent.unseen)) == ((0, 0, 0, 0), 0)
    assert sent.unseen._ranks == {}


@pytest.mark.parametrize("reported", [True, False])
def test_a_rank_nobody_sends_to_any_more_is_forgotten(reported: bool) -> None:
    sent = Sent()
    sent.send(0.0, expected_s=1.0)
    if reported:
        sent.report(0.5, running=1)
    sent.unseen.settle(0.5 + REPORT_FRESH_S + 1.0)
    assert sent.unseen._ranks == {}
