"""LoadStream against a real publisher on loopback."""

from __future__ import annotations

from collections.abc import Callable

from router.stream.loadstream import LoadStream
from tests.stream.publisher import HOST, Publisher, Recorder
from tests.support.waiting import until


async def test_the_newest_report_is_always_delivered(publisher: Callable[..., Publisher]) -> None:
    engine = publisher(topic=b"load")
    sink = Recorder()
    stream = LoadStream(f"tcp://{HOST}:{engine.port}", "load", sink)
    stream.start()
    await engine.wait_subscribed()
    for number in range(500):
        engine.publish(1, b"%d" % number)
    await until(lambda: sink.loads and sink.loads[-1] == b"499", "the newest")
    assert [int(report) for report in sink.loads] == sorted({int(report) for report in sink.loads})
    engine.restart()
    await engine.wait_subscribed()
    engine.publish(1, b"after")
    await until(lambda: sink.loads[-1] == b"after", "the restarted engine's")
    await stream.close()
    await stream.close()


async def test_other_messages_are_counted_and_skipped(publisher: Callable[..., Publisher]) -> None:
    engine = publisher(topic=b"load")
    sink = Recorder()
    stream = LoadStream(f"tcp://{HOST}:{engine.port}", "load", sink)
    stream.start()
    await engine.wait_subscribed()
    engine.pub.send_multipart([b"load"])
    engine.pub.send_multipart([b"load2", b"\0" * 8, b"x"])
    engine.publish(1, b"good")
    await until(lambda: sink.loads == [b"good"], "the good one")
    assert sink.counts == {"rejected frames": 1, "rejected topic": 1}
    await stream.close()
