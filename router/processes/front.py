"""The admin listener of several processes: one view over all of them, and every change made in each.

What an operator changes (workers, log level) is remembered, so that a process that is started again begins where the
others are.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from typing import Any

import msgspec
from aiohttp import web

from router.admin_guard import error_response, guarded_application, json_response
from router.config import Config, Secret
from router.contract.url import WorkerUrl
from router.errors import ConfigError, RouterError
from router.observe.logs import set_level
from router.processes.merged import merge_workers
from router.processes.page import CommonPage
from router.processes.pages import Pages
from router.processes.process import ASK_TIMEOUT_S, Answer, ServingProcess

log = logging.getLogger("router.admin")

PAGE_TYPE = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
MAX_CHANGES = 10_000
"""Workers whose addition or removal by hand is remembered."""
LONGEST_ANSWER_S = 630.0
"""Over what the fan-out to engines may take."""
READ_TIMEOUT_S = 2.0
"""Of a process that hangs: a probe or a person waits no longer to hear what the others say."""
METRICS_TIMEOUT_S = 5.0
"""One process that hangs must not cost a scraper the page of all: under Prometheus's 10 s."""
PASSED_ON = ("Content-Type", "x-kv-router-error", "Allow")


class Front:
    """`config` is replaced when SIGHUP re-reads it."""

    def __init__(self, config: Config, processes: Sequence[ServingProcess], page: CommonPage) -> None:
        self.config = config
        self._processes = processes
        self._page = page
        self._pages = Pages()
        self._rendering = asyncio.Lock()  # a page is made in a thread, from what the last one left behind
        self._changes: dict[str, tuple[str, str, bytes | None]] = {}
        self._log_level: bytes | None = None

    def application(self) -> web.Application:
        app = guarded_application(self._key)
        app.router.add_get("/health", self._health)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/workers", self._workers)
        app.router.add_post("/workers", self._change_workers)
        app.router.add_delete("/workers", self._change_workers)
        app.router.add_put("/log-level", self._set_log_level)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/config", self._config)
        app.router.add_get("/ui/worker", self._worker)
        self._page.add_routes(app)
        app.router.add_route("*", "/{path:.*}", self._ask_one)
        return app

    def private_application(self) -> web.Application:
        """For the processes themselves: what their public /metrics shows."""
        app = web.Application()
        app.router.add_get("/metrics", self._metrics)
        return app

    def forget_removals(self) -> None:
        """The configuration was read again, which brings its workers back."""
        self._changes = {url: change for url, change in self._changes.items() if change[0] != "DELETE"}

    async def prepare(self, process: ServingProcess) -> None:
        """Makes the changes made so far in a new process."""
        for url in list(self._changes):
            if url in self._changes:  # what is changed meanwhile is told to the new process as well
                method, target, body = self._changes[url]
                await process.ask(method, target, body=body)
        if self._log_level is not None:
            await process.ask("PUT", "/log-level", body=self._log_level)

    def _key(self) -> Secret | None:
        return self.config.admin.key

    # ---- views

    async def _health(self, request: web.Request) -> web.Response:
        serving = any(process.state == "serving" for process in self._processes)
        status = "ok" if serving else "no process serves"
        return json_response(
            {"status": status, "processes": self._described()},
            200 if serving else 503,
        )

    async def _ready(self, request: web.Request) -> web.Response:
        """Every process that takes connections can serve them."""
        answers = await self._ask_serving("GET", "/ready")
        ready = bool(answers) and all(answer.ok for _, answer in answers)
        return json_response({"ready": ready}, 200 if ready else 503)

    async def _workers(self, request: web.Request) -> web.Response:
        answers = await self._ask_all("GET", "/workers", timeout_s=READ_TIMEOUT_S)
        views = [(process.number, msgspec.json.decode(answer.body)) for process, answer in answers if answer.ok]
        told = {number: view["process"] for number, view in views}
        processes = [{**process, **told.get(process["process"], {})} for process in self._described()]
        merged: dict[str, Any] = {"workers": merge_workers(views), "processes": processes}
        if views:
            first = views[0][1]
            merged["prompts"] = first["prompts"]
            merged["siblings"] = first["siblings"]
        return json_response(merged)

    async def _worker(self, request: web.Request) -> web.Response:
        url = request.query.get("url", "")
        answers = await self._ask_all("GET", "/workers", timeout_s=READ_TIMEOUT_S)
        views = [(process.number, msgspec.json.decode(answer.body)) for process, answer in answers if answer.ok]
        for worker in merge_workers(views):
            if worker["url"] == url:
                return json_response(worker)
        raise RouterError("not_found", f"no worker {url[:200]!r}; GET /workers lists them")

    async def _metrics(self, request: web.Request) -> web.Response:
        # Its restarts from before the question: one that is replaced meanwhile answers as the old one or not at all.
        asked = [(process, process.restarts) for process in self._processes]
        answers = await self._ask_all("GET", "/metrics", timeout_s=METRICS_TIMEOUT_S)
        texts = {process: answer.body.decode() for process, answer in answers if answer.ok}
        pages = {(p.number, restarts): texts[p] for p, restarts in asked if p in texts and p.restarts == restarts}
        async with self._rendering:
            page = await asyncio.to_thread(self._pages.render, pages, self._own_metrics())
        return web.Response(body=page, headers=PAGE_TYPE)

    async def _config(self, request: web.Request) -> web.Response:
        masked: dict[str, Any] = self.config.masked()
        return json_response(masked)

    def _described(self) -> list[dict[str, Any]]:
        return [process.describe() for process in self._processes]

    def _own_metrics(self) -> str:
        lines = [
            "# HELP kv_router_process_up 1 while the process takes requests",
            "# TYPE kv_router_process_up gauge",
            *(f'kv_router_process_up{{process="{p.number}"}} {int(p.state == "serving")}' for p in self._processes),
            "# HELP kv_router_process_restarts_total times the process was started again",
            "# TYPE kv_router_process_restarts_total counter",
            *(f'kv_router_process_restarts_total{{process="{p.number}"}} {p.restarts}' for p in self._processes),
        ]
        return "\n".join(lines) + "\n"

    # ---- changes

    async def _change_workers(self, request: web.Request) -> web.Response:
        body = await request.read()
        answers = await self._ask_all(request.method, request.path_qs, body, request.headers.get("Content-Type"))
        told = _common([answer for _, answer in answers])
        if told.ok:
            self._remember(request, told, body)
        return _passed_on(told)

    def _remember(self, request: web.Request, told: Answer, body: bytes) -> None:
        if request.method == "POST":
            url = msgspec.json.decode(told.body)["url"]
        else:
            try:
                url = WorkerUrl.parse(request.query.get("url", "")).text
            except ConfigError:
                return
        self._changes.pop(url, None)
        self._changes[url] = request.method, request.path_qs, body or None
        if len(self._changes) > MAX_CHANGES:
            del self._changes[next(iter(self._changes))]

    async def _set_log_level(self, request: web.Request) -> web.Response:
        body = await request.read()
        told = _common([answer for _, answer in await self._ask_all("PUT", "/log-level", body)])
        if told.ok:
            self._log_level = body
            set_level(msgspec.json.decode(told.body)["level"])
        return _passed_on(told)

    # ---- asking

    async def _ask_one(self, request: web.Request) -> web.Response:
        """A question whose answer any of them knows, or what is to be done to the engines once (flush_cache)."""
        body = await request.read()
        for process in self._serving() or self._processes:
            headers = {"Content-Type": request.headers.get("Content-Type", "application/json")}
            answer = await process.ask(
                request.method, request.raw_path, body=body or None, headers=headers, timeout_s=LONGEST_ANSWER_S
            )
            if answer is not None:
                return _passed_on(answer)
            if request.method != "GET":
                break  # it may have been done
        return error_response(RouterError("internal", "no process answered"))

    async def _ask_all(
        self,
        method: str,
        target: str,
        body: bytes | None = None,
        content_type: str | None = None,
        *,
        timeout_s: float = ASK_TIMEOUT_S,
    ) -> list[tuple[ServingProcess, Answer]]:
        """The answers of those that answered."""
        return await self._ask(self._processes, method, target, body, content_type, timeout_s)

    async def _ask_serving(self, method: str, target: str) -> list[tuple[ServingProcess, Answer]]:
        return await self._ask(self._serving(), method, target, None, None, READ_TIMEOUT_S)

    def _serving(self) -> list[ServingProcess]:
        return [process for process in self._processes if process.state == "serving"]

    async def _ask(
        self,
        processes: Sequence[ServingProcess],
        method: str,
        target: str,
        body: bytes | None,
        content_type: str | None,
        timeout_s: float,
    ) -> list[tuple[ServingProcess, Answer]]:
        headers = None if content_type is None else {"Content-Type": content_type}
        asked: list[Awaitable[Answer | None]] = [
            process.ask(method, target, body=body or None, headers=headers, timeout_s=timeout_s)
            for process in processes
        ]
        answers = await asyncio.gather(*asked)
        return [(process, a) for process, a in zip(processes, answers, strict=True) if a is not None]


def _common(answers: Sequence[Answer]) -> Answer:
    """What was done, by all of them or by those that could; the first refusal where none did it: one that is just
    being started may lack what the others take out. Raises RouterError when none answered."""
    if not answers:
        raise RouterError("internal", "no process answered")
    refused = [answer for answer in answers if not answer.ok]
    if refused and len(refused) == len(answers):
        return refused[0]
    return max((answer for answer in answers if answer.ok), key=lambda answer: answer.status)


def _passed_on(answer: Answer) -> web.Response:
    headers = {name: value for name, value in answer.headers.items() if name in PASSED_ON}
    return web.Response(status=answer.status, body=answer.body, headers=headers)
