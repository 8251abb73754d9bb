"""One serving process's part among several: what the supervisor tells it on stdin, and where the others are.

The pipe is the leash as well: it ends when the supervisor does, however that happens, and then so does the process.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import threading
from collections.abc import Callable
from typing import IO

import aiohttp
import msgspec

from router.config import Config
from router.errors import RouterError
from router.siblings.exchange import Meeting
from router.siblings.frames import mac_key

JOIN = b"join\n"
ORPHANED = 3
"""Exit status of a process whose supervisor is gone."""
PAGE_TIMEOUT_S = 10.0


class Role(msgspec.Struct, frozen=True):
    """`folder` is private to this user and holds every socket. `port`: the public one, shared by all. `key`: of the
    load exchange where the configuration has none."""

    number: int
    count: int
    folder: str
    port: int
    key: str

    @property
    def admin_socket(self) -> str:
        return admin_socket(self.folder, self.number)

    def meeting(self, config: Config) -> Meeting:
        """The other processes; with `siblings` also the replicas, whom the supervisor tells (router.siblings.relay)."""
        siblings = config.siblings
        others = (n for n in range(self.count) if n != self.number)
        return Meeting(
            listen=load_socket(self.folder, self.number),
            peers=(*(load_socket(self.folder, n) for n in others), *siblings.peers),
            key=exchange_key(config, self.key),
            names=() if siblings.dns is None else (siblings.dns,),
            port=0 if siblings.listen is None else int(siblings.listen.rpartition(":")[2]),
            snapshots=siblings.snapshots,
        )

    async def page(self) -> bytes:
        """The metrics page of all processes together. Raises RouterError."""
        connector = aiohttp.UnixConnector(front_socket(self.folder))
        timeout = aiohttp.ClientTimeout(total=PAGE_TIMEOUT_S)
        try:
            async with (
                aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
                session.get("http://front/metrics", raise_for_status=True) as answer,
            ):
                return await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise RouterError("internal", f"the supervisor did not answer: {error!r}") from None


def admin_socket(folder: str, number: int) -> str:
    return f"{folder}/admin-{number}"


def front_socket(folder: str) -> str:
    return f"{folder}/front"


def load_socket(folder: str, number: int) -> str:
    return f"ipc://{folder}/load-{number}"


def exchange_key(config: Config, own: str) -> bytes:
    key = config.siblings.key
    return mac_key(own if key is None else key.reveal())


class SupervisorLines:
    """What comes on stdin after the role. `join`: take requests now."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self.join = asyncio.Event()
        self._pipe = pipe

    def follow(self, loop: asyncio.AbstractEventLoop) -> None:
        """A thread, so that the end of the supervisor is noticed even while the loop is busy."""
        threading.Thread(target=self._read, args=(loop,), name="supervisor", daemon=True).start()

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        while line := self._pipe.readline():
            if line == JOIN:
                loop.call_soon_threadsafe(self.join.set)
        os._exit(ORPHANED)


def supervisor_lines() -> tuple[Role, SupervisorLines]:
    """Reads the role from stdin."""
    pipe = open(0, "rb", buffering=0, closefd=False)  # noqa: SIM115  (held until the end; no lock, no read ahead)
    return msgspec.json.decode(pipe.readline(), type=Role), SupervisorLines(pipe)


def write_locked(role: Role) -> Callable[[bytes], None]:
    """Writes to stdout, which the processes share: large pieces would end up inside each other's lines."""
    lock = os.open(f"{role.folder}/stdout.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)

    def write(data: bytes) -> None:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            while data:
                data = data[os.write(1, data) :]
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)

    return write
