"""The sockets of one rank's event stream: SUB and its monitor, a DEALER while something is asked, one timer.

All decisions are the tracker's (`sequence`); here its actions meet the sink and the sockets.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
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
from router.stream.pump import Pump, running_pump
from router.stream.replay import SEQ_BYTES, StreamLimits, decode_reply, encode_request
from router.stream.sequence import SequenceTracker
from router.stream.sink import RankSink
from router.stream.sockets import LinkChange, LoopSocket, speaks_ipv6_only

RECEIVE_LIMIT = 10_000
"""Messages libzmq queues for us; beyond it TCP pushes back and the publisher drops, which shows as a gap (case 20)."""
DRAIN_BATCHES = 16
"""Held batches applied between two looks at the clock."""
RESOLVE_RETRY_S = (0.5, 5.0)


class RankStream:
    """Everything one rank publishes, given to `sink` exactly once and in order. Needs `start` and `close`.

    `endpoints.events` must not be None. `topic` must EQUAL the topic frame: the SUB filter alone would let every topic
    through that begins with it. The sink's methods are called on the event loop, only between `start` and `close`.
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
        self._endpoint = endpoints.events
        self._replay_endpoint = endpoints.replay
        self._topic = topic.encode()
        self._sink = sink
        self._pump: Pump | None = None
        self._clock = clock
        self._tracker = SequenceTracker(
            endpoints.events, replay=endpoints.replay is not None, now_s=clock(), limits=limits
        )
        self._ipv6 = False
        self._opening: asyncio.Task[None] | None = None
        self._sub: LoopSocket | None = None
        self._changes: deque[LinkChange] = deque()
        self._stale_messages = 0  # at most so many of a lost connection's are still in the SUB socket
        self._asked: _ReplayAsk | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def tracker(self) -> SequenceTracker:
        """For reading: state, reason, history, last_seq."""
        return self._tracker

    def start(self) -> None:
        """Connect, and keep connecting for ever. Call it once, on the running loop."""
        self._pump = running_pump()
        self._sink.state_changed(self._tracker.state, self._tracker.reason, self._tracker.history)
        self._opening = asyncio.get_running_loop().create_task(self._open(), name=f"subscribe {self._endpoint}")
        self._arm_timer()

    async def close(self) -> None:
        """Close every socket and stop every task; the sink hears nothing more. May be called twice."""
        self._closed = True
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._close_ask()
        if self._pump is not None:
            self._pump.forget(self)
        if self._sub is not None:
            self._sub.close()
            self._sub = None

    async def _open(self) -> None:
        wait_s, longest_s = RESOLVE_RETRY_S
        while self._sub is None:
            try:
                self._ipv6 = await speaks_ipv6_only(self._endpoint)
                self._sub = LoopSocket(
                    self._context,
                    zmq.SUB,
                    self._endpoint,
                    ipv6=self._ipv6,
                    receive_limit=RECEIVE_LIMIT,
                    wake=self._wake,
                    subscribe=self._topic,
                    watch=True,
                )
            except (OSError, zmq.ZMQError) as error:
                self._do(self._tracker.disconnected(f"cannot connect to {self._endpoint}: {error}", self._clock()))
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, longest_s)

    # ---------------------------------------------------------------- incoming

    def _wake(self) -> None:
        if self._pump is not None:
            self._pump.wake(self)

    def drain(self, until_s: float) -> bool:
        """Handle queued connection changes and messages until `until_s`. For the pump."""
        sub, tracker = self._sub, self._tracker
        if sub is None or self._closed:
            return False
        now_s = self._clock()
        self._changes += sub.link_changes()
        more = True
        while more and time.monotonic() < until_s:
            if tracker.backlog:
                self._do(tracker.drain(DRAIN_BATCHES, now_s))
            elif self._changes and (self._stale_messages == 0 or not self._changes[0].up):
                self._link_changed(self._changes.popleft(), now_s)
            elif self._receive(sub, now_s):
                self._stale_messages = max(0, self._stale_messages - 1)
            else:
                self._stale_messages = 0
                more = bool(self._changes)
        self._arm_timer()
        return more

    def _link_changed(self, change: LinkChange, now_s: float) -> None:
        """A new connection is told only once the lost one's messages are read: never one process's as another's."""
        if change.up:
            self._do(self._tracker.connected(now_s))
        else:
            self._stale_messages = RECEIVE_LIMIT
            self._do(self._tracker.disconnected(f"{change.why} ({self._endpoint})", now_s))

    def _receive(self, sub: LoopSocket, now_s: float) -> bool:
        frames = sub.receive()
        if frames is None:
            return False
        if len(frames) != 3:
            self._sink.rejected("frames")
        elif frames[0] != self._topic:
            self._sink.rejected("topic")
        elif len(frames[1]) != SEQ_BYTES:
            self._sink.rejected("seq")
        else:
            self._do(self._tracker.live(int.from_bytes(frames[1], "big"), frames[2], now_s))
        return True

    def replay_reply(self, ask: int, frames: list[bytes]) -> None:
        """One answer to `ask`, as the DEALER got it."""
        reply = decode_reply(frames)
        if reply is None:
            self._sink.rejected("replay")
        else:
            self._do(self._tracker.replay_batch(ask, reply.seq, reply.payload, self._clock()))

    def replay_idle(self) -> None:
        """The DEALER's queue is empty for now: what the answers made ready can be handed out."""
        self._arm_timer()
        if self._tracker.backlog:
            self._wake()

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
                self._asked = _ReplayAsk(self, self._context, self._replay_endpoint, ask, start, self._ipv6)

    def _close_ask(self) -> None:
        if self._asked is not None:
            self._asked.close()
            self._asked = None

    def _arm_timer(self) -> None:
        """One timer, set for the earliest deadline known; it looks again when it fires."""
        deadline_s = self._tracker.deadline_s
        if self._timer is None and deadline_s is not None and not self._closed:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, deadline_s - self._clock()), self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._do(self._tracker.tick(self._clock()))
        self.replay_idle()


class _ReplayAsk:
    """One request on a DEALER of its own: what answers it late goes nowhere (case 22)."""

    def __init__(
        self,
        stream: RankStream,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        ask: int,
        start: int,
        ipv6: bool,
    ) -> None:
        self._stream = stream
        self._ask = ask
        self._pump = pump = running_pump()
        self._socket: LoopSocket | None = LoopSocket(
            context, zmq.DEALER, endpoint, ipv6=ipv6, receive_limit=RECEIVE_LIMIT, wake=lambda: pump.wake(self)
        )
        self._socket.send(encode_request(start))

    def drain(self, until_s: float) -> bool:
        """Handle queued answers until `until_s`. For the pump. The stream may close this ask on the way."""
        more = True
        while more and self._socket is not None and time.monotonic() < until_s:
            frames = self._socket.receive()
            more = frames is not None
            if frames is not None:
                self._stream.replay_reply(self._ask, frames)
        self._stream.replay_idle()
        return more and self._socket is not None

    def close(self) -> None:
        self._pump.forget(self)
        if self._socket is not None:
            self._socket.close()
            self._socket = None
