"""`kv-router serve --processes N`: N serving processes on one port, restarted when they end, with one admin listener.

The supervisor serves no client. It holds the public port (so that port 0 is one port, and nobody else takes it while a
process is down), the admin listener, and the processes' leash (router.processes.role).
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from aiohttp import web

from router.admin_guard import parser_log
from router.announce import announce
from router.config import Config, Overrides
from router.errors import ConfigError
from router.processes.front import Front
from router.processes.page import CommonPage
from router.processes.process import ServingProcess, StartFailed
from router.processes.role import Role, front_socket, load_socket
from router.siblings.relay import Relay

log = logging.getLogger("router.processes")

END_MARGIN_S = 10.0
"""Beyond drain_s and grace_s: then a process is killed."""
MAX_FOLDER_CHARS = 80
"""A socket's path has room for 108 bytes."""


async def supervise(
    config: Config, path: Path | None, overrides: Overrides, reread: Callable[[], Config] | None
) -> int:
    """Runs until SIGTERM or SIGINT. Returns the exit status: that of a process that could not start, or 0.

    Raises ConfigError when an address cannot be had.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(_private_folder())
        held = stack.enter_context(_held_port(config))
        port = held.getsockname()[1]
        key = secrets.token_urlsafe(32)
        roles = [Role(n, config.processes, folder, port, key) for n in range(config.processes)]
        processes = [ServingProcess(role, _arguments(path, overrides)) for role in roles]
        supervisor = Supervisor(config, processes, reread)
        relay = None
        if config.siblings.listen is not None:
            sockets = [load_socket(folder, role.number) for role in roles]
            relay = Relay(config.siblings.listen, sockets)
        try:
            if relay is not None:
                relay.start()
            await supervisor.start(front_socket(folder))
            return await supervisor.run(port)
        finally:
            await supervisor.close()
            if relay is not None:
                await relay.close()


class Supervisor:
    """`start`, `run` until a signal ends it, `close`."""

    def __init__(
        self, config: Config, processes: Sequence[ServingProcess], reread: Callable[[], Config] | None
    ) -> None:
        self._config = config
        self._processes = processes
        self._reread = reread
        self._page = CommonPage(processes)
        self._front = Front(config, processes, self._page)
        self._stop = asyncio.Event()
        self._runners: list[web.AppRunner] = []
        self._admin_port = 0
        self._keepers: list[asyncio.Task[None]] = []
        self._reloading: set[asyncio.Task[None]] = set()

    async def start(self, socket_path: str) -> None:
        """Binds the admin listener, and `socket_path` for the processes. Raises ConfigError."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._end, signal.SIGTERM)
        loop.add_signal_handler(signal.SIGINT, self._end, signal.SIGINT)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        admin = self._config.admin
        public, private = self._front.application(), self._front.private_application()
        for app in (public, private):
            self._runners.append(web.AppRunner(app, access_log=None, logger=parser_log, shutdown_timeout=1.0))
            await self._runners[-1].setup()
        try:
            await web.TCPSite(self._runners[0], admin.host, admin.port).start()
        except OSError as error:
            raise ConfigError(f"admin: cannot bind {admin.host}:{admin.port}: {error.strerror or error}") from None
        self._admin_port = int(self._runners[0].addresses[0][1])
        await web.UnixSite(self._runners[1], socket_path).start()

    async def run(self, port: int) -> int:
        status = await self._start_processes()
        if status is not None:
            return status
        if not self._stop.is_set():
            announce(self._config, port, self._admin_port)
            self._keepers = [asyncio.create_task(p.keep(self._front.prepare)) for p in self._processes]
        await self._stop.wait()
        for keeper in self._keepers:
            if not keeper.done():
                keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await self._wait_for_processes()
        return 0

    async def close(self) -> None:
        await self._page.close()
        for process in self._processes:
            process.stopping = True
        await asyncio.gather(*(process.close() for process in self._processes))
        for runner in self._runners:
            await runner.cleanup()

    async def _start_processes(self) -> int | None:
        """The status of one that could not start; it has said why itself."""
        for step in (ServingProcess.launch, ServingProcess.join):
            if self._stop.is_set():
                return None
            outcomes = await asyncio.gather(*(step(process) for process in self._processes), return_exceptions=True)
            for outcome in outcomes:
                if isinstance(outcome, StartFailed) and not self._stop.is_set():
                    log.error("%s", outcome)
                    return outcome.status if outcome.status > 0 else 1
                if isinstance(outcome, BaseException) and not isinstance(outcome, StartFailed):
                    raise outcome
        return None

    async def _wait_for_processes(self) -> None:
        timeouts = self._config.timeouts
        limit_s = timeouts.drain_s + timeouts.grace_s + END_MARGIN_S
        waits = [asyncio.ensure_future(process.wait()) for process in self._processes]
        _, late = await asyncio.wait(waits, timeout=limit_s)
        for wait in late:
            wait.cancel()
        if late:
            log.error("%d processes did not end within %g s and are killed", len(late), limit_s)

    def _end(self, number: signal.Signals) -> None:
        """Passed on as it came: the second one cuts the processes' draining short."""
        self._stop.set()
        for process in self._processes:
            process.stopping = True
            process.signal(number)

    def _reload(self) -> None:
        if self._reread is None:
            log.warning("SIGHUP: nothing to re-read, the router was started without --config")
            return
        task = asyncio.create_task(self._take_config(self._reread))
        self._reloading.add(task)
        task.add_done_callback(self._reloading.discard)

    async def _take_config(self, reread: Callable[[], Config]) -> None:
        """The processes read the file themselves; here it is the admin key."""
        try:
            self._front.config = await asyncio.to_thread(reread)
        except ConfigError as error:
            log.error("SIGHUP: the configuration was not taken: %s", error)
            return
        self._front.forget_removals()
        for process in self._processes:
            process.reload()


def _arguments(path: Path | None, overrides: Overrides) -> list[str]:
    """The command line that gives a process the configuration of this one."""
    given: list[tuple[str, object]] = [
        ("--config", path),
        ("--host", overrides.host),
        ("--port", overrides.port),
        ("--admin-port", overrides.admin_port),
        ("--processes", overrides.processes),
        *(("--worker", url) for url in overrides.workers),
    ]
    return [text for option, value in given if value is not None for text in (option, str(value))]


def _private_folder() -> tempfile.TemporaryDirectory[str]:
    """Readable by this user only. Raises ConfigError where no folder can be written."""
    shared_memory = "/dev/shm"  # a container's root may be read-only; its sockets need no disk
    for parent in (None, shared_memory):
        try:
            made = tempfile.TemporaryDirectory(prefix="kv-router-", dir=parent)
        except OSError:
            continue
        if len(made.name) <= MAX_FOLDER_CHARS:
            return made
        made.cleanup()
    raise ConfigError(
        f"processes: no folder for the processes' sockets: TMPDIR must be writable and shorter than {MAX_FOLDER_CHARS} "
        "characters"
    )


def _held_port(config: Config) -> socket.socket:
    """A socket bound to the public port that never listens, so it gets no connection. Raises ConfigError."""
    listen = config.listen
    try:
        info = socket.getaddrinfo(listen.host, listen.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        family, kind, protocol, _, address = info
        if listen.port:
            # Another router's processes would gladly share the port.
            with socket.socket(family, kind, protocol) as alone:
                alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                alone.bind(address)
        held = socket.socket(family, kind, protocol)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(address)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error
        raise ConfigError(f"listen: cannot bind {listen.host}:{listen.port}: {reason}") from None
    return held
