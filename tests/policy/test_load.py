"""In-flight accounting: counted once from placement to the last byte, whatever happens in between."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.policy.load import REPORT_FRESH_S, RankLoad, Report, Ticket

TAU_S = 120.0


def place(load: RankLoad, now_s: float = 0.0, prompt: int = 100, uncached: int = 40) -> Ticket:
    return load.place(prompt, uncached, now_s, TAU_S)


def test_a_placed_request_is_queued_work_until_its_first_byte_and_in_flight_until_its_last() -> None:
    """case 54"""
    load = RankLoad()
    ticket = place(load)
    assert (load.requests, load.tokens, load.queued_uncached_tokens, load.decoding) == (1, 100, 40, 0)
    ticket.first_byte()
    assert (load.requests, load.tokens, load.queued_uncached_tokens, load.decoding) == (1, 100, 0, 1)
    ticket.finish()
    assert (load.requests, load.tokens, load.queued_uncached_tokens, load.decoding) == (0, 0, 0, 0)


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["place", "first", "finish"])), max_size=200))
def test_every_gauge_returns_to_zero_whatever_the_order_and_repetition_of_calls(steps: list[tuple[int, str]]) -> None:
    """case 55"""
    load = RankLoad()
    tickets: dict[int, Ticket] = {}
    made: list[Ticket] = []
    for number, what in steps:
        if what == "place" and number not in tickets:
            tickets[number] = place(load, prompt=10 + number, uncached=number)
            made.append(tickets[number])
        elif what == "first" and number in tickets:
            tickets[number].first_byte()
        elif what == "finish" and number in tickets:
            tickets.pop(number).finish()
        assert load.requests == len(tickets)
        assert load.queued_uncached_tokens == sum(t.uncached_tokens for t in tickets.values() if t.waiting)
    for ticket in made:
        ticket.finish()
        ticket.finish()
    assert (load.requests, load.tokens, load.queued_uncached_tokens, load.decoding) == (0, 0, 0, 0)
    assert load.oldest_wait_s(99.0) == 0.0


def test_the_age_of_the_oldest_unanswered_request_counts_as_queue() -> None:
    load = RankLoad()
    first = place(load, now_s=10.0, uncached=5)
    place(load, now_s=14.0, uncached=5)
    assert load.queue_tokens(15.0, rate_tokens_per_s=100.0) == 500.0
    first.first_byte()
    assert load.queue_tokens(15.0, rate_tokens_per_s=100.0) == 100.0


def test_a_fresh_report_plus_what_was_sent_since_outweighs_the_own_view_and_an_old_one_is_ignored() -> None:
    """case 57"""
    load = RankLoad()
    load.reported(Report(received_s=0.0, running=1, waiting=3, waiting_uncached_tokens=5000))
    assert load.queue_tokens(1.0, 0.0) == 5000
    place(load, now_s=1.0, uncached=40)
    assert load.queue_tokens(1.0, 0.0) == 5040
    assert load.queue_tokens(REPORT_FRESH_S + 0.1, 0.0) == 40
    load.reported(Report(received_s=4.0, running=1, waiting=0, waiting_uncached_tokens=0))
    assert load.queue_tokens(4.0, 0.0) == 40


def test_prefill_speed_is_measured_from_cumulative_counters_and_nonsense_is_bounded() -> None:
    load = RankLoad()
    load.reported(Report(0.0, 0, 0, 0, (0, 0)))
    load.reported(Report(1.0, 0, 0, 0, (10_000, 1_000_000)))
    assert load.prefill_tokens_per_s == pytest.approx(10_000)
    load.reported(Report(2.0, 0, 0, 0, (5, 10)))  # the engine restarted: counters went back
    assert load.prefill_tokens_per_s == pytest.approx(10_000)
    load.reported(Report(3.0, 0, 0, 0, (10**15, 11)))
    assert load.prefill_tokens_per_s is not None
    assert load.prefill_tokens_per_s <= 200_000


def test_one_absurd_report_at_most_doubles_a_measured_speed() -> None:
    """A rate that is too high is catastrophic: a full queue would look empty."""
    load = RankLoad()
    load.reported(Report(0.0, 0, 0, 0, (0, 0)))
    load.reported(Report(1.0, 0, 0, 0, (10_000, 1_000_000)))
    load.reported(Report(2.0, 0, 0, 0, (10**12, 1_000_001)))
    assert load.prefill_tokens_per_s == pytest.approx(20_000)


def test_speed_is_smoothed_over_tokens_and_small_prefills_add_up() -> None:
    load = RankLoad()
    load.reported(Report(0.0, 0, 0, 0, (0, 0)))
    for step in range(1, 30):
        load.reported(Report(float(step), 0, 0, 0, (100 * step, 10_000 * step)))
    assert load.prefill_tokens_per_s == pytest.approx(10_000)
    load.reported(Report(40.0, 0, 0, 0, (2_900 + 8_000, 290_000 + 1_600_000)))  # one long context, at 5,000 a second
    assert load.prefill_tokens_per_s == pytest.approx(10_000, rel=0.05)


def test_the_share_decays_with_its_time_constant() -> None:
    load = RankLoad()
    place(load, now_s=0.0, uncached=1000)
    assert load.share_tokens(TAU_S, TAU_S) == pytest.approx(1000 / 2.718281828, rel=1e-6)


@given(st.lists(st.tuples(st.floats(0, 400), st.integers(0, 10_000)), min_size=1, max_size=20), st.floats(0, 500))
def test_the_share_is_the_sum_of_what_was_sent_each_decayed_since(
    sent: list[tuple[float, int]], later_s: float
) -> None:
    load, now_s = RankLoad(), 3e5
    times = []
    for pause_s, uncached in sent:
        now_s += pause_s
        times.append((now_s, uncached))
        place(load, now_s, uncached=uncached)
    expected = sum(tokens * math.exp(-(now_s + later_s - at_s) / TAU_S) for at_s, tokens in times)
    assert load.share_tokens(now_s + later_s, TAU_S) == pytest.approx(expected)


def test_gauges_return_to_zero_after_many_random_lives() -> None:
    rng = random.Random(7)
    load = RankLoad()
    alive: list[Ticket] = []
    for step in range(10_000):
        if rng.random() < 0.5 or not alive:
            alive.append(place(load, now_s=float(step), prompt=rng.randrange(1, 9999), uncached=rng.randrange(0, 9999)))
        else:
            ticket = alive.pop(rng.randrange(len(alive)))
            if rng.random() < 0.7:
                ticket.first_byte()
            ticket.finish()
    for ticket in alive:
        ticket.finish()
    assert (load.requests, load.tokens, load.queued_uncached_tokens, load.decoding) == (0, 0, 0, 0)
