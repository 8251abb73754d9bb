"""The admin listener: the fleet, dry-run decisions, metrics, the configuration in force. Never on the public port."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec
from aiohttp import web

from router.admin_fanout import FanOutRoutes
from router.config import Config, parse_worker
from router.core import DRY_RUN, RoutingCore
from router.errors import ConfigError, RouterError
from router.fleet.registry import Fleet
from router.observe.live import LivePage
from router.observe.logs import set_level
from router.proxy.routes import PROXIED

log = logging.getLogger("router.admin")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
OPEN_PATHS = ("/health", "/ready", "/ui")
"""Without admin.key; /ui is the page without its data, which asks for the key."""
MAX_ADMIN_BODY_MB = 64


class RouteQuery(msgspec.Struct, forbid_unknown_fields=True):
    """The body of `POST /route`: a public path, and the body a client would send there."""

    path: str
    body: msgspec.Raw
    headers: dict[str, str] = {}


class LogLevel(msgspec.Struct, forbid_unknown_fields=True):
    """The body of `PUT /log-level`; it holds until the next start."""

    level: Literal["debug", "info", "warning", "error"]


def json_response(value: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def error_response(error: RouterError) -> web.Response:
    response = json_response(
        {"error": {"message": error.message, "type": error.type, "code": error.code}}, error.status
    )
    response.headers["x-kv-router-error"] = error.code
    return response


def _refuse_foreign_pages(request: web.Request) -> None:
    """A page open in the operator's browser can POST to loopback, without a preflight and without a key."""
    if request.method in ("GET", "HEAD", "OPTIONS"):
        return
    origin = request.headers.get("Origin")
    foreign = origin is not None and urlsplit(origin).netloc != request.host
    if foreign or request.headers.get("Sec-Fetch-Site") in ("cross-site", "same-site"):
        raise RouterError("forbidden", "requests from web pages of another origin are not taken")


class Admin:
    """Handlers of the admin listener. `config` is replaced when SIGHUP re-reads it."""

    def __init__(self, config: Config, fleet: Fleet, core: RoutingCore, page: LivePage, fan_out: FanOutRoutes) -> None:
        self.config = config
        self._fleet = fleet
        self._core = core
        self._page = page
        self._fan_out = fan_out

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._guard], client_max_size=MAX_ADMIN_BODY_MB << 20)
        app.router.add_get("/health", self._health)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/workers", self._workers)
        app.router.add_post("/workers", self._add_worker)
        app.router.add_delete("/workers", self._remove_worker)
        app.router.add_post("/route", self._route)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/config", self._config)
        app.router.add_put("/log-level", self._log_level)
        self._page.add_routes(app)
        self._fan_out.add_routes(app)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            _refuse_foreign_pages(request)
            if request.path not in OPEN_PATHS:
                self._check_key(request)
            return await handler(request)
        except RouterError as error:
            return error_response(error)
        except web.HTTPMethodNotAllowed as refused:
            response = error_response(RouterError("method_not_allowed", f"{request.method} is not for this path"))
            response.headers["Allow"] = refused.headers["Allow"]
            return response
        except web.HTTPNotFound:
            return error_response(RouterError("not_found", "no such path on the admin listener"))
        except web.HTTPRequestEntityTooLarge:
            return error_response(RouterError("body_too_large", f"the body is over {MAX_ADMIN_BODY_MB} MB"))
        except ConnectionError:
            raise  # the client left: nobody is there to be answered
        except web.RequestPayloadError:
            return error_response(RouterError("bad_request", "the body is not framed or coded as its fields say"))
        except web.HTTPException:
            raise
        except Exception:
            log.exception("admin request failed")
            return error_response(RouterError("internal", "the router's log has the trace"))

    def _check_key(self, request: web.Request) -> None:
        key = self.config.admin.key
        if key is None:
            return
        given = request.headers.get("Authorization", "").removeprefix("Bearer ").encode()
        if not hmac.compare_digest(given, key.reveal().encode()):
            raise RouterError("unauthorized", "the admin listener wants `Authorization: Bearer` with admin.key")

    async def _health(self, request: web.Request) -> web.Response:
        return json_response({"status": "ok"})

    async def _ready(self, request: web.Request) -> web.Response:
        ready = self._core.ready()
        return json_response({"ready": ready}, 200 if ready else 503)

    async def _workers(self, request: web.Request) -> web.Response:
        return json_response({"workers": self._fleet.describe(), "prompts": self._core.prompts()})

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
        page = await self._core.metrics()
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
