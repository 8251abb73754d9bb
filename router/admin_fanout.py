"""The admin listener's routes that mean every engine: /flush_cache and friends, with a result for each worker."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from aiohttp import web

from router.contract.url import WorkerUrl
from router.errors import ConfigError, RouterError
from router.fleet.registry import Fleet
from router.fleet.worker import Worker
from router.proxy.fanout import FANNED_OUT, FanOut, WorkerAnswer
from router.proxy.upstream import UpstreamClient

log = logging.getLogger("router.admin")

DEFAULT_TIMEOUT_S = 30.0
LONGEST_TIMEOUT_S = 600.0
_OWN_PARAMETERS = ("worker=", "timeout_s=")


class _Abort(msgspec.Struct):
    rid: str | list[str] | None = None
    abort_all: bool = False


class FanOutRoutes:
    """POST only: a GET can be made by any page or prefetch."""

    def __init__(self, fleet: Fleet, upstream: UpstreamClient) -> None:
        self._fleet = fleet
        self._fan_out = FanOut(upstream)

    def add_routes(self, app: web.Application) -> None:
        for path in FANNED_OUT:
            app.router.add_post(path, self._ask_all)

    async def _ask_all(self, request: web.Request) -> web.Response:
        """The same bytes to every worker (or to `?worker=URL`), each within `?timeout_s=`; 502 unless all did it."""
        body = await request.read()
        if request.path == "/abort_request":
            check_abort(body)
        timeout_s = _timeout_s(request.query.get("timeout_s"))
        workers = self._asked_workers(request.query.get("worker"))
        passed_on = request.rel_url.raw_query_string.split("&")
        query = "&".join(part for part in passed_on if not part.startswith(_OWN_PARAMETERS))
        target = f"{request.path}?{query}" if query else request.path
        fields = [(b"Content-Type", request.headers.get("Content-Type", "application/json").encode())]
        asked = [(worker.url, worker.authorization) for worker in workers]
        answers = await self._fan_out(asked, target.encode(), fields, body, timeout_s)
        log.info("%s: %s", request.path, ", ".join(f"{a.worker} {a.status or a.error}" for a in answers))
        done = all(answer.ok for answer in answers)
        return web.Response(
            body=msgspec.json.encode({"ok": done, "results": [_result(answer) for answer in answers]}),
            status=200 if done else 502,
            content_type="application/json",
        )

    def _asked_workers(self, url: str | None) -> list[Worker]:
        workers = self._fleet.workers
        if not workers:
            raise RouterError("no_worker", "there are no workers")
        if url is None:
            return workers
        try:
            wanted = WorkerUrl.parse(url).text
        except ConfigError as error:
            raise RouterError("bad_request", str(error)) from None
        found = [worker for worker in workers if worker.url.text == wanted]
        if not found:
            raise RouterError("not_found", f"no worker {url[:200]!r}; GET /workers lists them")
        return found


def check_abort(body: bytes) -> None:
    """Raises RouterError unless the body says which requests. Engines match `rid` by prefix, so an empty one means all
    of them (contract, section 5): that has to be said as abort_all."""
    try:
        abort = msgspec.json.decode(body, type=_Abort)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise RouterError("bad_json", f'send {{"rid": …}} or {{"abort_all": true}}: {error}') from None
    rids = abort.rid if isinstance(abort.rid, list) else [abort.rid or ""]
    if not abort.abort_all and not (rids and all(rids)):
        raise RouterError("bad_request", 'an empty rid means every request: send {"abort_all": true} for that')


def _timeout_s(text: str | None) -> float:
    try:
        timeout_s = DEFAULT_TIMEOUT_S if text is None else float(text)
    except ValueError:
        timeout_s = 0.0
    if not 0 < timeout_s <= LONGEST_TIMEOUT_S:
        raise RouterError("bad_request", f"timeout_s is a number of seconds up to {LONGEST_TIMEOUT_S:g}")
    return timeout_s


def _result(answer: WorkerAnswer) -> dict[str, Any]:
    return {
        "worker": answer.worker,
        "ok": answer.ok,
        "status": answer.status,
        "body": answer.body.decode("utf-8", "replace"),
        "error": answer.error,
        "seconds": round(answer.seconds, 3),
    }
