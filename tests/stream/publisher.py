"""A real publisher on loopback (XPUB, and a ROUTER served by a thread), and a sink that remembers."""

from __future__ import annotations

import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field

import zmq

from router.contract.descriptor import RankEndpoints
from router.stream.replay import END_SEQ
from tests.support.waiting import until

HOST = "127.0.0.1"


@dataclass
class Recorder:
    """A RankSink and LoadSink. `run` holds (seq, payload) applied since the last reset."""

    run: list[tuple[int, bytes]] = field(default_factory=list)
    resets: list[str] = field(default_factory=list)
    states: list[tuple[str, str, str]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    loads: list[bytes] = field(default_factory=list)

    def apply(self, seq: int, payload: bytes) -> None:
        self.run.append((seq, payload))

    def rested(self) -> None:
        self.counted = len(self.run)

    def reset(self, reason: str) -> None:
        self.resets.append(reason)
        self.run = []

    def state_changed(self, state: str, reason: str, history: str) -> None:
        self.states.append((state, reason, history))

    def lost(self, batches: int) -> None:
        self.counts["lost"] += batches

    def gap(self) -> None:
        self.counts["gap"] += 1

    def restarted(self) -> None:
        self.counts["restarted"] += 1

    def replayed(self, outcome: str) -> None:
        self.counts[f"replayed {outcome}"] += 1

    def rejected(self, why: str) -> None:
        self.counts[f"rejected {why}"] += 1

    def load(self, payload: bytes) -> None:
        self.loads.append(payload)

    @property
    def state(self) -> str:
        return self.states[-1][0]

    @property
    def history(self) -> str:
        return self.states[-1][2]

    @property
    def seqs(self) -> list[int]:
        return [seq for seq, _ in self.run]


class Publisher:
    """One publisher process. Its replay buffer is `log`; numbers in `hidden` are left out of what replay answers."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], *, topic: bytes = b"", replay: str | None = None, port: int = 0
    ) -> None:
        """`replay`: None, "seq" or "topic" (the two reply forms). `port` 0: any free one."""
        self.context = context
        self.topic = topic
        self.form = replay
        self.log: list[tuple[int, bytes]] = []
        self.hidden: set[int] = set()
        self.end_mark = True
        self.answer = threading.Event()
        self.answer.set()
        self.asked: list[int] = []
        self.next_seq = 0
        self.subscribed = 0
        self._open(port)
        self.replay_port = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if replay is not None:
            router: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
            router.set_hwm(0)
            self.replay_port = router.bind_to_random_port(f"tcp://{HOST}")
            self._thread = threading.Thread(target=self._serve, args=(router,))
            self._thread.start()

    def _open(self, port: int) -> None:
        self.pub: zmq.Socket[bytes] = self.context.socket(zmq.XPUB)
        self.pub.setsockopt(zmq.XPUB_VERBOSE, 1)
        self.pub.setsockopt(zmq.LINGER, 0)
        self.pub.set_hwm(0)
        deadline_s = time.monotonic() + 5
        while True:
            try:
                self.pub.bind(f"tcp://{HOST}:{port or '*'}")
                break
            except zmq.ZMQError:
                assert time.monotonic() < deadline_s, f"port {port} stays taken"
        self.port = int(self.pub.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2].strip("\0"))

    @property
    def endpoints(self) -> RankEndpoints:
        replay = f"tcp://{HOST}:{self.replay_port}" if self.replay_port else None
        return RankEndpoints(0, f"tcp://{HOST}:{self.port}", replay, None, None)

    async def wait_subscribed(self, times: int = 1) -> None:
        def seen() -> bool:
            with suppress(zmq.Again):
                while True:
                    self.subscribed += self.pub.recv(zmq.NOBLOCK)[:1] == b"\x01"
            return self.subscribed >= times

        await until(seen, "a subscription")

    def number(self, payload: bytes | None = None) -> tuple[int, bytes]:
        """A batch that takes its number and goes to the replay buffer, and is not published."""
        batch = (self.next_seq, b"batch %d of %d" % (self.next_seq, id(self.log)) if payload is None else payload)
        self.log.append(batch)
        self.next_seq += 1
        return batch

    def publish(self, count: int = 1, payload: bytes | None = None) -> None:
        for _ in range(count):
            seq, body = self.number(payload)
            self.pub.send_multipart([self.topic, seq.to_bytes(8, "big"), body])

    def restart(self, next_seq: int = 0) -> None:
        """The process dies and another one binds the same port; its replay buffer is empty."""
        self.pub.close(0)
        self.log = []
        self.next_seq = next_seq
        self.subscribed = 0
        self._open(self.port)

    def _serve(self, router: zmq.Socket[bytes]) -> None:
        with router:
            while not self._stop.is_set():
                if not router.poll(10):
                    continue
                client, empty, start = router.recv_multipart()
                self.asked.append(int.from_bytes(start, "big"))
                while not self.answer.wait(0.01) and not self._stop.is_set():
                    pass
                topic = [self.topic] if self.form == "topic" else []
                for seq, payload in list(self.log):
                    if seq >= self.asked[-1] and seq not in self.hidden:
                        router.send_multipart([client, empty, *topic, seq.to_bytes(8, "big"), payload])
                if self.end_mark:
                    none = [b""] if self.form == "topic" else []
                    router.send_multipart([client, empty, *none, END_SEQ.to_bytes(8, "big"), b""])

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self.pub.close(0)
