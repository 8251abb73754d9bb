"""The listeners Envoy asks: made from the configuration, started and stopped with the router."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from router.config import EnvoyConfig, EnvoyListenConfig
from router.core import RequestPlan, RoutingCore
from router.envoy.addresses import AddressBook
from router.envoy.authz import AuthzCarrier
from router.envoy.pick import Picker, cancelled
from router.errors import ConfigError
from router.proxy.plan import RequestRecord
from router.proxy.queue import NOBODY_WAITS
from router.proxy.request import BodyBudget
from router.proxy.server import ListenerOptions, PublicListener
from router.proxy.upstream import UpstreamClient
from router.tls import server_context

if TYPE_CHECKING:
    from router.envoy.extproc import ExtProcServer

log = logging.getLogger("router.envoy")


class EnvoyPickers:
    """`start`, then `leave` and `close`, as the public listener."""

    def __init__(
        self,
        config: EnvoyConfig,
        core: RoutingCore,
        upstream: UpstreamClient,
        options: ListenerOptions,
        bodies: BodyBudget,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`options` and `bodies` are the public listener's: its limits and keys hold here as well.

        Raises ConfigError when a setting cannot be met.
        """
        self._config = config
        self._picker = Picker(
            core,
            AddressBook(clock=clock),
            fallbacks=config.fallbacks,
            charge_limit_s=config.charge_limit_s,
            clock=clock,
        )
        self._authz: PublicListener[RequestPlan] | None = None
        self._proc: ExtProcServer | None = None
        if config.ext_authz is not None:
            self._authz = PublicListener(
                core,
                upstream,
                replace(
                    options,
                    host=config.ext_authz.host,
                    port=config.ext_authz.port,
                    tls=server_context("envoy.ext_authz.tls", config.ext_authz.tls),
                    queue=NOBODY_WAITS,
                    own_routes=False,
                ),
                carrier=AuthzCarrier(self._picker),
                bodies=bodies,
            )
        if config.ext_proc is not None:
            self._proc = _ext_proc(config.ext_proc, self._picker, core, options, bodies)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Binds and listens. Raises ConfigError when an address cannot be had."""
        if self._authz is not None and self._config.ext_authz is not None:
            where = f"{self._config.ext_authz.host}:{self._config.ext_authz.port}"
            try:
                await self._authz.start()
            except OSError as error:
                raise ConfigError(f"envoy.ext_authz: cannot bind {where}: {error.strerror or error}") from None
        if self._proc is not None:
            await self._proc.start()
        self._task = asyncio.create_task(self._picker.run(), name="envoy picker")
        log.info("Envoy may ask", extra=self.ports)

    @property
    def ports(self) -> dict[str, int]:
        """In use, by protocol; also when 0 was asked for."""
        ports = {}
        if self._authz is not None:
            ports["ext_authz"] = self._authz.port
        if self._proc is not None:
            ports["ext_proc"] = self._proc.port
        return ports

    def set_api_keys(self, keys: Iterable[str]) -> None:
        """Replaces the client keys for requests that arrive from now on."""
        keys = tuple(keys)
        for each in (self._authz, self._proc):
            if each is not None:
                each.set_api_keys(keys)

    def leave(self) -> None:
        for each in (self._authz, self._proc):
            if each is not None:
                each.leave()

    async def close(self, grace_s: float) -> None:
        """A pick takes milliseconds: what is under way ends within `grace_s`, or is cut."""
        await asyncio.gather(*(each.close(grace_s) for each in (self._authz, self._proc) if each is not None))
        await cancelled(self._task)
        self._task = None


def _ext_proc(
    listen: EnvoyListenConfig, picker: Picker, core: RoutingCore, options: ListenerOptions, bodies: BodyBudget
) -> ExtProcServer:
    try:
        from router.envoy.extproc import ExtProcOptions, ExtProcServer
    except ImportError as error:
        raise ConfigError(f"envoy.ext_proc needs pip install '.[envoy]': {error}") from None
    # gRPC would take a pair that does not fit, and fail every connection.
    server_context("envoy.ext_proc.tls", listen.tls)

    def report(record: RequestRecord) -> None:
        try:
            core.request_done(record)
        except Exception:  # Envoy has its answer already
            log.exception("request %s could not be recorded", record.request_id)

    made = ExtProcOptions(
        host=listen.host,
        port=listen.port,
        max_body_bytes=options.max_body_bytes,
        body_s=options.body_s,
        api_keys=options.api_keys,
        forward_authorization=options.forward_authorization,
        tls=None if listen.tls is None else (listen.tls.key.read_bytes(), listen.tls.cert.read_bytes()),
        reuse_port=options.reuse_port,
    )
    return ExtProcServer(picker, bodies, made, ready=core.ready, report=report)
