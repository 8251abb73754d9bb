"""The HTTP client towards workers: a keep-alive pool per worker over our own connections.

aiohttp's ClientSession costs about 90 µs a request more than this (libraries.md). What it leaves out is left out on
purpose: no redirects followed, no environment proxies, no cookies, no decompression, no URL rewriting, no total limit.
"""

from __future__ import annotations

import asyncio
import ipaddress
import ssl
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from router.contract.url import diallable_host
from router.proxy.connection import (
    Connection,
    Owner,
    Sink,
    UpstreamConnectError,
    UpstreamReset,
    UpstreamTimeout,
)
from router.proxy.headers import lines_of
from router.proxy.outbox import Turn
from router.proxy.plan import Origin, RawHeaders


@dataclass(frozen=True, slots=True)
class UpstreamLimits:
    """Seconds. `pool_idle_s` stays below the 5 s after which uvicorn closes an idle connection (case 74)."""

    connect_s: float = 5.0
    idle_s: float = 600.0
    """Longest silence of a worker that owes bytes, also before the first one: a long prefill is silent too."""
    pool_idle_s: float = 4.0


class UpstreamResponse:
    """One answer. `close` must be called once it is no longer wanted, finished or not."""

    __slots__ = ("_connection", "content_length", "headers", "reason", "reused", "status")

    def __init__(self, connection: Connection, *, reused: bool) -> None:
        self._connection: Connection | None = connection
        self.status = connection.status
        self.reason = connection.reason
        self.headers: RawHeaders = connection.headers
        self.content_length = connection.content_length
        """Bytes of the body if the worker said so; None when chunked or ended by the connection's end."""
        self.reused = reused

    @property
    def has_data(self) -> bool:
        """Body bytes, or the body's end, came together with the head."""
        return self._connection is not None and self._connection.has_data

    async def pipe(self, sink: Sink) -> None:
        """Push the body into `sink` as it comes, `sink.end` last. Raises UpstreamError if it is cut short or stalls."""
        assert self._connection is not None
        await self._connection.pipe(sink)

    def pause(self) -> None:
        """Stop reading: the reader of our output is slower than the worker."""
        if self._connection is not None:
            self._connection.pause()

    def resume(self) -> None:
        if self._connection is not None:
            self._connection.resume()

    def close(self) -> None:
        """Give the connection back, or cut it when the answer is not complete: the worker then stops its work."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.release()


class UpstreamClient:
    """All connections of this process to its workers. Must be made and used on one event loop."""

    def __init__(self, limits: UpstreamLimits | None = None, *, tls: ssl.SSLContext | None = None) -> None:
        """`tls` verifies https workers; the system's trust store when None."""
        self._limits = limits or UpstreamLimits()
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self.turn = Turn(self._loop)
        self._idle: dict[str, deque[tuple[Connection, float]]] = {}
        self._all: set[Connection] = set()
        self._emptied: asyncio.Future[None] | None = None
        self._sweep_s = min(1.0, self._limits.idle_s / 4, self._limits.pool_idle_s / 2)
        self._sweeper = self._loop.call_later(self._sweep_s, self._sweep)

    @property
    def open_connections(self) -> int:
        return len(self._all)

    @property
    def idle_connections(self) -> int:
        return sum(map(len, self._idle.values()))

    async def send(
        self, origin: Origin, method: bytes, target: bytes, headers: Sequence[tuple[bytes, bytes]], body: bytes
    ) -> UpstreamResponse:
        """Send a request and wait for the head of its answer; 1xx answers are skipped.

        `target` goes on the wire as it is. `headers` must hold neither Host nor framing fields. A pooled connection
        that fails before a byte of the answer is replaced by a fresh one, once: the worker had closed it while idle.
        Raises UpstreamConnectError only when nothing at all was sent, else UpstreamReset, -Timeout, -ProtocolError.
        """
        head = _head(origin, method, target, lines_of(headers), len(body))
        no_body = method == b"HEAD"
        connection = self._checkout(origin.text)
        if connection is not None:
            try:
                await connection.exchange(head, body, no_body=no_body)
                return UpstreamResponse(connection, reused=True)
            except UpstreamReset:
                connection.release()
                if connection.got_bytes:
                    raise
            except BaseException:
                connection.release()
                raise
        return await self._send_fresh(origin, head, body, no_body=no_body, again=connection is not None)

    async def send_again(
        self, origin: Origin, target: bytes, headers: Sequence[tuple[bytes, bytes]], body: bytes
    ) -> UpstreamResponse:
        """`send` of a POST whose pooled connection has failed before a byte of the answer: on a fresh one."""
        head = _head(origin, b"POST", target, lines_of(headers), len(body))
        return await self._send_fresh(origin, head, body, no_body=False, again=True)

    def send_now(self, origin: Origin, target: bytes, lines: bytes, body: bytes, owner: Owner) -> Connection | None:
        """Send a POST of at most AT_ONCE_BYTES on a pooled connection, and tell `owner` what comes of it.

        None: there is no such connection, nothing was sent. The owner must `release` it. An UpstreamReset without
        `got_bytes` means that the worker had closed the connection while idle: `send_again`. `lines`: the header fields
        as they go on the wire.
        """
        connection = self._checkout(origin.text)
        if connection is not None:
            try:
                connection.ask(_head(origin, b"POST", target, lines, len(body)), body, owner)
            except BaseException:
                connection.release()
                raise
        return connection

    async def _send_fresh(
        self, origin: Origin, head: bytes, body: bytes, *, no_body: bool, again: bool
    ) -> UpstreamResponse:
        try:
            connection = await self._connect(origin)
        except UpstreamConnectError as error:
            if again:  # the first try may have reached the worker, so this is no licence to try another one
                raise UpstreamReset("the worker closed the connection and takes no new one") from error
            raise
        try:
            await connection.exchange(head, body, no_body=no_body)
        except BaseException:
            connection.release()
            raise
        return UpstreamResponse(connection, reused=False)

    async def close(self) -> None:
        """Cut every connection and wait until the loop has seen them end."""
        self._sweeper.cancel()
        for connection in list(self._all):
            connection.abort()
        if self._all:
            self._emptied = self._loop.create_future()
            await self._emptied

    def _checkout(self, origin_text: str) -> Connection | None:
        """The most recently used idle connection that is still young enough."""
        idle = self._idle.get(origin_text)
        oldest = self._loop.time() - self._limits.pool_idle_s
        while idle:
            connection, since = idle.pop()
            if connection.open and since > oldest:
                return connection
            connection.abort()
        return None

    async def _connect(self, origin: Origin) -> Connection:
        context: ssl.SSLContext | None = None
        if origin.scheme == "https":
            context = self._tls = self._tls or ssl.create_default_context()

        def on_idle(connection: Connection) -> None:
            idle = self._idle.get(origin.text)
            if idle is None:
                idle = self._idle[origin.text] = deque()
            idle.append((connection, connection.last_activity))

        def on_lost(connection: Connection) -> None:
            self._all.discard(connection)
            if self._emptied is not None and not self._all and not self._emptied.done():
                self._emptied.set_result(None)

        try:
            async with asyncio.timeout(self._limits.connect_s):
                _, connection = await self._loop.create_connection(
                    lambda: Connection(self.turn, on_idle, on_lost), origin.host, origin.port, ssl=context
                )
        except TimeoutError as error:
            text = f"no connection to {origin.text} within {self._limits.connect_s} s"
            raise UpstreamConnectError(text) from error
        except (OSError, UnicodeError) as error:
            raise UpstreamConnectError(f"no connection to {origin.text}: {_reason(error)}") from error
        self._all.add(connection)
        if not _is_address(origin.host):  # an address was checked when the worker was registered
            try:
                diallable_host(connection.peer)
            except ValueError as error:  # the name resolves to a metadata service, say (case 102); nothing was sent
                connection.abort()
                raise UpstreamConnectError(f"{origin.text} is not connected to: {error}") from None
        if not connection.open:
            self._all.discard(connection)
            raise UpstreamConnectError(f"no connection to {origin.text}: closed at once")
        return connection

    def _sweep(self) -> None:
        """Enforce the idle limits. One timer for all connections: a timer for each chunk would cost more than it."""
        now = self._loop.time()
        silent, stale = now - self._limits.idle_s, now - self._limits.pool_idle_s
        for connection in list(self._all):
            if connection.silent_since(silent):
                connection.fail(UpstreamTimeout(f"the worker was silent for {self._limits.idle_s:g} s"))
        for name, idle in list(self._idle.items()):
            while idle and (idle[0][1] <= stale or not idle[0][0].open):
                idle.popleft()[0].abort()
            if not idle:
                del self._idle[name]  # workers come and go under new names
        self._sweeper = self._loop.call_later(self._sweep_s, self._sweep)


@lru_cache(maxsize=4096)
def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _reason(error: OSError | UnicodeError) -> str:
    return getattr(error, "strerror", None) or type(error).__name__


@lru_cache(maxsize=4096)
def _host_line(host: str, port: int) -> bytes:
    text = f"[{host}]" if ":" in host else host
    return b" HTTP/1.1\r\nHost: %b:%d\r\n" % (text.encode(), port)


def _head(origin: Origin, method: bytes, target: bytes, lines: bytes, body_bytes: int) -> bytes:
    host_line = _host_line(origin.host, origin.port)
    if body_bytes or method not in (b"GET", b"HEAD"):
        return b"%b %b%b%bContent-Length: %d\r\n\r\n" % (method, target, host_line, lines, body_bytes)
    return b"%b %b%b%b\r\n" % (method, target, host_line, lines)
