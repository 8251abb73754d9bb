"""Every recorded stream, byte for byte through real sockets into a running router: `/route` tells the tree's truth."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.captures import Capture, capture, names
from tests.e2e.conftest import Running, Start
from tests.support.engine import FakeEngine

UNTOLD: dict[str, Callable[[dict[str, Any]], bool]] = {
    # In the default format extra_key is not in the hash: the wire says the same for "no key" and "key X".
    "namespaces_default": lambda path: path["extra_key"] is not None or path["cache_salt"] != "saltB",
    # The dynamo format folds extra_key into the hash by a rule no document gives.
    "namespaces_dynamo": lambda path: path["extra_key"] is not None,
}
"""Capture name part → which of its paths the stream cannot tell."""


async def replay(router: Running, engine: FakeEngine, recorded: Capture, rank: int, **settings: Any) -> None:
    """Publishes every frame of the capture, in order, and waits until the last one was applied."""
    engine.info["kv_events"]["topic"] = recorded.frames[0].topic
    if recorded.side.get("is_eagle"):
        engine.info["speculative_algorithm"] = "EAGLE"
    engine.next_seq[rank] = recorded.frames[0].seq
    assert await router.add(engine.url, **settings) == 201
    await engine.listened(rank)
    for frame in recorded.frames:
        engine.publish_raw(frame.payload, rank=rank)
    last = recorded.frames[-1].seq

    async def applied() -> bool:
        return bool((await router.ranks(engine.url))[rank]["last_seq"] == last)

    await router.until(applied, f"batch {last} of {recorded.name} applied")


def cap(tokens: int, resident: int, width: int, bigram: bool) -> int:
    return min(resident, max(0, tokens - (2 if bigram else 1)) // width * width)


@pytest.mark.parametrize("name", names("sgl_"))
async def test_route_credits_what_the_real_tree_still_held(
    name: str, start_router: Start, fake_engine: Callable[..., Awaitable[FakeEngine]]
) -> None:
    recorded = capture(name)
    side, rank, width = recorded.side, recorded.side["dp_rank"], recorded.side["page_size"]
    router = await start_router()
    engine = await fake_engine(block_size=width, dp_size=rank + 1)
    await replay(router, engine, recorded, rank)
    untold = [rule for part, rule in UNTOLD.items() if part in name]
    wrong, checked = [], 0
    for path in side["truth"]["paths"]:
        if any(rule(path) for rule in untold):
            continue
        body: dict[str, Any] = {} if path["cache_salt"] is None else {"cache_salt": path["cache_salt"]}
        want = cap(len(path["tokens"]), path["resident_tokens"], width, bool(side["is_eagle"]))
        got = await router.credit(path["tokens"], engine.url, rank, **body)
        checked += 1
        if got != want:
            wrong.append((len(path["tokens"]), want, got))
    assert not wrong, wrong
    assert checked > 0


@pytest.mark.parametrize("name", names("old_sglang_"))
async def test_old_sglang_ends_with_the_blocks_its_tree_held(
    name: str, start_router: Start, fake_engine: Callable[..., Awaitable[FakeEngine]]
) -> None:
    recorded = capture(name)
    router = await start_router()
    engine = await fake_engine(block_size=recorded.side["page_size"])
    await replay(router, engine, recorded, 0)
    blocks = (await router.ranks(engine.url))[0]["blocks"]
    assert sum(blocks.values()) == recorded.side["truth"]["resident_unique_blocks"]


@pytest.mark.parametrize("name", [*names("old_vllm_"), *names("vllm_")])
async def test_every_vllm_event_is_decoded_and_none_is_dropped(
    name: str, start_router: Start, fake_engine: Callable[..., Awaitable[FakeEngine]]
) -> None:
    recorded = capture(name)
    router = await start_router()
    engine = await fake_engine(block_size=16)
    events = {"endpoint_port_base": engine.kv_base, "dp_size": 1, "block_size": 16, "topic": recorded.frames[0].topic}
    engine.info = {**engine.info, "vllm_config": "…", "version": "0.32.0"}
    engine.bodies["/v1/models"] = b'{"data":[{"id":"tiny"}]}'
    await replay(router, engine, recorded, 0, kv_events=events)
    assert (await router.ranks(engine.url))[0]["rejected"] == {}
    assert await router.metric("events_total", worker=engine.url, type="skipped") == 0
    assert await router.metric("events_total", worker=engine.url, type="stored") > 0
