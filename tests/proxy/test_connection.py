"""The answer parser without sockets: bytes in, head and pieces out."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.proxy.connection import Connection, UpstreamError, UpstreamProtocolError, UpstreamReset
from router.proxy.headers import AnswerFields
from router.proxy.outbox import Turn
from tests.proxy.recorded import RECORDINGS


class Pipe(asyncio.Transport):
    """A transport that only remembers."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self.connection = connection
        self.closing = False
        self.written = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.closing

    def abort(self) -> None:
        self.closing = True

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class Untold:
    """An owner that does nothing."""

    def head_came(self) -> None: ...
    def ended(self) -> None: ...
    def failed(self, error: UpstreamError) -> None: ...


class Body:
    def __init__(self) -> None:
        self.data = b""
        self.ends = 0

    def write(self, data: bytes) -> None:
        assert data
        self.data += data

    def end(self, data: bytes) -> None:
        self.data += data
        self.ends += 1


async def feed(pieces: list[bytes], *, then_eof: bool = True, no_body: bool = False) -> tuple[Connection, Body, bool]:
    """(connection, body, reusable) after `pieces`. Raises what the exchange raises."""
    idle: list[Connection] = []
    connection = Connection(Turn(asyncio.get_running_loop()), idle.append, lambda _: None)
    pipe = Pipe(connection)
    connection.connection_made(pipe)
    body = Body()

    async def exchange() -> None:
        await connection.exchange(b"", b"", no_body=no_body)
        await connection.pipe(body)

    task = asyncio.create_task(exchange())
    await asyncio.sleep(0)
    for piece in pieces:
        if pipe.closing:
            break
        connection.data_received(piece)
        await asyncio.sleep(0)
    if then_eof and not pipe.closing:
        connection.eof_received()
    if then_eof:
        connection.connection_lost(None)
    await task
    connection.release()
    return connection, body, bool(idle)


def cut(raw: bytes, sizes: list[int]) -> list[bytes]:
    pieces = []
    for size in sizes:
        pieces.append(raw[:size])
        raw = raw[size:]
    return [piece for piece in [*pieces, raw] if piece]


sizes = st.lists(st.integers(1, 400), max_size=40)


@pytest.mark.parametrize("name", RECORDINGS)
@settings(deadline=None)
@given(sizes=sizes)
def test_recorded_answers_come_out_whole_however_they_are_cut(name: str, sizes: list[int]) -> None:
    recording = RECORDINGS[name]
    if name == "sgl_chat":  # its length field is not that of the recorded body (captures/README)
        body = recording.body()
        raw = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    else:
        raw = recording.raw
    connection, body_seen, _ = asyncio.run(feed(cut(raw, sizes)))
    assert (body_seen.data, body_seen.ends) == (recording.body(), 1)
    assert connection.status == int(recording.head.split()[1])


@pytest.mark.parametrize("name", ["sgl_gen_stream", "vllm_err_too_long_stream"])
@settings(deadline=None)
@given(data=st.data())
def test_a_truncated_answer_never_looks_complete(name: str, data: st.DataObject) -> None:
    raw = RECORDINGS[name].raw
    end = data.draw(st.integers(0, len(raw) - 1))
    with pytest.raises(UpstreamReset):
        asyncio.run(feed(cut(raw[:end], data.draw(sizes))))


@settings(deadline=None)
@given(st.binary(max_size=200), sizes)
def test_noise_raises_only_our_errors(noise: bytes, sizes: list[int]) -> None:
    for raw in (
        noise,
        b"HTTP/1.1 200 OK\r\n" + noise,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + noise,
    ):
        try:
            asyncio.run(feed(cut(raw, sizes)))
        except UpstreamError:
            pass


HEAD = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    ("raw", "body", "reusable"),
    [
        (HEAD + b"Content-Length: 2\r\n\r\nab", b"ab", True),
        (HEAD + b"Content-Length: 0\r\n\r\n", b"", True),
        (HEAD + b"Content-Length: 2\r\nConnection: close\r\n\r\nab", b"ab", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nab", b"ab", False),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n2;x=y\r\nab\r\n0\r\nX-Trailer: 1\r\n\r\n", b"ab", True),
        (
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nLink: x\r\n\r\n"
            + HEAD
            + b"Content-Length: 1\r\n\r\na",
            b"a",
            True,
        ),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b"", True),
        (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n", b"", True),
        (HEAD + b"Content-Length: 2\r\n\r\nabHTTP/1.1 200 OK\r\n\r\n", b"ab", False),
    ],
)
def test_framings(raw: bytes, body: bytes, reusable: bool) -> None:
    connection, seen, pooled = asyncio.run(feed([raw], then_eof=False))
    assert (seen.data, seen.ends, pooled) == (body, 1, reusable)
    assert all(name not in (b"X-Trailer", b"Link") for name, _ in connection.headers)


def test_a_body_without_framing_ends_with_the_connection() -> None:
    _, seen, pooled = asyncio.run(feed([HEAD + b"\r\nab", b"cd"]))
    assert (seen.data, seen.ends, pooled) == (b"abcd", 1, False)


def test_a_head_answer_has_no_body_and_ends_its_connection() -> None:
    _, seen, pooled = asyncio.run(feed([HEAD + b"Content-Length: 5\r\n\r\n"], then_eof=False, no_body=True))
    assert (seen.data, seen.ends, pooled) == (b"", 1, False)


@pytest.mark.parametrize(
    "raw",
    [
        b"nonsense\r\n\r\n",
        HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\nab",
        HEAD + b"Content-Length: x\r\n\r\n",
        HEAD + b"X: a\rb\r\n\r\n",
        HEAD + b"X: 1\r\n" * 300 + b"\r\n",
        HEAD + b"X: " + b"a" * 70000,
        b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
    ],
)
def test_answers_that_are_no_http_or_over_the_limits(raw: bytes) -> None:
    """Case 106, on the worker's side."""
    with pytest.raises(UpstreamProtocolError):
        asyncio.run(feed([raw], then_eof=False))


def test_bytes_on_an_idle_connection_end_it() -> None:
    async def run() -> bool:
        connection, _, pooled = await feed([HEAD + b"Content-Length: 0\r\n\r\n"], then_eof=False)
        assert pooled
        connection.data_received(HEAD)
        return connection.open

    assert not asyncio.run(run())


ANSWERS = [
    HEAD + b"Content-Length: %d\r\n\r\n",
    b"HTTP/1.1 429 Too Many\r\nDate: now\r\ncontent-length: %d\r\nX-A: \r\nContent-Type: a/b\r\n\r\n",
]
OTHERS = [
    HEAD + b"Content-Length:  2\r\n\r\nab",
    HEAD + b"Content-Length: +2\r\n\r\nab",
    HEAD + b"Content-Length: 5\r\n\r\nab",
    HEAD + b"Content-Length: 1\r\n\r\nab",
    HEAD + b"Content-Length: 2\r\nConnection: close\r\n\r\nab",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + b"Content-Length: 2\r\n\r\nab",
    HEAD + b"\r\nab",
]


async def told(connection: Connection, pieces: list[bytes]) -> tuple[object, ...]:
    """All that can be told of one exchange on a connection, and whether it takes another."""
    body = Body()

    async def exchange() -> None:
        await connection.exchange(b"", b"", no_body=False)
        await connection.pipe(body)

    task = asyncio.create_task(exchange())
    await asyncio.sleep(0)
    for piece in pieces:
        if connection.open:
            connection.data_received(piece)
            await asyncio.sleep(0)
    await asyncio.sleep(0)
    failure: str | None = None
    if not task.done():
        connection.connection_lost(None)
    try:
        await task
    except UpstreamError as error:
        failure = str(error)
    connection.release()
    known = connection.fields.kept if connection.fields is not None else AnswerFields(connection.headers).kept
    head = connection.status, connection.reason, connection.headers, connection.content_length
    return head, known, body.data, body.ends, failure, connection.busy, connection.open


@given(
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from(ANSWERS), st.binary(max_size=20)).map(lambda one: one[0] % len(one[1]) + one[1]),
            st.sampled_from(OTHERS),
        ),
        min_size=1,
        max_size=6,
    ),
    st.lists(st.integers(1, 120), max_size=3),
)
@settings(max_examples=300, deadline=None)
def test_a_head_that_was_seen_before_means_what_it_means_to_the_parser(answers: list[bytes], sizes: list[int]) -> None:
    """Heads that repeat are not parsed again; nothing may tell."""

    async def run() -> None:
        turn = Turn(asyncio.get_running_loop())
        knows, parses = (Connection(turn, lambda _: None, lambda _: None) for _ in range(2))
        parses._to_know = 0
        for connection in (knows, parses):
            connection.connection_made(Pipe(connection))
        for number, answer in enumerate(answers):
            pieces = cut(answer, sizes if number % 2 else [])
            first = await told(knows, pieces)
            assert first == await told(parses, pieces)
            if first[-2] or not first[-1]:
                return

    asyncio.run(run())


def test_the_second_answer_with_a_head_is_not_parsed_and_has_its_own_length() -> None:
    async def run() -> None:
        connection = Connection(Turn(asyncio.get_running_loop()), lambda _: None, lambda _: None)
        connection.connection_made(Pipe(connection))
        await told(connection, [ANSWERS[1] % 2 + b"ab"])
        connection._parser = None  # type: ignore[assignment]
        head, kept, body, *_ = await told(connection, [ANSWERS[1] % 3 + b"abc"])
        assert body == b"abc"
        assert head == (
            429,
            b"Too Many",
            [(b"Date", b"now"), (b"content-length", b"3"), (b"X-A", b""), (b"Content-Type", b"a/b")],
            3,
        )
        assert kept == [(b"Date", b"now"), (b"X-A", b""), (b"Content-Type", b"a/b")]

    asyncio.run(run())


async def test_a_worker_that_answers_unasked_is_sent_its_requests_in_order() -> None:
    """The first one waits for the end of the turn, the second is too large to be put behind it."""
    connection = Connection(Turn(asyncio.get_running_loop()), lambda _: None, lambda _: None)
    pipe = Pipe(connection)
    connection.connection_made(pipe)
    connection.ask(b"first", b"", Untold())
    connection.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
    connection.attach(Body())
    connection.release()
    connection.ask(b"second", bytes(9 << 10), Untold())
    assert pipe.written == b"first" + b"second" + bytes(9 << 10)
