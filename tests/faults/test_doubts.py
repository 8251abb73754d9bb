"""A stream that is up and must not be believed: two publishers, silence, useless stores, crossed ranks; over real
sockets through the whole service. Each is named, earns nothing, and is over when the fault is."""

from __future__ import annotations

import logging
import time

import msgspec
import pytest

from tests.faults.conftest import MakeScene, Scene
from tests.support.cache import Cache, prompts
from tests.support.engine import stored

REPLAY = pytest.mark.parametrize("replay", [0, 1000], ids=["no_replay", "replay"])


def batch(event: object) -> bytes:
    return msgspec.msgpack.encode([time.time(), [event], 0])


class Twin:
    """Another process of the same rank that publishes to the same socket with numbers of its own."""

    def __init__(self, at: Scene, seq: int) -> None:
        self.engine = at.engine
        self.seq = seq
        self.cache = Cache(at.engine)

    def store(self, prompt: list[int]) -> None:
        self.engine.send(self.seq, batch(self.cache.store_event(prompt)))
        self.seq += 1


@REPLAY
@pytest.mark.parametrize("first", [2, 4, 70])
async def test_two_publishers_on_one_rank_are_named_and_neither_is_believed_until_one_is_gone(
    first: int, replay: int, scene: MakeScene, caplog: pytest.LogCaptureFixture
) -> None:
    """Cases 16, 18 (sglang#22983: one publisher per context-parallel rank)."""
    caplog.set_level(logging.WARNING, "router")
    at = await scene(replay=replay)
    twin = Twin(at, first)
    for mine, other in zip(prompts(5, 12), prompts(6, 12), strict=True):
        at.cache.store(mine)
        twin.store(other)
    await at.state("duplicated", "two publishers speak for tcp://")
    restarts = (await at.rank())["restarts"]
    await at.drift("ranks", "rank 0 duplicated", "one event port a rank")
    for mine, other in zip(prompts(7, 30), prompts(8, 30), strict=True):
        at.cache.store(mine)
        twin.store(other)
    await at.state("duplicated", "two publishers speak for tcp://")
    assert (await at.rank())["restarts"] == restarts <= 4
    assert len([r for r in caplog.records if "duplicated" in r.getMessage() and "rank 0:" in r.getMessage()]) <= 2
    await at.serve(1)
    at.cache.clear()
    fresh = iter(range(100, 10_000))

    async def recovered() -> bool:
        at.cache.store(*prompts(next(fresh), 2))
        return bool((await at.rank())["state"] == "live")

    await at.router.until(recovered, "the one that is left is believed")
    again = prompts(9)
    at.cache.store(*again)
    await at.exact(asked=again)
    await at.no_drift()


async def test_a_rank_that_serves_and_never_speaks_is_silent_until_it_does(scene: MakeScene) -> None:
    """Case 17: the same as a publisher that connects instead of binding while something else listens there."""
    at = await scene()
    at.engine.info["kv_events"]["topic"] = "elsewhere"
    await at.router.until(lambda: _topic(at, "elsewhere"), "the engine now says so, and publishes under the old one")
    await at.router.live(at.engine.url)
    await at.serve(2)
    assert (await at.rank())["state"] == "live"
    await at.serve(1)
    await at.state("silent", "3 requests with 123 new prompt tokens were served and no event came")
    item = await at.drift("ranks", "rank 0 silent", "topic")
    assert item["advertised"] == "1 ranks"
    await at.engine.listened()
    at.cache.clear()
    at.cache.store(at.prompts[1])
    await at.exact()
    await at.no_drift()


async def _topic(at: Scene, topic: str) -> bool:
    return bool((await at.worker())["topic"] == topic)


async def test_stores_of_a_width_nobody_knows_leave_no_silent_zero(scene: MakeScene) -> None:
    """Cases 11, 34: the width was settled, then the engine pages differently and says nothing."""
    at = await scene()
    for n in range(20):
        at.engine.publish(stored([n * 3 + 1, n * 3 + 2], range(12), 6, parent=None))
    await at.state("drifted", "set kv_events.block_size")
    item = await at.drift("block_size", "4 tokens a block are expected")
    assert (item["advertised"], item["observed"]) == (4, 6)
    at.cache.store(at.prompts[5])
    await at.exact()
    await at.no_drift()


async def test_the_old_engines_width_under_dcp_is_taken_from_the_wire_and_flagged(scene: MakeScene) -> None:
    """Case 46: 16 advertised, 64 on the wire; credits appear."""
    at = await scene(block_size=4, warm=False)
    await at.engine.listened()
    cache = at.caches[0] = Cache(at.engine, width=16)
    asked = prompts(3, 12, tokens=100)
    for prompt in asked:
        cache.store(prompt)
    await at.exact(asked=asked)
    item = await at.drift("block_size", "set kv_events.block_size: 16")
    assert (item["advertised"], item["observed"]) == (4, 16)


async def test_an_advertised_rank_that_is_deaf_is_named_and_the_others_are_exact(scene: MakeScene) -> None:
    """Case 16."""
    at = await scene(dp_size=3)
    at.engine.close_publisher(1)
    await at.state("unreachable", "check host, port", rank=1)
    await at.drift("ranks", "rank 1 unreachable", "open the ports")
    assert (await at.worker())["state"] == "ready"
    await at.exact(0)
    await at.exact(2)
    at.caches[1].died()
    await at.engine.open_publisher(1)
    await at.engine.listened(1)
    at.caches[1].clear()
    at.caches[1].store(at.prompts[2])
    await at.exact(1)
    await at.no_drift()


async def test_crossed_event_ports_are_named_and_the_sockets_rank_is_believed(scene: MakeScene) -> None:
    """Case 12."""
    at = await scene(dp_size=2)
    for n, prompt in enumerate(prompts(4, 20)):
        at.caches[n % 2].store(prompt, says_rank=1 - n % 2)
    await at.drift("ranks", "ranks 0 and 1 crossed", "swapped")
    await at.exact(0)
    await at.exact(1)
    assert set((await at.rank(1))["names_ranks"]) == {"0"}


async def test_two_ranks_that_share_one_port_are_named(scene: MakeScene) -> None:
    """Cases 16 (sglang#29211): both publish to the port of rank 0; rank 1's own is not there."""
    at = await scene(dp_size=2, warm=False)
    at.engine.close_publisher(1)
    await at.engine.listened(0)
    at.engine.restarted(0, 100)
    twin = Twin(at, 700)
    for mine, other in zip(prompts(5, 12), prompts(6, 12), strict=True):
        at.cache.store(mine)
        event = twin.cache.store_event(other)
        at.engine.send(twin.seq, msgspec.msgpack.encode([time.time(), [event], 1]))
        twin.seq += 1
    await at.state("duplicated", "two publishers", rank=0)
    await at.drift("ranks", "rank 1 unreachable", "rank 0 duplicated", "put all ranks on one port")


async def test_one_event_endpoint_listed_for_two_ranks_is_named(scene: MakeScene) -> None:
    at = await scene(dp_size=2, warm=False)
    endpoint = f"tcp://127.0.0.1:{at.engine.kv_base}"
    assert await at.router.remove(at.engine.url) == 200
    listed = [{"events": endpoint}, {"events": endpoint}]
    assert await at.router.add(at.engine.url, kv_events={"endpoints": listed}) == 201
    await at.drift("ranks", "ranks 0, 1 on one port", "every rank has its own")
