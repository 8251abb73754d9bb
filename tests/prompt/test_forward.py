"""Which chats are sent with their ids: only what was seen to be served identically (tests/real/test_parity.py)."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from router.config.schema import TokenizerConfig
from router.prompt.forward import ids_json
from router.prompt.models import ModelFacts, ModelFiles
from router.prompt.source import PromptSource
from router.prompt.store import ModelStore
from router.prompt.verify import AGREEMENTS
from tests.prompt.support import FACTS, GENERATE, TINY, body, chat, tiny, user
from tests.prompt.test_checks import TOOL, Rig, exact


async def forwarded(request: Any, *, checks: int = AGREEMENTS, facts: ModelFacts = FACTS, **more: Any) -> bool:
    rig = Rig(**{"forward_ids": True, **more})
    for _ in range(checks):
        await rig.resolve(request, facts)
    prompt = await rig.resolve(request, facts)
    await rig.source.close()
    assert prompt.forward_for in (None, facts)
    return prompt.forward_for is not None


async def test_a_verified_text_chat_is_forwarded() -> None:
    assert await forwarded(chat(user("a"), {"role": "assistant", "content": "b"}, user("c"), stream=True, n=2))


async def test_an_unverified_chat_is_not() -> None:
    assert not await forwarded(chat(), checks=AGREEMENTS - 1)


async def test_not_without_the_switch() -> None:
    assert not await forwarded(chat(), forward_ids=False)


@pytest.mark.parametrize(
    "request_body",
    [
        chat(tools=[TOOL]),
        chat(response_format={"type": "json_object"}),
        chat(logprobs=True),
        chat(chat_template_kwargs={"enable_thinking": False}),
        chat(reasoning_effort="low"),
        body(GENERATE, text="a b"),
        body("/v1/messages", messages=[user("hi")]),
    ],
)
async def test_what_touches_sampling_or_another_route_is_not_forwarded(request_body: Any) -> None:
    assert not await forwarded(request_body)


async def test_a_multimodal_model_is_not_forwarded_to() -> None:
    files: ModelFiles = replace(tiny(), multimodal=True)
    assert not await forwarded(chat(), files=files)


async def test_vllm_is_not_forwarded_to() -> None:
    source = PromptSource(TokenizerConfig(path=TINY, forward_ids=True), store=ModelStore(lambda source: tiny()))
    facts = ModelFacts("vllm", ("tiny",))
    await source.prepare(facts)
    assert (await source.resolve(chat(), facts)).forward_for is None
    await source.close()


def test_ids_are_written_as_json() -> None:
    ids = tiny().tokenizer.encode("hello world", False)
    assert json.loads(ids_json(ids)) == exact("hello world")
