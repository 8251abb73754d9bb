"""Publishes this router's load and placements and takes in the siblings': one PUB socket, one SUB socket a sibling.

Processes of a machine meet over ipc://, replicas over tcp://; nothing else differs. A change is told within
`CHANGES_EVERY_S`, so that a burst is one frame; PUB drops for a sibling that does not read, which the next whole frame
heals.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import zmq

from router.config import Config
from router.contract.url import tcp_endpoint
from router.errors import ConfigError
from router.fleet.rank import Rank
from router.fleet.registry import Fleet
from router.fleet.worker import Worker
from router.observe.logs import RateLimit
from router.observe.metrics import Metrics
from router.policy.load import RankLoad
from router.policy.predicted import PredictedBlocks
from router.siblings.frames import (
    LOAD_TOPIC,
    REPLY_TOPIC,
    SENDER_BYTES,
    Ask,
    Entry,
    Frame,
    FrameRefused,
    Message,
    Reply,
    Senders,
    Take,
    mac_key,
    opened,
    opened_reply,
    seal,
)
from router.siblings.placements import Placements
from router.siblings.snapshots import Snapshots
from router.siblings.table import Place, Table
from router.stream.subscription import Subscription

log = logging.getLogger("router.siblings")

CHANGES_EVERY_S = 0.012
"""A change is seen by the others within 20 ms; more often would only cost more: a frame is 0.2 ms of work for both."""
WHOLE_EVERY_S = 0.5
RESOLVE_EVERY_S = 5.0
LINK_S = 0.5
"""How long a question for a snapshot waits for its way back to be connected."""
SEND_LIMIT = 1000
"""Messages queued for a sibling that does not read, and received but not yet read."""
LOG_EVERY_S = 60.0
REFUSALS = {
    "mac": "its siblings.key is another one, or it is no router of this fleet",
    "malformed": "it is no frame of this version",
    "clock": "its clock and ours are over 30 s apart: a load report that old is worth nothing",
    "senders": "too many routers were heard",
}


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where siblings meet. `listen`: the PUB socket's endpoint (tcp:// or ipc://). `names`: DNS names whose every
    address is a sibling, at `port`; our own address among them does no harm."""

    listen: str
    peers: tuple[str, ...]
    key: bytes
    names: tuple[str, ...] = ()
    port: int = 0
    snapshots: bool = True


def meeting_of(config: Config) -> Meeting | None:
    """Of a router that is one process; None when it has no siblings."""
    siblings = config.siblings
    if siblings.listen is None or siblings.key is None:
        return None
    return Meeting(
        listen=siblings.listen,
        peers=siblings.peers,
        key=mac_key(siblings.key.reveal()),
        names=() if siblings.dns is None else (siblings.dns,),
        port=int(siblings.listen.rpartition(":")[2]),
        snapshots=siblings.snapshots,
    )


def publisher_at(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> zmq.Socket[bytes]:
    """Raises ConfigError when the address cannot be had."""
    publisher = context.socket(zmq.PUB)
    publisher.setsockopt(zmq.LINGER, 0)
    publisher.setsockopt(zmq.SNDHWM, SEND_LIMIT)
    publisher.setsockopt(zmq.IPV6, int("[" in endpoint))
    try:
        publisher.bind(endpoint)
    except zmq.ZMQError as error:
        publisher.close(0)
        raise ConfigError(f"siblings.listen: cannot bind {endpoint}: {error.strerror}") from None
    return publisher


class Exchange:
    """`start` and `close` on the event loop; `watch` for every worker that was described, `placed` for every prompt
    whose blocks are predicted. Siblings' placements go into `predicted` beside our own."""

    def __init__(
        self,
        meeting: Meeting,
        fleet: Fleet,
        metrics: Metrics,
        predicted: PredictedBlocks,
        *,
        context: zmq.Context[zmq.Socket[bytes]],
        share_tau_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._meeting = meeting
        self._fleet = fleet
        self._metrics = metrics
        self._context = context
        self._clock = clock
        self._seq = 0
        self._replies_seq = 0
        self._senders = Senders()
        self._repliers = Senders()
        self._placements = Placements(predicted, self._slot)
        self._table = Table(os.urandom(SENDER_BYTES), self._account, share_tau_s, self._placements)
        self._publisher: zmq.Socket[bytes] | None = None
        self._peers: dict[str, Subscription] = {}
        self._flush: asyncio.TimerHandle | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._known: set[bytes] = set()
        self._log_limit = RateLimit(LOG_EVERY_S, clock)
        self._snapshots = Snapshots(fleet, self, metrics, clock) if meeting.snapshots else None
        self._reply_peers: list[tuple[Subscription, _Listener]] = []
        metrics.siblings.set_function(lambda: len(self._table.senders))

    # ---- life

    def start(self) -> None:
        """Raises ConfigError when the address cannot be had."""
        self._publisher = publisher_at(self._context, self._meeting.listen)
        for peer in self._meeting.peers:
            self._connect(peer)
        self._tasks.append(asyncio.create_task(self._beat(), name="siblings"))
        if self._snapshots is not None:
            self._tasks.append(asyncio.create_task(self._snapshots.run(), name="snapshots"))
        if self._meeting.names:
            self._tasks.append(asyncio.create_task(self._follow_names(), name="siblings by name"))

    async def close(self) -> None:
        """What is under way here counts nowhere else from now on: siblings notice the silence."""
        if self._flush is not None:
            self._flush.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._snapshots is not None:
            await self._snapshots.close()
        await self.ignore_replies()
        await asyncio.gather(*(peer.close() for peer in self._peers.values()))
        if self._publisher is not None:
            self._publisher.close(0)

    def watch(self, worker: Worker) -> None:
        """The worker was described; its ranks may be new ones."""
        for rank in worker.ranks:
            if rank.account.on_change is None:
                self._table.watch((worker.url.text, rank.number), rank.account, self._wake)

    def describe(self) -> list[dict[str, Any]]:
        return self._table.describe(self._clock())

    def placed(self, rank: Rank, keys: Sequence[int]) -> None:
        """A prompt went to `rank`, which was counted in its account just before: that frame tells of the blocks too."""
        worker = rank.worker
        if worker.scheme is not None:
            self._placements.made(worker.url.text, rank.number, worker.scheme.scheme, keys)

    def _rank(self, url: str, number: int) -> Rank | None:
        worker = self._fleet.worker(url)
        return None if worker is None or number >= len(worker.ranks) else worker.ranks[number]

    def _account(self, place: Place) -> RankLoad | None:
        rank = self._rank(*place)
        return None if rank is None else rank.account

    def _slot(self, url: str, number: int, scheme: tuple[str, int, bool]) -> int | None:
        """As for own placements: only a rank that may earn credit."""
        rank = self._rank(url, number)
        if rank is None or not rank.trusted or rank.worker.scheme is None or rank.worker.scheme.scheme != scheme:
            return None
        return rank.slot

    # ---- out

    def _wake(self) -> None:
        if self._flush is None:
            self._flush = asyncio.get_running_loop().call_later(CHANGES_EVERY_S, self._tell_changes)

    def _tell_changes(self) -> None:
        self._flush = None
        self._tell(self._table.changed(self._clock()), whole=False)

    async def _beat(self) -> None:
        while True:
            self._tell(self._table.everything(self._clock()), whole=True)
            self._expire()
            await asyncio.sleep(WHOLE_EVERY_S)

    def _tell(self, entries: list[Entry], *, whole: bool) -> None:
        self._seq += 1
        self._send(Frame(self.sender, self._seq, time.time(), whole, entries, self._placements.told()))
        self._metrics.sibling_frames.inc("sent")

    def _send(self, message: Message | Reply) -> None:
        if self._publisher is not None and not self._publisher.closed:
            self._publisher.send_multipart(seal(self._meeting.key, message), zmq.NOBLOCK)  # PUB drops, never blocks

    def _expire(self) -> None:
        for sender in self._table.expire(self._clock()):
            self._known.discard(sender)
            log.info("sibling %s is not heard any more", sender.hex()[:8])

    # ---- in

    def heard(self, mac: bytes, body: bytes) -> None:
        """One message from any sibling."""
        try:
            message = opened(self._meeting.key, mac, body)
            if message.sender == self.sender:
                return
            self._senders.check(message, time.time())
            if not isinstance(message, Frame):
                if self._snapshots is not None:
                    self._snapshots.heard(message)
                return
            if not self._table.take(message, self._clock()):
                raise FrameRefused("senders")
        except FrameRefused as refused:
            self.refused(str(refused))
            return
        self._metrics.sibling_frames.inc("taken")
        if message.sender not in self._known:
            self._known.add(message.sender)
            log.info("sibling %s is heard", message.sender.hex()[:8])

    def heard_reply(self, mac: bytes, body: bytes) -> None:
        try:
            reply = opened_reply(self._meeting.key, mac, body)
            if reply.sender == self.sender:
                return
            self._repliers.check(reply, time.time())
        except FrameRefused as refused:
            self.refused(str(refused))
            return
        if self._snapshots is not None:
            self._snapshots.replied(reply)

    def refused(self, why: str) -> None:
        """`why` is a label of the metric."""
        self._metrics.sibling_frames.inc(why)
        # Over two paths (a name that leads to ourselves, or to a sibling process) everything comes twice.
        if why in REFUSALS and self._log_limit.allows(why):
            log.warning("a sibling's message was refused: %s", REFUSALS[why])

    # ---- router.siblings.snapshots.Channel

    @property
    def sender(self) -> bytes:
        return self._table.sender

    @property
    def has_siblings(self) -> bool:
        return bool(self._table.senders)

    def ask(self, make: Callable[[int, float], Ask | Take]) -> None:
        self._seq += 1
        self._send(make(self._seq, time.time()))

    def reply(self, make: Callable[[int, float], Reply]) -> None:
        self._replies_seq += 1
        self._send(make(self._replies_seq, time.time()))

    async def hear_replies(self) -> None:
        """Returns once somebody is connected; not every peer need be there."""
        for endpoint in self._peers:
            listener = _Listener(self.heard_reply, self.refused)
            subscription = Subscription(endpoint, REPLY_TOPIC.decode(), listener)
            self._reply_peers.append((subscription, listener))
            subscription.start()
        until_s = self._clock() + LINK_S
        links = [listener for _, listener in self._reply_peers]
        while self._clock() < until_s and not all(link.is_linked for link in links):  # noqa: ASYNC110  (of several)
            await asyncio.sleep(0.01)

    async def ignore_replies(self) -> None:
        peers, self._reply_peers = self._reply_peers, []
        await asyncio.gather(*(subscription.close() for subscription, _ in peers))

    # ---- whom to hear

    def _connect(self, endpoint: str) -> None:
        peer = Subscription(endpoint, LOAD_TOPIC.decode(), _Listener(self.heard, self.refused))
        self._peers[endpoint] = peer
        peer.start()

    async def _follow_names(self) -> None:
        by_name: set[str] = set()
        while True:
            found: set[str] = set()
            try:
                for name in self._meeting.names:
                    found |= await _addresses(name, self._meeting.port)
            except OSError as error:
                if self._log_limit.allows("dns"):
                    log.warning("siblings.dns: %s; those that are known stay", error)
                found = by_name
            for endpoint in found - self._peers.keys():
                self._connect(endpoint)
            for endpoint in by_name - found:
                await self._peers.pop(endpoint).close()
            by_name = found - set(self._meeting.peers)
            await asyncio.sleep(RESOLVE_EVERY_S)


class _Listener:
    """Implements router.stream.subscription.Subscriber: messages have no order worth keeping."""

    def __init__(self, heard: Callable[[bytes, bytes], None], refused: Callable[[str], None]) -> None:
        self.is_linked = False
        self._heard = heard
        self._refused = refused

    def linked(self) -> None:
        self.is_linked = True

    def unlinked(self, why: str) -> None:
        self.is_linked = False

    def message(self, seq: bytes, payload: bytes) -> bool:
        self._heard(seq, payload)
        return False

    def rejected(self, why: str) -> None:
        self._refused("malformed")

    def step(self) -> bool:
        return False

    def rested(self) -> None: ...


async def _addresses(name: str, port: int) -> set[str]:
    """Raises OSError."""
    found: Sequence[Any] = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return {tcp_endpoint(str(address[0]), port) for *_, address in found}
