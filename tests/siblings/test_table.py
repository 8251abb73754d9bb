"""Routers' shares folded into each other's accounts: every one sees the load of all, whatever is lost on the way."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from router.policy.load import RankLoad, Report, Ticket
from router.policy.predicted import PredictedBlocks
from router.siblings.frames import Entry, Frame, Placed
from router.siblings.placements import Placements, packed
from router.siblings.table import MAX_SIBLINGS, SILENT_S, Place, Table

TAU_S = 120.0
W: Place = ("http://w:1", 0)


class Router:
    """A table over its own accounts."""

    def __init__(self, name: int, places: tuple[Place, ...] = (W,)) -> None:
        self.accounts = {place: RankLoad() for place in places}
        self.predicted = PredictedBlocks(10.0)
        self.table = Table(
            bytes([name]) * 16, self.accounts.get, TAU_S, Placements(self.predicted, lambda url, rank, scheme: rank)
        )
        self.woken = 0
        for place, account in self.accounts.items():
            self.table.watch(place, account, self._wake)
        self._seq = 0

    def _wake(self) -> None:
        self.woken += 1

    def place(self, uncached: int, now_s: float, at: Place = W) -> Ticket:
        return self.accounts[at].place(uncached + 10, uncached, now_s, TAU_S)

    def frame(self, now_s: float, *, whole: bool) -> Frame:
        self._seq += 1
        entries = self.table.everything(now_s) if whole else self.table.changed(now_s)
        return Frame(self.table.sender, self._seq, now_s, whole, entries)

    def load(self, at: Place = W) -> tuple[int, int, int]:
        account = self.accounts[at]
        return account.requests + account.sibling_requests, account.queued_uncached_tokens, account.decoding


def test_a_siblings_requests_count_in_queue_and_decodes_until_they_end() -> None:
    """case 57"""
    here, there = Router(1), Router(2)
    ticket = there.place(700, 5.0)
    assert there.woken == 1
    here.table.take(there.frame(5.0, whole=False), 8.0)
    account = here.accounts[W]
    assert (account.sibling_requests, account.queued_uncached_tokens, account.requests) == (1, 700, 0)
    ticket.first_byte()
    here.table.take(there.frame(5.0, whole=False), 8.0)
    assert here.load() == (1, 0, 1)
    ticket.finish()
    here.table.take(there.frame(5.0, whole=False), 8.0)
    assert here.load() == (0, 0, 0)
    assert account.oldest_placed_s == math.inf


def test_a_wait_is_told_as_an_age_because_clocks_differ() -> None:
    here, there = Router(1), Router(2)
    there.place(100, 1000.0)
    here.table.take(there.frame(1004.0, whole=False), 7.0)
    assert here.accounts[W].oldest_wait_s(8.0) == 5.0
    here.place(1, 2.0)
    assert here.accounts[W].oldest_wait_s(8.0) == 6.0, "the own one is older"


def test_what_a_sibling_sent_since_the_engines_report_counts_on_top_of_it() -> None:
    here, there = Router(1), Router(2)
    there.place(300, 0.0)
    here.table.take(there.frame(0.0, whole=True), 0.0)
    here.accounts[W].reported(Report(1.0, 1, 1, 300))
    ticket = there.place(500, 1.1)
    here.table.take(there.frame(1.1, whole=False), 1.1)
    assert here.accounts[W].queue_tokens(1.2, 0.0) == 800
    ticket.finish()
    here.table.take(there.frame(1.3, whole=False), 1.3)
    assert here.accounts[W].reported_queue_tokens == 800, "only the engine's next report takes it back"


def test_what_was_placed_before_a_sibling_was_first_heard_is_no_news() -> None:
    here, there = Router(1), Router(2)
    there.place(10_000, 0.0).finish()
    here.accounts[W].reported(Report(0.5, 0, 0, 0))
    there.place(1, 1.0)
    here.table.take(there.frame(1.0, whole=True), 1.0)
    assert here.accounts[W].reported_queue_tokens == 0


def test_a_lost_frame_is_healed_by_the_next_whole_one() -> None:
    here, there = Router(1), Router(2)
    ticket = there.place(700, 0.0)
    here.table.take(there.frame(0.0, whole=False), 0.0)
    ticket.finish()
    there.frame(0.1, whole=False)  # lost
    assert here.load() == (1, 700, 0)
    here.table.take(there.frame(0.5, whole=True), 0.5)
    assert here.load() == (0, 0, 0)


def test_a_silent_sibling_has_nothing_under_way_any_more() -> None:
    """A router that was killed: its requests died with it."""
    here, there = Router(1), Router(2)
    there.place(700, 0.0)
    here.table.take(there.frame(0.0, whole=True), 0.0)
    assert here.table.expire(SILENT_S) == []
    assert here.table.expire(SILENT_S + 0.1) == [there.table.sender]
    assert here.load() == (0, 0, 0)
    assert here.table.describe(9.0) == []


def test_own_frames_and_unknown_ranks_change_nothing() -> None:
    here = Router(1)
    here.place(50, 0.0)
    here.table.take(here.frame(0.0, whole=True), 0.0)
    stranger = Entry("http://elsewhere:1", 3, 1, 2, 3, 0, 4, 5)
    here.table.take(Frame(b"z" * 16, 1, 0.0, True, [stranger]), 0.0)
    assert here.load() == (1, 50, 0)


def test_placements_of_siblings_are_predicted_and_ones_own_not_twice() -> None:
    """case 53"""
    here = Router(1)
    placed = [Placed(W[0], 0, "sglang-sha256", 16, False, packed([1, 2]))]
    here.table.take(Frame(here.table.sender, 1, 0.0, False, [], placed), 0.0)
    assert len(here.predicted) == 0
    here.table.take(Frame(b"z" * 16, 1, 0.0, False, [], placed), 0.0)
    assert here.predicted.extend([1, 2, 3], {}) == [(0, 2)]


def test_a_new_incarnation_begins_without_what_siblings_sent_to_the_old_one() -> None:
    here, there = Router(1), Router(2)
    there.place(700, 0.0)
    here.table.take(there.frame(0.0, whole=True), 0.0)
    old = here.accounts[W]
    here.accounts[W] = RankLoad()
    here.table.take(there.frame(0.5, whole=True), 0.5)
    assert here.load() == (1, 700, 0), "the sibling has not seen the restart yet: it still says so itself"
    assert (old.sibling_requests, old.queued_uncached_tokens) == (0, 0)


def test_an_ended_incarnations_requests_are_not_told() -> None:
    there = Router(2)
    old = there.place(700, 0.0)
    there.accounts[W] = RankLoad()
    there.table.watch(W, there.accounts[W], lambda: None)
    old.first_byte()
    assert there.table.changed(1.0) == []


def test_more_siblings_than_there_may_be_are_not_taken() -> None:
    here = Router(255)
    for number in range(MAX_SIBLINGS):
        assert here.table.take(Frame(number.to_bytes(16, "big"), 1, 0.0, True, []), 0.0)
    assert not here.table.take(Frame(b"x" * 16, 1, 0.0, True, []), 0.0)


steps = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["place", "first", "finish", "changes", "lost", "whole"])),
    max_size=120,
)


@settings(max_examples=200)
@given(steps)
def test_after_a_whole_frame_of_each_every_router_sees_the_load_of_all(actions: list[tuple[int, str]]) -> None:
    """Whatever was placed, finished and lost before."""
    places = (W, ("http://w:2", 0), ("http://w:2", 1))
    routers = [Router(number, places) for number in range(3)]
    open_tickets: list[list[Ticket]] = [[], [], []]
    now_s = 0.0

    def tell(sender: int, one: Frame, reach: Any) -> None:
        for number in range(3):
            if number != sender and reach(number):
                routers[number].table.take(one, now_s)

    for count, (who, what) in enumerate(actions):
        now_s += 0.01
        mine = open_tickets[who]
        if what == "place":
            mine.append(routers[who].place(count, now_s, places[count % 3]))
        elif mine and what in ("first", "finish"):
            ticket = mine[count % len(mine)]
            ticket.first_byte() if what == "first" else ticket.finish()
        elif what == "changes":
            tell(who, routers[who].frame(now_s, whole=False), lambda number: True)
        elif what == "lost":
            tell(who, routers[who].frame(now_s, whole=False), lambda number: number == 0)
        elif what == "whole":
            tell(who, routers[who].frame(now_s, whole=True), lambda number: True)
    for who in range(3):
        tell(who, routers[who].frame(now_s, whole=True), lambda number: True)
    for place in places:
        assert len({router.load(place) for router in routers}) == 1
        waiting = [t for mine in open_tickets for t in mine if t.waiting and not t.done]
        here = [t for t in waiting if any(t.load is router.accounts[place] for router in routers)]
        assert routers[0].load(place)[1] == sum(t.uncached_tokens for t in here)
