"""The shipped rules and dashboard on a real Prometheus that scrapes a real router over engines with faults planted.

About a minute each: `pytest -m soak tests/observe`. Needs `prometheus` (Debian's package).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from router.engine.app import SimulatedEngine
from router.engine.options import TINY_MODEL, EngineOptions
from router.engine.timing import TimingProfile
from tests.e2e.conftest import Running, Start, context, fake_engine, start_router
from tests.index.streams import CHAIN, HASHES
from tests.observe.deployed import panel_queries
from tests.observe.prometheus import PROGRAM, prometheus
from tests.support.engine import FakeEngine, free_ports, stored
from tests.support.waiting import stays, until

__all__ = ["context", "fake_engine", "start_router"]
pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(PROGRAM is None, reason="prometheus is not installed (Debian: prometheus)"),
]
EMPTY_IS_GOOD = {"Not up, or passed over", "Replays by outcome"}
"""Panels without a line while all is well."""


def engine_options(**more: Any) -> EngineOptions:
    return EngineOptions(**{"port": 0, "time_scale": 0.2, "timing": replace(TimingProfile(), max_running=8), **more})


async def chat(router: Running, talk: list[dict[str, str]]) -> int:
    body = {"model": "tiny", "messages": talk, "max_tokens": 4}
    async with router.session.post(f"{router.base}/v1/chat/completions", json=body) as answer:
        said = await answer.json()
        assert answer.status == 200, said
    talk.append({"role": "assistant", "content": said["choices"][0]["message"]["content"]})
    details = said["usage"].get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)


@asynccontextmanager
async def users(router: Running, count: int = 4) -> AsyncIterator[None]:
    """Multi-turn chats until the block ends; a talk begins anew after ten turns."""

    async def user(number: int) -> None:
        talk: list[dict[str, str]] = []
        for turn in itertools.count():
            if turn % 10 == 0:
                talk = [{"role": "system", "content": "be brief and " * 40 + str(number % 2)}]
            talk.append({"role": "user", "content": f"turn {turn} of user {number} " * 12})
            await chat(router, talk)
            await asyncio.sleep(0.05)

    tasks = [asyncio.create_task(user(number)) for number in range(count)]
    try:
        yield
        for task in tasks:
            assert not task.done(), task.exception()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_every_query_of_the_dashboard_has_an_answer(start_router: Start, tmp_path: Path) -> None:
    engines = [SimulatedEngine(engine_options(dp_size=ranks)) for ranks in (1, 2)]
    for engine in engines:
        await engine.start()
    router = await start_router(*({"url": engine.url} for engine in engines))
    for engine in engines:
        await router.live(engine.url, engine.options.dp_size)
    async with prometheus(tmp_path, router.base.removeprefix("http://")) as prom, users(router):
        asked = dict.fromkeys(panel_queries())
        assert len(asked) > 50
        missing = set(asked)

        async def all_have_data() -> bool:
            for title, expression in list(missing):
                if await prom.query(expression) or title in EMPTY_IS_GOOD:
                    missing.discard((title, expression))
            return not missing

        await until(all_have_data, lambda: f"every panel has data, not yet {missing}", 60, 1)
        shown = {title: (await prom.query(expression))[:1] for title, expression in list(asked)[:8]}
        hit_rate = float(shown["Hit rate, as engines report"][0]["value"][1])
        predicted = float(shown["Predicted"][0]["value"][1])
        assert 0.3 < hit_rate <= 1
        assert abs(hit_rate - predicted) < 0.05
        assert await prom.firing() == set()
    for engine in engines:
        await engine.stop()
    print(json.dumps({title: sample[0]["value"][1] for title, sample in shown.items() if sample}))


async def test_the_founding_failure_fires_and_clears_when_it_is_mended(start_router: Start, tmp_path: Path) -> None:
    """The engine renders chats by another template than the router was told: stores flow, lookups miss."""
    other = tmp_path / "other"
    shutil.copytree(TINY_MODEL, other)
    config = json.loads((other / "tokenizer_config.json").read_text())
    config["chat_template"] = "another beginning {{ '' }}" + config["chat_template"]
    (other / "tokenizer_config.json").write_text(json.dumps(config))
    port = free_ports(1)
    healthy = SimulatedEngine(engine_options())
    drifted = SimulatedEngine(engine_options(port=port, model_path=other))
    await healthy.start()
    await drifted.start()
    router = await start_router(
        {"url": healthy.url},
        {"url": drifted.url},
        tokenizer={"mode": "local", "path": str(TINY_MODEL)},
        fleet={"probe_interval_s": 0.2, "info_interval_s": 0.5},
        policy={"name": "least_inflight"},  # so that both are asked
    )
    for engine in (healthy, drifted):
        await router.live(engine.url)
    url = drifted.url
    async with prometheus(tmp_path, router.base.removeprefix("http://")) as prom:
        async with users(router):
            fired_s = await prom.until("KvRouterHitRateZero", url, True)
            assert {who for what, who in await prom.firing() if what == "KvRouterHitRateZero"} == {url}
        await drifted.stop()
        mended = SimulatedEngine(engine_options(port=port))
        await mended.start()
        await router.live(url)
        async with users(router):
            cleared_s = await prom.until("KvRouterHitRateZero", url, False)

            async def cleared() -> bool:
                return ("KvRouterHitRateZero", url) not in await prom.firing()

            await stays(cleared, "the alert is cleared, under load", 15)  # longer than the window
    print(f"fired after {fired_s:.0f} s, cleared {cleared_s:.0f} s after the mended engine was live")
    for engine in (healthy, mended):
        await engine.stop()


async def test_a_drifted_width_fires_and_clears_with_the_engines_restart(
    start_router: Start, fake_engine: Any, tmp_path: Path
) -> None:
    """An engine that advertises 8 tokens a block and sends 4: SGLang < 0.5.18 under decode-context parallelism."""
    engine: FakeEngine = await fake_engine(block_size=8)
    router = await start_router({"url": engine.url}, fleet={"probe_interval_s": 0.2, "info_interval_s": 0.3})
    await engine.listened()
    async with prometheus(tmp_path, router.base.removeprefix("http://")) as prom:
        for _ in range(2):
            for at, (block, parent) in enumerate(zip(HASHES, [None, *HASHES], strict=False)):
                engine.publish(stored([block], CHAIN[4 * at : 4 * at + 4], 4, parent))
        fired_s = await prom.until("KvRouterContractDrift", engine.url, True)
        engine.info["kv_events"]["block_size"] = 4
        engine.info["startup_time"] = {"tokenizer_e2e": 2.5}
        cleared_s = await prom.until("KvRouterContractDrift", engine.url, False)
    print(f"fired after {fired_s:.0f} s, cleared {cleared_s:.0f} s after the engine was mended")
