"""A request's way through to a worker and back, over real sockets."""

from __future__ import annotations

import asyncio
import gzip
from typing import Any

import pytest

from router.proxy.plan import Fault, Outcome, Usage
from router.proxy.server import ListenerOptions
from router.proxy.upstream import UpstreamLimits
from tests.proxy.fakes import Bench, bench, every_way, unpooled  # noqa: F401
from tests.support.http import RawClient, Reply, Seen, fetch, ok, post
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("every_way")

EVENT = 'data: {"text":"\U0001f600"}\n\n'.encode()
DONE = b"data: [DONE]\n\n"


def end(b: Bench, at: int = -1) -> tuple[Outcome, Fault | None, int | None]:
    return b.core.placements[at].ends[0][:3]


async def test_bytes_pass_unchanged() -> None:
    """Cases 79 and 81."""
    async with bench() as b:
        body = b'\xef\xbb\xbf{"z":9007199254740993,"a":1.0,"a":NaN,"u":"\\u00e9"}'
        target = "//v1/./chat/completions?q=%25s3&x=a+b&%27"
        answer = await fetch(b.port, post(target, body, "X-Odd: \xff\xfe\r\nCookie: a=b\r\n"))
        seen = b.worker.requests[0]
        assert (seen.target, seen.body, seen.one("x-odd"), seen.one("cookie")) == (target, body, "\xff\xfe", "a=b")
        assert answer.head.startswith(b"HTTP/1.1 200 Scripted\r\n")
        assert b.core.planned == [("/v1/chat/completions", body)]
        assert b.core.records[0].route == "/v1/chat/completions"


async def test_no_cookie_state_is_kept() -> None:
    async with bench() as b:

        async def script(seen: Seen, reply: Reply) -> None:
            await reply.whole(200, b"{}", "Set-Cookie: a=1\r\nSet-Cookie: b=2\r\n")

        b.worker.script = script
        assert (await fetch(b.port, post())).all("set-cookie") == ["a=1", "b=2"]
        await fetch(b.port, post())
        assert b.worker.requests[1].all("cookie") == []


async def test_what_a_placement_sets_goes_out_and_what_it_shows_comes_back() -> None:
    async with bench() as b:
        b.core.authorization = b"Bearer worker"
        b.core.headers = [(b"X-Data-Parallel-Rank", b"1")]
        b.core.route_headers = [(b"x-kv-router-rank", b"1")]
        answer = await fetch(b.port, post(fields="Authorization: Bearer c\r\nX-Data-Parallel-Rank: 999\r\n"))
        seen = b.worker.requests[0]
        assert (seen.one("authorization"), seen.one("x-data-parallel-rank")) == ("Bearer worker", "1")
        assert answer.one("x-kv-router-rank") == "1"


async def test_a_stream_is_passed_on_piece_by_piece() -> None:
    """Case 76: each piece at once, an emoji and an event cut anywhere, the last event without its newline."""
    async with bench() as b:
        step = asyncio.Semaphore(0)
        pieces = [EVENT[:16], EVENT[16:18], EVENT[18:], b"data: [DONE]"]

        async def script(seen: Seen, reply: Reply) -> None:
            await reply.begin_stream("Cache-Control: no-cache\r\n")
            for piece in pieces:
                await step.acquire()
                await reply.chunk(piece)
            await step.acquire()
            await reply.end_stream()

        b.worker.script = script
        client = await RawClient.to(b.port)
        await client.send(post())
        head = await client.head()  # before the first piece was sent
        assert (head.one("x-accel-buffering"), head.one("cache-control")) == ("no", "no-cache")
        assert (head.one("transfer-encoding"), head.one("content-length")) == ("chunked", None)
        for piece in pieces:
            step.release()
            assert await client.chunk() == piece
        step.release()
        assert await client.chunk() == b""
        await until(lambda: b.core.outcomes == [Outcome.OK], "recorded")
        assert b.core.placements[0].first_bytes == 1
        client.leave()


async def test_compressed_answers_pass_as_they_are() -> None:
    """Case 72."""
    async with bench() as b:
        packed = gzip.compress(b"x" * 5000)

        async def script(seen: Seen, reply: Reply) -> None:
            await reply.whole(200, packed, "Content-Encoding: gzip\r\n")

        b.worker.script = script
        answer = await fetch(b.port, post(fields="Accept-Encoding: gzip\r\n"))
        assert (answer.body, answer.one("content-encoding")) == (packed, "gzip")
        assert b.worker.requests[0].one("accept-encoding") == "gzip"


@pytest.mark.parametrize("status", [400, 401, 404, 422, 500, 501, 502, 504])
async def test_errors_before_the_stream_keep_their_status(status: int) -> None:
    """Cases 67, 89 and 99: passed on as they are, to no other worker; 4xx is nobody's fault."""
    async with bench(workers=2) as b:

        async def script(seen: Seen, reply: Reply) -> None:
            await reply.whole(status, b'{"object":"error"}', "X-Why: because\r\n")

        b.worker.script = script
        answer = await fetch(b.port, post(body=b'{"stream":true}'))
        assert (answer.status, answer.body, answer.one("x-why")) == (status, b'{"object":"error"}', "because")
        assert answer.one("x-kv-router-error") is None
        outcome = Outcome.REJECTED if status < 500 else Outcome.UPSTREAM_ERROR
        fault = f"http_{status}" if status in (500, 502, 504) else None
        assert end(b) == (outcome, fault, status)
        assert b.core.records[0].ttft_s is None
        assert (b.core.outcomes, b.core.placements[0].first_bytes) == ([outcome], 0)
        assert b.workers[1].connections == 0


@pytest.mark.parametrize("status", [429, 503])
async def test_an_overloaded_worker_is_passed_over_once(status: int) -> None:
    async with bench(workers=3) as b:

        async def overloaded(seen: Seen, reply: Reply) -> None:
            await reply.whole(status, b"busy", "Retry-After: 3\r\n")

        b.worker.script = overloaded
        assert (await fetch(b.port, post())).body == b"{}"
        assert [end(b, 0), end(b, 1)] == [(Outcome.REJECTED, None, status), (Outcome.OK, None, 200)]
        assert (b.core.outcomes, b.core.records[0].attempts) == ([Outcome.OK], 2)
        b.workers[1].script = overloaded
        assert (await fetch(b.port, post())).status == status
        assert b.workers[2].connections == 0
        assert b.core.records[1].attempts == 2


@pytest.mark.parametrize("others", ["none", "dead"])
async def test_an_overload_answer_passes_unchanged_when_no_other_can_serve(others: str) -> None:
    """Interface.md: with body and retry-after."""
    async with bench(workers=1 if others == "none" else 2) as b:

        async def overloaded(seen: Seen, reply: Reply) -> None:
            await reply.whole(503, b"busy", "Retry-After: 3\r\n")

        b.worker.script = overloaded
        if others == "dead":
            await b.workers[1].stop_listening()
        answer = await fetch(b.port, post())
        assert (answer.status, answer.body, answer.one("retry-after")) == (503, b"busy", "3")
        assert b.core.outcomes == [Outcome.REJECTED]
        assert b.core.records[0].worker == b.core.urls[0].text


@pytest.mark.usefixtures("unpooled")
async def test_a_worker_that_cannot_be_reached_is_passed_over() -> None:
    """Cases 60 and 69."""
    async with bench(workers=3) as b:
        await b.workers[0].stop_listening()
        await b.workers[1].stop_listening()
        assert (await fetch(b.port, post())).status == 200
        assert [end(b, 0), end(b, 1)] == [(Outcome.UPSTREAM_ERROR, "connect", None)] * 2
        assert b.core.records[0].attempts == 3


@pytest.mark.usefixtures("unpooled")
async def test_connect_failures_are_bounded_and_end_in_502() -> None:
    async with bench(workers=5) as b:
        for worker in b.workers:
            await worker.stop_listening()
        answer = await fetch(b.port, post())
        assert (answer.status, answer.one("x-kv-router-error")) == (502, "upstream_connect")
        assert str(b.core.urls[0].port) not in answer.body.decode()
        assert len(b.core.placements) == 3
        assert b.core.outcomes == [Outcome.UPSTREAM_ERROR]


async def test_a_connection_that_the_worker_had_closed_while_it_was_idle_is_replaced() -> None:
    """Case 74."""
    async with bench(workers=2) as b:
        await fetch(b.port, post())

        async def close_once(seen: Seen, reply: Reply) -> None:
            b.worker.script = ok
            reply.close()

        b.worker.script = close_once
        assert (await fetch(b.port, post())).status == 200
        assert [record.attempts for record in b.core.records] == [1, 1]
        assert [end(b, at) for at in (0, 1)] == [(Outcome.OK, None, 200)] * 2
        assert (len(b.worker.requests), b.workers[1].requests) == (3, [])


async def test_a_worker_that_is_gone_for_good_may_have_accepted_what_came_on_an_old_connection() -> None:
    """Case 69."""
    async with bench(workers=2) as b:
        await fetch(b.port, post())

        async def go(seen: Seen, reply: Reply) -> None:
            await b.worker.stop_listening()
            reply.close()

        b.worker.script = go
        answer = await fetch(b.port, post())
        assert (answer.status, answer.one("x-kv-router-error")) == (502, "upstream_reset")
        assert end(b) == (Outcome.UPSTREAM_ERROR, "reset", None)
        assert (b.core.records[1].attempts, b.workers[1].requests) == (1, [])


@pytest.mark.parametrize("how", ["reset", "close", "garbage"])
async def test_work_a_worker_may_have_accepted_goes_to_no_other(how: str) -> None:
    """Case 69."""
    async with bench(workers=2) as b:

        async def fail(seen: Seen, reply: Reply) -> None:
            if how == "reset":
                reply.reset()
            elif how == "close":
                reply.close()
            else:
                await reply.raw(b"what?\r\n\r\n")
                await reply.gone()

        b.worker.script = fail
        answer = await fetch(b.port, post())
        code = "upstream_protocol" if how == "garbage" else "upstream_reset"
        assert (answer.status, answer.one("x-kv-router-error")) == (502, code)
        assert end(b) == (Outcome.UPSTREAM_ERROR, code.removeprefix("upstream_"), None)
        assert b.workers[1].connections == 0


async def test_a_silent_worker_is_a_504() -> None:
    async with bench(workers=2, limits=UpstreamLimits(idle_s=0.1)) as b:

        async def silent(seen: Seen, reply: Reply) -> None:
            await reply.gone()

        b.worker.script = silent
        answer = await fetch(b.port, post())
        assert (answer.status, answer.one("x-kv-router-error")) == (504, "upstream_timeout")
        assert end(b) == (Outcome.UPSTREAM_ERROR, "timeout", None)
        assert b.workers[1].connections == 0


@pytest.mark.parametrize("how", ["reset", "close", "silence", "bad chunk"])
@pytest.mark.parametrize("framing", ["chunked", "length"])
async def test_a_worker_that_dies_after_the_first_bytes_shows(how: str, framing: str) -> None:
    """Case 68: the client's body is cut, too; no end is forged, nothing is retried."""
    async with bench(workers=2, limits=UpstreamLimits(idle_s=0.2)) as b:

        async def die(seen: Seen, reply: Reply) -> None:
            if framing == "length":
                await reply.raw(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 9999\r\n\r\n" + EVENT)
            else:
                await reply.begin_stream()
                await reply.chunk(EVENT)
            if how == "reset":
                # A reset may overtake bytes that were sent just before it.
                await until(lambda: b.core.placements[0].first_bytes == 1, "the event has come to the router")
                reply.reset()
            elif how == "close":
                reply.close()
            elif how == "bad chunk" and framing == "chunked":
                await reply.raw(b"zz\r\n")
                await reply.gone()
            else:
                await reply.gone()

        b.worker.script = die
        answer = await fetch(b.port, post())
        assert (answer.status, answer.body, answer.complete) == (200, EVENT, False)
        await until(lambda: b.core.outcomes == [Outcome.STREAM_ERROR], "recorded")
        assert end(b)[0] is Outcome.STREAM_ERROR
        assert end(b)[1] in ("reset", "timeout", "protocol")
        assert b.workers[1].connections == 0


@pytest.mark.parametrize(
    ("last", "complete", "outcome"),
    [
        (EVENT, False, Outcome.STREAM_ERROR),
        (b'data: {"error":{"message":"out of memory"}}\n\n', True, Outcome.STREAM_ERROR),
        (DONE, True, Outcome.OK),
    ],
)
async def test_a_stream_that_ends_without_its_done_mark_is_a_failure(
    last: bytes, complete: bool, outcome: Outcome
) -> None:
    """Case 68: a clean close of the worker must not make half an answer look whole; no [DONE] is forged."""
    async with bench() as b:

        async def script(seen: Seen, reply: Reply) -> None:
            await reply.begin_stream()
            await reply.chunk(EVENT)
            await reply.chunk(last)
            await reply.end_stream()

        b.worker.script = script
        answer = await fetch(b.port, post("/v1/chat/completions"))
        assert (answer.body, answer.complete) == (EVENT + last, complete)
        await until(lambda: b.core.outcomes == [outcome], "recorded")


async def hang(b: Bench, when: str) -> RawClient:
    """A request whose worker has gone silent: before its head, after it, or after three events."""

    async def script(seen: Seen, reply: Reply) -> None:
        if when != "before the head":
            await reply.begin_stream()
        if when == "after events":
            for _ in range(3):
                await reply.chunk(EVENT)
        await reply.gone()

    b.worker.script = script
    client = await RawClient.to(b.port)
    await client.send(post(body=b'{"stream":false}' if when == "before the head" else b'{"stream":true}'))
    await until(lambda: len(b.worker.requests) == 1, "the worker has it")
    if when != "before the head":
        await client.head()
    if when == "after events":
        seen = b""
        while len(seen) < 3 * len(EVENT):
            seen += await client.chunk()
    return client


@pytest.mark.parametrize("when", ["before the head", "after the head", "after events"])
@pytest.mark.parametrize("how", ["reset", "half-close"])
async def test_a_client_that_leaves_ends_the_work_within_a_second(when: str, how: str) -> None:
    """Cases 63 and 64: noticed while waiting, streaming or not; the worker is not to blame."""
    async with bench() as b:
        client = await hang(b, when)
        if how == "reset":
            client.leave()
        else:
            client.writer.close()
        await until(lambda: b.worker.open == 0, "the worker's connection was closed", 1.0)
        await until(lambda: b.core.outcomes == [Outcome.CLIENT_CLOSED], "recorded")
        status = None if when == "before the head" else 200
        assert end(b) == (Outcome.CLIENT_CLOSED, None, status)
        assert b.core.records[0].status == (499 if when == "before the head" else 200)


async def test_a_slow_reader_holds_the_worker_back() -> None:
    """Case 77: bounded memory, and every byte arrives in the end."""
    async with bench() as b:
        total, sent = 24, 0
        worker: list[asyncio.WriteTransport] = []

        async def flood(seen: Seen, reply: Reply) -> None:
            nonlocal sent
            worker.append(reply.writer.transport)
            await reply.begin_stream(kind="application/octet-stream")
            for _ in range(total):
                await reply.chunk(bytes(1 << 20))
                sent += 1
            await reply.end_stream()

        b.worker.script = flood
        client = await RawClient.to(b.port, limit=1 << 16)
        await client.send(post())
        [connection] = b.listener._connections
        await until(
            lambda: connection.full and worker[0].get_write_buffer_size() > 0, "the sockets of both sides are full"
        )
        assert sent < total
        assert connection.unsent_bytes < 1 << 20
        answer = await client.answer()
        assert (len(answer.body), answer.complete) == (total << 20, True)
        client.leave()


async def test_a_reader_that_takes_nothing_is_cut_off() -> None:
    """Case 77."""
    async with bench(options=ListenerOptions(port=0, stall_s=0.1)) as b:

        async def flood(seen: Seen, reply: Reply) -> None:
            await reply.begin_stream()
            while True:
                await reply.chunk(bytes(1 << 20))

        b.worker.script = flood
        client = await RawClient.to(b.port, limit=1 << 16)
        await client.send(post())
        await until(lambda: b.core.outcomes == [Outcome.CLIENT_CLOSED], "cut off", 10)
        await until(lambda: b.worker.open == 0, "the worker was told")
        client.leave()


async def test_150_streams_at_once() -> None:
    """Case 73: no connection limit in the way."""
    async with bench() as b:
        everyone = asyncio.Event()

        async def script(seen: Seen, reply: Reply) -> None:
            await everyone.wait()
            await reply.whole()

        b.worker.script = script
        answers = asyncio.gather(*(fetch(b.port, post()) for _ in range(150)))
        await until(lambda: len(b.worker.requests) == 150, "all in flight")
        everyone.set()
        assert {answer.status for answer in await answers} == {200}


async def test_usage_reaches_the_placement_and_the_record() -> None:
    async with bench() as b:
        said = b'{"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":8},"completion_tokens":1}}'

        async def script(seen: Seen, reply: Reply) -> None:
            await reply.whole(200, said)

        b.worker.script = script
        await fetch(b.port, post())
        assert b.core.placements[0].ends[0][3] == b.core.records[0].usage == Usage(9, 8, 1)


@pytest.mark.parametrize("status", [204, 304])
async def test_an_answer_without_a_body_has_no_framing(status: int) -> None:
    async with bench() as b:

        async def script(seen: Seen, reply: Reply) -> None:
            await reply.raw(b"HTTP/1.1 %d None\r\n\r\n" % status)

        b.worker.script = script
        client = await RawClient.to(b.port)
        for _ in range(2):
            await client.send(post())
            answer = await client.answer()
            assert (answer.status, answer.one("content-length"), answer.one("transfer-encoding")) == (
                status,
                None,
                None,
            )
        client.leave()


async def test_an_answer_ended_by_its_connection_is_chunked_for_the_client() -> None:
    """Case 70: framing is ours."""
    async with bench() as b:

        async def script(seen: Seen, reply: Reply) -> None:
            await reply.raw(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\nhello")
            reply.close()

        b.worker.script = script
        answer = await fetch(b.port, post())
        assert (answer.body, answer.complete, answer.one("transfer-encoding")) == (b"hello", True, "chunked")


async def test_a_placement_that_raises_is_an_internal_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async with bench() as b:

        def broken(*_: Any) -> Any:
            raise ZeroDivisionError

        monkeypatch.setattr(b.core, "place", broken)
        assert (await fetch(b.port, post())).status == 500
        monkeypatch.undo()
        assert (await fetch(b.port, post())).status == 200
        assert b.worker.script is ok
