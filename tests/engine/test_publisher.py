"""Event, replay and load sockets, over real ZMQ."""

from __future__ import annotations

import asyncio
import struct

import aiohttp
import msgspec
import pytest
import zmq
import zmq.asyncio

from router.contract.load import decode_load
from router.engine.publisher import EventPublisher, bind_range, port_of
from tests.engine.support import END_SEQ, Starter, Wire, receive
from tests.support.waiting import until


async def test_seq_0_is_a_clear_that_only_replay_still_has(start: Starter, wire: Wire) -> None:
    """Engine contract, section 2: sent from construction, before anyone can subscribe."""
    engine = await start(dp_size=2, topic="kv@tiny")
    for rank in range(2):
        assert engine.ports.replay is not None
        (topic, seq, payload), end = await wire.replay(engine.ports.replay + rank)
        assert (topic, seq) == (b"kv@tiny", struct.pack(">Q", 0))
        _, events, named = msgspec.msgpack.decode(payload)
        assert (events, named) == ([{"type": "AllBlocksCleared"}], rank)
        assert end == [b"", END_SEQ, b""]


async def test_live_batches_are_dense_and_equal_to_their_replay(
    start: Starter, wire: Wire, http: aiohttp.ClientSession
) -> None:
    engine = await start()
    socket = wire.subscribe(engine.ports.kv)
    live: list[list[bytes]] = []

    async def one_more() -> bool:
        """A subscription takes a moment: ask until its first batch arrives."""
        body = {
            "input_ids": [len(live) + 1] * 40,
            "cache_salt": str(len(live)),
            "sampling_params": {"max_new_tokens": 1},
        }
        async with http.post(f"{engine.url}/generate", json=body) as response:
            assert response.status == 200
        async with http.post(f"{engine.url}/flush_cache"):
            pass
        while await socket.poll(50):
            live.append(await receive(socket))
        return len(live) >= 4

    await until(one_more, "four batches")
    seqs = [struct.unpack(">Q", frames[1])[0] for frames in live]
    assert seqs == list(range(seqs[0], seqs[0] + len(seqs)))
    assert (await wire.replay(engine.ports.replay, seqs[0]))[:-1] == live


async def test_a_short_buffer_begins_later_and_a_start_beyond_the_end_gives_only_the_mark(wire: Wire) -> None:
    """Engine contract, section 3."""
    context = zmq.asyncio.Context()
    try:
        (publish,) = bind_range(context, zmq.PUB, "127.0.0.1", 0, 1, send_limit=100)
        (replay,) = bind_range(context, zmq.ROUTER, "127.0.0.1", 0, 1, send_limit=100)
        publisher = EventPublisher(publish, replay, topic="", buffer_batches=4)
        for number in range(10):
            publisher.send(b"%d" % number)
        serving = asyncio.create_task(publisher.serve_replay())
        held = await wire.replay(port_of(replay), 0)
        beyond = await wire.replay(port_of(replay), 1_000_000)
        serving.cancel()
        assert [frames[2] for frames in held[:-1]] == [b"6", b"7", b"8", b"9"]
        assert beyond == [[b"", END_SEQ, b""]]
    finally:
        context.destroy(linger=0)


async def test_a_malformed_replay_request_is_ignored_and_the_next_one_answered(start: Starter, wire: Wire) -> None:
    engine = await start()
    with wire._context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(f"tcp://127.0.0.1:{engine.ports.replay}")
        await socket.send_multipart([b"", b"short"])
        await socket.send_multipart([b"junk"])
    assert len(await wire.replay(engine.ports.replay)) == 2


async def test_ranks_get_consecutive_ports_and_a_taken_port_is_a_clear_error() -> None:
    context = zmq.asyncio.Context()
    try:
        sockets = bind_range(context, zmq.PUB, "127.0.0.1", 0, 3, send_limit=10)
        base = port_of(sockets[0])
        assert [port_of(socket) for socket in sockets] == [base, base + 1, base + 2]
        with pytest.raises(OSError, match=f"cannot bind .*{base}"):
            bind_range(context, zmq.PUB, "127.0.0.1", base, 1, send_limit=10)
    finally:
        context.destroy(linger=0)


async def test_load_reports_come_every_second_and_on_change(
    start: Starter, wire: Wire, http: aiohttp.ClientSession
) -> None:
    """Engine contract, section 4; read with the router's own decoder."""
    engine = await start(tokens=16_000, time_scale=1.0)
    socket = wire.subscribe(engine.ports.load, b"load")
    idle = decode_load((await receive(socket))[2])  # the heartbeat: nothing has happened yet
    assert (idle.running_requests, idle.kv_tokens_used, idle.kv_tokens_capacity, idle.rank) == (0, 0, 16_000, 0)
    body = {"input_ids": [5] * 400, "sampling_params": {"max_new_tokens": 3}}
    async with http.post(f"{engine.url}/generate", json=body) as response:
        assert response.status == 200
    reports = [idle]
    while reports[-1].total_prefill_uncached_tokens != 400 or reports[-1].running_requests:
        reports.append(decode_load((await receive(socket))[2]))
    assert max(report.running_requests for report in reports) == 1
    assert max(report.kv_tokens_used for report in reports) >= 400
    assert reports[-1].kv_tokens_used == 0  # what is only cached is not in use
    busy_us = reports[-1].total_prefill_busy_us
    assert busy_us is not None
    assert 20_000 <= busy_us <= 40_000  # 400 tokens at 20,000 a second, and a step's overhead
