"""The ring of recent decisions: bounded, and without anything of a prompt."""

from __future__ import annotations

import timeit

from router.observe.requests import MAX_NAME, MAX_RECENT, MAX_RECENT_CANDIDATES, Requests
from router.observe.views import MAX_CANDIDATES, decision_view, ending_view, is_over, telling
from tests.observe.made import decision, place, record


def test_a_request_is_running_from_its_placement_to_its_record() -> None:
    requests = Requests()
    place(requests)
    assert requests.running == 1
    (one,) = requests.recent()
    assert not is_over(one)
    requests.done(record(), failed=False)
    assert (requests.running, requests.finished, requests.failed) == (0, 1, 0)
    assert ending_view(one)["reported"] == 624
    assert requests.take_ttfts() == [0.125]
    assert requests.take_ttfts() == []


def test_a_second_placement_of_a_request_is_the_firsts_retry() -> None:
    requests = Requests()
    place(requests)
    place(requests)
    requests.done(record(), failed=False)
    first, second = requests.recent()
    assert (ending_view(first)["outcome"], ending_view(second)["outcome"]) == ("retried elsewhere", "ok")
    assert requests.running == 0


def test_what_was_never_placed_is_no_request_of_the_curves() -> None:
    requests = Requests()
    requests.done(record(route="/health"), failed=False)
    assert requests.finished == 0


def test_the_ring_is_bounded_in_entries_and_in_candidates() -> None:
    requests = Requests()
    for number in range(3 * MAX_RECENT):
        place(requests, f"r{number}")
    assert len(list(requests.recent())) == MAX_RECENT
    assert [one.number for one in requests.recent(after=3 * MAX_RECENT - 2)] == [3 * MAX_RECENT - 1, 3 * MAX_RECENT]
    for number in range(20):
        place(requests, f"big{number}", held=(0,) * 500)
    kept = sum(len(one.decision.targets) for one in requests.recent())
    assert MAX_RECENT_CANDIDATES - 500 < kept <= MAX_RECENT_CANDIDATES


def test_a_model_name_from_a_client_is_cut() -> None:
    """case 96: `base:adapter` is served by its base, whatever the adapter's name."""
    requests = Requests()
    place(requests, model="tiny:" + "x" * 1_000_000)
    (one,) = requests.recent()
    assert one.model is not None
    assert len(one.model) == MAX_NAME


def test_a_placement_costs_the_decision_path_next_to_nothing() -> None:
    """The bar is 1 µs on an idle machine; this asks for an order of magnitude, as machines are shared."""
    requests, made = Requests(), decision([0, 640])

    def once() -> None:
        requests.placed(
            at_s=1.0,
            request_id="r",
            route="/generate",
            model="tiny",
            ids_source="given",
            ids_reason="",
            prompt_tokens=9,
            decision=made,
        )

    assert min(timeit.repeat(once, number=2000, repeat=5)) / 2000 < 20e-6


def test_a_decision_is_explained_by_the_chosen_the_holder_and_the_cheapest() -> None:
    held = [0] * 300
    held[17] = 960
    held[250] = 320
    made = decision(held)
    made.targets[17].account.queued_uncached_tokens = 10**6
    told = telling(made)
    assert len(told) <= MAX_CANDIDATES
    assert [one.cost_s for one in told] == sorted(one.cost_s for one in told)
    assert made.chosen.target in [one.target for one in told]
    assert max(one.cached_by_tier[3] for one in told) == 960


def test_the_view_of_a_decision_has_its_terms_in_tokens_and_its_age() -> None:
    requests = Requests()
    place(requests)
    (one,) = requests.recent()
    view = decision_view(one, 7.5)
    assert (view["worker"], view["reason"], view["age_s"]) == ("http://engine-1:30000", "prefix", 2.5)
    assert (view["cached"], view["best"], view["of"]) == (640, 640, 2)
    assert "end" not in view
    first = view["candidates"][0]
    assert (first[0], first[3]) == ("http://engine-1:30000", 640)
    assert abs(first[8] - sum(first[5:8]) / 8000) < 1e-3
