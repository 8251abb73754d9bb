"""One running router: puts the parts together, listens, and takes everything down in order."""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from aiohttp import web

from router.admin import Admin
from router.admin_fanout import FanOutRoutes
from router.admin_guard import parser_log
from router.config import Config, EnvoyConfig
from router.core import RoutingCore
from router.engine_ask import EngineAsk
from router.errors import ConfigError
from router.fleet.ask import probe_session
from router.fleet.discovery.run import Discovery
from router.fleet.registry import Fleet
from router.fleet.worker import Worker
from router.index.prefix import PrefixIndex
from router.observe.access import AccessLog
from router.observe.live import LivePage
from router.observe.metrics import Metrics
from router.observe.requests import Requests
from router.observe.traces import Traces
from router.pair_placement import Pairing
from router.policy.cost import CostWeights
from router.policy.decide import Policy
from router.policy.predicted import PredictedBlocks
from router.processes.role import Role, write_locked
from router.prompt.models import ModelFacts
from router.prompt.source import PromptSource
from router.prompt.verify import Difference
from router.proxy.queue import QueueOptions
from router.proxy.server import ListenerOptions, PublicListener
from router.proxy.upstream import UpstreamClient, UpstreamLimits
from router.siblings.exchange import Exchange, Meeting, meeting_of
from router.stream.pump import running_pump
from router.stream.sockets import new_context
from router.tls import server_context

if TYPE_CHECKING:
    from router.envoy.pickers import EnvoyPickers

log = logging.getLogger("router")

ADMIN_SHUTDOWN_S = 1.0
MAX_PREPARED = 64
"""Kinds of engine whose tokenizer load was begun; the oldest is forgotten, and merely looked up again."""


class Service:
    """One running router. `start`, then `stop`; `reload` applies a changed configuration's workers and keys."""

    def __init__(self, config: Config, role: Role | None = None) -> None:
        """`role`: this is one of several processes."""
        self._config = config
        self._role = role
        self._context = new_context()
        self._tls = _worker_tls(config)
        self._session = probe_session(self._tls)
        clock = time.monotonic
        self._index = PrefixIndex(
            max_blocks=config.index.max_blocks, max_blocks_per_slot=config.index.max_blocks_per_rank
        )
        metrics = Metrics()
        self._access = _access_log(metrics, role) if config.log.access else None
        traces = config.traces
        self._traces = (
            Traces(traces.endpoint, sample=traces.sample, service_name=traces.service_name) if traces.endpoint else None
        )
        self._requests = requests = Requests(tuple(sink for sink in (self._access, self._traces) if sink is not None))
        self.fleet = Fleet(
            config,
            self._index,
            context=self._context,
            session=self._session,
            clock=clock,
            wall_clock=time.time,
            rng=random.Random(),
            observer=metrics,
            on_described=self._described,
        )
        self._discovery = Discovery(config.discovery, self.fleet, metrics, rng=random.Random())
        self._upstream = UpstreamClient(
            UpstreamLimits(connect_s=config.timeouts.connect_s, idle_s=config.timeouts.idle_s), tls=self._tls
        )
        running_pump().before.add(self._upstream.turn.flush)
        self._ask = EngineAsk(self.fleet, self._tls)
        self._prompts = PromptSource(
            config.tokenizer,
            ask=self._ask,
            count=metrics.prompts.inc,
            on_check=metrics.prompt_checks.inc,
            on_drift=self._prompt_drift,
            on_change=self._prompts_changed,
            on_tokens=lambda result, tokens: metrics.prompt_cache_tokens.inc(result, by=tokens),
        )
        metrics.prompt_cache_bytes.set_function(lambda: self._prompts.cache.bytes)
        self._predicted = PredictedBlocks(config.policy.prediction_ttl_s)
        meeting = meeting_of(config) if role is None else role.meeting(config)
        self._exchange = None if meeting is None else self._exchange_at(meeting, metrics)
        self.core = RoutingCore(
            fleet=self.fleet,
            index=self._index,
            prompts=self._prompts,
            policy=_policy(config),
            predicted=self._predicted,
            metrics=metrics,
            requests=requests,
            traces=self._traces,
            expose_routing_headers=config.admin.expose_routing_headers,
            allow_internal_fields=config.listen.allow_internal_fields,
            clock=clock,
            pairing=Pairing(
                config.disaggregation, self.fleet, metrics, clock=clock, share_tau_s=config.policy.share_tau_s
            ),
            shared_page=None if role is None else role.page,
            on_predicted=None if self._exchange is None else self._exchange.placed,
        )
        self._live = LivePage(self.fleet, requests, metrics.totals, policy=config.policy.name, clock=clock)
        self._admin = Admin(
            config,
            self.fleet,
            self.core,
            self._live,
            FanOutRoutes(self.fleet, self._upstream),
            siblings=self._exchange,
            state=None if role is None else self._state,
        )
        self._admin_runner = web.AppRunner(
            self._admin.application(), access_log=None, logger=parser_log, shutdown_timeout=ADMIN_SHUTDOWN_S
        )
        options = _listener_options(config, role)
        self.listener = PublicListener(self.core, self._upstream, options)
        self.envoy = self._envoy_pickers(config.envoy, options)
        metrics.waiting_requests.set_function(lambda: self.listener.waiting)
        metrics.buffered_body_bytes.set_function(lambda: self.listener.buffered_bytes)
        self.admin_port = 0
        self._listening = False
        self._prepared: deque[ModelFacts] = deque(maxlen=MAX_PREPARED)
        self._loading: set[asyncio.Task[str]] = set()

    def _close_sinks(self) -> None:
        for sink in (self._access, self._traces):
            if sink is not None:
                sink.close()

    def _exchange_at(self, meeting: Meeting, metrics: Metrics) -> Exchange:
        return Exchange(
            meeting,
            self.fleet,
            metrics,
            self._predicted,
            context=self._context,
            share_tau_s=self._config.policy.share_tau_s,
            clock=time.monotonic,
        )

    def _envoy_pickers(self, config: EnvoyConfig, options: ListenerOptions) -> EnvoyPickers | None:
        if config.ext_authz is None and config.ext_proc is None:
            return None
        from router.envoy.pickers import EnvoyPickers

        return EnvoyPickers(config, self.core, self._upstream, options, self.listener.bodies)

    def _described(self, worker: Worker) -> None:
        if self._exchange is not None:
            self._exchange.watch(worker)
        self._prepare_prompts(worker)

    def _state(self) -> dict[str, object]:
        return {"ready": self.core.ready(), "listening": self._listening, "requests": self._requests.finished}

    def _prepare_prompts(self, worker: Worker) -> None:
        """Loads the worker's tokenizer before its first request; a load that is done or under way costs nothing."""
        if worker.info is None:
            return
        facts = ModelFacts.from_server_info(worker.info)
        prepared, worker.prepared = worker.prepared, worker.incarnation
        if prepared not in (None, worker.incarnation):
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

    def _prompts_changed(self, folder: str) -> None:
        """Tokenizer or template files were read anew: what was found of the old ones is over."""
        log.info("prompts made with %s are compared with the engines' again", folder)
        for worker in self.fleet.workers:
            if worker.info is not None and self._prompts.drift(ModelFacts.from_server_info(worker.info)) is None:
                worker.drift_over("prompt")

    def _of(self, facts: ModelFacts) -> list[Worker]:
        described = [(worker, worker.info) for worker in self.fleet.workers if worker.info is not None]
        return [worker for worker, info in described if ModelFacts.from_server_info(info) == facts]

    def _loaded(self, done: asyncio.Task[str], worker: Worker, facts: ModelFacts) -> None:
        self._loading.discard(done)
        if done.cancelled():
            return
        problem = str(done.exception() or "") or done.result()
        if problem:
            instead = "are routed by load" if self._config.tokenizer.mode == "local" else "go to the engine's tokenizer"
            log.info("%s: text prompts %s: %s", worker.url, instead, problem)
        else:
            folder = self._config.tokenizer.path or facts.tokenizer_path
            log.info("%s: text prompts are tokenised here, with %s", worker.url, folder)

    async def start(self) -> None:
        """Binds both listeners, then watches the fleet. Raises ConfigError when an address cannot be had.

        One of several processes takes clients only from `listen` on.
        """
        if self._role is None:
            await self.listen()
        await self._admin_runner.setup()
        await self._start_admin()
        if self._exchange is not None:
            self._exchange.start()
        self.fleet.start()
        self._live.start()
        self._discovery.start()

    async def listen(self) -> None:
        """Takes clients. Raises ConfigError when the address cannot be had."""
        listen = self._config.listen
        try:
            await self.listener.start()
        except OSError as error:
            raise ConfigError(f"listen: cannot bind {listen.host}:{listen.port}: {error.strerror or error}") from None
        if self.envoy is not None:
            await self.envoy.start()
        self._listening = True

    def leave(self) -> None:
        """Not ready any more, for whoever balances; requests are served."""
        self.listener.leave()
        if self.envoy is not None:
            self.envoy.leave()

    async def close_listeners(self, grace_s: float) -> None:
        """Takes no request any more and lets the running ones finish for `grace_s`."""
        if self.envoy is None:
            await self.listener.close(grace_s)
        else:
            await asyncio.gather(self.listener.close(grace_s), self.envoy.close(grace_s))

    async def _start_admin(self) -> None:
        admin, role = self._config.admin, self._role
        if role is not None:
            await web.UnixSite(self._admin_runner, role.admin_socket).start()
            return
        try:
            await web.TCPSite(self._admin_runner, admin.host, admin.port).start()
        except OSError as error:
            raise ConfigError(f"admin: cannot bind {admin.host}:{admin.port}: {error.strerror or error}") from None
        self.admin_port = int(self._admin_runner.addresses[0][1])

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
        for taking in (self.listener, self.envoy):
            if taking is not None:
                taking.set_api_keys([key.reveal() for key in config.api_keys])
        self._config = config
        self._admin.config = config

    async def stop(self, grace_s: float) -> None:
        """Lets running requests finish for `grace_s`, then closes every socket and task. A step that fails is logged
        and keeps none of the others from being taken."""
        steps: list[Callable[[], Awaitable[object]]] = [
            lambda: self.close_listeners(grace_s),
            self._live.close,
            lambda: asyncio.to_thread(self._close_sinks),
            self._admin_runner.cleanup,
            self._discovery.close,
            *([] if self._exchange is None else [self._exchange.close]),
            self.fleet.close,
            self._stop_loading,
            self._prompts.close,
            self._ask.close,
            self._upstream.close,
            self._session.close,
        ]
        for step in steps:
            try:
                await step()
            except Exception:
                log.exception("stopping: one step failed, the others follow")
        running_pump().before.discard(self._upstream.turn.flush)
        self._context.destroy(linger=0)

    async def _stop_loading(self) -> None:
        for task in self._loading:
            task.cancel()
        await asyncio.gather(*self._loading, return_exceptions=True)


def _worker_tls(config: Config) -> ssl.SSLContext | None:
    ca = config.worker_tls.ca
    if ca is None:
        return None
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"worker_tls.ca: cannot load certificates from {ca}: {error}") from None


def _access_log(metrics: Metrics, role: Role | None) -> AccessLog:
    dropped = metrics.access_lines_dropped.inc
    return AccessLog(dropped=dropped) if role is None else AccessLog(dropped=dropped, write=write_locked(role))


def _listener_options(config: Config, role: Role | None) -> ListenerOptions:
    return ListenerOptions(
        host=config.listen.host,
        port=config.listen.port if role is None else role.port,
        reuse_port=role is not None,
        max_body_bytes=config.listen.max_body_mb << 20,
        max_buffered_bytes=config.listen.max_buffered_mb << 20,
        body_s=config.timeouts.body_s,
        api_keys=tuple(key.reveal() for key in config.api_keys),
        forward_authorization=config.forward_authorization,
        metrics=config.listen.metrics,
        tls=server_context("listen.tls", config.listen.tls),
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
        consistent_tolerance=settings.consistent_tolerance,
        tier_weights=(0.0, 1 - settings.cpu_pinned_credit, 1 - settings.disk_credit, 1 - settings.external_credit),
    )
    return Policy(settings.name, weights, default_rate_tokens_per_s=settings.prefill_tokens_per_s, rng=random.Random())
