"""One serving process as its supervisor sees it: started, told to join, asked over its private socket, restarted."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from router.processes.role import JOIN, Role

log = logging.getLogger("router.processes")

START_LIMIT_S = 60.0
READY_LIMIT_S = 5.0
"""A restarted process takes requests once it knows a worker, or after so long."""
POLL_S = 0.02
ASK_TIMEOUT_S = 30.0
WATCH_EVERY_S, WATCH_TIMEOUT_S, WATCH_MISSES = 2.0, 5.0, 3
"""A process that does not answer so many times in a row hangs, with its share of the connections: it is killed."""
BACKOFF_S = (0.1, 10.0)
STEADY_S = 30.0
"""After so long the next end is not taken for a consequence of the last."""


class StartFailed(Exception):
    """A process ended before it served. `status`: its exit status, or minus the signal's number."""

    def __init__(self, number: int, status: int) -> None:
        super().__init__(f"process {number} {ending(status)} before it served")
        self.status = status


@dataclass(frozen=True, slots=True)
class Answer:
    """What a process answered to one admin request."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300


def ending(status: int) -> str:
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(-status).name}"
    return f"ended with status {status}"


def backoff_s(failures: int) -> float:
    """The wait before a process that ended `failures` (≥ 1) times in a row is started again."""
    low, high = BACKOFF_S
    return float(min(high, low * 2 ** min(failures - 1, 16)))


class ServingProcess:
    """`launch`, `join`, then `keep` until `stopping`. `state`: starting, serving, down."""

    def __init__(self, role: Role, arguments: Sequence[str]) -> None:
        self.role = role
        self.state = "starting"
        self.restarts = 0
        self.pid: int | None = None
        self.since_s = time.monotonic()
        """When `state` began."""
        self.stopping = False
        self._answers = False
        """It has answered, so its signal handlers are there."""
        self._reload_due = False
        self._command = [sys.executable, "-m", "router", "serve", "--as-process", *arguments]
        self._process: asyncio.subprocess.Process | None = None
        self._session: aiohttp.ClientSession | None = None

    @property
    def number(self) -> int:
        return self.role.number

    def describe(self) -> dict[str, Any]:
        return {
            "process": self.number,
            "pid": self.pid,
            "state": self.state,
            "state_age_s": round(time.monotonic() - self.since_s, 3),
            "restarts": self.restarts,
        }

    def _be(self, state: str) -> None:
        self.state, self.since_s = state, time.monotonic()

    # ---- life

    async def launch(self) -> None:
        """Starts it and waits until its private socket answers. Raises StartFailed, and OSError when the system has no
        process to give."""
        self._be("starting")
        self._answers = self._reload_due = False
        # A session of its own: Ctrl-C reaches it through the supervisor, once.
        self._process = process = await asyncio.create_subprocess_exec(
            *self._command, stdin=asyncio.subprocess.PIPE, start_new_session=True
        )
        self.pid = process.pid
        if self.stopping:  # asked to while there was no process yet to tell
            self.signal(signal.SIGTERM)
        await self._say(msgspec.json.encode(self.role) + b"\n")
        await self._until(lambda state: True, START_LIMIT_S)
        self._answers = True
        if self._reload_due:
            self.signal(signal.SIGHUP)

    async def join(self) -> None:
        """Tells it to take requests and waits until it does. Raises StartFailed."""
        await self._say(JOIN)
        await self._until(lambda state: state["listening"], START_LIMIT_S)
        self._be("serving")

    async def ready(self, limit_s: float) -> None:
        """Waits until it could serve a request, at most `limit_s`. Raises StartFailed."""
        await self._until(lambda state: state["ready"], limit_s, kill=False)

    async def keep(self, prepare: Callable[[ServingProcess], Awaitable[None]]) -> None:
        """Starts it again whenever it ends. `prepare` is awaited before a new one takes requests."""
        failures = 0
        while not self.stopping:
            began_s = time.monotonic()
            status = await self._ended()
            self._be("down")
            if self.stopping:
                return
            self.restarts += 1
            failures = 1 if time.monotonic() - began_s > STEADY_S else failures + 1
            wait_s = backoff_s(failures)
            log.error("process %d %s; started again in %g s", self.number, ending(status), wait_s)
            await asyncio.sleep(wait_s)
            if self.stopping:
                return
            try:
                await self.launch()
                await prepare(self)
                await self.ready(READY_LIMIT_S)
                await self.join()
                log.info("process %d serves again", self.number)
            except StartFailed:
                continue  # `_ended` returns at once
            except OSError as error:  # likewise, of the one before
                log.error("process %d cannot be started: %s", self.number, error)

    def reload(self) -> None:
        """SIGHUP, held back while it would end the process: until its handlers are there."""
        if self._answers:
            self.signal(signal.SIGHUP)
        else:
            self._reload_due = True

    def signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def wait(self) -> None:
        """Until it has ended."""
        if self._process is not None:
            await self._process.wait()

    async def close(self) -> None:
        """Kills what is still there."""
        self.signal(signal.SIGKILL)
        await self.wait()
        if self._session is not None:
            await self._session.close()

    async def _ended(self) -> int:
        assert self._process is not None
        watch = asyncio.create_task(self._watch())
        try:
            return await self._process.wait()
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    async def _watch(self) -> None:
        misses = 0
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            misses = 0 if await self._asked_state(WATCH_TIMEOUT_S) is not None else misses + 1
            if misses >= WATCH_MISSES and not self.stopping:
                log.error("process %d has not answered for %g s", self.number, misses * WATCH_TIMEOUT_S)
                self.signal(signal.SIGKILL)

    async def _say(self, line: bytes) -> None:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        with contextlib.suppress(ConnectionError):  # that it ended is seen elsewhere
            process.stdin.write(line)
            await process.stdin.drain()

    async def _until(self, seen: Callable[[dict[str, Any]], bool], limit_s: float, *, kill: bool = True) -> None:
        process = self._process
        assert process is not None
        deadline_s = time.monotonic() + limit_s
        while process.returncode is None:
            state = await self._asked_state(WATCH_TIMEOUT_S)
            if state is not None and state["pid"] == process.pid and seen(state):
                return
            if time.monotonic() > deadline_s:
                if not kill:
                    return
                self.signal(signal.SIGKILL)
                await process.wait()
                break
            await asyncio.sleep(POLL_S)
        raise StartFailed(self.number, process.returncode or -signal.SIGKILL)

    # ---- questions

    async def ask(
        self,
        method: str,
        target: str,
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = ASK_TIMEOUT_S,
    ) -> Answer | None:
        """One admin request. None when the process does not answer."""
        try:
            async with self.session().request(
                method,
                f"http://process{target}",
                data=body,
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=timeout_s),
            ) as answer:
                return Answer(answer.status, dict(answer.headers), await answer.read())
        except (aiohttp.ClientError, TimeoutError, OSError):
            return None

    def session(self) -> aiohttp.ClientSession:
        """Over the private socket, whose path stays the same."""
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.UnixConnector(self.role.admin_socket, limit=0))
        return self._session

    async def _asked_state(self, timeout_s: float) -> dict[str, Any] | None:
        answer = await self.ask("GET", "/process", timeout_s=timeout_s)
        if answer is None or not answer.ok:
            return None
        state: dict[str, Any] = msgspec.json.decode(answer.body)
        return state
