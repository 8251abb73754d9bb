"""`kv-router serve`: puts the parts together, listens, obeys signals, and takes everything down in order."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import random
import resource
import signal
import ssl
import sys
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from aiohttp import web

from router.admin import Admin
from router.admin_fanout import FanOutRoutes
from router.config import Config, DiscoveryConfig, Overrides, load_config
from router.core import RoutingCore
from router.engine_ask import EngineAsk
from router.errors import ConfigError, RouterError
from router.fleet.ask import probe_session
from router.fleet.discovery.run import Discovery
from router.fleet.registry import Fleet
from router.fleet.worker import Worker
from router.index.prefix import PrefixIndex
from router.observe.access import AccessLog
from router.observe.live import LivePage
from router.observe.logs import set_up
from router.observe.metrics import Metrics
from router.observe.requests import Requests
from router.observe.traces import Traces
from router.policy.cost import CostWeights
from router.policy.decide import Policy
from router.policy.predicted import PredictedBlocks
from router.prompt.models import ModelFacts
from router.prompt.source import PromptSource
from router.prompt.verify import Difference
from router.proxy.queue import QueueOptions
from router.proxy.server import ListenerOptions, PublicListener, parser_log
from router.proxy.upstream import UpstreamClient, UpstreamLimits
from router.stream.sockets import new_context

log = logging.getLogger("router")

ADMIN_SHUTDOWN_S = 1.0
THREAD_TURN_S = 0.001
"""A thread that renders or tokenises gives way to the event loop after so long; Python's own 5 ms would be a stall."""
MAX_PREPARED = 64
"""Kinds of engine whose tokenizer load was begun; the oldest is forgotten, and merely looked up again."""


class Service:
    """One running router. `start`, then `stop`; `reload` applies a changed configuration's workers and keys."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._context = new_context()
        self._tls = _worker_tls(config)
        self._session = probe_session(self._tls)
        clock = time.monotonic
        self._index = PrefixIndex(
            max_blocks=config.index.max_blocks, max_blocks_per_slot=config.index.max_blocks_per_rank
        )
        metrics = Metrics()
        self._access = AccessLog(dropped=metrics.access_lines_dropped.inc) if config.log.access else None
        traces = config.traces
        self._traces = (
            Traces(traces.endpoint, sample=traces.sample, service_name=traces.service_name) if traces.endpoint else None
        )
        requests = Requests(tuple(sink for sink in (self._access, self._traces) if sink is not None))
        self.fleet = Fleet(
            config,
            self._index,
            context=self._context,
            session=self._session,
            clock=clock,
            wall_clock=time.time,
            rng=random.Random(),
            observer=metrics,
            on_described=self._prepare_prompts,
        )
        self._discovery = Discovery(config.discovery, self.fleet, metrics, rng=random.Random())
        self._upstream = UpstreamClient(
            UpstreamLimits(connect_s=config.timeouts.connect_s, idle_s=config.timeouts.idle_s), tls=self._tls
        )
        self._ask = EngineAsk(self.fleet, self._tls)
        self._prompts = PromptSource(
            config.tokenizer,
            ask=self._ask,
            count=metrics.prompts.inc,
            on_check=metrics.prompt_checks.inc,
            on_drift=self._prompt_drift,
            on_tokens=lambda result, tokens: metrics.prompt_cache_tokens.inc(result, by=tokens),
        )
        metrics.prompt_cache_bytes.set_function(lambda: self._prompts.cache.bytes)
        self.core = RoutingCore(
            fleet=self.fleet,
            index=self._index,
            prompts=self._prompts,
            policy=_policy(config),
            predicted=PredictedBlocks(config.policy.prediction_ttl_s),
            metrics=metrics,
            requests=requests,
            traces=self._traces,
            expose_routing_headers=config.admin.expose_routing_headers,
            allow_internal_fields=config.listen.allow_internal_fields,
            clock=clock,
        )
        self._live = LivePage(self.fleet, requests, metrics.totals, policy=config.policy.name, clock=clock)
        self._admin = Admin(config, self.fleet, self.core, self._live, FanOutRoutes(self.fleet, self._upstream))
        self._admin_runner = web.AppRunner(
            self._admin.application(), access_log=None, logger=parser_log, shutdown_timeout=ADMIN_SHUTDOWN_S
        )
        self.listener = PublicListener(self.core, self._upstream, _listener_options(config))
        metrics.waiting_requests.set_function(lambda: self.listener.waiting)
        metrics.buffered_body_bytes.set_function(lambda: self.listener.buffered_bytes)
        self.admin_port = 0
        self._prepared: deque[ModelFacts] = deque(maxlen=MAX_PREPARED)
        self._loading: set[asyncio.Task[str]] = set()
        self._incarnations: WeakKeyDictionary[Worker, int] = WeakKeyDictionary()

    def _close_sinks(self) -> None:
        for sink in (self._access, self._traces):
            if sink is not None:
                sink.close()

    def _prepare_prompts(self, worker: Worker) -> None:
        """Loads the worker's tokenizer before its first request; a load that is done or under way costs nothing."""
        if worker.info is None:
            return
        facts = ModelFacts.from_server_info(worker.info)
        if self._incarnations.setdefault(worker, worker.incarnation) != worker.incarnation:
            self._incarnations[worker] = worker.incarnation
            self._prompts.doubt(facts)
            for other in self._of(facts):
                other.drift_over("prompt")
        if (seen := self._prompts.drift(facts)) is not None:  # a new incarnation of what is known to differ
            self._prompt_drift(facts, seen)
        if facts in self._prepared:
            return
        self._prepared.append(facts)
        task = asyncio.create_task(self._prompts.prepare(facts))
        self._loading.add(task)
        task.add_done_callback(lambda done: self._loaded(done, worker, facts))

    def _prompt_drift(self, facts: ModelFacts, seen: Difference) -> None:
        """Flags every worker whose prompts are made by the same rules. No token id leaves the log."""
        feature = "+".join(sorted(seen.features)) or "plain"
        where = f"token {seen.at}" if seen.at >= 0 else "number of tokens"
        advice = (
            f"prompts with {feature} are not made as this engine makes them, so its own tokenizer is asked; "
            "compare its chat template and tokenizer with those of tokenizer.path"
        )
        for worker in self._of(facts):
            worker.drifted("prompt", "prompts as rendered here", f"{where} differs", advice)

    def _of(self, facts: ModelFacts) -> list[Worker]:
        described = [(worker, worker.info) for worker in self.fleet.workers if worker.info is not None]
        return [worker for worker, info in described if ModelFacts.from_server_info(info) == facts]

    def _loaded(self, done: asyncio.Task[str], worker: Worker, facts: ModelFacts) -> None:
        self._loading.discard(done)
        if done.cancelled():
            return
        problem = str(done.exception() or "") or done.result()
        if problem:
            log.info("%s: text prompts go to the engine's tokenizer: %s", worker.url, problem)
        else:
            log.info("%s: text prompts are tokenised here, with %s", worker.url, facts.tokenizer_path)

    async def start(self) -> None:
        """Binds both listeners, then watches the fleet. Raises ConfigError when an address cannot be had."""
        listen, admin = self._config.listen, self._config.admin
        try:
            await self.listener.start()
        except OSError as error:
            raise ConfigError(f"listen: cannot bind {listen.host}:{listen.port}: {error.strerror or error}") from None
        await self._admin_runner.setup()
        try:
            await web.TCPSite(self._admin_runner, admin.host, admin.port).start()
        except OSError as error:
            raise ConfigError(f"admin: cannot bind {admin.host}:{admin.port}: {error.strerror or error}") from None
        self.admin_port = int(self._admin_runner.addresses[0][1])
        self.fleet.start()
        self._live.start()
        self._discovery.start()

    def reload(self, config: Config) -> None:
        """Takes over workers and keys; every other setting needs a restart."""
        wanted = {worker.url.text: worker for worker in config.workers}
        before = {worker.url.text for worker in self._config.workers}
        for worker in self.fleet.workers:
            name = worker.url.text
            if (name in before and name not in wanted) or (name in wanted and wanted[name] != worker.settings):
                self.fleet.remove(name)
        for settings in config.workers:
            self.fleet.add(settings)
        self.fleet.set_worker_api_key(config.worker_api_key)
        self.listener.set_api_keys([key.reveal() for key in config.api_keys])
        self._config = config
        self._admin.config = config

    async def stop(self, grace_s: float) -> None:
        """Lets running requests finish for `grace_s`, then closes every socket and task."""
        await self.listener.close(grace_s)
        await self._live.close()
        await asyncio.to_thread(self._close_sinks)
        await self._admin_runner.cleanup()
        await self._discovery.close()
        await self.fleet.close()
        for task in self._loading:
            task.cancel()
        await asyncio.gather(*self._loading, return_exceptions=True)
        await self._prompts.close()
        await self._ask.close()
        await self._upstream.close()
        await self._session.close()
        self._context.destroy(linger=0)


def _raise_file_limit() -> None:
    """Streams and connections each take a descriptor: up to what the system allows this process."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _worker_tls(config: Config) -> ssl.SSLContext | None:
    if config.worker_tls.ca is None:
        return None
    return ssl.create_default_context(cafile=config.worker_tls.ca)


def _listener_tls(config: Config) -> ssl.SSLContext | None:
    tls = config.listen.tls
    if tls is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(tls.cert, tls.key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"listen.tls: cannot load {tls.cert} with {tls.key}: {error}") from None
    return context


def _listener_options(config: Config) -> ListenerOptions:
    return ListenerOptions(
        host=config.listen.host,
        port=config.listen.port,
        max_body_bytes=config.listen.max_body_mb << 20,
        max_buffered_bytes=config.listen.max_buffered_mb << 20,
        body_s=config.timeouts.body_s,
        api_keys=tuple(key.reveal() for key in config.api_keys),
        forward_authorization=config.forward_authorization,
        metrics=config.listen.metrics,
        tls=_listener_tls(config),
        queue=QueueOptions(config.admission.max_waiting, config.admission.wait_s),
        priority_header=config.admission.priority_header,
    )


def _policy(config: Config) -> Policy:
    settings = config.policy
    weights = CostWeights(
        u_weight=settings.u_weight,
        decode_weight=settings.decode_weight,
        share_weight=settings.share_weight,
        share_tau_s=settings.share_tau_s,
        attention_tokens=settings.attention_tokens,
        age_rate_factor=settings.age_rate_factor,
        same_speed=settings.same_speed,
        tier_weights=(0.0, 1 - settings.cpu_pinned_credit, 1 - settings.disk_credit, 1 - settings.external_credit),
    )
    return Policy(settings.name, weights, default_rate_tokens_per_s=settings.prefill_tokens_per_s, rng=random.Random())


def serve(
    path: Path | None,
    *,
    workers: Sequence[str] = (),
    host: str | None = None,
    port: int | None = None,
    admin_port: int | None = None,
) -> int:
    """Runs until SIGTERM or SIGINT. Raises ConfigError for what the operator can mend."""
    overrides = Overrides(workers=tuple(workers), host=host, port=port, admin_port=admin_port)
    config = load_config(path, overrides)
    set_up(config.log.format, config.log.level)
    _raise_file_limit()
    sys.setswitchinterval(THREAD_TURN_S)

    def reread() -> Config:
        return load_config(path, overrides)

    runner = asyncio.Runner(loop_factory=_loop_factory())
    with runner:
        return runner.run(_run(config, reread if path is not None else None))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where there is one; asyncio's own loop otherwise."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


async def _run(config: Config, reread: Callable[[], Config] | None) -> int:
    stop, cut, reload = asyncio.Event(), asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    drain_s = config.timeouts.drain_s

    def signalled(by_person: bool) -> None:
        nonlocal drain_s
        if by_person:
            drain_s = 0.0  # Ctrl-C: no load balancer is to be told first
        (cut if stop.is_set() else stop).set()

    loop.add_signal_handler(signal.SIGTERM, signalled, False)  # before slow start-up work (case 94)
    loop.add_signal_handler(signal.SIGINT, signalled, True)
    loop.add_signal_handler(signal.SIGHUP, reload.set)
    service = Service(config)
    # What lives as long as the process need not be walked through again: the index's list of runs alone takes 10 ms at
    # 2M blocks.
    gc.freeze()
    try:
        await service.start()
    except ConfigError:
        await service.stop(0.0)
        raise
    for warning in config.warnings():
        log.warning(warning)
    _announce(config, service)
    reloader = asyncio.create_task(_reload_on_signal(service, reload, reread))
    await stop.wait()
    log.info("stopping", extra={"drain_s": drain_s, "grace_s": config.timeouts.grace_s})
    reloader.cancel()
    service.listener.leave()
    await _unless(cut, asyncio.sleep(drain_s))
    await _unless(cut, service.listener.close(config.timeouts.grace_s))
    await service.stop(0.0)
    return 0


async def _unless(cut: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Waits for `work`, or until `cut` is set."""
    task, cutter = asyncio.ensure_future(work), asyncio.ensure_future(cut.wait())
    await asyncio.wait((task, cutter), return_when=asyncio.FIRST_COMPLETED)
    for each in (task, cutter):
        each.cancel()
    await asyncio.gather(task, cutter, return_exceptions=True)


async def _reload_on_signal(service: Service, signalled: asyncio.Event, reread: Callable[[], Config] | None) -> None:
    while True:
        await signalled.wait()
        signalled.clear()
        if reread is None:
            log.warning("SIGHUP: nothing to re-read, the router was started without --config")
            continue
        try:
            service.reload(await asyncio.to_thread(reread))
            log.info("SIGHUP: workers and keys re-read")
        except (ConfigError, RouterError) as error:
            log.error("SIGHUP: the configuration was not taken: %s", error)


def _announce(config: Config, service: Service) -> None:
    """One JSON line on stdout for whoever started the process: where the listeners are (ports may have been 0)."""
    host, admin = _bracketed(config.listen.host), _bracketed(config.admin.host)
    where = {
        "listen": f"http{'s' if config.listen.tls else ''}://{host}:{service.listener.port}",
        "admin": f"http://{admin}:{service.admin_port}",
    }
    print(json.dumps(where), flush=True)
    log.info("listening", extra=where)
    if not config.workers and config.discovery == DiscoveryConfig():
        log.warning("no workers yet: give --worker URL, or POST /workers on the admin listener")


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
