"""One simulated engine as a process: `kv-router engine`."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable

from router.engine.app import SimulatedEngine
from router.engine.options import EngineOptions


def run_engine(options: EngineOptions) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit status: 1 when a port cannot be bound."""

    def ready(engine: SimulatedEngine) -> None:
        print(f"simulated engine ready at {engine.url}  {engine.ports.describe()}", flush=True)

    try:
        asyncio.run(serve(options, ready))
    except OSError as error:
        print(f"kv-router engine: {error}", file=sys.stderr)
        return 1
    return 0


async def serve(options: EngineOptions, ready: Callable[[SimulatedEngine], None]) -> None:
    """Run one engine until SIGTERM or SIGINT, then let running requests finish. A second signal cuts them off."""
    engine = SimulatedEngine(options)
    stop, cut = asyncio.Event(), asyncio.Event()

    def signalled() -> None:
        (cut if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled)
    await engine.start()
    try:
        ready(engine)
        await stop.wait()
        engine.draining = True
        waits = [asyncio.ensure_future(engine.drain()), asyncio.ensure_future(cut.wait())]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
    finally:
        await engine.stop()
