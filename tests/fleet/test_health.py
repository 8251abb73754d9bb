from __future__ import annotations

from router.fleet.worker import Health


def test_a_worker_passes_after_one_good_probe() -> None:
    health = Health(3)
    assert (health.passing, health.down) == (False, False)
    health.passed()
    assert (health.passing, health.down, health.why) == (True, False, "")


def test_it_is_down_only_after_so_many_failures_in_a_row() -> None:
    health = Health(3)
    health.passed()
    for _ in range(2):
        health.failed("slow")
    health.passed()
    for _ in range(2):
        health.failed("slow")
        assert health.passing
    health.failed("no answer within 10 s")
    assert (health.passing, health.down, health.why) == (False, True, "no answer within 10 s")


def test_two_refused_connections_in_a_row_are_enough() -> None:
    health = Health(10)
    health.passed()
    health.failed("connection refused", refused=True)
    health.failed("slow")
    health.failed("connection refused", refused=True)
    assert not health.down
    health.failed("connection refused", refused=True)
    assert health.down


def test_an_engine_that_never_passed_and_says_503_is_loading_not_down() -> None:
    """Engine contract, section 1: HTTP opens before the engine is ready."""
    health = Health(3)
    for _ in range(50):
        health.failed("503 from /health", loading=True)
    assert (health.passing, health.down) == (False, False)


def test_an_engine_that_passed_and_says_503_goes_down() -> None:
    health = Health(3)
    health.passed()
    for _ in range(3):
        health.failed("503 from /health", loading=True)
    assert health.down


def test_two_failed_requests_in_a_row_take_it_out_at_once() -> None:
    health = Health(3)
    health.passed()
    health.fault("connect")
    health.served()
    health.fault("connect")
    assert health.passing
    assert health.suspect
    health.fault("reset")
    assert health.down
    assert health.why == "2 requests in a row failed: reset"


def test_down_ends_with_one_good_probe() -> None:
    health = Health(1)
    health.failed("slow")
    assert health.down
    health.passed()
    assert (health.passing, health.down, health.suspect) == (True, False, False)


def test_another_process_keeps_the_pass_of_the_old_one_only_until_the_next_look() -> None:
    health = Health(3)
    health.passed()
    health.reborn()
    assert health.passing
    health.failed("503 from /health", loading=True)
    assert (health.passing, health.down) == (False, False)


def test_another_process_behind_a_worker_that_was_down_starts_afresh() -> None:
    health = Health(1)
    health.failed("connection refused", refused=True)
    health.reborn()
    assert (health.passing, health.down) == (False, False)
    health.failed("503 from /health", loading=True)
    assert not health.down
