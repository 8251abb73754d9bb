"""A burst is worked off in slices, on both event loops."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import pytest
import uvloop

from router.stream.pump import SLICE_S, running_pump
from router.stream.subscriber import RankStream
from tests.stream.conftest import Context
from tests.stream.publisher import Publisher, Recorder
from tests.support.waiting import until

BURST = 20_000
APPLY_S = 30e-6


class BusySink(Recorder):
    """Takes as long over a batch as decoding and indexing one would."""

    def apply(self, seq: int, payload: bytes) -> None:
        until_s = time.thread_time() + APPLY_S
        super().apply(seq, payload)
        while time.thread_time() < until_s:
            pass


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("replayed", [False, True])
def test_a_burst_leaves_the_loop_responsive(
    context: Context,
    publisher: Callable[..., Publisher],
    new_loop: Callable[[], asyncio.AbstractEventLoop],
    replayed: bool,
) -> None:
    """Case 31: 20,000 batches, live or from replay, on two ranks at once; other work gets its turns all the while."""

    async def main() -> None:
        engines = [publisher(replay="topic") for _ in range(2)]
        sinks = [BusySink(), BusySink()]
        streams = [RankStream(context, e.endpoints, "", s) for e, s in zip(engines, sinks, strict=True)]
        for engine in engines:
            if replayed:
                for _ in range(BURST // 2):
                    engine.number()
        for stream in streams:
            stream.start()
        for engine in engines:
            await engine.wait_subscribed()
            engine.publish(1 if replayed else BURST // 2)
        stalls_s: list[float] = []
        began_s, last_s = time.monotonic(), time.thread_time()
        while any(len(s.run) < len(e.log) for s, e in zip(sinks, engines, strict=True)):
            assert time.monotonic() - began_s < 60
            await asyncio.sleep(0)
            now_s = time.thread_time()  # of this thread alone: other processes' load is not the pump's
            stalls_s.append(now_s - last_s)
            last_s = now_s
        for sink, engine in zip(sinks, engines, strict=True):
            assert sink.run == engine.log
            assert (sink.resets, sink.history) == ([], "complete")
        # Every turn ends after its slice: without slices this would be a handful of turns.
        assert len(stalls_s) > BURST * APPLY_S / SLICE_S / 2
        assert sorted(stalls_s)[int(len(stalls_s) * 0.99)] < 0.05
        for stream in streams:
            await stream.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())


class FailingSink(Recorder):
    def apply(self, seq: int, payload: bytes) -> None:
        super().apply(seq, payload)
        if seq == 1:
            raise RuntimeError("sink")


async def test_a_sink_that_fails_does_not_stop_its_stream(
    context: Context, publisher: Callable[..., Publisher], caplog: pytest.LogCaptureFixture
) -> None:
    engine = publisher()
    sink = FailingSink()
    stream = RankStream(context, engine.endpoints, "", sink)
    stream.start()
    await engine.wait_subscribed()
    engine.publish(4)
    with caplog.at_level(logging.ERROR):
        await until(lambda: sink.run == engine.log, "the batches behind the failure")
    assert "sink failed" in caplog.text
    await stream.close()


async def test_what_must_not_wait_for_a_slice_is_done_ahead_of_each() -> None:
    pump, order = running_pump(), list[str]()

    class Source:
        def drain(self, until_s: float) -> bool:
            order.append("slice")
            while time.monotonic() < until_s:
                pass
            return len(order) < 4

    def ahead() -> None:
        order.append("ahead")

    pump.before.add(ahead)
    pump.wake(Source())
    await until(lambda: len(order) == 4, "two slices")
    pump.before.remove(ahead)
    assert order == ["ahead", "slice"] * 2


async def test_the_pump_is_the_loops_own() -> None:
    assert running_pump() is running_pump()
