"""Run-time comparison with the engine's own tokenizer, through PromptSource and a scripted engine."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from datetime import datetime
from typing import Any

import pytest

from router.config.schema import TokenizerConfig
from router.hashing import TokenIds, pack_ids
from router.prompt import checks as module
from router.prompt.body import RequestBody
from router.prompt.models import ModelFacts, ModelFiles
from router.prompt.source import PromptSource
from router.prompt.store import ModelStore
from router.prompt.template import ChatTemplate
from router.prompt.verify import AGREEMENTS, COUNT_FAULTS, Difference
from tests.prompt.support import FACTS, GENERATE, TINY, body, chat, tiny, user
from tests.support.built import interpreted

TOOL = {"type": "function", "function": {"name": "f"}}


def exact(text: str) -> list[int]:
    return memoryview(tiny().tokenizer.encode(text, False)).cast("I").tolist()


class Engine:
    """Answers /v1/tokenize: as the tiny template renders, or with `lie` put in front."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.lie: Callable[[dict[str, Any], list[int]], list[int]] = lambda question, ids: ids
        self.down = False

    async def __call__(self, model: ModelFacts, path: str, question: bytes) -> bytes:
        asked = json.loads(question)
        self.asked.append(asked)
        if self.down:
            raise OSError("gone")
        if "messages" in asked:
            rendered = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in asked["messages"])
            ids = exact(rendered + "<|im_start|>assistant\n")
        else:
            ids = exact(asked["prompt"])
        return json.dumps({"tokens": self.lie(asked, ids)}).encode()


class Rig:
    def __init__(self, files: ModelFiles | None = None, **settings: Any) -> None:
        self.engine = Engine()
        self.drifts: list[tuple[ModelFacts, Difference]] = []
        self.outcomes: list[str] = []
        self.source = PromptSource(
            TokenizerConfig(path=TINY, **settings),
            ask=self.engine,
            store=ModelStore(lambda source: files or tiny()),
            on_check=self.outcomes.append,
            on_drift=lambda model, seen: self.drifts.append((model, seen)),
        )

    async def resolve(self, request: RequestBody, facts: ModelFacts = FACTS) -> Any:
        """One request, and every comparison it began."""
        await self.source.prepare(facts)
        prompt = await self.source.resolve(request, facts)
        while self.source._checks._tasks:
            await asyncio.gather(*self.source._checks._tasks)
        return prompt


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    made = Rig()
    yield made
    await made.source.close()


async def verify(rig: Rig, request: RequestBody) -> None:
    for _ in range(AGREEMENTS):
        await rig.resolve(request)


async def test_prompts_are_verified_by_the_first_few_and_then_left_alone(rig: Rig) -> None:
    standings = [(await rig.resolve(chat())).standing for _ in range(AGREEMENTS + 5)]
    assert standings == ["unverified"] * AGREEMENTS + ["verified"] * 5
    assert len(rig.engine.asked) == AGREEMENTS
    assert rig.outcomes == ["equal"] * AGREEMENTS
    assert (await rig.resolve(body(GENERATE, text="a b"))).standing == "unverified", "raw text is another feature"


async def test_the_request_does_not_wait_for_the_comparison(rig: Rig) -> None:
    gate = asyncio.Event()

    async def slow(model: ModelFacts, path: str, question: bytes) -> bytes:
        await gate.wait()
        return await Engine.__call__(rig.engine, model, path, question)

    source = PromptSource(TokenizerConfig(path=TINY), ask=slow, store=ModelStore(lambda source: tiny()))
    await source.prepare(FACTS)
    assert (await source.resolve(chat(), FACTS)).source == "local"
    gate.set()
    await source.close()


async def test_a_difference_sends_that_feature_to_the_engine_and_is_told(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    await verify(rig, chat())
    rig.engine.lie = lambda question, ids: [ids[0], 77, *ids[1:]] if "tools" in question else ids
    with caplog.at_level(logging.WARNING, "router.prompt"):
        first = await rig.resolve(chat(tools=[TOOL]))
    second = await rig.resolve(chat(tools=[TOOL]))
    more = await rig.resolve(chat(user([{"type": "text", "text": "secret word"}]), tools=[TOOL]))
    assert [p.source for p in (first, second, more)] == ["local", "engine", "engine"]
    assert (await rig.resolve(chat())).standing == "verified", "other features are not touched"
    assert second.reason == "drifted"
    assert second.ids == pack_ids(
        [exact("<|im_start|>")[0], 77, *exact("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")[1:]]
    )
    ((facts, seen),) = rig.drifts
    assert (facts, seen.features, seen.at) == (FACTS, frozenset({"tools"}), 1)
    assert rig.source.drift(FACTS) == seen
    assert "token 1 differs" in caplog.text
    assert "77" in caplog.text
    assert not any(hasattr(record, "text_here") for record in caplog.records), "never the text itself"


async def test_the_text_is_logged_only_where_the_operator_allows_it(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(log_text=True)
    rig.engine.lie = lambda question, ids: ids[:-1]
    with caplog.at_level(logging.WARNING, "router.prompt"):
        await rig.resolve(chat(user("a secret")))
    assert "a secret" in vars(caplog.records[-1])["text_here"]
    await rig.source.close()


async def test_another_release_starts_from_nothing(rig: Rig) -> None:
    rig.engine.lie = lambda question, ids: [1]
    await rig.resolve(chat())
    newer = ModelFacts("sglang", ("tiny",), str(TINY), version="9.9")
    assert (await rig.resolve(chat())).reason == "drifted"
    rig.engine.lie = lambda question, ids: ids
    assert (await rig.resolve(chat(), newer)).standing == "unverified"
    assert rig.source.drift(newer) is None


async def test_a_restarted_engine_is_compared_anew(rig: Rig) -> None:
    """Whether its template was mended or broken meanwhile."""
    rig.engine.lie = lambda question, ids: [1]
    await rig.resolve(chat())
    assert (await rig.resolve(chat())).reason == "drifted"
    rig.engine.lie = lambda question, ids: ids
    rig.source.doubt(FACTS)
    assert rig.source.drift(FACTS) is None
    await verify(rig, chat())
    assert (await rig.resolve(chat())).standing == "verified"
    rig.source.doubt(FACTS)
    assert (await rig.resolve(chat())).standing == "unverified"


async def test_an_engine_that_does_not_answer_teaches_nothing(rig: Rig) -> None:
    rig.engine.down = True
    prompts = [await rig.resolve(chat()) for _ in range(5)]
    assert {(p.source, p.standing) for p in prompts} == {("local", "unverified")}
    assert len(rig.engine.asked) == 1, "it is left alone for a while"
    assert rig.drifts == []


async def test_local_mode_compares_nothing() -> None:
    rig = Rig(mode="local")
    await rig.resolve(chat())
    assert rig.engine.asked == []
    await rig.source.close()


async def test_the_engines_own_count_is_evidence_too() -> None:
    """usage.prompt_tokens on every answer, here with nobody to compare with."""
    rig = Rig(verify_every=0)
    for _ in range(COUNT_FAULTS):
        prompt = await rig.resolve(chat())
        assert prompt.source == "local"
        prompt.counted(FACTS, prompt.tokens + 1)
    assert rig.source.drift(FACTS) is not None
    assert [facts for facts, _ in rig.drifts] == [FACTS]
    assert (await rig.resolve(chat())).source == "engine"
    await rig.source.close()


async def test_a_count_of_another_kind_of_engine_or_of_copies_is_no_evidence(rig: Rig) -> None:
    for _ in range(2 * COUNT_FAULTS):
        prompt = await rig.resolve(chat())
        prompt.counted(ModelFacts("vllm", ("tiny",)), prompt.tokens + 1)
    assert rig.source.drift(FACTS) is None
    assert (await rig.resolve(chat(n=2))).counted is None
    assert (await rig.resolve(body("/v1/completions", prompt=["a", "b"]))).counted is None


async def test_a_date_that_changed_meanwhile_is_no_difference() -> None:
    """case 37: the template prints the day; the engine was asked just after midnight."""
    day = [1]
    text = "{{ strftime_now('%d') }}{% for m in messages %}{{ m.content }}{% endfor %}"
    template = ChatTemplate(text, {}, lambda: datetime(2026, 1, day[0]))
    rig = Rig(ModelFiles(tiny().tokenizer, template), cache_mb=0)

    async def next_day(model: ModelFacts, path: str, question: bytes) -> bytes:
        day[0] = 2
        return json.dumps({"tokens": exact("02hi")}).encode()

    rig.source._checks._engine._ask = next_day  # type: ignore[union-attr]
    await rig.resolve(chat())
    assert rig.outcomes == ["equal"]
    assert rig.source.drift(FACTS) is None
    await rig.source.close()


@interpreted
async def test_a_cache_that_put_a_prompt_together_wrongly_is_found_and_then_not_used(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = rig.source.cache.encode
    text = "one word after another " * 60

    def broken(*args: Any) -> tuple[TokenIds, Any]:
        ids, cached = wrong(*args)
        return ids[:-4], cached

    monkeypatch.setattr(rig.source.cache, "encode", broken)
    monkeypatch.setattr("router.prompt.local.WORTH_KEEPING_CHARS", 0)
    for _ in range(module.CACHE_FAULTS):
        assert rig.source._checks.cache_trusted
        await rig.resolve(chat(user(text)))
    assert rig.outcomes.count("cache_fault") == module.CACHE_FAULTS
    assert rig.source.drift(FACTS) is None, "the rendering itself is right"
    good = await rig.resolve(chat(user(text)))
    assert good.ids == tiny().tokenizer.encode(
        "<|im_start|>user\n" + text + "<|im_end|>\n<|im_start|>assistant\n", False
    )


async def test_the_admin_page_can_show_what_is_verified(rig: Rig) -> None:
    await verify(rig, chat())
    shown = rig.source.describe(FACTS)
    assert shown["tokenizer"] in ("fastokens", "tokenizers")
    assert shown["cuts_conversations"] is True
    assert shown["features"] == [
        {"features": [], "standing": "verified", "comparisons_equal": AGREEMENTS, "difference": None}
    ]
