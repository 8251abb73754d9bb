"""From an engine's publisher to the worker's blocks, over real sockets."""

from __future__ import annotations

from typing import Any

import msgspec
import zmq

from router.fleet.rank import Rank
from router.fleet.registry import Fleet
from router.hashing import Namespace, pack_ids, prompt_keys
from router.index.prefix import PrefixIndex
from router.index.scheme import WorkerScheme
from tests.fleet.helpers import MakeEngine, MakeFleet, settings
from tests.support.engine import HOST, FakeEngine, stored
from tests.support.waiting import until

WIDTH = 4


def chain(first: int, blocks: int = 2) -> dict[str, Any]:
    tokens = list(range(first, first + blocks * WIDTH))
    keys = prompt_keys(WorkerScheme(WIDTH, "sglang").scheme, pack_ids(tokens), Namespace())
    assert keys is not None
    return stored(keys, tokens, WIDTH)


def rank_of(fleet: Fleet, engine: FakeEngine, number: int = 0) -> Rank:
    (worker,) = [w for w in fleet.workers if w.url.text == engine.url]
    return worker.ranks[number]


async def holding(fleet: Fleet, engine: FakeEngine, blocks: int, number: int = 0) -> Rank:
    """The rank, once it is live with so many blocks on the GPU."""

    def ready() -> bool:
        (worker,) = [w for w in fleet.workers if w.url.text == engine.url]
        if len(worker.ranks) <= number:
            return False
        rank = worker.ranks[number]
        return rank.trusted and rank.blocks().get("GPU", 0) == blocks

    await until(ready, f"rank {number} live with {blocks} blocks; shown {fleet.describe()}")
    return rank_of(fleet, engine, number)


async def test_every_rank_hears_its_own_publisher(make_engine: MakeEngine, make_fleet: MakeFleet) -> None:
    """Case 16: in others' routers only rank 0 was heard."""
    engine = await make_engine(dp_size=4)
    index = PrefixIndex()
    fleet = make_fleet(workers=(settings(engine.url),), index=index)
    for rank in range(4):
        await engine.listened(rank)
        engine.publish(chain(1), chain(100 * (rank + 1), blocks=rank + 1), rank=rank)
    slots = [(await holding(fleet, engine, 3 + rank, rank)).slot for rank in range(4)]
    assert set(index.match(chain(1)["block_hashes"])) == set(slots)
    assert set(index.match(chain(300, blocks=3)["block_hashes"])) == {slots[2]}
    assert rank_of(fleet, engine, 2).last_seq == 1


async def test_a_deaf_rank_is_an_unknown_cache_not_a_worker_that_is_down(
    make_engine: MakeEngine, make_fleet: MakeFleet
) -> None:
    """Case 16."""
    engine = await make_engine(dp_size=2)
    engine.close_publisher(1)
    fleet = make_fleet(workers=(settings(engine.url),))
    await engine.listened(0)
    engine.publish(chain(1), rank=0)
    await holding(fleet, engine, 2, 0)
    deaf = rank_of(fleet, engine, 1)
    assert (deaf.trusted, deaf.state in ("connecting", "unreachable")) == (False, True)
    await until(lambda: len(fleet.routable("tiny")) == 1, "routable all the same")
    await engine.open_publisher(1)
    await engine.listened(1)
    engine.publish(chain(50), rank=1)
    await holding(fleet, engine, 2, 1)


async def test_a_publisher_that_starts_again_is_forgotten_and_server_info_is_read_at_once(
    make_engine: MakeEngine, make_fleet: MakeFleet
) -> None:
    """Case 18."""
    engine = await make_engine()
    fleet = make_fleet(workers=(settings(engine.url),))
    await engine.listened()
    engine.next_seq[0] = 41
    engine.publish(chain(1))
    engine.publish(chain(100, blocks=3))
    await holding(fleet, engine, 5)
    engine.close_publisher()
    await engine.open_publisher(next_seq=1)
    await engine.listened()
    looks = engine.asked("/server_info")
    engine.publish(chain(500, blocks=1))
    rank = await holding(fleet, engine, 1)
    assert rank.restarts == 1
    await until(lambda: engine.asked("/server_info") > looks, "another look")


async def test_a_restart_seen_in_server_info_voids_every_rank(make_engine: MakeEngine, make_fleet: MakeFleet) -> None:
    """Case 110: the same address, another process; its silent ranks hold nothing either."""
    engine = await make_engine(dp_size=2)
    index = PrefixIndex()
    fleet = make_fleet(workers=(settings(engine.url),), index=index)
    for rank in range(2):
        await engine.listened(rank)
        engine.publish(chain(1), rank=rank)
        await holding(fleet, engine, 2, rank)
    engine.info["startup_time"] = {"tokenizer_e2e": 99.0}
    await until(lambda: fleet.describe()[0]["incarnation"] == 2, "the new incarnation")
    assert index.match(chain(1)["block_hashes"]) == {}
    await until(lambda: index.total_blocks == 0, "the memory is given back")
    await until(lambda: engine.subscriptions_ever(1) == 2, "the new socket")
    await until(lambda: engine.subscriptions(1) == 1, "the old one is closed")
    engine.publish(chain(700, blocks=1), rank=1)
    await holding(fleet, engine, 1, 1)


async def test_removing_a_worker_removes_its_blocks_and_only_its(
    make_engine: MakeEngine, make_fleet: MakeFleet
) -> None:
    """Case 32."""
    engines = [await make_engine() for _ in range(2)]
    index = PrefixIndex()
    fleet = make_fleet(workers=tuple(settings(e.url) for e in engines), index=index)
    for engine in engines:
        await engine.listened()
        engine.publish(chain(1))
        await holding(fleet, engine, 2)
    fleet.remove(engines[0].url)
    assert set(index.match(chain(1)["block_hashes"])) == {rank_of(fleet, engines[1]).slot}
    await until(lambda: engines[0].subscriptions() == 0, "the stream is closed")
    engines[0].next_seq[0] = 0
    fleet.add(settings(engines[0].url))
    await engines[0].listened()
    engines[0].publish(chain(900, blocks=1))
    rank = await holding(fleet, engines[0], 1)
    assert (rank.last_seq, rank.gaps, rank.restarts) == (0, 0, 0)


async def test_load_reports_are_heard_where_the_engine_announces_them(
    make_engine: MakeEngine, make_fleet: MakeFleet, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    engine = await make_engine(dp_size=2)
    engine.info["kv_events"] |= {"load_endpoint_port_base": engine.load_base, "load_topic": "load"}
    publishers = []
    for rank in range(2):
        publisher = context.socket(zmq.XPUB)
        publisher.linger = 0
        publisher.bind(f"tcp://{HOST}:{engine.load_base + rank}")
        publishers.append(publisher)
    fleet = make_fleet(workers=(settings(engine.url),))
    await until(lambda: all(p.poll(0) for p in publishers), "subscriptions")
    report = msgspec.msgpack.encode(["LoadStat", 7, 1, 10, 100, 1])
    publishers[1].send_multipart([b"load", bytes(8), report])
    await until(lambda: rank_of(fleet, engine, 1).load_report is not None, "a report")
    loaded, idle = rank_of(fleet, engine, 1).account.report, rank_of(fleet, engine, 0).account.report
    assert loaded is not None
    assert (loaded.running, idle) == (7, None)


async def test_a_worker_whose_http_is_down_keeps_its_streams_and_its_blocks(
    make_engine: MakeEngine, make_fleet: MakeFleet
) -> None:
    engine = await make_engine()
    fleet = make_fleet(workers=(settings(engine.url),))
    await engine.listened()
    engine.publish(chain(1))
    rank = await holding(fleet, engine, 2)
    await engine.stop_http()
    await until(lambda: fleet.describe()[0]["state"] == "unhealthy", "unhealthy")
    engine.publish(chain(100))
    assert await holding(fleet, engine, 4) is rank
    assert fleet.routable("tiny") == []
    await engine.start_http()
    await until(lambda: len(fleet.routable("tiny")) == 1, "back")
    assert (rank_of(fleet, engine), rank.blocks()) == (rank, {"GPU": 4})
