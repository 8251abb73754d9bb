"""RankStream against real publishers on loopback."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from router.contract.descriptor import RankEndpoints
from router.stream.replay import END_SEQ, StreamLimits
from router.stream.subscriber import RankStream
from router.stream.zmtp import frame
from tests.captures import capture, names
from tests.stream.conftest import Context, Follow
from tests.stream.publisher import HOST, Publisher, Recorder
from tests.stream.test_zmtp import GREETING, ready
from tests.support.waiting import until

MakePublisher = Callable[..., Publisher]
FORMS = ["seq", "topic"]


def endpoints(port: int) -> RankEndpoints:
    return RankEndpoints(0, f"tcp://{HOST}:{port}", None, None, None)


@pytest.mark.parametrize("form", FORMS)
async def test_a_late_start_gets_everything_from_replay(publisher: MakePublisher, follow: Follow, form: str) -> None:
    engine = publisher(replay=form)
    engine.publish(50)
    async with follow(engine.endpoints) as sink:
        await engine.wait_subscribed()
        engine.publish(3)
        await until(lambda: sink.run == engine.log and sink.state == "live", "everything applied")
        assert sink.history == "complete"
        assert sink.resets == []


async def test_a_late_start_without_replay_is_partial(publisher: MakePublisher, follow: Follow) -> None:
    engine = publisher()
    engine.publish(50)
    async with follow(engine.endpoints) as sink:
        await engine.wait_subscribed()
        engine.publish(3)
        await until(lambda: sink.seqs == [50, 51, 52], "the live batches")
        assert (sink.state, sink.history) == ("live", "partial")


@pytest.mark.parametrize("form", FORMS)
async def test_a_gap_is_filled_by_replay(publisher: MakePublisher, follow: Follow, form: str) -> None:
    """Case 20, and case 21's two framings."""
    engine = publisher(replay=form, topic=b"kv")
    async with follow(engine.endpoints, "kv") as sink:
        await engine.wait_subscribed()
        engine.publish(3)
        engine.number()
        engine.number()
        engine.publish(2)
        await until(lambda: sink.run == engine.log and sink.state == "live", "the hole filled")
        assert (sink.counts["lost"], sink.history) == (0, "complete")


async def test_a_gap_that_replay_does_not_have_costs_what_was_held_before_it(
    publisher: MakePublisher, follow: Follow
) -> None:
    """Case 21: a burned number."""
    engine = publisher(replay="topic")
    engine.hidden = {3}
    async with follow(engine.endpoints) as sink:
        await engine.wait_subscribed()
        engine.publish(3)
        await until(lambda: sink.seqs == [0, 1, 2], "the first three")
        engine.number()
        engine.publish(2)
        await until(lambda: sink.seqs == [4, 5] and sink.state == "live", "what came behind the hole")
        assert (sink.history, len(sink.resets), sink.counts["gap"], sink.counts["lost"]) == ("partial", 1, 1, 1)


async def test_a_replay_that_answers_too_late_changes_nothing(publisher: MakePublisher, follow: Follow) -> None:
    """Case 22."""
    engine = publisher(replay="seq")
    async with follow(engine.endpoints) as sink:
        await engine.wait_subscribed()
        engine.publish(2)
        await until(lambda: sink.seqs == [0, 1] and sink.state == "live", "joined")
        asked = len(engine.asked)
        engine.answer.clear()
        engine.number()
        engine.publish()
        await until(lambda: sink.seqs == [3] and sink.state == "live", "went on without the hole")
        engine.answer.set()
        engine.publish()
        await until(lambda: len(engine.asked) == asked + 3, "the late answers")
        await until(lambda: sink.seqs == [3, 4], "the next live batch")
        engine.publish()
        await until(lambda: sink.seqs == [3, 4, 5], "and the next")


async def test_a_replay_without_end_mark_still_ends(publisher: MakePublisher, follow: Follow) -> None:
    """Engine contract, section 3: the ROUTER may drop the end mark too."""
    engine = publisher(replay="topic")
    engine.end_mark = False
    engine.publish(20)
    async with follow(engine.endpoints) as sink:
        await until(lambda: sink.run == engine.log and sink.state == "live", "joined")
        assert sink.history == "complete"


async def test_a_dead_replay_socket_delays_the_join_by_its_time_limit_only(
    publisher: MakePublisher, follow: Follow
) -> None:
    engine = publisher()
    engine.next_seq = 7
    dead = replace(engine.endpoints, replay=f"tcp://{HOST}:9")
    async with follow(dead, limits=StreamLimits(replay_quiet_s=0.1, unreachable_after_s=3600.0)) as sink:
        await engine.wait_subscribed()
        engine.publish()
        await until(lambda: sink.run == engine.log and sink.state == "live", "joined without replay")
        assert (sink.history, sink.counts["replayed timeout"]) == ("partial", 1)


@pytest.mark.parametrize("form", [None, *FORMS])
async def test_a_restart_on_the_same_port_begins_a_new_history(
    publisher: MakePublisher, follow: Follow, form: str | None
) -> None:
    """Case 18: the new process is heard from batch 1 on."""
    engine = publisher(replay=form)
    async with follow(engine.endpoints) as sink:
        await engine.wait_subscribed()
        engine.publish(40)
        await until(lambda: sink.run == engine.log and sink.state == "live", "joined")
        engine.restart()
        engine.number()
        await engine.wait_subscribed()
        engine.publish(2)
        heard_from = 0 if form else 1
        await until(lambda: sink.run == engine.log[heard_from:] and sink.state == "live", "the new process's batches")
        assert (sink.history, sink.counts["restarted"]) == ("complete", 1)


@pytest.mark.parametrize("form", [None, *FORMS])
async def test_a_restart_that_has_already_counted_further_is_not_mistaken_for_a_gap(
    publisher: MakePublisher, follow: Follow, form: str | None
) -> None:
    engine = publisher(replay=form)
    async with follow(engine.endpoints) as sink:
        await engine.wait_subscribed()
        engine.publish(4)
        await until(lambda: sink.run == engine.log and sink.state == "live", "joined")
        engine.restart()
        for _ in range(9):
            engine.number()
        await engine.wait_subscribed()
        engine.publish(2)
        await until(lambda: sink.run == engine.log[0 if form else 9 :] and sink.state == "live", "the new process's")
        assert sink.history == ("complete" if form else "partial")
        assert len(sink.resets) == 1


async def test_a_short_outage_costs_nothing_when_replay_proves_the_same_process(
    publisher: MakePublisher, follow: Follow
) -> None:
    engine = publisher(replay="topic")
    async with follow(engine.endpoints) as sink:
        await engine.wait_subscribed()
        engine.publish(4)
        await until(lambda: sink.run == engine.log and sink.state == "live", "joined")
        log = engine.log
        engine.restart(next_seq=4)
        engine.log = log
        engine.number()
        await engine.wait_subscribed()
        await until(lambda: sink.run == engine.log and sink.state == "live", "caught up")
        assert sink.resets == []


async def test_the_end_mark_ends_the_process_not_the_subscription(publisher: MakePublisher, follow: Follow) -> None:
    """Case 8."""
    engine = publisher()
    async with follow(engine.endpoints) as sink:
        await engine.wait_subscribed()
        engine.publish(3)
        engine.pub.send_multipart([b"", END_SEQ.to_bytes(8, "big"), b""])
        await until(lambda: len(sink.resets) == 1 and sink.run == [], "the old process's blocks void")
        engine.next_seq = 0
        engine.log = []
        engine.publish(2)
        await until(lambda: sink.run == engine.log and sink.state == "live", "the new process")
        assert sink.counts["gap"] == 0


async def test_bad_messages_are_counted_and_move_nothing(publisher: MakePublisher, follow: Follow) -> None:
    """Case 7: 1, 2, 4 and 9 frames, a 4-byte and a 9-byte sequence; and topics that only begin with ours."""
    engine = publisher(topic=b"kv")
    async with follow(engine.endpoints, "kv") as sink:
        await engine.wait_subscribed()
        engine.publish()
        for frames in ([b"kv"], [b"kv", b"\0" * 8], [b"kv", b"\0" * 8, b"", b""], [b"kv"] * 9):
            engine.pub.send_multipart(frames)
        for seq in (b"\0" * 4, b"\0" * 9):
            engine.pub.send_multipart([b"kv", seq, b"x"])
        engine.pub.send_multipart([b"kv2", b"\0" * 8, b"x"])
        engine.publish()
        await until(lambda: sink.run == engine.log, "the two good ones")
        assert sink.counts == {"rejected frames": 4, "rejected seq": 2, "rejected topic": 1}
        assert sink.state == "live"


async def test_an_empty_payload_takes_its_number_and_goes_to_the_sink(publisher: MakePublisher, follow: Follow) -> None:
    """Case 7: the batch cannot be decoded, which is the sink's to say; the cursor goes on."""
    engine = publisher()
    async with follow(engine.endpoints) as sink:
        await engine.wait_subscribed()
        engine.publish(1, b"")
        engine.publish()
        await until(lambda: sink.run == engine.log, "both")
        assert sink.counts == {}


async def test_nothing_there_is_unreachable_and_heard_as_soon_as_it_is(
    context: Context, publisher: MakePublisher, follow: Follow
) -> None:
    """Cases 16, 17: a closed port; a publisher that connects instead of binding leaves the port just as closed."""
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        port = taken.getsockname()[1]
        connecting: zmq.Socket[bytes] = context.socket(zmq.XPUB)
        connecting.setsockopt(zmq.LINGER, 0)
        connecting.connect(f"tcp://{HOST}:{port}")
        async with follow(endpoints(port)) as sink:
            assert sink.state == "connecting"
            await until(lambda: sink.state == "unreachable", "noticed")
            assert str(port) in sink.states[-1][1]
            connecting.close(0)
            taken.close()
            engine = publisher(port=port)
            await engine.wait_subscribed()
            engine.publish()
            await until(lambda: sink.run == engine.log and sink.state == "live", "heard")


async def test_a_name_that_does_not_resolve_is_unreachable_and_says_so(follow: Follow) -> None:
    async with follow(RankEndpoints(0, "tcp://no-such-host.invalid:5557", None, None, None)) as sink:
        await until(lambda: any("no-such-host.invalid" in reason for _, reason, _ in sink.states), "the reason")
        await until(lambda: sink.state == "unreachable", "noticed")
        assert "cannot connect" in sink.states[-1][1]


async def test_a_name_with_both_families_finds_a_publisher_on_ipv4(publisher: MakePublisher, follow: Follow) -> None:
    """Case 15: libzmq alone would try ::1 only."""
    engine = publisher(replay="seq")
    engine.publish(2)
    at = RankEndpoints(0, f"tcp://localhost:{engine.port}", f"tcp://localhost:{engine.replay_port}", None, None)
    async with follow(at) as sink:
        await until(lambda: sink.run == engine.log and sink.state == "live", "joined")


async def test_an_ipv6_publisher_is_heard(context: Context, follow: Follow) -> None:
    """Case 15."""
    pub: zmq.Socket[bytes] = context.socket(zmq.XPUB)
    try:
        pub.setsockopt(zmq.IPV6, 1)
        try:
            port = pub.bind_to_random_port("tcp://[::1]")
        except zmq.ZMQError:
            pytest.skip("this machine has no IPv6 loopback")
        async with follow(RankEndpoints(0, f"tcp://[::1]:{port}", None, None, None)) as sink:
            await until(lambda: sink.state == "live", "connected")
    finally:
        pub.close(0)


async def test_a_frame_beyond_the_limit_costs_the_connection_and_nothing_else(
    publisher: MakePublisher, follow: Follow
) -> None:
    """Case 9: a 200 MiB frame is refused before it is allocated."""
    engine = publisher()
    async with follow(engine.endpoints) as sink:
        await engine.wait_subscribed()
        engine.publish(2)
        await until(lambda: sink.run == engine.log, "joined")
        engine.pub.send_multipart([b"", (2).to_bytes(8, "big"), bytes(200 << 20)])
        await engine.wait_subscribed(2)
        engine.number()
        engine.publish()
        await until(lambda: sink.seqs == [3] and sink.state == "live", "went on")
        assert sink.history == "partial"


async def test_something_that_is_no_publisher_is_named(context: Context, follow: Follow) -> None:
    with context.socket(zmq.REP) as wrong:
        port = wrong.bind_to_random_port(f"tcp://{HOST}")
        async with follow(endpoints(port)) as sink:
            await until(lambda: sink.state == "unreachable", "noticed")
            assert sink.run == []


class Scripted(asyncio.Protocol):
    """Sends `script` to whoever connects; remembers what it got."""

    def __init__(self, script: bytes, heard: bytearray) -> None:
        self.script, self.heard = script, heard

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self.script)

    def data_received(self, data: bytes) -> None:
        self.heard += data


async def scripted(script: bytes) -> tuple[asyncio.Server, RankEndpoints, bytearray]:
    heard = bytearray()
    server = await asyncio.get_running_loop().create_server(lambda: Scripted(script, heard), HOST, 0)
    return server, endpoints(server.sockets[0].getsockname()[1]), heard


async def test_a_server_of_another_protocol_is_named(follow: Follow) -> None:
    """Case 17: the port of the engine's HTTP server, say."""
    server, at, _ = await scripted(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    async with server, follow(at) as sink:
        await until(lambda: sink.state == "unreachable", "noticed")
        assert "does not speak ZMTP" in sink.states[-1][1]


async def test_a_heartbeat_is_answered_over_the_connection(follow: Follow) -> None:
    """libzmq drops a peer that leaves its PING unanswered."""
    server, at, heard = await scripted(GREETING + ready() + frame(b"\x04PING\x00\x0aagain", command=True))
    async with server, follow(at):
        await until(lambda: frame(b"\x04PONGagain", command=True) in heard, "the answer")


async def test_a_publisher_at_a_unix_socket_is_heard(context: Context, follow: Follow, tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/pub"
    with context.socket(zmq.XPUB) as pub:
        pub.setsockopt(zmq.LINGER, 0)
        pub.bind(endpoint)
        async with follow(RankEndpoints(0, endpoint, None, None, None)) as sink:
            await until(lambda: pub.poll(0), "a subscription")
            pub.send_multipart([b"", bytes(8), b"x"])
            await until(lambda: sink.run == [(0, b"x")], "the batch")


def test_a_rank_without_an_event_endpoint_has_no_stream(context: Context) -> None:
    with pytest.raises(ValueError, match="port 65540"):
        RankStream(context, RankEndpoints(7, None, None, None, "port 65540 does not exist"), "", Recorder())


async def test_close_before_connecting_and_twice_leaves_nothing(context: Context) -> None:
    stream = RankStream(context, endpoints(9), "", Recorder())
    stream.start()
    await stream.close()
    await stream.close()
    assert len(asyncio.all_tasks()) == 1


@pytest.mark.parametrize("name", names())
async def test_recorded_streams_arrive_byte_for_byte_live_and_by_replay(
    name: str, publisher: MakePublisher, follow: Follow
) -> None:
    """Every capture: the first half from replay, exactly as the engine framed it; the second half live."""
    recorded = capture(name)
    batches = [(frame.seq, frame.payload) for frame in recorded.frames]
    topic = recorded.frames[0].topic
    form = "topic" if any(len(reply.frames) == 4 for reply in recorded.replies) else "seq"
    engine = publisher(replay=form, topic=topic.encode())
    half = len(batches) // 2
    for _, payload in batches[:half]:
        engine.publish(1, payload)
    async with follow(engine.endpoints, topic) as sink:
        await engine.wait_subscribed()
        for _, payload in batches[half:]:
            engine.publish(1, payload)
        await until(lambda: sink.run == batches and sink.state == "live", "every batch")
        assert (sink.history, sink.resets) == ("complete", [])


async def test_what_waits_for_a_stalled_rank_is_bounded_and_the_rest_waits_at_the_publisher(
    context: Context, follow: Follow
) -> None:
    """Case 31: a stalled loop must not collect gigabytes. 64 KiB a message; the kernel's buffers hold a few MB more."""
    pub = context.socket(zmq.XPUB)
    pub.setsockopt(zmq.LINGER, 0)
    pub.setsockopt(zmq.SNDHWM, 1)
    pub.setsockopt(zmq.XPUB_NODROP, 1)
    pub.setsockopt(zmq.SNDTIMEO, 300)
    port = pub.bind_to_random_port(f"tcp://{HOST}")
    with pub:
        async with follow(endpoints(port)) as sink:
            await until(lambda: pub.poll(0), "a subscription")
            pub.recv()
            sent = 0
            with suppress(zmq.Again):
                while sent < 4000:  # the loop stands still meanwhile
                    pub.send_multipart([b"", sent.to_bytes(8, "big"), bytes(64 << 10)])
                    sent += 1
            assert sent < 400
            await until(lambda: len(sink.run) == sent, "everything that was sent")
            assert sink.counts["gap"] == 0
