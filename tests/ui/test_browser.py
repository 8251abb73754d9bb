"""The page in a real browser on a real router. Needs Chromium; with KV_ROUTER_AXE=FILE (axe.min.js) also audited."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import Running, Start
from tests.index.streams import CHAIN, HASHES
from tests.support.engine import FakeEngine, stored
from tests.ui.chromium import chromium
from tests.ui.test_live import ANSWER, ask

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium on this machine (Debian: chromium)")
Fake = Callable[..., Awaitable[FakeEngine]]
ENTER, ESCAPE, RIGHT, LEFT = 13, 27, 39, 37


async def fleet(start_router: Start, fake_engine: Fake, **settings: object) -> tuple[Running, FakeEngine]:
    """Two workers, one of them with two ranks, one that is not there; and a few answered requests."""
    engine, other = await fake_engine(block_size=4), await fake_engine(block_size=4, dp_size=2)
    router = await start_router({"url": engine.url}, {"url": other.url}, {"url": "http://127.0.0.1:9"}, **settings)
    await engine.listened()
    engine.publish(stored(HASHES, CHAIN, 4))
    engine.bodies["/v1/completions"] = other.bodies["/v1/completions"] = ANSWER
    await router.live(engine.url)
    for _ in range(3):
        assert await ask(router) == 200
    return router, engine


async def test_the_page_shows_the_fleet_and_explains_a_decision(start_router: Start, fake_engine: Fake) -> None:
    router, engine = await fleet(start_router, fake_engine)
    assert PROGRAM is not None
    async with chromium(PROGRAM) as browser:
        await browser.open(f"{router.admin}/ui")
        await browser.until("document.querySelectorAll('#decisions > li').length === 3")
        assert await browser.value("document.querySelector('#summary').textContent.startsWith('2 of 3 workers ready')")
        assert await browser.value("document.querySelectorAll('#fleet-body tbody tr').length") == 3
        assert await browser.value("document.querySelectorAll('.tile').length") == 3

        explained = await browser.value(
            "(() => { const item = document.querySelector('#decisions > li button'); item.click();"
            "return item.getAttribute('aria-expanded') + ' ' + item.nextElementSibling.textContent })()"
        )
        assert explained.startswith("true ")
        assert "already holds 24 of 25 prompt tokens" in explained
        assert "the engine reused 20 tokens, 24 were predicted" in explained

        await browser.value("document.querySelector('.name').focus()")
        await browser.press("Enter", ENTER)
        await browser.until("!document.querySelector('#detail').hidden")
        assert engine.url in await browser.value("document.querySelector('#detail').textContent")
        assert await browser.value("document.activeElement.id") == "detail-title"
        await browser.press("Escape", ESCAPE)
        await browser.until("document.querySelector('#detail').hidden")
        assert await browser.value("document.activeElement.className") == "name"

        assert (await browser.until("document.querySelector('#link-text').textContent")) == "live"
        assert browser.complaints == []


async def test_tiles_and_curves_are_moved_through_with_arrow_keys(start_router: Start, fake_engine: Fake) -> None:
    router, _ = await fleet(start_router, fake_engine)
    assert PROGRAM is not None
    async with chromium(PROGRAM) as browser:
        await browser.open(f"{router.admin}/ui", dark=True)
        await browser.until("document.querySelectorAll('.tile').length === 3")
        assert await browser.value("document.documentElement.dataset.theme") == "dark"
        await browser.value("document.querySelector('input[name=layout][value=map]').click()")
        await browser.until("document.querySelector('.map') !== null")
        await browser.value("document.querySelector('.tile[tabindex=\"0\"]').focus()")
        first = await browser.value("document.activeElement.dataset.id")
        await browser.press("ArrowRight", RIGHT)
        second = await browser.value("document.activeElement.dataset.id")
        assert first != second
        label = await browser.value("document.activeElement.getAttribute('aria-label')")
        assert "rank 0" in label
        assert "in flight" in label
        assert await browser.value("document.querySelectorAll('.tile[tabindex=\"0\"]').length") == 1

        await browser.until("view.points.length >= 2")
        await browser.value("document.querySelector('#chart-hit .plot').focus()")
        await browser.press("ArrowLeft", LEFT)
        spoken = await browser.value("document.activeElement.getAttribute('aria-valuetext')")
        assert "reported" in spoken
        assert "best possible" in spoken
        assert not spoken.startswith("now")
        assert browser.complaints == []


async def test_with_an_admin_key_the_page_asks_for_it(start_router: Start, fake_engine: Fake) -> None:
    engine = await fake_engine()
    router = await start_router({"url": engine.url}, admin={"host": "127.0.0.1", "port": 0, "key": "sesame"})
    assert PROGRAM is not None
    async with chromium(PROGRAM) as browser:
        await browser.open(f"{router.admin}/ui")
        await browser.until("document.querySelector('#key-form') && !document.querySelector('#key-form').hidden")
        for key, there in (("wrong", False), ("sesame", True)):
            await browser.value(f"document.querySelector('#key').value = '{key}'; $('key-form').requestSubmit()")
            expected = "!$('main').hidden" if there else "$('key-error').textContent.length > 0"
            await browser.until(expected)
        await browser.until("view.workers.length === 1")


@pytest.mark.skipif("KV_ROUTER_AXE" not in os.environ, reason="set KV_ROUTER_AXE to axe-core's axe.min.js")
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (390, False), (390, True)])
async def test_axe_finds_nothing(start_router: Start, fake_engine: Fake, width: int, dark: bool) -> None:
    router, _ = await fleet(start_router, fake_engine)
    axe = await asyncio.to_thread(Path(os.environ["KV_ROUTER_AXE"]).read_text)
    assert PROGRAM is not None
    async with chromium(PROGRAM) as browser:
        await browser.open(f"{router.admin}/ui", width=width, dark=dark)
        await browser.until("document.querySelectorAll('#decisions > li').length === 3")
        await browser.value("document.querySelector('#decisions > li button').click()")
        await browser.value("document.querySelector('.name').click()")
        await browser.until("!document.querySelector('#detail').hidden")
        await browser.value(axe + "; 1")
        found = await browser.value("axe.run().then(r => r.violations.map(v => `${v.id}: ${v.nodes[0].html}`))")
        assert found == []
