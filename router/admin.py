"""The admin listener: the fleet, dry-run decisions, metrics, the configuration in force. Never on the public port."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any, Literal

import msgspec
from aiohttp import web

from router.admin_fanout import FanOutRoutes
from router.admin_guard import guarded_application, json_response
from router.config import Config, Secret, parse_worker
from router.core import DRY_RUN, RoutingCore
from router.errors import ConfigError, RouterError
from router.fleet.registry import Fleet
from router.observe.live import LivePage
from router.observe.logs import set_level
from router.proxy.routes import PROXIED
from router.siblings.exchange import Exchange

log = logging.getLogger("router.admin")


class RouteQuery(msgspec.Struct, forbid_unknown_fields=True):
    """The body of `POST /route`: a public path, and the body a client would send there."""

    path: str
    body: msgspec.Raw
    headers: dict[str, str] = {}


class LogLevel(msgspec.Struct, forbid_unknown_fields=True):
    """The body of `PUT /log-level`; it holds until the next start."""

    level: Literal["debug", "info", "warning", "error"]


class Admin:
    """Handlers of the admin listener. `config` is replaced when SIGHUP re-reads it."""

    def __init__(
        self,
        config: Config,
        fleet: Fleet,
        core: RoutingCore,
        page: LivePage,
        fan_out: FanOutRoutes,
        *,
        siblings: Exchange | None = None,
        state: Callable[[], dict[str, object]] | None = None,
    ) -> None:
        """`state`, of one of several processes, is what GET /process says. Its listener is a private socket of the
        supervisor, who has checked the key."""
        self.config = config
        self._siblings = siblings
        self._state = state
        self._fleet = fleet
        self._core = core
        self._page = page
        self._fan_out = fan_out

    def application(self) -> web.Application:
        app = guarded_application(self._key)
        app.router.add_get("/health", self._health)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/workers", self._workers)
        app.router.add_post("/workers", self._add_worker)
        app.router.add_delete("/workers", self._remove_worker)
        app.router.add_post("/route", self._route)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/config", self._config)
        app.router.add_put("/log-level", self._log_level)
        if self._state is not None:
            app.router.add_get("/process", self._process)
        self._page.add_routes(app)
        self._fan_out.add_routes(app)
        return app

    def _key(self) -> Secret | None:
        return self.config.admin.key if self._state is None else None

    async def _process(self, request: web.Request) -> web.Response:
        assert self._state is not None
        return json_response({"pid": os.getpid(), **self._state()})

    async def _health(self, request: web.Request) -> web.Response:
        return json_response({"status": "ok"})

    async def _ready(self, request: web.Request) -> web.Response:
        if self._core.ready():
            return json_response({"ready": True})
        return json_response({"ready": False, "code": self._core.not_ready().code}, 503)

    async def _workers(self, request: web.Request) -> web.Response:
        view: dict[str, Any] = {"workers": self._fleet.describe(), "prompts": self._core.prompts()}
        if self._siblings is not None:
            view["siblings"] = self._siblings.describe()
        if self._state is not None:
            view["process"] = self._state()
        return json_response(view)

    async def _add_worker(self, request: web.Request) -> web.Response:
        try:
            settings = parse_worker(msgspec.json.decode(await request.read()))
        except ConfigError as error:
            raise RouterError("bad_request", str(error)) from None
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise RouterError("bad_json", f"send a JSON object like an entry of `workers`: {error}") from None
        worker, created = self._fleet.add(settings)
        return json_response({"url": worker.url.text, "state": worker.state}, 201 if created else 200)

    async def _remove_worker(self, request: web.Request) -> web.Response:
        url = request.query.get("url")
        if not url:
            raise RouterError("bad_request", "say which: DELETE /workers?url=http://host:port")
        if not self._fleet.remove(url):
            raise RouterError("not_found", f"no worker {url[:200]!r}; GET /workers lists them")
        return json_response({"removed": True})

    async def _route(self, request: web.Request) -> web.Response:
        try:
            query = msgspec.json.decode(await request.read(), type=RouteQuery)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise RouterError("bad_json", f'send {{"path": …, "body": {{…}}}}: {error}') from None
        if query.path not in PROXIED:
            raise RouterError("bad_request", f"path is one of {', '.join(PROXIED)}")
        headers = {name.lower(): value for name, value in query.headers.items()}
        plan = await self._core.plan(query.path, headers, bytes(query.body), DRY_RUN)
        return json_response(self._core.explain(plan))

    async def _metrics(self, request: web.Request) -> web.Response:
        page = await (self._core.metrics() if self._state is None else self._core.own_metrics())
        return web.Response(body=page, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def _log_level(self, request: web.Request) -> web.Response:
        try:
            wanted = msgspec.json.decode(await request.read(), type=LogLevel)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise RouterError("bad_request", f'send {{"level": "debug"}}, or info, warning, error: {error}') from None
        set_level(wanted.level)
        log.warning("log level is now %s", wanted.level)
        return json_response({"level": wanted.level})

    async def _config(self, request: web.Request) -> web.Response:
        masked: dict[str, Any] = self.config.masked()
        return json_response(masked)
