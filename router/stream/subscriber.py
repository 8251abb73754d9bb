"""One rank's event stream: its subscription, a DEALER while something is asked, one timer.

All decisions are the tracker's (`sequence`); here its actions meet the sink and the sockets.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

import zmq

from router.contract.descriptor import RankEndpoints
from router.stream.actions import (
    Action,
    Apply,
    AskReplay,
    CancelReplay,
    Gap,
    Lost,
    Rejected,
    Replayed,
    Reset,
    Restarted,
    StateChanged,
)
from router.stream.pump import running_pump
from router.stream.replay import SEQ_BYTES, StreamLimits, decode_reply, encode_request
from router.stream.sequence import SequenceTracker
from router.stream.sink import RankSink
from router.stream.sockets import Dealer
from router.stream.subscription import Subscription

REPLAY_LIMIT = 10_000
"""Answers queued while a replay runs. A ROUTER drops what a slow reader leaves (engine contract, section 3)."""
DRAIN_BATCHES = 16
"""Held batches applied between two looks at the clock."""


class RankStream:
    """Everything one rank publishes, given to `sink` exactly once and in order. Needs `start` and `close`.

    `topic` must EQUAL the topic frame: the SUB filter alone would let every topic through that begins with it. The
    sink's methods are called on the event loop, only between `start` and `close`.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoints: RankEndpoints,
        topic: str,
        sink: RankSink,
        *,
        clock: Callable[[], float] = time.monotonic,
        limits: StreamLimits | None = None,
    ) -> None:
        """`clock`: monotonic seconds. Raises ValueError when the rank has no event endpoint."""
        if endpoints.events is None:
            raise ValueError(f"rank {endpoints.rank} has no event endpoint: {endpoints.problem}")
        self._context = context
        self._replay_endpoint = endpoints.replay
        self._sink = sink
        self._clock = clock
        self._tracker = SequenceTracker(
            endpoints.events, replay=endpoints.replay is not None, now_s=clock(), limits=limits
        )
        self._apply = sink.apply
        self._subscription = Subscription(endpoints.events, topic, self)
        self._asked: _ReplayAsk | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0
        self._closed = False

    @property
    def tracker(self) -> SequenceTracker:
        """For reading: state, reason, history, last_seq."""
        return self._tracker

    def start(self) -> None:
        """Connect, and keep connecting for ever. Call it once, on the running loop."""
        self._sink.state_changed(self._tracker.state, self._tracker.reason, self._tracker.history)
        self._subscription.start()
        self._arm_timer()

    async def close(self) -> None:
        """Close every socket and stop every task; the sink hears nothing more. May be called twice."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._close_ask()
        await self._subscription.close()

    # ---------------------------------------------------------------- incoming, from the subscription

    def linked(self) -> None:
        self._do(self._tracker.connected(self._clock()))

    def unlinked(self, why: str) -> None:
        self._do(self._tracker.disconnected(why, self._clock()))
        self._arm_timer()

    def message(self, seq: bytes, payload: bytes) -> bool:
        if len(seq) != SEQ_BYTES:
            self._sink.rejected("seq")
            return False
        number = int.from_bytes(seq)
        if self._tracker.in_line(number, payload):
            self._apply(number, payload)
            return False
        self._do(self._tracker.live(number, payload, self._clock()))
        return self._tracker.backlog

    def rejected(self, why: str) -> None:
        self._sink.rejected(why)

    def step(self) -> bool:
        if not self._tracker.backlog:
            return False
        self._do(self._tracker.drain(DRAIN_BATCHES, self._clock()))
        return True

    def rested(self) -> None:
        self._sink.rested()
        self._arm_timer()

    # ---------------------------------------------------------------- incoming, from the replay socket and the timer

    def replay_reply(self, ask: int, frames: list[bytes]) -> None:
        """One answer to `ask`, as the DEALER got it."""
        reply = decode_reply(frames)
        if reply is None:
            self._sink.rejected("replay")
        else:
            self._do(self._tracker.replay_batch(ask, reply.seq, reply.payload, self._clock()))

    def replay_rested(self) -> None:
        """The answers at hand are dealt with: what they made ready can be handed out."""
        self._sink.rested()
        self._arm_timer()
        if self._tracker.backlog:
            self._subscription.wake()

    def _tick(self) -> None:
        self._timer = None
        self._do(self._tracker.tick(self._clock()))
        self.replay_rested()

    def _arm_timer(self) -> None:
        """One timer. It never fires too late; when it fires too early (deadlines move on) it is set again."""
        deadline_s = self._tracker.deadline_s
        if deadline_s is None or self._closed or (self._timer is not None and self._timer_s <= deadline_s):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_s = deadline_s
        self._timer = asyncio.get_running_loop().call_later(max(0.0, deadline_s - self._clock()), self._tick)

    # ---------------------------------------------------------------- outgoing

    def _do(self, actions: Iterable[Action]) -> None:
        sink = self._sink
        for action in actions:
            match action:
                case Apply(seq, payload):
                    sink.apply(seq, payload)
                case Reset(reason):
                    sink.reset(reason)
                case StateChanged(state, reason, history):
                    sink.state_changed(state, reason, history)
                case AskReplay(ask, start):
                    self._open_ask(ask, start)
                case CancelReplay():
                    self._close_ask()
                case Gap():
                    sink.gap()
                case Lost(batches):
                    sink.lost(batches)
                case Restarted():
                    sink.restarted()
                case Replayed(outcome):
                    sink.replayed(outcome)
                case Rejected(why):
                    sink.rejected(why)

    def _open_ask(self, ask: int, start: int) -> None:
        self._close_ask()
        if self._replay_endpoint is not None:
            with suppress(zmq.ZMQError):  # no socket to be had: the tracker's time limit ends the wait
                self._asked = _ReplayAsk(
                    self, self._context, self._replay_endpoint, ask, start, ipv6=self._subscription.ipv6
                )

    def _close_ask(self) -> None:
        if self._asked is not None:
            self._asked.close()
            self._asked = None


class _ReplayAsk:
    """One request on a DEALER of its own: what answers it late goes nowhere (case 22)."""

    def __init__(
        self,
        stream: RankStream,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        ask: int,
        start: int,
        *,
        ipv6: bool,
    ) -> None:
        self._stream = stream
        self._ask = ask
        self._pump = pump = running_pump()
        self._socket: Dealer | None = Dealer(
            context, endpoint, ipv6=ipv6, receive_limit=REPLAY_LIMIT, wake=lambda: pump.wake(self)
        )
        self._socket.send(encode_request(start))

    def drain(self, until_s: float) -> bool:
        """For the pump. The stream may close this ask on the way."""
        more = True
        while more and self._socket is not None and time.monotonic() < until_s:
            frames = self._socket.receive()
            more = frames is not None
            if frames is not None:
                self._stream.replay_reply(self._ask, frames)
        self._stream.replay_rested()
        return more and self._socket is not None

    def close(self) -> None:
        self._pump.forget(self)
        if self._socket is not None:
            self._socket.close()
            self._socket = None
