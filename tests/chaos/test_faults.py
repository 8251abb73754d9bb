"""Chaos in one process: engines that refuse, reset, hang, lie and overload at random, clients that leave at random.

Every request ends in exactly one known outcome, on both sides the same one, and no load is left anywhere.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from tests.chaos.engines import ChaosEngine
from tests.e2e.conftest import Start
from tests.support.http import RawClient, Reply, Seen, post
from tests.support.waiting import until

SEED = 20
REQUESTS = 800
TOGETHER = 40
DONE = b"data: [DONE]\n\n"
EVENT = b'data: {"choices":[{"text":"t"}]}\n\n'


class Chaos:
    """What the engines do, drawn anew for every request; `down` engines take no connection at all."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)

    async def answer(self, seen: Seen, reply: Reply) -> None:
        what = self.chance.choices(
            ("whole", "stream", "late", "reset", "cut", "ended", "error", "busy", "rubbish", "hang"),
            (30, 30, 6, 6, 6, 6, 6, 6, 2, 2),
        )[0]
        if what == "whole":
            await reply.whole()
        elif what == "late":
            await asyncio.sleep(self.chance.random() * 0.05)
            await reply.whole()
        elif what == "reset":
            reply.reset()
        elif what == "error":
            await reply.whole(self.chance.choice((400, 422, 500, 502)))
        elif what == "busy":
            await reply.whole(self.chance.choice((429, 503)), b"busy", "Retry-After: 1\r\n")
        elif what == "rubbish":
            await reply.raw(b"SSH-2.0-OpenSSH\r\n\r\n")
            reply.close()
        elif what == "hang":
            await reply.gone()
        else:
            await self.stream(what, reply)

    async def stream(self, what: str, reply: Reply) -> None:
        await reply.begin_stream()
        for _ in range(self.chance.randrange(1, 6)):
            await reply.chunk(EVENT)
            await asyncio.sleep(self.chance.random() * 0.003)
        if what == "cut":
            reply.reset()
        elif what == "ended":  # a proper end of the chunks without [DONE]
            await reply.end_stream()
        else:
            await reply.chunk(DONE)
            await reply.end_stream()


async def one_request(port: int, chance: random.Random) -> str:
    """What the client saw: `left`, `cut`, `complete`, or an error's status and code."""
    client = await RawClient.to(port)
    stream = chance.random() < 0.5
    body = b'{"model":"tiny","prompt":[1,2,3],"stream":%b}' % (b"true" if stream else b"false")
    try:
        await client.send(post("/v1/completions", body))
        patience_s = chance.random() * 0.01 if chance.random() < 0.15 else 20.0
        answer = await asyncio.wait_for(client.answer(), patience_s)
    except TimeoutError:
        assert patience_s < 1, "a request was lost without an error"
        return "left"
    except (ConnectionError, asyncio.IncompleteReadError):
        return "no answer"
    finally:
        client.leave()
    if not answer.complete:
        return "cut"
    if answer.status < 400:
        kind = answer.one("content-type") or ""
        assert "event-stream" not in kind or answer.body.endswith(DONE), "an incomplete stream that looks complete"
        return "complete"
    return f"{answer.status} {answer.one('x-kv-router-error') or 'of the engine'}"


async def test_every_request_ends_in_one_known_outcome(start_router: Start, capsys: pytest.CaptureFixture[str]) -> None:
    """Cases 55, 60, 63, 64, 67, 68, 69 and 99 together."""
    chaos, chance = Chaos(SEED), random.Random(SEED + 1)
    engines = [await ChaosEngine.running(chaos.answer) for _ in range(4)]
    router = await start_router(
        *({"url": engine.url} for engine in engines),
        timeouts={"idle_s": 0.4, "connect_s": 1},
        fleet={"probe_interval_s": 0.2},
        admission={"max_inflight_per_worker": 8, "max_waiting": 20, "wait_s": 2},
    )
    await until(lambda: len(router.service.fleet.routable("tiny")) == 4, "all ready")
    port, seen = router.service.listener.port, Counter[str]()

    async def crowd() -> None:
        for _ in range(REQUESTS // TOGETHER):
            seen[await one_request(port, chance)] += 1

    async def requests_end(count: int) -> None:
        wanted = seen.total() + count
        await until(lambda: seen.total() >= wanted, "requests go on")

    async def outages() -> None:
        """One engine after the other refuses connections while 30 requests end; 30 later it is the next one's turn."""
        while True:
            engine = chance.choice(engines)
            at = engine.port
            await engine.stop_listening()
            await requests_end(30)
            engine._server = await asyncio.start_server(engine._serve, "127.0.0.1", at)
            await requests_end(30)

    trouble = asyncio.create_task(outages())
    await asyncio.gather(*(crowd() for _ in range(TOGETHER)))
    trouble.cancel()
    await asyncio.gather(trouble, return_exceptions=True)
    await until(lambda: router.service.listener.in_flight == 0, "every request ended")
    sent = REQUESTS // TOGETHER * TOGETHER
    ends = {
        outcome: int(await router.metric("requests_total", route="/v1/completions", outcome=outcome))
        for outcome in ("ok", "client_closed", "rejected", "upstream_error", "stream_error")
    }
    with capsys.disabled():
        print(f"\nseed {SEED}: {sent} requests; clients saw {dict(sorted(seen.items()))}; router counted {ends}")
    assert sum(seen.values()) == sum(ends.values()) == sent
    assert all(ends.values()), "the run did not reach every outcome"
    assert seen["no answer"] == 0
    assert not any(key.startswith("500 internal") for key in seen)
    assert ends["stream_error"] >= seen["cut"]
    assert seen["complete"] <= ends["ok"] <= seen["complete"] + seen["left"]
    assert await router.metric("worker_inflight_requests") == 0
    assert await router.metric("worker_inflight_tokens") == 0
    assert await router.metric("waiting_requests") == 0
    assert await router.metric("buffered_body_bytes") == 0
    assert all(worker.inflight_requests == 0 for worker in router.service.fleet.workers)
    for engine in engines:
        await engine.close()
