from __future__ import annotations

import random
import time

import pytest

from router.config import FleetConfig
from router.contract.server_info import ServerInfo
from router.fleet.ask import probe_session
from router.fleet.observer import NullObserver
from router.fleet.probe import FIRST_RETRY_S, Backoff, Prober, info_wait_s
from router.fleet.worker import Worker
from tests.fleet.helpers import FAST, MakeEngine, settings
from tests.support.waiting import until


def test_waits_grow_from_a_fifth_of_a_second_to_the_interval_and_are_spread() -> None:
    """Case 86: a fleet must not ask in step."""
    backoff = Backoff(5.0, random.Random(3))
    waits = [backoff.next_s() for _ in range(200)]
    assert 0.8 * FIRST_RETRY_S <= waits[0] <= 1.2 * FIRST_RETRY_S
    assert waits[2] > waits[0]
    settled = waits[20:]
    assert all(4.0 <= wait <= 6.0 for wait in settled)
    assert max(settled) - min(settled) > 1.0
    backoff.reset()
    assert backoff.next_s() < 1.0


def test_an_interval_shorter_than_the_first_retry_is_kept() -> None:
    backoff = Backoff(0.1, random.Random(3))
    assert all(0.08 <= backoff.next_s() <= 0.12 for _ in range(20))


def test_a_restart_is_looked_for_often_enough_to_be_noticed_within_twelve_seconds() -> None:
    """interface.md, with the default configuration and two seconds for the answer."""
    rng = random.Random(5)
    waits = [info_wait_s(FleetConfig().info_interval_s, rng) for _ in range(500)]
    assert max(waits) <= 10.0
    assert max(waits) - min(waits) > 2.0, "spread over the fleet"


async def test_a_fault_of_the_router_itself_does_not_end_the_watch(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine = await make_engine()
    worker = Worker(
        settings(engine.url), authorization=None, unhealthy_after=3, clock=time.monotonic, observer=NullObserver()
    )
    taken: list[ServerInfo] = []

    def take(info: ServerInfo) -> None:
        if engine.asked("/server_info") < 3:
            raise ZeroDivisionError
        taken.append(info)

    async with probe_session() as session:
        prober = Prober(worker, session, FAST, rng=random.Random(1), on_info=take, on_look=worker.settle)
        prober.start()
        await until(lambda: taken, "a description after two failures")
        await prober.close()
    assert "ZeroDivisionError" in caplog.text
    assert worker.info_problem == ""


async def test_answers_to_both_questions_do_not_wait_for_each_other(make_engine: MakeEngine) -> None:
    """/health takes 1.0 s on a real SGLang, and far longer on a busy one."""
    engine = await make_engine()
    engine.delays["/health"] = 1.2
    worker = Worker(
        settings(engine.url), authorization=None, unhealthy_after=3, clock=time.monotonic, observer=NullObserver()
    )
    taken: list[ServerInfo] = []
    async with probe_session() as session:
        prober = Prober(worker, session, FAST, rng=random.Random(1), on_info=taken.append, on_look=worker.settle)
        prober.start()
        await until(lambda: len(taken) >= 2, "two descriptions")
        assert not worker.health.passing
        await until(lambda: worker.health.passing, "healthy")
        await prober.close()
