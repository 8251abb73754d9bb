from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from router.hashing import pack_ids
from router.prompt import engine as module
from router.prompt.body import RequestBody, parse_body
from router.prompt.engine import FIRST_PAUSE_S, LAST_PAUSE_S, MAX_ASKING, AskRefused, EngineTokenizer, tokenize_request
from router.prompt.forms import prompt_form
from router.prompt.models import ModelFacts
from tests.prompt.support import CHAT, COMPLETIONS, FACTS, body, chat

QUESTION = ("/v1/tokenize", b"{}")


class Engine:
    """An engine's answers in order; the last one stays."""

    def __init__(self, *answers: bytes | Exception) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, bytes]] = []

    async def __call__(self, model: ModelFacts, path: str, question: bytes) -> bytes:
        self.asked.append((path, question))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def asked(request: RequestBody, engine: str) -> tuple[str, dict[str, Any]] | None:
    question = tokenize_request(request, prompt_form(request, engine), engine)
    return None if question is None else (question[0], json.loads(question[1]))


def test_sglang_is_asked_without_stream_or_generation_prompt() -> None:
    """contract section 6; captures fact 7"""
    request = chat(stream=True, add_generation_prompt=False, n=2, tools=[], tool_choice="none", reasoning_effort="low")
    question = asked(request, "sglang")
    assert question is not None
    assert question[0] == "/v1/tokenize"
    assert question[1].keys() == {"model", "messages", "tools", "tool_choice", "reasoning_effort"}


def test_the_question_keeps_the_bodys_own_json() -> None:
    messages = b'[{"role":"user","content":"\\u0061","n":1.0,"n":1e2}]'
    request = parse_body(CHAT, b'{"messages":' + messages + b"}")
    question = tokenize_request(request, prompt_form(request), "sglang")
    assert question == ("/v1/tokenize", b'{"messages":' + messages + b"}")


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_vllm_renders_the_other_chat_routes_bodies_as_they_are(path: str) -> None:
    raw = b'{"model":"tiny","stream":true,"max_tokens":1,"messages":[{"role":"user","content":"x"}],"input":"x"}'
    request = parse_body(path, raw)
    assert tokenize_request(request, prompt_form(request, "vllm"), "vllm") == (path + "/render", raw)


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (b'{"token_ids":[1,2],"features":null,"sampling_params":{}}', pack_ids([1, 2])),
        (b'{"token_ids":[1,2],"features":{"mm_hashes":{}}}', "ask_empty"),
        (b'{"token_ids":[1,-2]}', "ask_failed"),
        (b"{}", "ask_failed"),
    ],
)
async def test_rendered_ids_are_taken_unless_they_hold_images(answer: bytes, found: object) -> None:
    """case 42"""
    assert await EngineTokenizer(Engine(answer), lambda: 0.0).ids(FACTS, ("/v1/messages/render", b"{}")) == found


async def test_a_server_without_the_render_routes_is_still_asked_to_tokenize() -> None:
    engine = Engine(OSError("404"), b'{"tokens":[3]}')
    tokenizer = EngineTokenizer(engine, lambda: 0.0)
    assert await tokenizer.ids(FACTS, ("/v1/messages/render", b"{}")) == "ask_failed"
    assert await tokenizer.ids(FACTS, ("/v1/messages/render", b"{}")) == "ask_paused"
    assert await tokenizer.ids(FACTS, QUESTION) == pack_ids([3])


def test_a_body_too_long_to_be_answered_in_time_is_not_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ASKED_BYTES", 200)
    assert asked(chat(), "sglang") is not None
    assert asked(chat({"role": "user", "content": "x" * 200}), "sglang") is None


def test_text_is_asked_for_as_one_prompt() -> None:
    question = asked(body(COMPLETIONS, prompt=["first", "second"], max_tokens=4), "vllm")
    assert question == ("/tokenize", {"prompt": "first", "model": "tiny"})


def test_engines_that_cannot_say_are_not_asked() -> None:
    assert asked(chat(), "unknown") is None
    assert asked(chat(tool_choice="none"), "vllm") is None
    assert asked(chat(add_generation_prompt=False), "vllm") is not None


async def test_the_answers_tokens_are_the_ids() -> None:
    engine = EngineTokenizer(Engine(b'{"tokens":[1,2,3],"count":3}'), lambda: 0.0)
    assert await engine.ids(FACTS, QUESTION) == pack_ids([1, 2, 3])


@pytest.mark.parametrize(
    "answer",
    [b"", b"[]", b'{"tokens":"x"}', b'{"tokens":[-1]}', b'{"tokens":[[1]]}', OSError("gone"), TimeoutError()],
)
async def test_a_failure_pauses_asking_twice_as_long_each_time(answer: bytes | Exception) -> None:
    now_s = 100.0
    engine = Engine(answer)
    tokenizer = EngineTokenizer(engine, lambda: now_s)
    pause_s = FIRST_PAUSE_S
    for attempt in range(1, 9):
        assert await tokenizer.ids(FACTS, QUESTION) == "ask_failed"
        assert await tokenizer.ids(FACTS, QUESTION) == "ask_paused"
        assert len(engine.asked) == attempt
        now_s += pause_s
        pause_s = min(2 * pause_s, LAST_PAUSE_S)
    engine.answers = [b'{"tokens":[1]}', OSError("gone again")]
    assert await tokenizer.ids(FACTS, QUESTION) == pack_ids([1])
    assert await tokenizer.ids(FACTS, QUESTION) == "ask_failed"
    now_s += FIRST_PAUSE_S
    assert await tokenizer.ids(FACTS, QUESTION) == "ask_failed"


async def test_a_pause_is_one_models_own() -> None:
    """case 43"""
    tokenizer = EngineTokenizer(Engine(OSError("gone"), b'{"tokens":[1]}'), lambda: 0.0)
    assert await tokenizer.ids(FACTS, QUESTION) == "ask_failed"
    assert await tokenizer.ids(ModelFacts("sglang", ("other",)), QUESTION) == pack_ids([1])


async def test_a_refusal_or_an_empty_answer_pauses_nothing() -> None:
    engine = Engine(AskRefused("400"), b'{"tokens":[]}', b'{"tokens":[1]}')
    tokenizer = EngineTokenizer(engine, lambda: 0.0)
    assert await tokenizer.ids(FACTS, QUESTION) == "ask_refused"
    assert await tokenizer.ids(FACTS, QUESTION) == "ask_empty"
    assert await tokenizer.ids(FACTS, QUESTION) == pack_ids([1])


async def test_a_silent_engine_costs_the_deadline_and_questions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    started = 0

    async def silent(model: ModelFacts, path: str, question: bytes) -> bytes:
        nonlocal started
        started += 1
        await asyncio.Event().wait()
        return b""

    monkeypatch.setattr(module, "DEADLINE_S", 0.05)
    tokenizer = EngineTokenizer(silent, lambda: 0.0)
    answers = await asyncio.gather(*(tokenizer.ids(FACTS, QUESTION) for _ in range(MAX_ASKING + 3)))
    assert started == MAX_ASKING
    assert answers == ["ask_failed"] * MAX_ASKING + ["ask_busy"] * 3
