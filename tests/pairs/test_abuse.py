"""A split fleet under load, with clients that leave at any moment and engines that die: nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from router.engine.app import SimulatedEngine
from router.engine.text import TextCodec
from router.pair_placement import PairPlacement, PrefillPlacement
from router.proxy.pair import PairResponse
from router.proxy.prefill_leg import LegTask
from tests.pairs.conftest import MakeSplit, Split
from tests.pairs.test_failures import gone
from tests.support.waiting import until

REQUESTS = 1000
AT_A_TIME = 24
KILL_EVERY = 125
PREFIXES = 12


class Abuse:
    """Asks, leaves, kills. `outcomes` counts what clients saw."""

    def __init__(self, made: Split, codec: TextCodec, seed: int) -> None:
        self.made = made
        self.outcomes: Counter[str] = Counter()
        self.killed: list[SimulatedEngine] = []
        self._codec = codec
        self._rng = random.Random(seed)
        self._prefixes = [[self._rng.randrange(10, 4000) for _ in range(320)] for _ in range(PREFIXES)]

    def body(self) -> dict[str, Any]:
        rng = self._rng
        prompt = rng.choice(self._prefixes) + [rng.randrange(10, 4000) for _ in range(rng.randrange(1, 60))]
        return {"model": "tiny", "prompt": prompt, "max_tokens": rng.randrange(1, 30), "stream": rng.random() < 0.5}

    async def ask(self, patience_s: float | None) -> None:
        try:
            async with asyncio.timeout(patience_s):
                self.outcomes[await self._whole()] += 1
        except TimeoutError:
            self.outcomes["left"] += 1
        except (aiohttp.ClientError, ConnectionError):
            self.outcomes["cut"] += 1

    async def _whole(self) -> str:
        running = self.made.running
        async with running.session.post(f"{running.base}/v1/completions", json=self.body()) as answer:
            await answer.read()
            return str(answer.status)

    async def kill_one(self) -> None:
        """An engine dies with all it does, and another process comes up behind its URL."""
        half = self._rng.choice([self.made.prefill, self.made.decode])
        at = self._rng.randrange(len(half))
        old = half[at]
        await old.stop()
        self.killed.append(old)
        options = replace(old.options, port=int(old.url.rsplit(":", 1)[1]))
        half[at] = SimulatedEngine(options, codec=self._codec)
        await half[at].start()

    async def run(self) -> None:
        waiting: set[asyncio.Task[None]] = set()
        for number in range(REQUESTS):
            if number % KILL_EVERY == KILL_EVERY - 1:
                await self.kill_one()
            while len(waiting) >= AT_A_TIME:
                _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            patience_s = self._rng.choice([0.0, 0.02, 0.1, 0.2, 0.4, 0.8, None])
            waiting.add(asyncio.create_task(self.ask(patience_s)))
        await asyncio.gather(*waiting)


def alive() -> dict[str, int]:
    gc.collect()
    kinds = (PairPlacement, PrefillPlacement, PairResponse, LegTask)
    counts = Counter(type(one).__name__ for one in gc.get_objects() if isinstance(one, kinds))
    return dict(counts)


@pytest.fixture
def silent() -> Iterator[None]:
    """pytest keeps log records, and with an error in them the frames of the whole request."""
    logger = logging.getLogger("router")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)


@pytest.mark.usefixtures("silent")
async def test_a_thousand_clients_that_leave_and_engines_that_die_leave_nothing_behind(
    split: MakeSplit, codec: TextCodec
) -> None:
    made = await split(
        2,
        3,
        prefill_options={"dp_size": 2},
        disaggregation={"linger_s": 2, "meet_s": 10},
        fleet={"probe_interval_s": 0.3, "info_interval_s": 0.3},
    )
    abuse = Abuse(made, codec, seed=9)
    try:
        await abuse.run()
        assert abuse.outcomes["left"] > REQUESTS / 4, abuse.outcomes
        assert abuse.outcomes["200"] > REQUESTS / 20, abuse.outcomes
        assert abuse.outcomes["500"] + abuse.outcomes["502"] < REQUESTS / 5, abuse.outcomes
        assert len(abuse.killed) == REQUESTS // KILL_EVERY
        await gone(made)
        rooms = made.rooms()
        assert (rooms["reused"], rooms["open"]) == (0, 0)
        assert [one.refused for one in (*made.engines, *abuse.killed)] == [0] * (5 + len(abuse.killed))

        async def back() -> bool:
            return all(w["state"] == "ready" for w in await made.running.workers())

        await made.running.until(back, "every engine is in use again", 15)
        before = made.rooms()["met"]
        for _ in range(20):
            await abuse.ask(None)
        await gone(made)
        assert made.rooms()["met"] == before + 20
        await until(lambda: not alive(), "no pair and no leg is kept in memory")
        assert await made.running.metric("prefill_legs") == 0
        assert made.running.service.core._requests.running == 0
    finally:
        for engine in made.engines:
            if engine.options.port:
                await engine.stop()
