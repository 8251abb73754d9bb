from __future__ import annotations

from router.fleet.breaker import FAULTS_TO_OPEN, FIRST_WAIT_S, LONGEST_WAIT_S, Breaker


def opened(at_s: float = 0.0) -> Breaker:
    breaker = Breaker()
    for _ in range(FAULTS_TO_OPEN):
        assert breaker.admits(at_s)
        breaker.fault(at_s)
    return breaker


def test_only_faults_in_a_row_open_it() -> None:
    """Case 89: one good answer between them, and the count starts again."""
    breaker = Breaker()
    for _ in range(20):
        for _ in range(FAULTS_TO_OPEN - 1):
            breaker.fault(0.0)
        breaker.served()
    assert (breaker.admits(0.0), breaker.state) == (True, "closed")
    assert not opened().admits(0.0)
    assert opened().state == "open"


def test_after_the_wait_one_request_tries_and_a_good_answer_closes_it() -> None:
    breaker = opened()
    assert not breaker.admits(FIRST_WAIT_S - 0.1)
    assert breaker.admits(FIRST_WAIT_S)
    breaker.placed()
    assert (breaker.admits(FIRST_WAIT_S), breaker.state) == (False, "half_open")
    breaker.served()
    assert (breaker.admits(FIRST_WAIT_S), breaker.state) == (True, "closed")


def test_a_failed_trial_opens_it_for_twice_as_long_up_to_a_bound() -> None:
    breaker, now_s, waits = opened(), 0.0, []
    for _ in range(8):
        began_s = now_s
        while not breaker.admits(now_s):
            now_s += 0.5
        waits.append(now_s - began_s)
        breaker.placed()
        breaker.fault(now_s)
    assert waits == [min(FIRST_WAIT_S * 2**n, LONGEST_WAIT_S) for n in range(8)]
    now_s += LONGEST_WAIT_S
    breaker.placed()
    breaker.served()
    for _ in range(FAULTS_TO_OPEN):
        breaker.fault(now_s)
    assert breaker.admits(now_s + FIRST_WAIT_S), "a good answer takes the long wait back"


def test_a_trial_that_says_nothing_lets_another_one_try() -> None:
    """The trial's client left, or it was answered 400: the worker must not stay out for that."""
    breaker = opened()
    breaker.placed()
    breaker.neutral()
    assert breaker.admits(FIRST_WAIT_S)


def test_requests_placed_before_it_opened_do_not_prolong_the_wait() -> None:
    breaker = opened()
    for _ in range(10):
        breaker.fault(1.0)
    assert breaker.admits(FIRST_WAIT_S)
