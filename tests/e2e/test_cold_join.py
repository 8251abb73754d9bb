"""A router that comes to a warm fleet too late for its replay buffers, and one whose predictions do not come true."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from router.engine.app import SimulatedEngine
from router.engine.options import EngineOptions
from tests.e2e.conftest import Running, Start
from tests.index.streams import CHAIN, HASHES, hashes_of
from tests.support.engine import FakeEngine, stored

TAIL = [7, 7, 7, 7]
PROMPT = [*CHAIN, *TAIL, 1]
TAIL_HASHES = hashes_of([*CHAIN, *TAIL])[6:]
TALKS = 8


async def settled(router: Running) -> None:
    """No request in flight and every rank's stream at rest since the last look."""
    seen: list[Any] = []

    async def still() -> bool:
        seen.append([(r["last_seq"], r["inflight_requests"]) for r in await router.ranks()])
        return len(seen) > 3 and all(look == seen[-1] for look in seen[-3:])

    await router.until(still, "streams at rest")


@dataclass
class Talks:
    """Multi-turn conversations under two system prompts, the same for every run of one seed."""

    rng: random.Random = field(default_factory=lambda: random.Random(11))
    rows: list[tuple[int, int, int]] = field(default_factory=list)
    """(predicted, reported, prompt tokens) of every request of the last round."""

    def __post_init__(self) -> None:
        systems = [[self.rng.randrange(10, 4000) for _ in range(300)] for _ in range(2)]
        self.prompts = [[*systems[n % 2]] for n in range(TALKS)]

    async def round(self, router: Running) -> None:
        self.rows = []
        for prompt in self.prompts:
            prompt.extend(self.rng.randrange(10, 4000) for _ in range(60))
            await settled(router)
            body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 20}}
            async with router.session.post(f"{router.base}/generate", json=body) as answer:
                assert answer.status == 200, await answer.text()
                meta = (await answer.json())["meta_info"]
                predicted = int(answer.headers["x-kv-router-cached-tokens"])
            self.rows.append((predicted, meta["cached_tokens"], meta["prompt_tokens"]))

    @property
    def hit_rate(self) -> float:
        return sum(row[1] for row in self.rows) / sum(row[2] for row in self.rows)


@pytest.fixture
async def start_engines() -> AsyncIterator[Callable[[], Awaitable[list[SimulatedEngine]]]]:
    made: list[SimulatedEngine] = []

    async def start() -> list[SimulatedEngine]:
        # No load reports: speeds measured over a few short prompts would decide more than the prefixes.
        fleet = [
            SimulatedEngine(EngineOptions(port=0, load_port=None, buffer_batches=3, dp_size=ranks, time_scale=0.05))
            for ranks in (1, 1, 2)
        ]
        made.extend(fleet)
        for engine in fleet:
            await engine.start()
        return fleet

    yield start
    for engine in made:
        await engine.stop()


async def open_router(start_router: Start, fleet: list[SimulatedEngine]) -> Running:
    router = await start_router(*({"url": engine.url} for engine in fleet))
    for engine in fleet:
        await router.live(engine.url, engine.options.dp_size)
    return router


async def test_one_request_per_conversation_after_a_restart_the_hit_rate_is_back(
    start_router: Start,
    start_engines: Callable[[], Awaitable[list[SimulatedEngine]]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Case 95: beside a warm fleet whose replay reaches back three batches."""
    rates: dict[str, list[float]] = {}
    for run in ("never restarted", "restarted"):
        fleet = await start_engines()
        router, talks = await open_router(start_router, fleet), Talks()
        for _ in range(3):
            await talks.round(router)
        if run == "restarted":
            await router.service.stop(0.0)
            router = await open_router(start_router, fleet)
            assert "partial" in [rank["history"] for rank in await router.ranks()]
        rates[run] = []
        for number in range(3):
            await talks.round(router)
            rates[run].append(talks.hit_rate)
            over = [row for row in talks.rows if row[0] > row[1]]
            assert not over, f"more credited than there was: {over}"
            believed, reported, _ = (sum(column) for column in zip(*talks.rows, strict=True))
            assert number == 0 or believed >= 0.9 * reported
    with capsys.disabled():
        print(f"\nhit rate, three rounds after: {rates}")
    for number in (1, 2):
        assert rates["restarted"][number] >= rates["never restarted"][number] - 0.05


@pytest.fixture
async def late(start_router: Start, fake_engine: Callable[..., Awaitable[FakeEngine]]) -> tuple[Running, FakeEngine]:
    """A router that heard its first batch, number 7, in the middle of a history; the engine holds CHAIN."""
    engine = await fake_engine(block_size=4)
    router = await start_router({"url": engine.url})
    await engine.listened()
    engine.next_seq[0] = 7
    engine.publish(stored(hashes_of([9] * 4), [9] * 4, 4))
    await router.live(engine.url)
    assert (await router.ranks())[0]["history"] == "partial"
    return router, engine


async def applied(router: Running, engine: FakeEngine) -> None:
    async def seen() -> bool:
        return bool((await router.ranks())[0]["last_seq"] == engine.next_seq[0] - 1)

    await router.until(seen, "the last batch")


async def send(router: Running, prompt: list[int]) -> None:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1}
    async with router.session.post(f"{router.base}/v1/completions", json=body) as answer:
        assert answer.status == 200
        await answer.read()


async def test_route_teaches_nothing_and_a_sent_prompt_teaches_its_chain(late: tuple[Running, FakeEngine]) -> None:
    """Design section 5; case 25."""
    router, engine = late
    assert await router.credit(PROMPT, engine.url) == 0
    engine.publish(stored(TAIL_HASHES, TAIL, 4, parent=HASHES[5]))
    await applied(router, engine)
    assert await router.credit(PROMPT, engine.url) == 0
    assert await router.credit(PROMPT, engine.url) == 0
    await send(router, PROMPT)
    assert await router.credit(PROMPT, engine.url) == 28
    assert (await router.ranks())[0]["ledger"]["vouched_blocks"] == 6
    engine.publish({"type": "BlockRemoved", "block_hashes": [*TAIL_HASHES, HASHES[5]], "medium": "GPU"})
    await applied(router, engine)
    assert await router.credit(PROMPT, engine.url) == 20


def usage(cached: int) -> bytes:
    details = {"prompt_tokens": len(PROMPT), "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": cached}}
    return json.dumps({"object": "text_completion", "choices": [], "usage": details}).encode()


async def test_reported_tokens_vouch_until_their_removal_is_announced(late: tuple[Running, FakeEngine]) -> None:
    router, engine = late
    engine.bodies["/v1/completions"] = usage(24)
    await send(router, PROMPT)
    assert await router.credit(PROMPT, engine.url) == 24
    engine.publish({"type": "BlockRemoved", "block_hashes": [HASHES[5]]})
    await applied(router, engine)
    assert await router.credit(PROMPT, engine.url) == 20


async def test_predictions_that_do_not_come_true_cost_credit_until_they_do(
    start_router: Start, fake_engine: Callable[..., Awaitable[FakeEngine]]
) -> None:
    """Case 34: this engine's blocks are gone, and it never said so."""
    engine = await fake_engine(block_size=4)
    router = await start_router({"url": engine.url})
    await engine.listened()
    engine.publish(stored(hashes_of([*CHAIN, *TAIL]), [*CHAIN, *TAIL], 4))
    await router.live(engine.url)
    assert await router.credit(PROMPT, engine.url) == 28
    engine.bodies["/v1/completions"] = usage(0)
    for _ in range(16):
        await send(router, PROMPT)
    (worker,) = await router.workers()
    assert [drift["kind"] for drift in worker["drift"]] == ["outcome"]
    assert "rank 0" in worker["drift"][0]["advice"]
    assert (worker["ranks"][0]["outcome"], worker["ranks"][0]["credit_share"]) == ("over", 0.0)
    assert await router.credit(PROMPT, engine.url) == 0
    assert await router.metric("contract_drift", kind="outcome") == 1
    assert await router.metric("rank_predicted_cached_tokens_total") == 16 * 28
    assert await router.metric("rank_reported_cached_tokens_total") == 0
    engine.bodies["/v1/completions"] = usage(28)
    for _ in range(8):
        await send(router, PROMPT)
    (worker,) = await router.workers()
    assert worker["drift"] == []
    assert await router.credit(PROMPT, engine.url) == 28
    assert await router.metric("contract_drift", kind="outcome") == 0


async def test_reuse_nobody_predicted_is_named(
    start_router: Start, fake_engine: Callable[..., Awaitable[FakeEngine]]
) -> None:
    """Design section 4: never a silent zero."""
    engine = await fake_engine(block_size=4)
    router = await start_router({"url": engine.url})
    await engine.listened()
    engine.publish(stored(hashes_of([9] * 4), [9] * 4, 4))
    await router.live(engine.url)

    async def joined() -> bool:
        return bool((await router.ranks())[0]["history"] == "complete")

    await router.until(joined, "the first batch applied")
    engine.bodies["/v1/completions"] = usage(28)
    for number in range(16):
        await send(router, [number, *PROMPT[1:]])
    (worker,) = await router.workers()
    assert [drift["kind"] for drift in worker["drift"]] == ["outcome"]
    assert "token ids" in worker["drift"][0]["advice"]
    assert worker["ranks"][0]["credit_share"] == 1.0
