"""HTTP over real loopback sockets for tests: a scripted worker and a client that sees the bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

HOST = "127.0.0.1"


@dataclass
class Seen:
    """A request as it arrived at the scripted worker."""

    method: str
    target: str
    fields: list[tuple[str, str]]
    body: bytes
    connection: int

    def all(self, name: str) -> list[str]:
        return [value for key, value in self.fields if key.lower() == name.lower()]

    def one(self, name: str) -> str | None:
        found = self.all(name)
        assert len(found) <= 1, f"{name} came {len(found)} times"
        return found[0] if found else None


class Reply:
    """What a script can do with its connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.keep = True

    async def raw(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def whole(
        self, status: int = 200, body: bytes = b"{}", fields: str = "", kind: str = "application/json"
    ) -> None:
        head = f"HTTP/1.1 {status} Scripted\r\nContent-Type: {kind}\r\n{fields}Content-Length: {len(body)}\r\n\r\n"
        await self.raw(head.encode() + body)

    async def begin_stream(self, fields: str = "", kind: str = "text/event-stream") -> None:
        await self.raw(
            f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\n{fields}Transfer-Encoding: chunked\r\n\r\n".encode()
        )

    async def chunk(self, data: bytes) -> None:
        await self.raw(b"%x\r\n%b\r\n" % (len(data), data))

    async def end_stream(self) -> None:
        await self.raw(b"0\r\n\r\n")

    def reset(self) -> None:
        self.keep = False
        self.writer.transport.abort()

    def close(self) -> None:
        self.keep = False
        self.writer.close()

    async def gone(self) -> None:
        """Until the other side has closed the connection."""
        try:
            while await self.reader.read(65536):
                pass
        except ConnectionError:
            pass
        self.keep = False


Script = Callable[[Seen, Reply], Awaitable[None]]


async def ok(seen: Seen, reply: Reply) -> None:
    await reply.whole()


@dataclass(eq=False)
class ScriptedWorker:
    """A worker whose answer to each request is `script`; counts what it sees."""

    script: Script = ok
    requests: list[Seen] = field(default_factory=list)
    connections: int = 0
    open: int = 0
    read_body: bool = True
    _server: asyncio.Server | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def start(self) -> ScriptedWorker:
        self._server = await asyncio.start_server(self._serve, HOST, 0)
        return self

    @property
    def port(self) -> int:
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    async def stop_listening(self) -> None:
        assert self._server is not None
        self._server.close()

    async def close(self) -> None:
        await self.stop_listening()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        self.open += 1
        number = self.connections
        reply = Reply(reader, writer)
        try:
            while reply.keep:
                head = await reader.readuntil(b"\r\n\r\n")
                seen = _seen(head, number)
                if self.read_body:
                    seen.body = await reader.readexactly(int(seen.one("content-length") or 0))
                self.requests.append(seen)
                await self.script(seen, reply)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self.open -= 1
            self._tasks.discard(task)
            writer.close()


def _seen(head: bytes, number: int) -> Seen:
    first, *lines = head.decode("latin-1").split("\r\n")
    method, target, _ = first.split(" ")
    fields = [(name, value.strip()) for name, _, value in (line.partition(":") for line in lines if line)]
    return Seen(method, target, fields, b"", number)


@dataclass
class Answered:
    """An answer as the client saw it. `complete` False: the connection ended before the framing said so."""

    status: int
    head: bytes
    fields: list[tuple[str, str]]
    body: bytes
    complete: bool = True

    def all(self, name: str) -> list[str]:
        return [value for key, value in self.fields if key.lower() == name.lower()]

    def one(self, name: str) -> str | None:
        found = self.all(name)
        assert len(found) <= 1, f"{name} came {len(found)} times"
        return found[0] if found else None


class RawClient:
    """One client connection; what is sent and read is bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def to(cls, port: int, limit: int = 1 << 22) -> RawClient:
        return cls(*await asyncio.open_connection(HOST, port, limit=limit))

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def head(self) -> Answered:
        """The next answer's head; 1xx answers are returned too."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        fields = [(name, value.strip()) for name, _, value in (line.partition(":") for line in lines if line)]
        return Answered(int(first.split(" ")[1]), head, fields, b"")

    async def chunk(self) -> bytes:
        """One chunk of a chunked body, b"" for the last."""
        size = int((await self.reader.readuntil(b"\r\n")).strip(), 16)
        data = await self.reader.readexactly(size + 2)
        return data[:-2]

    async def answer(self, *, head_only: bool = False) -> Answered:
        """The next answer with its body, however it is framed."""
        found = await self.head()
        length, coding = found.one("content-length"), found.one("transfer-encoding")
        assert length is None or coding is None, "both framings"
        if head_only or found.status < 200 or found.status in (204, 304):
            return found
        try:
            if coding is not None:
                while piece := await self.chunk():
                    found.body += piece
            elif length is not None:
                found.body = await self.reader.readexactly(int(length))
            else:
                found.body = await self.reader.read()
        except asyncio.IncompleteReadError as error:
            found.body += error.partial
            found.complete = False
        except ConnectionError:
            found.complete = False
        return found

    async def at_end(self) -> bool:
        """The other side has closed; False when bytes came instead."""
        try:
            return await asyncio.wait_for(self.reader.read(1), 5) == b""
        except ConnectionError:
            return True

    def leave(self) -> None:
        self.writer.transport.abort()


def post(target: str = "/v1/completions", body: bytes = b"{}", fields: str = "", method: str = "POST") -> bytes:
    head = f"{method} {target} HTTP/1.1\r\nHost: router\r\nContent-Length: {len(body)}\r\n{fields}\r\n"
    return head.encode("latin-1") + body


def get(target: str, fields: str = "", method: str = "GET") -> bytes:
    return f"{method} {target} HTTP/1.1\r\nHost: router\r\n{fields}\r\n".encode("latin-1")


async def fetch(port: int, data: bytes, *, head_only: bool = False) -> Answered:
    """One request on a connection of its own."""
    client = await RawClient.to(port)
    await client.send(data)
    try:
        return await client.answer(head_only=head_only)
    finally:
        client.leave()
