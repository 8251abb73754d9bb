"""The fleet: which workers there are, what runs behind each URL now, and who can be given a request."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine
from typing import Any

import aiohttp
import zmq

from router.config import Config, Secret, WorkerConfig
from router.contract.server_info import ServerInfo
from router.contract.url import WorkerUrl
from router.errors import ConfigError, RouterError
from router.fleet.incarnation import Incarnations
from router.fleet.loadpoll import LoadPoll
from router.fleet.observer import FleetObserver
from router.fleet.probe import Prober
from router.fleet.worker import Hold, Worker
from router.index.prefix import PrefixIndex
from router.index.vouch import Chains
from router.pairs.pools import Pools, by_role

log = logging.getLogger("router.fleet")

MAX_REMEMBERED_MODELS = 1024
"""Names of removed workers' models, kept to tell "down" (503) from "never heard of" (404)."""
CONNECTION_FAULTS = frozenset({"connect", "reset", "timeout", "protocol"})
SWEEP_BLOCKS = 20_000
"""Blocks of cleared or removed ranks that are given back in one turn of the event loop."""
SWEEP_EVERY_S = 0.5
SWEEP_PAUSE_S = 0.01


class Fleet:
    """All mutable state is `_workers` (by normalised URL), each worker's prober, and what is derived from them.

    Everything but `close` is synchronous and runs on the event loop it was started on.
    """

    def __init__(
        self,
        config: Config,
        index: PrefixIndex,
        *,
        context: zmq.Context[zmq.Socket[bytes]],
        session: aiohttp.ClientSession,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        rng: random.Random,
        observer: FleetObserver,
        on_described: Callable[[Worker], None] = lambda worker: None,
    ) -> None:
        """`on_described` is called whenever a worker's /server_info was read.

        `session` comes from `router.fleet.ask.probe_session`. `clock` is monotonic, `wall_clock` Unix (s)."""
        self._config = config
        self._worker_api_key = config.worker_api_key
        self._index = index
        self._session = session
        self._clock = clock
        self._rng = rng
        self._observer = observer
        self._on_described = on_described
        self._workers: dict[str, Worker] = {}
        self._probers: dict[str, Prober] = {}
        self._known: dict[str, None] = {}
        self._routable: dict[str | None, list[Worker]] = {}
        self._pools: dict[str | None, Pools[Worker]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._sweeper: asyncio.Task[None] | None = None
        self._incarnations = Incarnations(
            index,
            context=context,
            clock=clock,
            wall_clock=wall_clock,
            observer=observer,
            spawn=self._spawn,
            poll=self._load_poll,
        )

    # ---- life

    def start(self) -> None:
        """Adds the configured workers and begins to watch them."""
        self._sweeper = asyncio.create_task(self._sweep(), name="index sweep")
        for settings in self._config.workers:
            self.add(settings)

    async def close(self) -> None:
        """Removes every worker and waits until all sockets and tasks are gone."""
        for worker in list(self._workers.values()):
            self.remove(worker.url.text)
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)
        while self._closing:
            await asyncio.gather(*self._closing, return_exceptions=True)

    # ---- membership

    def add(self, settings: WorkerConfig, *, identity: str | None = None) -> tuple[Worker, bool]:
        """The worker, and whether it is new. The same URL with the same settings is the same worker (case 87).

        `identity` names the process where discovery knows it (pod UID and restarts); it is shown in GET /workers.
        Raises RouterError("conflict") when it is there with other settings.
        """
        name = settings.url.text
        present = self._workers.get(name)
        if present is not None:
            if present.settings != settings:
                raise RouterError("conflict", f"{name} is registered with other settings: DELETE /workers?url={name}")
            return present, False
        worker = Worker(
            settings,
            authorization=self._authorization(settings),
            unhealthy_after=self._config.fleet.unhealthy_after,
            clock=self._clock,
            observer=self._observer,
            identity=identity,
        )
        prober = Prober(
            worker,
            self._session,
            self._config.fleet,
            rng=self._rng,
            on_info=lambda info: self._described(worker, info),
            on_look=lambda: self._settle(worker),
        )
        worker.on_anomaly = prober.look_at_info
        worker.max_inflight = settings.max_inflight or self._config.admission.max_inflight_per_worker
        self._workers[name] = worker
        self._probers[name] = prober
        self._remember(worker)
        self._observer.worker_state(name, worker.state)
        prober.start()
        log.info("%s: added", name)
        return worker, True

    def remove(self, url: str) -> bool:
        """False when there is no such worker. From here on it gets no new request, its blocks are gone, and whatever
        its streams or probes still deliver changes nothing; requests under way are not touched.

        Raises RouterError("bad_request") for what is no worker URL.
        """
        name = _normalised(url)
        worker = self._workers.pop(name, None)
        if worker is None:
            return False
        worker.removed = True
        worker.settle()
        self._changed()
        self._spawn(self._probers.pop(name).close())
        self._incarnations.end(worker)
        self._observer.worker_removed(name)
        log.info("%s: removed", name)
        return True

    def replace(self, settings: WorkerConfig, *, identity: str) -> Worker:
        """Another process answers at this URL now, or with other settings: nothing of the old worker is kept but the
        count of its incarnations (case 110)."""
        before = self.worker(settings.url.text)
        self.remove(settings.url.text)
        worker, _ = self.add(settings, identity=identity)
        worker.incarnation = before.incarnation if before is not None else 0
        return worker

    def hold(self, worker: Worker, hold: Hold | None) -> None:
        """From here on the worker gets no new request; None gives it back to what its own health says."""
        worker.hold = hold
        self._settle(worker)

    def set_worker_api_key(self, key: Secret | None) -> None:
        """Replaces `worker_api_key`, for every worker without a key of its own."""
        self._worker_api_key = key
        for worker in self._workers.values():
            worker.authorization = self._authorization(worker.settings)

    # ---- queries

    @property
    def chains(self) -> Chains:
        """What is known of which block follows which."""
        return self._incarnations.chains

    @property
    def workers(self) -> list[Worker]:
        """In the order they were added."""
        return list(self._workers.values())

    def worker(self, url: str) -> Worker | None:
        """By normalised URL."""
        return self._workers.get(url)

    def routable(self, model: str | None) -> list[Worker]:
        """Ready workers that serve `model` (all of them for None), in the order they were added. Not to be changed."""
        found = self._routable.get(model)
        if found is None:
            found = [w for w in self._workers.values() if w.routable and (model is None or w.serves(model))]
            if found:  # only names that are served are kept, and not every `base:adapter` (case 96)
                _make_room(self._routable)
                self._routable[model] = found
        return found

    def pools(self, model: str | None) -> Pools[Worker]:
        """`routable(model)` by role."""
        found = self._pools.get(model)
        if found is None:
            workers = self.routable(model)
            found = by_role(workers)
            if workers:
                _make_room(self._pools)
                self._pools[model] = found
        return found

    def known_model(self, model: str) -> bool:
        """Whether a worker, even one that is down or was removed, serves or served it (case 93)."""
        return model in self._known or model.rpartition(":")[0] in self._known

    def models(self) -> list[str]:
        """Every served name of the present workers once, sorted."""
        return sorted({name for worker in self._workers.values() for name in worker.models})

    def describe(self) -> list[dict[str, Any]]:
        """`workers` of GET /workers."""
        return [worker.describe() for worker in self._workers.values()]

    # ---- what requests met

    def fault(self, worker: Worker, kind: str) -> None:
        """A request met a fault (router.proxy.plan.Fault) of the worker.

        Two in a row that broke the connection take it out at once; it is back when /health and /server_info answered. A
        5xx is an answer and counts in the worker's breaker, which is ignored when every worker's is open: a client that
        knows how to get one must not be able to take the service down (case 89).
        """
        if worker.removed:
            return
        if kind not in CONNECTION_FAULTS:
            worker.health.served()
            tripped = worker.breaker.tripped
            worker.breaker.fault(self._clock())
            if worker.breaker.tripped is not tripped:
                self._changed()
            return
        worker.health.fault(kind)
        if worker.health.down:
            self._settle(worker)
            self._probers[worker.url.text].look_at_health()

    def served(self, worker: Worker) -> None:
        """The worker answered a request, with whatever status."""
        worker.health.served()
        breaker = worker.breaker
        tripped = breaker.tripped
        breaker.served()
        if tripped:
            self._changed()

    # ---- inside

    def _changed(self) -> None:
        """Who is routable, or as what, may be another now; or whose breaker is closed, see `candidates.Roster`."""
        self._routable.clear()
        self._pools.clear()

    def _load_poll(self, worker: Worker) -> LoadPoll | None:
        interval_s = self._config.fleet.load_poll_s
        return LoadPoll(worker, self._session, interval_s=interval_s, clock=self._clock) if interval_s else None

    def _authorization(self, settings: WorkerConfig) -> str | None:
        key = settings.api_key or self._worker_api_key
        return None if key is None else f"Bearer {key.reveal()}"

    def _described(self, worker: Worker, info: ServerInfo) -> None:
        if worker.removed:
            return
        if self._incarnations.adopt(worker, info):
            self._probers[worker.url.text].look_at_health()
        self._remember(worker)
        self._changed()
        self._on_described(worker)

    def _settle(self, worker: Worker) -> None:
        if worker.removed:
            return
        changed = worker.settle()
        worker.watch()
        if not changed:
            return
        self._changed()
        self._observer.worker_state(worker.url.text, worker.state)
        level = logging.WARNING if worker.state == "unhealthy" else logging.INFO
        log.log(level, "%s: %s%s", worker.url, worker.state, f" ({worker.reason})" if worker.reason else "")

    def _remember(self, worker: Worker) -> None:
        for name in worker.names:
            self._known.pop(name, None)
            self._known[name] = None
        while len(self._known) > MAX_REMEMBERED_MODELS:
            del self._known[next(iter(self._known))]

    def _spawn(self, closing: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(closing)
        self._closing.add(task)
        task.add_done_callback(self._closed)

    def _closed(self, task: asyncio.Task[None]) -> None:
        self._closing.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("closing a stream failed", exc_info=task.exception())

    async def _sweep(self) -> None:
        """Gives the memory of cleared and removed ranks back in slices, so that requests never wait for it."""
        while True:
            pause_s = SWEEP_PAUSE_S if self._index.sweep(SWEEP_BLOCKS) else SWEEP_EVERY_S
            await asyncio.sleep(pause_s)


def _make_room(known: dict[str | None, Any]) -> None:
    if len(known) >= MAX_REMEMBERED_MODELS:
        known.clear()


def _normalised(url: str) -> str:
    try:
        return WorkerUrl.parse(url).text
    except ConfigError as error:
        raise RouterError("bad_request", str(error)) from None
