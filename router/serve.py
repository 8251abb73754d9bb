"""`kv-router serve`: one process, or one of several (router.processes): signals, start and end in order."""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from router.announce import announce
from router.config import Config, Overrides, load_config
from router.errors import ConfigError, RouterError
from router.observe.logs import set_up
from router.processes.role import Role, SupervisorLines, supervisor_lines
from router.service import Service

log = logging.getLogger("router")

THREAD_TURN_S = 0.001
"""A thread that renders or tokenises gives way to the event loop after so long; Python's own 5 ms would be a stall."""
GC_THRESHOLDS = (20_000, 20, 50)
"""What a request leaves behind is freed by its last reference; with Python's own 700 the search for cycles took 4 % of
the time at 256 streams."""


def _raise_file_limit() -> None:
    """Streams and connections each take a descriptor: up to what the system allows this process."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def serve(path: Path | None, overrides: Overrides, *, as_process: bool = False) -> int:
    """Runs until SIGTERM or SIGINT. Raises ConfigError for what the operator can mend.

    `as_process`: a supervisor started this one, and says its part in it on stdin.
    """
    config = load_config(path, overrides)
    set_up(config.log.format, config.log.level)
    _raise_file_limit()
    sys.setswitchinterval(THREAD_TURN_S)

    def reread() -> Config:
        return load_config(path, overrides)

    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        if as_process:
            role, lines = supervisor_lines()
            return runner.run(_serve_as(role, lines, config, reread if path is not None else None))
        if config.processes > 1:
            from router.processes.supervisor import supervise

            return runner.run(supervise(config, path, overrides, reread if path is not None else None))
        return runner.run(_serve_alone(config, reread if path is not None else None))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where there is one; asyncio's own loop otherwise."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


class _Life:
    """What signals ask for: `stop` once, `cut` when asked again, `reload`."""

    def __init__(self, drain_s: float) -> None:
        self.drain_s = drain_s
        self.stop, self.cut, self.reload = asyncio.Event(), asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._signalled, False)
        loop.add_signal_handler(signal.SIGINT, self._signalled, True)
        loop.add_signal_handler(signal.SIGHUP, self.reload.set)

    def _signalled(self, by_person: bool) -> None:
        if by_person:
            self.drain_s = 0.0  # Ctrl-C: no load balancer is to be told first
        (self.cut if self.stop.is_set() else self.stop).set()


async def _serve_alone(config: Config, reread: Callable[[], Config] | None) -> int:
    life = _Life(config.timeouts.drain_s)  # before slow start-up work (case 94)
    service = await _started(config, None)
    announce(config, service.listener.port, service.admin_port)
    return await _until_stopped(life, config, service, reread)


async def _serve_as(role: Role, lines: SupervisorLines, config: Config, reread: Callable[[], Config] | None) -> int:
    life = _Life(config.timeouts.drain_s)
    service = await _started(config, role)
    lines.follow(asyncio.get_running_loop())
    await _first(life.stop, lines.join)
    if not life.stop.is_set():
        try:
            await service.listen()
        except ConfigError:
            await service.stop(0.0)
            raise
        log.info("process %d takes requests", role.number)
    return await _until_stopped(life, config, service, reread)


async def _started(config: Config, role: Role | None) -> Service:
    service = Service(config, role)
    # What lives as long as the process need not be walked through again: the index's list of runs alone takes 10 ms at
    # 2M blocks.
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        await service.start()
    except ConfigError:
        await service.stop(0.0)
        raise
    return service


async def _until_stopped(life: _Life, config: Config, service: Service, reread: Callable[[], Config] | None) -> int:
    reloader = asyncio.create_task(_reload_on_signal(service, life.reload, reread))
    await life.stop.wait()
    log.info("stopping", extra={"drain_s": life.drain_s, "grace_s": config.timeouts.grace_s})
    reloader.cancel()
    service.leave()
    await _unless(life.cut, asyncio.sleep(life.drain_s))
    await _unless(life.cut, service.close_listeners(config.timeouts.grace_s))
    await service.stop(0.0)
    return 0


async def _first(*events: asyncio.Event) -> None:
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for each in waits:
        each.cancel()
    await asyncio.gather(*waits, return_exceptions=True)


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
