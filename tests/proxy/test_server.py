"""Admission: what the public listener takes, refuses and answers itself."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging

import pytest

from router.errors import RouterError
from router.proxy.plan import UNMATCHED, Outcome
from router.proxy.server import ListenerOptions
from tests.proxy.fakes import Bench, bench
from tests.support.http import Answered, RawClient, Reply, Script, Seen, fetch, get, post
from tests.support.waiting import until


def assert_error(answer: Answered, status: int, code: str) -> None:
    assert (answer.status, answer.one("x-kv-router-error")) == (status, code)
    error = json.loads(answer.body)["error"]
    assert error["code"] == code
    assert set(error) == {"message", "type", "code"}
    assert "Traceback" not in answer.body.decode()


async def test_the_routers_own_routes() -> None:
    async with bench(options=ListenerOptions(port=0, api_keys=("k",))) as b:
        assert (await fetch(b.port, get("/health"))).status == 200
        assert (await fetch(b.port, get("/ready"))).status == 200
        assert (await fetch(b.port, get("/metrics"))).body == b"kv_router_up 1\n"
        assert_error(await fetch(b.port, get("/v1/models")), 401, "unauthorized")
        models = await fetch(b.port, get("/v1/models", "x-api-key: k\r\n"))
        assert (models.one("content-type"), models.body) == ("application/json", b'{"object":"list","data":[]}')
        b.core.is_ready = False
        refused = await fetch(b.port, get("/ready"))
        assert_error(refused, 503, "no_worker")
        assert refused.one("retry-after") == "1"
        assert b.worker.requests == []


async def test_metrics_can_be_taken_off_the_public_listener() -> None:
    async with bench(options=ListenerOptions(port=0, metrics=False)) as b:
        assert_error(await fetch(b.port, get("/metrics")), 404, "not_found")


async def test_a_head_answer_has_no_body() -> None:
    """Case 83."""
    async with bench() as b:
        client = await RawClient.to(b.port)
        await client.send(get("/v1/models", method="HEAD") + get("/health"))
        head = await client.answer(head_only=True)
        assert (head.status, head.one("content-length")) == (200, "27")
        assert (await client.answer()).body == b'{"status":"alive"}'
        client.leave()


@pytest.mark.parametrize(
    ("request_", "status", "code", "allow"),
    [
        (post(method="OPTIONS"), 405, "method_not_allowed", "POST"),
        (get("/v1/chat/completions"), 405, "method_not_allowed", "POST"),
        (post("/v1/models"), 405, "method_not_allowed", "GET, HEAD"),
        (get("/v1/completions", "Upgrade: websocket\r\nConnection: Upgrade\r\n"), 501, "not_implemented", None),
        (post(fields="Expect: something\r\n"), 417, "expectation_failed", None),
        (post("/flush_cache"), 404, "not_found", None),
        (post("/v1/%2e%2e/flush_cache"), 404, "not_found", None),
        (post("/workers"), 404, "not_found", None),
        (post("/generate#x"), 400, "bad_request", None),
    ],
)
async def test_refusals_reach_no_worker_and_are_counted_once(
    request_: bytes, status: int, code: str, allow: str | None
) -> None:
    """Cases 83, 97, 99, 101."""
    async with bench() as b:
        answer = await fetch(b.port, request_)
        assert_error(answer, status, code)
        assert answer.one("allow") == allow
        assert [(r.outcome, r.status, r.error) for r in b.core.records] == [(Outcome.REJECTED, status, code)]
        assert b.core.records[0].route == UNMATCHED or b.core.records[0].route.startswith("/v1/")
        assert (b.core.planned, b.worker.connections) == ([], 0)


async def test_an_upgrade_to_http2_is_ignored() -> None:
    """Case 83: Java's and curl's offer of h2c is no WebSocket; the answer is plain HTTP/1.1."""
    async with bench() as b:
        fields = "Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABk\r\n"
        assert (await fetch(b.port, post(fields=fields))).status == 200
        assert b.worker.requests[0].all("upgrade") + b.worker.requests[0].all("http2-settings") == []


@pytest.mark.parametrize("fields", ["", "Authorization: Bearer wrong\r\n", "x-api-key: \r\n"])
async def test_a_missing_or_wrong_key_is_refused(fields: str) -> None:
    async with bench(options=ListenerOptions(port=0, api_keys=("right",))) as b:
        answer = await fetch(b.port, post(fields=fields))
        assert_error(answer, 401, "unauthorized")
        assert answer.one("www-authenticate") == "Bearer"
        assert (await fetch(b.port, post(fields="Authorization: Bearer right\r\n"))).status == 200
        b.listener.set_api_keys(["new"])
        assert (await fetch(b.port, post(fields="Authorization: Bearer right\r\n"))).status == 401
        assert (await fetch(b.port, post(fields="Authorization: Bearer new\r\n"))).status == 200
        assert all("Authorization" not in str(seen.fields) for seen in b.worker.requests)


CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\n"


async def test_body_limit() -> None:
    """Case 78: limit and limit + 1, with a length and chunked; nothing is forwarded."""
    async with bench(options=ListenerOptions(port=0, max_body_bytes=1000)) as b:
        for size, status in ((1000, 200), (1001, 413)):
            body = b"x" * size
            chunked = CHUNKED + b"%x\r\n%b\r\n0\r\n\r\n" % (size, body)
            for request in (post(body=body), chunked):
                assert (await fetch(b.port, request)).status == status
        assert [len(seen.body) for seen in b.worker.requests] == [1000, 1000]
        assert all(seen.one("content-length") == "1000" for seen in b.worker.requests)
        assert [record.error for record in b.core.records if record.status == 413] == ["body_too_large"] * 2


async def test_bodies_held_at_a_time_are_bounded() -> None:
    """Case 78: in total, counted as they arrive, given back when the answer ended or the client left."""
    options = ListenerOptions(port=0, max_body_bytes=1000, max_buffered_bytes=2500)
    async with bench(options=options) as b:
        step = asyncio.Semaphore(0)

        async def script(seen: Seen, reply: Reply) -> None:
            await step.acquire()
            await reply.whole()

        b.worker.script = script
        clients = [await RawClient.to(b.port) for _ in range(2)]
        for client in clients:
            await client.send(post(body=b"x" * 1000))
        await until(lambda: len(b.worker.requests) == 2, "both forwarded")
        announced = await RawClient.to(b.port)
        await announced.send(b"POST /generate HTTP/1.1\r\nHost: r\r\nContent-Length: 1000\r\n\r\n{")
        await until(lambda: b.listener.buffered_bytes == 2001, "what is only announced is not counted")
        for request in (post(body=b"x" * 600), CHUNKED + b"258\r\n%b\r\n0\r\n\r\n" % (b"x" * 600)):
            refused = await fetch(b.port, request)
            assert_error(refused, 503, "overloaded")
            assert refused.one("retry-after") == "1"
        announced.leave()
        await until(lambda: b.listener.buffered_bytes == 2000, "given back by the one that left")
        step.release()
        step.release()
        assert [(await client.answer()).status for client in clients] == [200, 200]
        await until(lambda: b.listener.buffered_bytes == 0, "all given back")
        step.release()
        assert (await fetch(b.port, post(body=b"x" * 600))).status == 200
        assert (await fetch(b.port, post(body=b"x" * 1001))).status == 413
        assert b.listener.buffered_bytes == 0


async def test_a_large_body_arrives_whole() -> None:
    """Case 78: a 10 MiB body."""
    async with bench() as b:
        body = bytes(range(256)) * (40 << 10)
        assert (await fetch(b.port, post(body=body))).status == 200
        assert b.worker.requests[0].body == body


async def test_a_slow_body_is_given_up_and_no_load_is_held() -> None:
    """Case 85."""
    async with bench(options=ListenerOptions(port=0, body_s=0.1)) as b:
        answer = await fetch(b.port, b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Length: 99\r\n\r\n{")
        assert_error(answer, 408, "request_timeout")
        assert answer.one("connection") == "close"
        assert b.core.placements == []


async def test_a_slow_head_is_given_up() -> None:
    """Case 85."""
    async with bench(options=ListenerOptions(port=0, head_s=0.1)) as b:
        client = await RawClient.to(b.port)
        await client.send(b"POST /v1/completions HTTP/1.1\r\nHo")
        assert await client.at_end()
        assert b.core.records == []


async def test_connections_are_capped() -> None:
    """Case 85."""
    async with bench(options=ListenerOptions(port=0, max_connections=2)) as b:
        first, second = await RawClient.to(b.port), await RawClient.to(b.port)
        for client in (first, second):
            await client.send(get("/health"))
            assert (await client.answer()).status == 200
        third = await RawClient.to(b.port)
        assert await third.at_end()
        first.leave()
        await until(lambda: b.listener.connections == 1, "the first has gone")
        assert (await fetch(b.port, get("/health"))).status == 200
        second.leave()


async def test_a_client_that_leaves_during_its_body_is_client_closed() -> None:
    async with bench() as b:
        client = await RawClient.to(b.port)
        await client.send(b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Length: 99\r\n\r\n{")
        await until(lambda: b.listener.in_flight == 1, "the head arrived")
        client.leave()
        await until(lambda: b.core.outcomes == [Outcome.CLIENT_CLOSED], "recorded")
        assert b.core.placements == []


async def test_expect_100_is_answered_here() -> None:
    """Case 82: after the cheap checks, and never forwarded."""
    async with bench(options=ListenerOptions(port=0, api_keys=("k",))) as b:
        client = await RawClient.to(b.port)
        head = "POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Length: 2\r\nExpect: 100-continue\r\n"
        await client.send(f"{head}x-api-key: k\r\n\r\n".encode())
        assert (await client.head()).status == 100
        await client.send(b"{}")
        assert (await client.answer()).status == 200
        assert b.worker.requests[0].all("expect") == []
        client.leave()
        refused = await fetch(b.port, f"{head}\r\n".encode())
        assert refused.status == 401


SMUGGLING = {
    "length and coding": b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "two lengths": b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}x",
    "list of lengths": b"Content-Length: 2, 3\r\n\r\n{}x",
    "empty length": b"Content-Length:\r\n\r\n{}",
    "signed length": b"Content-Length: +2\r\n\r\n{}",
    "hex length": b"Content-Length: 0x2\r\n\r\n{}",
    "bare cr in a value": b"X: a\rb\r\nContent-Length: 2\r\n\r\n{}",
    "nul in a value": b"X: a\x00b\r\nContent-Length: 2\r\n\r\n{}",
    "space before the colon": b"Content-Length : 2\r\n\r\n{}",
    "folded field": b"X: a\r\n b\r\nContent-Length : 2\r\n\r\n{}",
    "coding that is not chunked": b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "chunked not last": b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "newline in a chunk extension": b"Transfer-Encoding: chunked\r\n\r\n2;a\nb\r\n{}\r\n0\r\n\r\n",
    "bad chunk size": b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    "huge field": b"X: " + b"a" * 100_000 + b"\r\nContent-Length: 2\r\n\r\n{}",
}


@pytest.mark.parametrize("name", SMUGGLING)
async def test_ambiguous_framing_is_refused_and_the_connection_ends(name: str) -> None:
    """Case 106."""
    async with bench() as b:
        client = await RawClient.to(b.port)
        await client.send(b"POST /v1/completions HTTP/1.1\r\nHost: r\r\n" + SMUGGLING[name])
        answer = await client.answer()
        assert_error(answer, 400, "bad_request")
        assert await client.at_end()
        assert b.worker.requests == []
        # Cases 97 and 99: what the parser refuses is counted too, once. (The handler itself sees bad chunks.)
        (record,) = b.core.records
        assert (record.outcome, record.status, record.error) == (Outcome.REJECTED, 400, "bad_request")
        assert record.route in (UNMATCHED, "/v1/completions")


@pytest.mark.parametrize("target", ["/generate?q=\xff", "/gen\terate", "/generate?q=a b"])
async def test_a_target_that_is_no_uri_is_refused(target: str) -> None:
    """Case 106: raw bytes beyond ASCII and spaces must come percent-encoded."""
    async with bench() as b:
        assert_error(await fetch(b.port, post(target)), 400, "bad_request")
        assert b.worker.requests == []


@pytest.mark.parametrize("noise", [b"\x16\x03\x01\x02\x00\x01\x00", b"GARBAGE\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"])
async def test_what_is_no_http_is_refused(noise: bytes) -> None:
    async with bench() as b:
        client = await RawClient.to(b.port)
        await client.send(noise + b"\r\n\r\n")
        assert (await client.answer()).status == 400
        client.leave()


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with bench() as b:
        client = await RawClient.to(b.port)
        await client.send(post() + get("/health") + post("/generate") + get("/nope"))
        assert [(await client.answer()).status for _ in range(4)] == [200, 200, 200, 404]
        assert [seen.target for seen in b.worker.requests] == ["/v1/completions", "/generate"]
        client.leave()


async def test_a_flood_of_pipelined_requests_is_answered_in_order_and_others_get_their_turn() -> None:
    async with bench() as b:
        client, other = await RawClient.to(b.port), await RawClient.to(b.port)
        await client.send(b"".join(get(f"/nope?{number}") for number in range(3000)))
        await other.send(get("/health"))
        assert (await other.answer()).status == 200
        assert len(b.core.records) < 3000, "not after all the others"
        for _ in range(3000):
            assert (await client.answer()).status == 404
        client.leave()
        other.leave()


async def test_a_request_refused_at_its_head_leaves_the_connection_usable() -> None:
    async with bench() as b:
        client = await RawClient.to(b.port)
        head = b"POST /nope HTTP/1.1\r\nHost: r\r\nContent-Length: 1000\r\n\r\n"
        await client.send(head + b"x")
        refused = await client.answer()
        assert_error(refused, 404, "not_found")
        await client.send(b"x" * 999 + post())
        assert (await client.answer()).status == 200
        assert b.listener.buffered_bytes == 0
        client.leave()


async def test_a_client_that_still_sends_gets_the_whole_refusal() -> None:
    """Case 78: a connection that is closed with bytes unread is reset, and the answer lost with it."""
    async with bench(options=ListenerOptions(port=0, max_body_bytes=1000)) as b:
        for _ in range(5):
            client = await RawClient.to(b.port)
            await client.send(b"POST /generate HTTP/1.1\r\nHost: r\r\nContent-Length: 4000000\r\n\r\n")
            for _ in range(40):
                await client.send(bytes(100_000))
            answer = await client.answer()
            assert_error(answer, 413, "body_too_large")
            assert answer.one("connection") == "close"
            assert await client.at_end()
            client.leave()


async def test_a_refused_expectation_ends_the_connection() -> None:
    """Case 82: the client may or may not send the body now, so nothing behind the head can be told from it."""
    async with bench(options=ListenerOptions(port=0, api_keys=("k",))) as b:
        client = await RawClient.to(b.port)
        await client.send(b"POST /generate HTTP/1.1\r\nHost: r\r\nContent-Length: 9\r\nExpect: 100-continue\r\n\r\n")
        refused = await client.answer()
        assert (refused.status, refused.one("connection")) == (401, "close")
        assert await client.at_end()


async def test_an_http_10_client_gets_a_plain_body() -> None:
    async with bench() as b:
        answer = await fetch(b.port, b"POST /generate HTTP/1.0\r\nContent-Length: 2\r\n\r\n{}")
        assert (answer.body, answer.one("connection")) == (b"{}", "close")


@pytest.mark.parametrize("given", ["x" * 8000, "a b", "a\r\nX-Request-Id: b"])
async def test_an_unfit_request_id_becomes_a_fresh_one_everywhere(given: str) -> None:
    """Case 105."""
    async with bench() as b:
        answer = await fetch(b.port, post(fields=f"X-Request-Id: {given}\r\n"))
        fresh = answer.one("x-request-id")
        assert fresh is not None
        assert len(fresh) == 32
        assert (b.worker.requests[0].one("x-request-id"), b.core.records[0].request_id) == (fresh, fresh)


async def test_a_fit_request_id_is_passed_on_and_back() -> None:
    async with bench() as b:
        answer = await fetch(b.port, post(fields="X-Request-Id: mine-1\r\n"))
        assert (answer.one("x-request-id"), b.worker.requests[0].one("x-request-id")) == ("mine-1", "mine-1")


async def test_a_refusal_of_the_core_is_told_in_our_shape() -> None:
    """Case 93."""
    async with bench() as b:
        b.core.refusal = RouterError("model_not_found", 'model "nope" is not served here')
        assert_error(await fetch(b.port, post()), 404, "model_not_found")
        b.core.refusal = RouterError("no_worker", "down", retry_after_s=7)
        answer = await fetch(b.port, post())
        assert (answer.status, answer.one("retry-after")) == (503, "7")


async def test_a_fault_of_ours_shows_no_traceback_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with bench() as b:
        b.core.refusal = KeyError("secret detail")
        with caplog.at_level(logging.ERROR):
            answer = await fetch(b.port, post())
        assert_error(answer, 500, "internal")
        assert b"secret" not in answer.body
        assert "secret detail" in caplog.text
        assert b.core.outcomes == [Outcome.UPSTREAM_ERROR]
        b.core.refusal = None
        assert (await fetch(b.port, post())).status == 200


async def test_a_record_that_fails_leaves_the_answer_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with bench() as b:

        def broken(_: object) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(b.core, "request_done", broken)
        client = await RawClient.to(b.port)
        await client.send(get("/health") + get("/health"))
        assert [(await client.answer()).status for _ in range(2)] == [200, 200]
        assert "could not be recorded" in caplog.text
        client.leave()


async def test_a_compressed_request_body_is_passed_as_it_is() -> None:
    """Case 72."""
    async with bench() as b:
        packed = gzip.compress(b"{}" * 100)
        await fetch(b.port, post(body=packed, fields="Content-Encoding: gzip\r\n"))
        assert (b.worker.requests[0].body, b.worker.requests[0].one("content-encoding")) == (packed, "gzip")


async def in_flight(b: Bench, script: Script) -> RawClient:
    b.worker.script = script
    client = await RawClient.to(b.port)
    await client.send(post())
    await until(lambda: len(b.worker.requests) == 1, "in flight")
    return client


async def test_leaving_serves_but_says_so() -> None:
    """Case 94."""
    async with bench() as b:
        b.listener.leave()
        assert (await fetch(b.port, get("/ready"))).status == 503
        answer = await fetch(b.port, post())
        assert (answer.status, answer.one("connection")) == (200, "close")


async def test_closing_waits_for_requests_in_flight() -> None:
    """Case 94."""
    async with bench() as b:
        idle = await RawClient.to(b.port)
        await idle.send(get("/health"))
        await idle.answer()
        go = asyncio.Event()

        async def script(seen: Seen, reply: Reply) -> None:
            await go.wait()
            await reply.whole()

        client = await in_flight(b, script)
        closing = asyncio.create_task(b.listener.close(10))
        assert await idle.at_end()
        assert not closing.done()
        go.set()
        assert (await client.answer()).status == 200
        await closing
        assert b.core.outcomes[-1] is Outcome.OK


async def test_closing_cuts_what_takes_too_long() -> None:
    """Case 94."""
    async with bench() as b:

        async def script(seen: Seen, reply: Reply) -> None:
            await reply.gone()

        client = await in_flight(b, script)
        await b.listener.close(0.05)
        assert await client.at_end()
        await until(lambda: b.worker.open == 0, "the worker was told")
        assert b.core.outcomes == [Outcome.UPSTREAM_ERROR]


async def test_a_key_that_is_taken_back_while_a_body_arrives_admits_no_other_request() -> None:
    """A head that was seen before is not looked at again, but only while the keys are those that admitted it."""
    async with bench(options=ListenerOptions(port=0, api_keys=("one",))) as b:
        client = await RawClient.to(b.port)
        asked = post(body=b"{}", fields="Authorization: Bearer one\r\n")
        for _ in range(3):
            await client.send(asked)
            assert (await client.answer()).status == 200
        second = await RawClient.to(b.port)
        await second.send(asked)
        assert (await second.answer()).status == 200
        await second.send(asked[:-1])
        await until(lambda: b.listener.in_flight == 1, "its body is being read")
        b.listener.set_api_keys(["two"])
        await second.send(asked[-1:])
        assert (await second.answer()).status == 200
        for one in (second, client):
            await one.send(asked)
            assert (await one.answer()).status == 401
            one.leave()
