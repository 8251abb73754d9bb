from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.config.schema import TokenizerConfig
from router.errors import RouterError
from router.hashing import Namespace, TokenIds, pack_ids, token_count
from router.prompt import source as module
from router.prompt.body import parse_body
from router.prompt.engine import AskRefused
from router.prompt.forms import prompt_form
from router.prompt.local import NoIds, local_ids
from router.prompt.models import ModelFacts, ModelFiles, ModelSource
from router.prompt.source import MAX_QUEUED, Prompt, PromptSource
from router.prompt.store import ModelStore
from router.prompt.template import ChatTemplate
from router.prompt.tokenizer import Tokenizer
from tests.prompt.support import CHAT, COMPLETIONS, FACTS, GENERATE, TINY, body, chat, tiny, user
from tests.support.waiting import until

Make = Callable[..., PromptSource]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    """Sources over the tiny tokenizer, already loaded; closed afterwards."""
    made: list[PromptSource] = []

    def build(
        mode: Any = "auto", *, load: Callable[[ModelSource], ModelFiles] | None = None, **more: Any
    ) -> PromptSource:
        store = ModelStore(load or (lambda source: tiny()))
        made.append(PromptSource(TokenizerConfig(path=TINY, mode=mode), store=store, **more))
        return made[-1]

    yield build
    for source in made:
        await source.close()


async def ready(source: PromptSource) -> PromptSource:
    assert await source.prepare(FACTS) == ""
    return source


def answering(answer: bytes | Exception) -> Callable[[ModelFacts, str, bytes], Any]:
    async def ask(model: ModelFacts, path: str, question: bytes) -> bytes:
        if isinstance(answer, Exception):
            raise answer
        return answer

    return ask


def said(prompt: Prompt) -> tuple[TokenIds | None, int, Namespace, str, str]:
    return prompt.ids, prompt.tokens, prompt.namespace, prompt.source, prompt.reason


def encode(text: str) -> bytes:
    return tiny().tokenizer.encode(text, False)


async def test_chat_is_rendered_and_tokenised_here(make: Make) -> None:
    """case 35: the templated prompt, generation prompt included."""
    source = await ready(make())
    prompt = await source.resolve(chat(user("hello")), FACTS)
    ids = encode("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")
    assert said(prompt) == (ids, token_count(ids), Namespace(), "local", "")


async def test_the_next_turn_extends_the_prompt(make: Make) -> None:
    source = await ready(make())
    first = await source.resolve(chat(user("one")), FACTS)
    second = await source.resolve(chat(user("one"), {"role": "assistant", "content": "two"}, user("three")), FACTS)
    assert first.ids is not None
    assert second.ids is not None
    assert second.ids.startswith(first.ids)


async def test_raw_text_is_tokenised_and_given_ids_are_taken(make: Make) -> None:
    """cases 36, 38"""
    source = await ready(make())
    for request in (body(COMPLETIONS, prompt="a b"), body(GENERATE, text=["a b"])):
        assert (await source.resolve(request, FACTS)).ids == encode("a b")
    given = await source.resolve(body(GENERATE, input_ids=[5, 6, 7]), FACTS)
    assert said(given) == (pack_ids([5, 6, 7]), 3, Namespace(), "given", "")


async def test_continue_final_message_is_encoded_apart(make: Make) -> None:
    """captures fact 6"""
    source = await ready(make())
    request = chat(user("a"), {"role": "assistant", "content": "wel"}, continue_final_message=True)
    prompt = await source.resolve(request, FACTS)
    assert prompt.ids == encode("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n") + encode("wel")


async def test_tokens_count_the_batch_and_its_copies(make: Make) -> None:
    """case 61: n and the batch cost what they cost."""
    source = await ready(make())
    one = await source.resolve(body(COMPLETIONS, prompt="hello world " * 20), FACTS)
    batch = await source.resolve(body(COMPLETIONS, prompt=["hello world " * 20] * 4, n=3), FACTS)
    assert batch.ids == one.ids
    assert batch.tokens == 12 * one.tokens
    assert (await source.resolve(body(COMPLETIONS, prompt=[[1, 2], [3]], n=2), FACTS)).tokens == 6
    assert (await source.resolve(body("/v1/embeddings", input="x" * 400), None)).tokens >= 100


async def test_vllm_chat_is_rendered_by_vllms_rules(make: Make) -> None:
    source = make()
    facts = ModelFacts(engine="vllm", names=("tiny",))
    assert await source.prepare(facts) == ""
    answer = {"role": "assistant", "content": "b"}
    prompt = await source.resolve(chat(user("a"), answer, input_ids=[1]), facts)
    assert prompt.ids == encode(
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("model", "fields", "namespace"),
    [
        ("tiny", {}, Namespace()),
        ("tiny:poet", {}, Namespace(lora_name="poet")),
        ("tiny:poet", {"lora_path": "other"}, Namespace(lora_name="poet")),
        ("tiny", {"lora_path": "other"}, Namespace(lora_name="other")),
        ("s3://bucket/tiny", {}, Namespace()),
        ("s3://bucket/tiny:poet", {}, Namespace(lora_name="poet")),
        ("unheard-of:poet", {}, Namespace(lora_name="poet")),
        ("tiny:", {}, Namespace()),
        ("tiny", {"cache_salt": "s", "extra_key": "k"}, Namespace(cache_salt="s", extra_key="k")),
        ("tiny", {"cache_salt": "", "extra_key": None}, Namespace()),
    ],
)
async def test_namespaces_keep_salts_keys_and_adapters_apart(
    make: Make, model: str, fields: dict[str, Any], namespace: Namespace
) -> None:
    """cases 40, 41: "base:adapter" beats lora_path; the base's tokenizer serves."""
    source = await ready(make())
    facts = ModelFacts(engine="sglang", names=("tiny", "s3://bucket/tiny"))
    raw = json.dumps({"model": model, "prompt": "a b", **fields}).encode()
    prompt = await source.resolve(parse_body(COMPLETIONS, raw), facts)
    assert (prompt.ids, prompt.namespace) == (encode("a b"), namespace)


async def test_a_vllm_adapter_is_a_model_name_of_its_own(make: Make) -> None:
    """case 40"""
    source = await ready(make())
    facts = ModelFacts(engine="vllm", names=("base",), adapters=frozenset({"tiny"}))
    assert (await source.resolve(chat(), facts)).namespace == Namespace(lora_name="tiny")
    facts = ModelFacts(engine="vllm", names=("base",))
    raw = b'{"model":"qwen:7b","prompt":"a"}'
    assert (await source.resolve(parse_body(COMPLETIONS, raw), facts)).namespace == Namespace()


@pytest.mark.parametrize("field", ["cache_salt", "extra_key", "lora_path", "model"])
async def test_a_namespace_that_cannot_be_read_earns_no_credit(make: Make, field: str) -> None:
    """case 41: if unsure, no credit — not even for ids that came along."""
    source = await ready(make())
    prompt = await source.resolve(body(COMPLETIONS, **{"prompt": [1, 2, 3], field: 5}), FACTS)
    assert (prompt.ids, prompt.tokens, prompt.source, prompt.reason) == (None, 3, "none", "odd_namespace")


@pytest.mark.parametrize(
    ("request_body", "reason"),
    [
        (chat(user([{"type": "image_url", "image_url": {"url": "http://x/y.png"}}])), "media"),
        (chat({"role": "wizard", "content": "x"}), "refused"),
        (chat(user("\ud800")), "cannot_encode"),
        (body(CHAT), "refused"),
        (parse_body(CHAT, b'{"messages":' + b"[" * 600 + b"]" * 600 + b"}"), "refused"),
        (body(COMPLETIONS, prompt=""), "empty"),
        (body("/v1/embeddings", input="x"), "route"),
        (body("/v1/responses", input="x", previous_response_id="r"), "unsupported_stored_response"),
    ],
)
async def test_what_cannot_be_reproduced_is_routed_by_load(make: Make, request_body: Any, reason: str) -> None:
    """cases 37, 38, 42, 48: never an error, and counted."""
    counted: list[tuple[str, str]] = []
    source = await ready(make(count=lambda *labels: counted.append(labels), ask=answering(AssertionError("asked"))))
    prompt = await source.resolve(request_body, FACTS)
    assert (prompt.ids, prompt.source, prompt.reason) == (None, "none", reason)
    assert counted == [("none", reason)]


async def test_without_a_local_tokenizer_the_engine_is_asked(make: Make) -> None:
    def fails(source: ModelSource) -> ModelFiles:
        raise OSError("no such folder")

    source = make(load=fails, ask=answering(b'{"tokens":[9,8]}'))
    assert await source.prepare(FACTS) == "no such folder"
    prompt = await source.resolve(chat(), FACTS)
    assert said(prompt) == (pack_ids([9, 8]), 2, Namespace(), "engine", "no_tokenizer")


@pytest.mark.parametrize(
    ("answer", "reason"), [(AskRefused("400"), "engine_mode+ask_refused"), (OSError("gone"), "engine_mode+ask_failed")]
)
async def test_an_engine_that_does_not_answer_leaves_load_routing(make: Make, answer: Exception, reason: str) -> None:
    source = make("engine", ask=answering(answer))
    prompt = await source.resolve(chat(user("x" * 4000)), FACTS)
    assert (prompt.ids, prompt.source, prompt.reason) == (None, "none", reason)
    assert prompt.tokens >= 1000


@pytest.mark.parametrize(
    ("mode", "expected"), [("auto", "local"), ("local", "local"), ("engine", "engine"), ("off", "none")]
)
async def test_modes(make: Make, mode: str, expected: str) -> None:
    source = await ready(make(mode, ask=answering(b'{"tokens":[1]}')))
    assert (await source.resolve(chat(), FACTS)).source == expected
    assert (await source.resolve(body(GENERATE, input_ids=[1]), FACTS)).source == "given"


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("auto", ("engine", "route")),
        ("engine", ("engine", "engine_mode")),
        ("local", ("none", "route")),
        ("off", ("none", "off")),
    ],
)
async def test_vllm_is_asked_for_what_only_it_can_render(make: Make, mode: str, expected: tuple[str, str]) -> None:
    asked: list[str] = []

    async def ask(model: ModelFacts, path: str, question: bytes) -> bytes:
        asked.append(path)
        return b'{"token_ids":[1,2,3],"features":null}'

    source = make(mode, ask=ask)
    prompt = await source.resolve(body("/v1/messages", messages=[user()]), ModelFacts("vllm", ("tiny",)))
    assert (prompt.source, prompt.reason) == expected
    assert asked == ["/v1/messages/render"] * (expected[0] == "engine")
    assert prompt.ids == (pack_ids([1, 2, 3]) if asked else None)


async def test_local_mode_never_asks_the_engine(make: Make) -> None:
    source = make("local", ask=answering(AssertionError("asked")))
    prompt = await source.resolve(chat(), FACTS)
    assert (prompt.source, prompt.reason) == ("none", "loading")


async def test_an_engine_without_a_folder_here_has_no_local_tokenizer() -> None:
    source = PromptSource(TokenizerConfig())
    assert "no local tokenizer" in await source.prepare(ModelFacts(engine="sglang"))
    assert (await source.resolve(chat(), ModelFacts(engine="sglang"))).reason == "no_tokenizer"
    assert (await source.resolve(chat(), None)).reason == "no_worker"
    await source.close()


async def test_the_engines_own_tokenizer_folder_is_found() -> None:
    """End to end: discovery, load, warm-up, template, ids."""
    source = PromptSource(TokenizerConfig(), now=lambda: datetime(2026, 1, 1))
    assert await source.prepare(FACTS) == ""
    assert (await source.resolve(chat(), FACTS)).source == "local"
    assert source.loaded() == {str(TINY): tiny().tokenizer.backend}
    await source.close()


class Gate:
    """A tokenizer that waits in its thread until it is let go."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.entered = threading.Event()

    def files(self) -> ModelFiles:
        def encode(text: str, special: bool) -> bytes:
            self.entered.set()
            self.open.wait(10)
            return pack_ids([1, 2])

        return ModelFiles(Tokenizer("tokenizers", {}, None, None, b"", encode), tiny().template)


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open.set()


LONG = body(COMPLETIONS, prompt="long " * 1000)


async def test_long_texts_leave_the_loop_free(make: Make, gate: Gate) -> None:
    """case 44"""
    source = await ready(make(load=lambda source: gate.files()))
    resolving = asyncio.create_task(source.resolve(LONG, FACTS))
    await asyncio.to_thread(gate.entered.wait, 5)
    assert gate.entered.is_set()
    assert not resolving.done()
    gate.open.set()
    assert (await resolving).ids == pack_ids([1, 2])


async def test_a_slow_text_costs_its_deadline_and_no_more(make: Make, gate: Gate) -> None:
    """case 44"""
    source = await ready(make(load=lambda source: gate.files(), encode_deadline_s=0.02))
    prompt = await source.resolve(LONG, FACTS)
    assert (prompt.ids, prompt.source, prompt.reason) == (None, "none", "deadline")
    assert prompt.tokens == 1250


async def test_the_queue_is_bounded_and_drains(make: Make, gate: Gate) -> None:
    source = await ready(make(load=lambda source: gate.files(), encode_deadline_s=0.02))
    prompts = await asyncio.gather(*(source.resolve(LONG, FACTS) for _ in range(MAX_QUEUED + 3)))
    assert [p.reason for p in prompts] == ["deadline"] * MAX_QUEUED + ["busy"] * 3
    gate.open.set()

    async def made_here() -> Prompt | None:
        prompt = await source.resolve(LONG, FACTS)
        return prompt if prompt.source == "local" else None

    prompt = await until(made_here, "the queue has drained")
    assert prompt.ids == pack_ids([1, 2])


async def test_too_long_a_prompt_is_routed_by_load(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.prompt.local.MAX_CHARS", 100)
    source = await ready(make())
    assert (await source.resolve(body(COMPLETIONS, prompt="x" * 101), FACTS)).reason == "too_long"
    assert (await source.resolve(chat(user("x" * 90)), FACTS)).reason == "too_long"
    monkeypatch.setattr(module, "MAX_BODY_BYTES", 20_000)
    assert (await source.resolve(body(COMPLETIONS, prompt="x" * 20_000), FACTS)).reason == "too_long"


async def test_a_template_that_fails_asks_the_engine(make: Make) -> None:
    """case 37"""
    source = await ready(make(ask=answering(b'{"tokens":[4]}')))
    prompt = await source.resolve(chat(chat_template_kwargs={"add_generation_prompt": False}), FACTS)
    assert (prompt.ids, prompt.reason) == (pack_ids([4]), "template_error")


async def test_a_config_path_beats_the_engines_folder(tmp_path: Path) -> None:
    seen: list[ModelSource] = []

    def load(source: ModelSource) -> ModelFiles:
        seen.append(source)
        return tiny()

    config = TokenizerConfig(path=tmp_path, chat_template=tmp_path / "t.jinja")
    source = PromptSource(config, store=ModelStore(load))
    await source.prepare(ModelFacts("vllm", tokenizer_path="/models/x", chat_template="y.jinja"))
    assert seen == [ModelSource(str(tmp_path), "vllm", str(tmp_path / "t.jinja"), "y.jinja")]
    await source.close()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "type", "text"]), inner, max_size=3)
    ),
    max_leaves=6,
)
message_keys = st.sampled_from(["role", "content", "tool_calls", "name", "tools", "prefix"])
messages = st.lists(
    st.dictionaries(message_keys, json_values | st.sampled_from(["user", "assistant", "tool"]), max_size=5)
    | json_values,
    max_size=3,
)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(messages, st.fixed_dictionaries({}, optional={"tools": json_values, "tool_choice": json_values}), st.booleans())
def test_no_chat_body_raises_anything_but_no_ids(sent: list[Any], fields: dict[str, Any], vllm: bool) -> None:
    request = body(CHAT, messages=sent, **fields)
    facts = ModelFacts("vllm" if vllm else "sglang")
    with contextlib.suppress(NoIds):
        assert token_count(local_ids(request, prompt_form(request), tiny(), facts)) > 0


@pytest.mark.parametrize(
    "request_body",
    [
        body(COMPLETIONS, prompt=[1, 2, 4096]),
        body(COMPLETIONS, prompt=[[1, 2], [3, 999_999]]),
        body(GENERATE, input_ids=[2**40]),
        body(GENERATE, input_ids=[-5]),
        body(COMPLETIONS, prompt=[True, 1]),
        chat(input_ids=[5, 2**32 - 1]),
    ],
)
async def test_ids_outside_a_known_vocabulary_are_refused(make: Make, request_body: Any) -> None:
    """case 48; one such id ends a CPU SGLang server (contract, section 5)."""
    source = await ready(make())
    with pytest.raises(RouterError) as refused:
        await source.resolve(request_body, FACTS)
    assert (refused.value.code, refused.value.status) == ("bad_token_ids", 400)
    assert "4096" in refused.value.message or "4095" in refused.value.message


async def test_ids_pass_where_the_vocabulary_is_not_known(make: Make) -> None:
    """case 48: odd ids never raise on their own account; the worker answers."""
    source = make(load=lambda source: ModelFiles(Gate().files().tokenizer, tiny().template))
    await ready(source)
    assert (await source.resolve(body(COMPLETIONS, prompt=[1, 2**31]), FACTS)).source == "given"
    assert (await source.resolve(body(COMPLETIONS, prompt=[1, -5]), FACTS)).reason == "odd_ids"
    assert (await source.resolve(body(COMPLETIONS, prompt=[True]), None)).reason == "odd_ids"
    assert (await source.resolve(body(COMPLETIONS, prompt=[1, 4095]), FACTS)).ids == pack_ids([1, 4095])


PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
LONG_TEXT = "Look at this picture and say what you see in it please, word for word. " * 3


async def test_the_text_before_the_first_picture_earns_credit_and_nothing_behind_it(make: Make) -> None:
    """case 42: never equal credit for different images, never a download."""
    source_text = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}{% if p.type == 'image_url' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %}"
        "{% endif %}<|im_end|>\n{% endfor %}"
    )
    files = ModelFiles(tiny().tokenizer, ChatTemplate(source_text, {}))
    source = await ready(make(load=lambda source: files))
    content = [{"type": "text", "text": LONG_TEXT}, PICTURE, {"type": "text", "text": "and this?"}, PICTURE]
    prompt = await source.resolve(chat(user(content)), FACTS)
    assert prompt.ids is not None
    assert encode(f"<|im_start|>user\n{LONG_TEXT}").startswith(prompt.ids)
    assert token_count(prompt.ids) > 0.8 * token_count(encode(LONG_TEXT))
    assert (prompt.source, prompt.reason, prompt.forward_for, prompt.counted) == ("local", "media", None, None)
    other = [content[0], {**PICTURE, "image_url": {"url": "http://other/"}}, {"type": "text", "text": "else"}]
    assert (await source.resolve(chat(user(other)), FACTS)).ids == prompt.ids
    assert (await source.resolve(chat(user([PICTURE, content[0]])), FACTS)).ids is None


async def test_million_id_prompts_are_read_in_slices(make: Make) -> None:
    """case 44"""
    ids = [n % 4000 for n in range(300_000)]
    source = await ready(make())
    assert (await source.resolve(body(COMPLETIONS, prompt=ids), FACTS)).ids == pack_ids(ids)
    odd = json.dumps({"prompt": ids}).replace("3999, 0", "3999, , 0", 1)[:-1] + "}"
    with pytest.raises(RouterError):
        parse_body(COMPLETIONS, odd.encode())
    holed = body(COMPLETIONS, prompt=[*ids, 1.5])
    with pytest.raises(RouterError, match="token ids are integers"):
        await source.resolve(holed, FACTS)


async def test_the_next_turn_is_made_of_what_earlier_turns_left(make: Make) -> None:
    spent: dict[str, int] = {"reused": 0, "made": 0}

    def count(result: str, tokens: int) -> None:
        spent[result] += tokens

    source = await ready(make(on_tokens=count))
    talk = [user("one " * 400)]
    first = await source.resolve(chat(*talk), FACTS)
    assert spent["reused"] == 0
    talk += [{"role": "assistant", "content": "two " * 200}, user("three")]
    second = await source.resolve(chat(*talk), FACTS)
    assert spent["reused"] >= 400
    assert spent["reused"] + spent["made"] == first.tokens + second.tokens
    assert second.ids == local_ids(chat(*talk), prompt_form(chat(*talk)), tiny(), FACTS)


async def test_what_needs_no_waiting_is_resolved_now_and_counted_once(make: Make) -> None:
    counted: list[tuple[str, str]] = []
    source = await ready(make(count=lambda source, reason: counted.append((source, reason))))
    for request in (chat(user("hello")), body(COMPLETIONS, prompt=[5, 6]), body(GENERATE), chat({"role": "x"})):
        now = source.resolve_now(request, FACTS)
        assert now is not None
        assert said(now) == said(await source.resolve(request, FACTS, again=True))
    assert counted == [("local", "unverified"), ("given", ""), ("none", "no_prompt"), ("none", "refused")]


async def test_what_waits_for_a_thread_or_an_engine_is_not_resolved_now(make: Make) -> None:
    counted: list[tuple[str, str]] = []
    asked: list[str] = []

    async def ask(model: ModelFacts, path: str, question: bytes) -> bytes:
        asked.append(path)
        return b'{"tokens": [9, 8]}'

    def count(source: str, reason: str) -> None:
        counted.append((source, reason))

    source = await ready(make(count=count))
    for request in (chat(user("long " * 50_000)), chat(user("longer " * 200_000))):
        assert source.resolve_now(request, FACTS) is None
        assert not counted
        assert (await source.resolve(request, FACTS)).source == "local"
        counted.clear()
    engine = await ready(make("engine", ask=ask, count=count))
    request = chat(user("hello"))
    assert (engine.resolve_now(request, FACTS), asked) == (None, [])
    assert said(await engine.resolve(request, FACTS)) == (pack_ids([9, 8]), 2, Namespace(), "engine", "engine_mode")
    assert (counted, asked) == ([("engine", "engine_mode")], ["/v1/tokenize"])
    other = ModelFacts(engine="unknown", names=("tiny",))
    assert engine.resolve_now(request, FACTS) is None
    assert (await engine.resolve(request, other)).source == "none", "what was begun was for engines of another kind"
