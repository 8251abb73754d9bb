"""One serving process under its supervisor, at moments that `kv-router serve --processes` meets only by chance."""

from __future__ import annotations

import asyncio
import errno
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from router.config import Config
from router.errors import RouterError
from router.processes.front import Front
from router.processes.page import CommonPage
from router.processes.process import Answer, ServingProcess, StartFailed
from router.processes.role import Role, front_socket
from tests.support.waiting import until

# Answers as a serving process does, from its private socket; SIGHUP ends it until its handler is there.
CHILD = """
import http.server, json, os, signal, socketserver, sys
hups = []
role = json.loads(sys.stdin.readline())
signal.signal(signal.SIGHUP, lambda *_: hups.append(1))
path = f"{role['folder']}/admin-{role['number']}"
if os.path.exists(path):
    os.unlink(path)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"pid": os.getpid(), "ready": True, "listening": True, "hups": len(hups)}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def address_string(self):
        return "-"
    def log_message(self, *_):
        pass
socketserver.UnixStreamServer(path, Handler).serve_forever()
"""


@pytest.fixture
async def child(tmp_path: Path) -> AsyncIterator[ServingProcess]:
    process = ServingProcess(Role(0, 1, str(tmp_path), 0, "key"), [])
    process._command = [sys.executable, "-c", CHILD]
    yield process
    process.stopping = True
    await process.close()


async def test_sighup_while_a_process_starts_does_not_end_it_and_is_not_lost(child: ServingProcess) -> None:
    """A sidecar that signals as soon as the file has changed, and the router is being started."""
    starting = asyncio.create_task(child.launch())
    await until(lambda: child.pid, "started")
    child.reload()
    await asyncio.wait_for(starting, 20)
    await child._until(lambda state: state["hups"] == 1, 10)
    child.reload()
    await child._until(lambda state: state["hups"] == 2, 10)


async def test_a_stop_that_came_before_the_process_reaches_it(child: ServingProcess) -> None:
    child._command = [sys.executable, "-c", "import signal; signal.pause()"]
    child.stopping = True
    with pytest.raises(StartFailed, match="SIGTERM"):
        await asyncio.wait_for(child.launch(), 20)


async def test_a_process_the_system_refuses_once_is_started_later(
    child: ServingProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pod's limit of processes or memory, for a moment."""
    await child.launch()
    await child.join()
    start, refusals = asyncio.create_subprocess_exec, [OSError(errno.EAGAIN, "no more processes")]

    async def refused(*command: str, **settings: Any) -> asyncio.subprocess.Process:
        if refusals:
            raise refusals.pop()
        return await start(*command, **settings)

    async def prepare(_: ServingProcess) -> None:
        pass

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refused)
    first = child.pid
    keeper = asyncio.create_task(child.keep(prepare))
    try:
        child.signal(signal.SIGKILL)
        await until(lambda: keeper.done() or (child.state == "serving" and child.pid != first), "started again")
        assert not keeper.done()
        assert child.restarts == 2
    finally:
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)


async def test_an_error_of_the_supervisor_is_not_shown_as_the_page_of_metrics(tmp_path: Path) -> None:
    async def fails(_: web.Request) -> web.Response:
        return web.Response(status=500, text="trouble")

    app = web.Application()
    app.router.add_get("/metrics", fails)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.UnixSite(runner, front_socket(str(tmp_path))).start()
        with pytest.raises(RouterError, match="did not answer"):
            await Role(0, 1, str(tmp_path), 0, "key").page()
    finally:
        await runner.cleanup()


class Asked(ServingProcess):
    """Answers at once; remembers what it was asked, and with what limit."""

    def __init__(self, folder: Path, answer: bytes = b"") -> None:
        super().__init__(Role(0, 1, str(folder), 0, "key"), [])
        self.answer = answer
        self.asked: list[tuple[str, str]] = []
        self.limits_s: list[float] = []
        self.meanwhile: Callable[[], object] = lambda: None

    async def ask(self, method: str, target: str, **more: Any) -> Answer | None:
        self.asked.append((method, target))
        self.limits_s.append(more.get("timeout_s", 30.0))
        self.meanwhile()
        return Answer(200, {}, self.answer)


def front_of(process: ServingProcess) -> Front:
    return Front(msgspec.convert({}, Config), [process], CommonPage([process]))


async def test_two_scrapers_at_once_do_not_mix_up_the_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = Asked(tmp_path)
    front = front_of(process)
    inside, together = threading.Semaphore(1), []
    second = threading.Event()

    def render(pages: object, own: str) -> bytes:
        alone = inside.acquire(blocking=False)
        together.append(not alone)
        if alone:
            second.wait(0.3)  # for the other to come in, if it can
            inside.release()
        else:
            second.set()
        return b""

    monkeypatch.setattr(front._pages, "render", render)
    request: Any = None
    await asyncio.gather(front._metrics(request), front._metrics(request))
    assert together == [False, False]
    assert max(process.limits_s) < 10.0, "a process that hangs is given up before Prometheus gives up the page"


async def test_a_worker_taken_out_while_a_new_process_is_prepared_stays_out(tmp_path: Path) -> None:
    process = Asked(tmp_path)
    front = front_of(process)
    front._changes = {"a": ("POST", "/workers?a", b"{}"), "b": ("POST", "/workers?b", b"{}")}
    process.meanwhile = lambda: front._changes.update(b=("DELETE", "/workers?b", None))
    await front.prepare(process)
    assert process.asked == [("POST", "/workers?a"), ("DELETE", "/workers?b")]
