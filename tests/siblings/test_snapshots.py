"""A router that joins a warm fleet learns from its sibling what its ranks hold, and only where no batch is missing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from router.fleet.rank import Rank
from router.index.snapshot import SnapshotRefused, facts_of
from router.siblings import snapshots
from router.siblings.frames import Heading
from router.siblings.snapshots import _check_run
from router.siblings.taps import Batches, digest
from tests.e2e.conftest import Running, Start
from tests.index.streams import hashes_of
from tests.siblings.test_exchange import meeting
from tests.support.engine import FakeEngine, free_ports, stored
from tests.support.waiting import until

Fake = Callable[..., Awaitable[FakeEngine]]

ROOT = list(range(1, 17))


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "LOOK_EVERY_S", 0.05)
    monkeypatch.setattr(snapshots, "RETRY_S", (0.2, 0.2))


def chain(number: int) -> list[int]:
    return [*ROOT, *(100 + number for _ in range(16))]


def publish(engine: FakeEngine, number: int) -> None:
    """The tail of a chain, below the root that was stored once."""
    hashes = hashes_of(chain(number))
    engine.publish(stored(hashes[4:], chain(number)[16:], 4, parent=hashes[3]))


async def warm(start: Start, engine: FakeEngine, base: int, **settings: Any) -> Running:
    """A router that has heard everything."""
    router = await start({"url": engine.url}, siblings={**meeting(base, base + 1), **settings})
    await engine.listened()
    engine.publish({"type": "AllBlocksCleared"})
    engine.publish(stored(hashes_of(ROOT), ROOT, 4))
    for number in range(5):
        publish(engine, number)
    await router.live(engine.url)
    await router.until(lambda: has(router, engine, chain(4), 32), "everything heard")
    return router


async def has(router: Running, engine: FakeEngine, prompt: list[int], tokens: int) -> bool:
    return await router.credit([*prompt, 1], engine.url) == tokens


def only_rank(router: Running) -> Rank:
    (worker,) = router.service.fleet.workers
    return worker.ranks[0]


async def test_a_cold_router_earns_what_its_sibling_does_and_goes_on_with_the_stream(
    start_router: Start, fake_engine: Fake
) -> None:
    """case 113: without it every old conversation would earn nothing until its engine says something of it again"""
    engine = await fake_engine()
    base = free_ports(2)
    one = await warm(start_router, engine, base)
    two = await start_router({"url": engine.url}, siblings=meeting(base + 1, base))
    await two.live(engine.url)
    assert await two.credit([*chain(3), 1], engine.url) == 0
    stop = asyncio.Event()

    async def traffic() -> None:
        number = 10
        while not stop.is_set():
            publish(engine, number)
            number += 1
            await asyncio.sleep(0.002)

    serving = asyncio.create_task(traffic())
    try:
        await two.until(lambda: has(two, engine, chain(3), 32), "the sibling's blocks")
    finally:
        stop.set()
        await serving
    rank = only_rank(two)
    (shown,) = await two.ranks()
    assert (shown["history"], shown["state"]) == ("complete", "live")
    assert shown["restored_from"] is not None
    assert await two.metric("snapshots_total", outcome="restored") == 1
    assert await one.metric("snapshots_total", outcome="told") == 1
    engine.publish({"type": "BlockRemoved", "block_hashes": hashes_of(chain(3))[-1:]})
    await two.until(lambda: has(two, engine, chain(3), 28), "a removal that came afterwards")
    await until(lambda: only_rank(one).last_seq == rank.last_seq == engine.next_seq[0] - 1, "both at the end")
    assert rank.blocks() == only_rank(one).blocks()


async def test_a_restart_of_the_engine_takes_the_siblings_blocks_back(start_router: Start, fake_engine: Fake) -> None:
    engine = await fake_engine()
    base = free_ports(2)
    await warm(start_router, engine, base)
    two = await start_router({"url": engine.url}, siblings=meeting(base + 1, base))
    await two.live(engine.url)
    publish(engine, 6)
    await two.until(lambda: has(two, engine, chain(3), 32), "the sibling's blocks")
    engine.restarted(0, 0)
    engine.publish({"type": "AllBlocksCleared"})
    await two.until(lambda: has(two, engine, chain(3), 0), "the new process's empty cache")
    await until(lambda: only_rank(two).restored_from is None, "nothing of the old one")


@pytest.mark.parametrize("who", ["asks", "tells"])
async def test_snapshots_can_be_turned_off(who: str, start_router: Start, fake_engine: Fake) -> None:
    engine = await fake_engine()
    base = free_ports(2)
    await warm(start_router, engine, base, **({"snapshots": False} if who == "tells" else {}))
    other = {"snapshots": False} if who == "asks" else {}
    two = await start_router({"url": engine.url}, siblings={**meeting(base + 1, base), **other})
    await two.live(engine.url)
    publish(engine, 6)

    async def asked_in_vain() -> bool:
        return await two.metric("snapshots_total", outcome="none") >= 1

    async def heard_twice() -> bool:
        return await two.metric("sibling_frames_total", outcome="taken") >= 3

    await two.until(heard_twice if who == "asks" else asked_in_vain, "a look around")
    assert await two.credit([*chain(3), 1], engine.url) == 0


async def started_rank(start: Start, engine: FakeEngine) -> Rank:
    router = await warm(start, engine, free_ports(2))
    return only_rank(router)


async def test_a_state_of_another_process_or_behind_a_gap_is_refused(start_router: Start, fake_engine: Fake) -> None:
    """case 18: the batches of two processes have the same numbers, and other bytes"""
    rank = await started_rank(start_router, await fake_engine())
    assert rank.ledger is not None
    assert rank.last_seq is not None
    facts = facts_of(rank.ledger)
    batches = Batches(rank, holding=False)
    _check_run(batches, Heading(rank.last_seq, digest(rank.last_payload), facts))
    with pytest.raises(SnapshotRefused, match="another process"):
        _check_run(batches, Heading(rank.last_seq, digest(b"other bytes"), facts))
    with pytest.raises(SnapshotRefused, match="did not come"):
        _check_run(batches, Heading(rank.last_seq + 9, digest(rank.last_payload), facts))
    rank.reset("a gap")
    with pytest.raises(SnapshotRefused, match="broke"):
        _check_run(batches, Heading(0, digest(rank.last_payload), facts))


async def test_batches_held_back_are_bounded_and_applied_in_order(
    start_router: Start, fake_engine: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await fake_engine()
    rank = await started_rank(start_router, engine)
    monkeypatch.setattr("router.siblings.taps.MAX_KEPT_BATCHES", 8)
    assert rank.last_seq is not None
    held = Batches(rank, holding=True)
    begun = rank.last_seq
    publish(engine, 20)
    await until(lambda: begun + 1 in held.kept, "the batch to be held")
    assert rank.last_seq == begun
    for number in range(21, 40):
        publish(engine, number)
    await until(lambda: rank.last_seq == engine.next_seq[0] - 1, "all of them applied")
    assert held.void
    assert rank.tap is None
    assert rank.blocks() == {"GPU": 4 + 4 * 25}
