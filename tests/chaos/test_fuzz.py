"""Seeded nonsense against both listeners: no fault of ours (500), no traceback, no hang, and both still work then."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
from collections import Counter

import pytest

from router.proxy.fanout import FANNED_OUT
from router.proxy.routes import OWN, PROXIED
from tests.chaos.engines import ChaosEngine
from tests.e2e.conftest import Start
from tests.support.http import RawClient, get, ok
from tests.support.waiting import until

SEED = int(os.environ.get("KV_ROUTER_FUZZ_SEED", "6"))
REQUESTS = int(os.environ.get("KV_ROUTER_FUZZ_REQUESTS", "480"))
TOGETHER = 12
PATHS = {
    "public": [*PROXIED, *OWN, "/flush_cache", "/workers", "/server_info", "/docs", "/"],
    "admin": ["/workers", "/route", "/metrics", "/config", "/health", "/ready", "/log-level", *FANNED_OUT],
}
METHODS = ["POST"] * 10 + ["GET", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "BREW", "get", ""]
KEYS = """
model prompt messages text input_ids input stream n max_tokens temperature stop tools tool_choice role content
rid routed_dp_rank data_parallel_rank sampling_params stream_options cache_salt extra_key lora_path bootstrap_host url
kv_events api_key path body headers level abort_all documents chat_template chat_template_kwargs session_id
"""
ODD = [
    "null", "true", "[]", "{}", "0", "-1", "1e400", "NaN", "-Infinity", "9" * 400, "1.0", '""', '"tiny"', '"\\ud800"',
    '"\\u0000"', '"' + "x" * 3000 + '"', "[" * 3000 + "]" * 3000, '{"a":' * 3000 + "1" + "}" * 3000, "[1,2,3]",
    '[[1,2],[3]]', '[{"role":"user","content":"hi"}]', '[{"role":7,"content":{"x":[]}}]', '"http://127.0.0.1:1"',
    '"file:///etc/passwd"', '"/v1/completions"', '{"prompt":[1,2,3]}', '{"include_usage":"maybe"}', '"debug"', '"info"',
    "[99999999999]", "[-5]", '["a","b"]',
]  # fmt: skip
FIELDS = [
    "X-Data-Parallel-Rank: 99", "X-Data-Parallel-Rank: \xff", "Expect: 100-continue", "Expect: magic",
    "Content-Encoding: gzip", "Content-Encoding: zstd, br", "Authorization: Bearer \x80", "Authorization: Basic eA==",
    "Upgrade: websocket", "Connection: close, x", "Connection: keep-alive", "Accept-Encoding: *", "Range: bytes=0-1",
    "X-Request-Id: \"><script>", "Origin: http://evil", "Content-Type: multipart/form-data", "Content-Type: ",
    "If-None-Match: *", "Forwarded: for=1.2.3.4", "Cookie: a=b", "TE: trailers", "Trailer: X", "Host: other",
    "X: " + "y" * 9000, "traceparent: 00-zz", "Content-Length: 5", "Transfer-Encoding: chunked",
]  # fmt: skip


def value(chance: random.Random) -> str:
    return chance.choice(ODD)


def body(chance: random.Random) -> bytes:
    kind = chance.randrange(10)
    if kind == 0:
        return bytes(chance.randrange(256) for _ in range(chance.randrange(60)))
    if kind == 1:
        return value(chance).encode()
    members = [f'"{chance.choice(KEYS.split())}":{value(chance)}' for _ in range(chance.randrange(6))]
    text = ("{" + ",".join(members) + "}").encode("utf-8", "surrogatepass")
    if kind == 2:
        at = chance.randrange(len(text) + 1)
        text = text[:at] + bytes([chance.randrange(256)]) + text[at + chance.randrange(3) :]
    return b"\xef\xbb\xbf" + text if kind == 3 else text


def target(chance: random.Random, paths: list[str]) -> str:
    path = chance.choice(paths)
    kind = chance.randrange(12)
    if kind == 0:
        at = chance.randrange(len(path))
        path = (
            path[:at]
            + chance.choice(["%2f", "%00", "/../", "//", "%", "%zz", ";", "\\", "?", "*", "%e2%28"])
            + path[at:]
        )
    elif kind == 1:
        path = f"http://{chance.choice(['x', '', '[', 'a:b@c'])}{path}"
    elif kind == 2:
        path += "?" + chance.choice(
            ["url=", "url=http://%00", "timeout_s=0.2", "worker=", "a=%ff&=&&", "url=" + "9" * 3000]
        )
    return path


def request(chance: random.Random, paths: list[str]) -> tuple[bytes, bool]:
    """The bytes, and whether they may rightly leave the listener waiting for more."""
    data = body(chance)
    fields = "".join(f"{field}\r\n" for field in chance.sample(FIELDS, chance.choice((0, 0, 0, 1, 2))))
    head = f"{chance.choice(METHODS)} {target(chance, paths)} HTTP/1.{chance.choice('11110')}\r\nHost: r\r\n{fields}"
    raw = f"{head}Content-Length: {len(data)}\r\n\r\n".encode("latin-1") + data
    waits = any(field.startswith(("Content-Length", "Transfer-Encoding")) for field in fields.splitlines())
    if chance.randrange(15) == 0:
        at, waits = chance.randrange(len(raw)), True
        raw = raw[:at] + bytes([chance.randrange(256)]) + raw[at + 1 :]
    if chance.randrange(25) == 0:
        return raw[: chance.randrange(len(raw))], True
    return raw, waits


async def shoot(port: int, raw: bytes, may_wait: bool) -> str:
    """The answer's status, `closed` when the listener ended the connection, `waits` for the rest of a torso."""
    client = await RawClient.to(port)
    try:
        await client.send(raw)
        head_only = raw.startswith(b"HEAD")
        async with asyncio.timeout(0.3 if may_wait else 8):
            answer = await client.answer(head_only=head_only)
            while answer.status < 200:
                answer = await client.answer(head_only=head_only)
    except TimeoutError:
        assert may_wait, raw[:600]
        return "waits"
    except (asyncio.IncompleteReadError, ConnectionError):
        return "closed"
    finally:
        client.leave()
    assert b"Traceback" not in answer.body
    assert answer.status != 500, (raw[:600], answer.body[:300])
    if answer.status >= 400 and answer.body and answer.one("x-kv-router-error"):
        assert json.loads(answer.body)["error"]["code"] == answer.one("x-kv-router-error")
    return str(answer.status)


@pytest.mark.parametrize("listener", ["public", "admin"])
async def test_nonsense_never_becomes_a_fault_of_ours(
    start_router: Start,
    listener: str,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Cases 81, 83, 84, 96, 105, 106 and 107 together."""
    engine = await ChaosEngine.running(ok)
    router = await start_router({"url": engine.url})
    await until(lambda: router.service.fleet.routable("tiny"), "ready")
    port = router.service.listener.port if listener == "public" else router.service.admin_port
    chance, tally = random.Random(SEED), Counter[str]()

    async def one() -> None:
        tally[await shoot(port, *request(chance, PATHS[listener]))] += 1

    with caplog.at_level(logging.WARNING):
        for _ in range(REQUESTS // TOGETHER):
            await asyncio.gather(*(one() for _ in range(TOGETHER)))
    faults = [
        r for r in caplog.records if r.levelno >= logging.ERROR and r.name.startswith(("router", "aiohttp", "asyncio"))
    ]
    with capsys.disabled():
        print(f"\n{listener}, seed {SEED}: {dict(sorted(tally.items()))}")
    assert [record.getMessage() for record in faults] == []
    assert len(tally) >= 5, "the fuzzer did not get around"
    await until(lambda: router.service.listener.in_flight == 0, "nothing hangs")
    client = await RawClient.to(port)
    await client.send(get("/health"))
    assert (await client.answer()).status == 200
    client.leave()
    series = [line for line in (await router.service.core.metrics()).splitlines() if b"requests_total{" in line]
    assert len(series) < 120, "labels come from closed sets"
    await engine.close()
