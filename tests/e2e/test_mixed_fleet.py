"""One model served by two kinds of engine that make different ids of the same chat: each is matched with its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from router.prompt.forms import CHAT, prompt_form
from router.prompt.local import local_ids
from router.prompt.models import ModelFacts, ModelSource, load_model
from tests.e2e.conftest import Running, Start
from tests.prompt.support import TINY, chat, user
from tests.support.built import interpreted
from tests.support.cache import Cache
from tests.support.engine import FakeEngine

OTHER = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "
MESSAGE = user("the same words for every engine of the fleet, and quite a few of them")
Fake = Callable[..., Awaitable[FakeEngine]]


def ids(template: str | None) -> list[int]:
    files = load_model(ModelSource(str(TINY), engine_template=template), lambda: pytest.fail("no clock in it"))
    body = chat(MESSAGE)
    return list(memoryview(local_ids(body, prompt_form(body), files, ModelFacts("sglang"))).cast("I"))


async def kinds(start_router: Start, fake_engine: Fake, *templates: str | None) -> tuple[Running, list[FakeEngine]]:
    engines = [await fake_engine() for _ in templates]
    for engine, template in zip(engines, templates, strict=True):
        engine.info |= {"tokenizer_path": str(TINY), "chat_template": template}
    router = await start_router(*({"url": engine.url} for engine in engines), tokenizer={"mode": "local"})
    for engine in engines:
        await router.live(engine.url)

    async def loaded() -> bool:
        prompts = (await router.get(f"{router.admin}/workers"))["prompts"]
        return all(prompt["tokenizer"] for prompt in prompts)

    await router.until(loaded, "tokenizers loaded")
    return router, engines


async def decided(router: Running) -> dict[str, Any]:
    return await router.route(CHAT, model="tiny", messages=[MESSAGE])


def credit(decision: dict[str, Any], engine: FakeEngine) -> int:
    (found,) = [c for c in decision["candidates"] if c["worker"] == engine.url]
    tokens: int = max(found["cached_tokens"].values())
    return tokens


async def test_every_kind_of_engine_is_matched_with_its_own_ids(
    start_router: Start, fake_engine: Fake, tmp_path: Path
) -> None:
    other = tmp_path / "other.jinja"
    other.write_text(OTHER)
    router, (one, two) = await kinds(start_router, fake_engine, None, str(other))
    prompts = ids(None), ids(str(other))
    assert prompts[0][:4] != prompts[1][:4]
    for engine, prompt in zip((one, two), prompts, strict=True):
        cache = Cache(engine)
        cache.store(prompt)
        want = cache.truth(prompt)

        async def seen(engine: FakeEngine = engine, want: int = want) -> bool:
            return credit(await decided(router), engine) == want > 0

        await router.until(seen, f"{want} tokens are credited")
    Cache(one).store(prompts[1])  # ids that this engine will never make of the chat
    decision = await decided(router)
    assert [credit(decision, engine) for engine in (one, two)] == [(len(p) - 1) // 4 * 4 for p in prompts]
    chosen = [one, two][[one.url, two.url].index(decision["worker"])]
    assert decision["prompt_tokens"] == len(prompts[0] if chosen is one else prompts[1])


async def test_a_request_is_taught_to_the_kind_it_went_to(
    start_router: Start, fake_engine: Fake, tmp_path: Path
) -> None:
    other = tmp_path / "other.jinja"
    other.write_text(OTHER)
    router, (one, two) = await kinds(start_router, fake_engine, None, str(other))
    prompts = {one.url: ids(None), two.url: ids(str(other))}
    for engine in (one, two):
        engine.bodies[CHAT] = b'{"choices":[]}'
    async with router.session.post(f"{router.base}{CHAT}", json={"model": "tiny", "messages": [MESSAGE]}) as answer:
        assert answer.status == 200
        served = answer.headers["x-kv-router-worker"]
    found = {c["worker"]: c["predicted_tokens"] for c in (await decided(router))["candidates"]}
    assert found == {url: (len(prompts[url]) - 1) // 4 * 4 if url == served else 0 for url in prompts}
    assert await router.metric("prompts_total") == 2, "the request and the dry run, each counted once"


@interpreted
async def test_engines_of_one_kind_have_their_prompt_made_once(start_router: Start, fake_engine: Fake) -> None:
    router, engines = await kinds(start_router, fake_engine, None, None)
    asked: list[object] = []
    resolve = router.service.core._prompts.resolve

    async def counted(*args: Any, **how: Any) -> Any:
        asked.append(args)
        return await resolve(*args, **how)

    router.service.core._prompts.resolve = counted  # type: ignore[method-assign]
    assert {c["worker"] for c in (await decided(router))["candidates"]} == {engine.url for engine in engines}
    assert len(asked) == 1
