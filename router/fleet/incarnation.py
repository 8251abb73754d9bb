"""What runs behind a worker's URL now: made from /server_info, replaced whole when that shows another process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any

import zmq

from router.config.schema import MAX_DP_SIZE
from router.contract.descriptor import Descriptor, RankEndpoints, parse_descriptor
from router.contract.server_info import ServerInfo
from router.errors import ContractError
from router.fleet.observer import FleetObserver
from router.fleet.rank import Closable, Rank
from router.fleet.worker import Worker
from router.index.prefix import PrefixIndex
from router.index.scheme import WorkerScheme
from router.index.vouch import Chains
from router.stream.loadstream import LoadStream
from router.stream.subscriber import RankStream

log = logging.getLogger("router.fleet")


class Incarnations:
    """Begins and ends them. A new one owns nothing of the old: slots, ledgers, streams, load and scheme are new
    objects, and the old ranks ignore whatever is still on its way to them (design section 3)."""

    def __init__(
        self,
        index: PrefixIndex,
        *,
        context: zmq.Context[zmq.Socket[bytes]],
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        observer: FleetObserver,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        poll: Callable[[Worker], Closable | None] = lambda worker: None,
    ) -> None:
        """`spawn` runs the closing of streams to its end. `poll` makes what asks an engine that announces no load."""
        self.chains = Chains(index.discard)
        """Shared by all ranks of the fleet."""
        self._index = index
        self._context = context
        self._clock = clock
        self._wall_clock = wall_clock
        self._observer = observer
        self._spawn = spawn
        self._poll = poll

    def adopt(self, worker: Worker, info: ServerInfo) -> bool:
        """Takes a /server_info answer. True when it shows another process, or the first: an incarnation then began."""
        try:
            descriptor: Descriptor | None = parse_descriptor(info.kv_events, worker.url, worker.settings.kv_events)
            problem = ""
        except ContractError as error:
            descriptor, problem = None, str(error)
        change = _change(worker, info, descriptor)
        worker.take_info(info)
        if change is None:
            worker.roles.check(worker)
            return False
        before = worker.ranks
        self.end(worker)
        worker.incarnation += 1
        worker.descriptor = descriptor
        if worker.incarnation > 1 or worker.health.down:
            worker.health.reborn()
        log.info("%s: incarnation %d (%s)", worker.url, worker.incarnation, change)
        if descriptor is None:
            log.warning("%s: routed by load only: %s", worker.url, problem)
        self._begin(worker, info, descriptor, problem)
        self._carry_over(worker, before)
        worker.roles.check(worker)
        return True

    def end(self, worker: Worker) -> None:
        """Forgets everything of the present incarnation at once; its sockets close in the background."""
        for rank in worker.ranks:
            for stream in rank.retire():
                self._spawn(stream.close())
        worker.forget()

    def _begin(self, worker: Worker, info: ServerInfo, descriptor: Descriptor | None, problem: str) -> None:
        if descriptor is None:
            # A decode engine without a radix cache announces nothing; its ranks are chosen and named all the same.
            count = min(info.dp_size, MAX_DP_SIZE) if worker.role == "decode" else 1
            endpoints = tuple(RankEndpoints(rank, None, None, None, problem) for rank in range(count))
        else:
            endpoints = descriptor.ranks
            worker.scheme = WorkerScheme(descriptor.block_size, info.engine, info.bigram)
            for note in descriptor.notes:
                log.warning("%s: %s", worker.url, note)
        worker.ranks = tuple(self._rank(worker, at, several=len(endpoints) > 1) for at in endpoints)
        for rank, at in zip(worker.ranks, endpoints, strict=True):
            self._listen(rank, at, descriptor)
        poll = self._poll(worker) if info.engine == "vllm" else None
        if poll is not None:
            worker.ranks[0].streams.append(poll)
            poll.start()

    def _carry_over(self, worker: Worker, before: tuple[Rank, ...]) -> None:
        for old in before:
            if old.number < len(worker.ranks):
                # Restarts are counted over the life of the worker: within one incarnation there would hardly be any.
                worker.ranks[old.number].restarts += old.restarts
            else:
                self._observer.rank_removed(worker.url.text, old.number)

    def _rank(self, worker: Worker, at: RankEndpoints, *, several: bool) -> Rank:
        return Rank(
            worker,
            at.rank,
            pin=at.rank if several else None,
            off=None if at.events is not None else at.problem,
            index=self._index,
            clock=self._clock,
            wall_clock=self._wall_clock,
            observer=self._observer,
            endpoints=at,
            chains=self.chains,
        )

    def _listen(self, rank: Rank, at: RankEndpoints, descriptor: Descriptor | None) -> None:
        if descriptor is None:
            return
        if at.events is not None:
            rank.streams.append(RankStream(self._context, at, descriptor.topic, rank, clock=self._clock))
        if at.load is not None:
            rank.streams.append(LoadStream(at.load, descriptor.load_topic, rank))
        for stream in rank.streams:
            stream.start()


def _change(worker: Worker, info: ServerInfo, descriptor: Descriptor | None) -> str | None:
    """Why this answer comes from another process than the last one; None when it need not."""
    old = worker.info
    if old is None:
        return "first description"
    if info.startup_fingerprint != old.startup_fingerprint:
        return "startup_time changed: the engine restarted"
    if descriptor != worker.descriptor:
        return "the KV event descriptor changed"
    if info.role != old.role:
        return f"the role changed in place from {old.role} to {info.role}"
    if _model(info) != _model(old):
        return "the model changed"
    # vLLM gives no startup_time. Health was lost and is back; only a stream that went on shows the same process.
    back = worker.stale and worker.health.passing
    if back and not info.startup_fingerprint and not worker.heard_since_loss():
        return "health was lost, and nothing shows that this is still the same process"
    return None


def _model(info: ServerInfo) -> tuple[object, ...]:
    """vLLM's served names change when an adapter is loaded: that is no other process."""
    names = info.model_names if info.engine != "vllm" else ()
    return info.engine, info.version, info.model_path, names, info.dp_size, info.bigram
