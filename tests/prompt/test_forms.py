from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.hashing import pack_ids
from router.prompt.forms import prompt_form
from tests.prompt.support import CHAT, COMPLETIONS, GENERATE, body, chat


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, {"prompt": "hello"}),
        (COMPLETIONS, {"prompt": ["hello"]}),
        (GENERATE, {"text": "hello"}),
        (GENERATE, {"text": ["hello"]}),
        ("/v1/tokenize", {"prompt": "hello"}),
    ],
)
def test_text_forms(path: str, fields: dict[str, Any]) -> None:
    """case 38"""
    form = prompt_form(body(path, **fields))
    assert (form.kind, form.text, form.prompts) == ("text", "hello", 1)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, {"prompt": [1, 2, 4294967295]}),
        (COMPLETIONS, {"prompt": [[1, 2, 4294967295]]}),
        (GENERATE, {"input_ids": [1, 2, 4294967295]}),
        (GENERATE, {"input_ids": [[1, 2, 4294967295]]}),
        (CHAT, {"messages": [], "input_ids": [1, 2, 4294967295]}),
    ],
)
def test_id_forms_flat_and_nested(path: str, fields: dict[str, Any]) -> None:
    """case 38: flat ints are one prompt."""
    form = prompt_form(body(path, **fields))
    assert (form.kind, form.ids, form.prompts) == ("ids", pack_ids([1, 2, 4294967295]), 1)
    assert form.estimate_tokens == 3


def test_vllm_ignores_ids_beside_messages() -> None:
    assert prompt_form(chat(input_ids=[1, 2]), "vllm").kind == "chat"


def test_a_batch_is_its_first_prompt_and_the_sum_of_all() -> None:
    """cases 38, 61"""
    ids = prompt_form(body(COMPLETIONS, prompt=[[1, 2], [3], [4, 5, 6]]))
    assert (ids.ids, ids.prompts, ids.rest_tokens, ids.estimate_tokens) == (pack_ids([1, 2]), 3, 4, 6)
    texts = prompt_form(body(COMPLETIONS, prompt=["abcd" * 10, "x" * 8]))
    assert (texts.text, texts.prompts, texts.rest_chars, texts.estimate_tokens) == ("abcd" * 10, 2, 8, 12)


@pytest.mark.parametrize("odd", [-5, 2**40, True, 1.0, None, "1", [1], 2**70])
@pytest.mark.parametrize("nested", [False, True])
def test_ids_no_engine_can_have_are_no_ids(odd: object, nested: bool) -> None:
    """case 48"""
    prompt = [1, odd, 2]
    form = prompt_form(body(COMPLETIONS, prompt=[prompt] if nested else prompt))
    assert (form.kind, form.reason, form.ids) == ("none", "odd_ids", None)
    assert form.estimate_tokens > 0


@pytest.mark.parametrize(
    ("path", "fields", "reason"),
    [
        (COMPLETIONS, {}, "no_prompt"),
        (COMPLETIONS, {"prompt": None}, "no_prompt"),
        (COMPLETIONS, {"prompt": ""}, "empty"),
        (COMPLETIONS, {"prompt": []}, "empty"),
        (COMPLETIONS, {"prompt": [[]]}, "empty"),
        (COMPLETIONS, {"prompt": [""]}, "empty"),
        (COMPLETIONS, {"prompt": 5}, "odd_ids"),
        (COMPLETIONS, {"prompt": {"a": 1}}, "odd_ids"),
        (COMPLETIONS, {"prompt": ["a", 1]}, "prompt_form"),
        (COMPLETIONS, {"prompt": "\ud800"}, "prompt_form"),
        (GENERATE, {}, "no_prompt"),
        (GENERATE, {"text": "a", "input_ids": [1]}, "no_prompt"),
        (GENERATE, {"input_embeds": [[0.1, 0.2]]}, "embeds"),
        (GENERATE, {"text": "what is this", "image_data": "x"}, "media"),
        ("/v1/embeddings", {"input": "text"}, "route"),
        ("/v1/responses", {"input": "text"}, "route"),
    ],
)
def test_forms_without_a_prompt_to_tokenise_are_for_load_routing(
    path: str, fields: dict[str, Any], reason: str
) -> None:
    """cases 38, 42, 61"""
    form = prompt_form(body(path, **fields))
    assert (form.kind, form.reason, form.ids, form.text) == ("none", reason, None, None)


def test_chat_is_estimated_from_its_messages_and_tools() -> None:
    long = prompt_form(chat({"role": "user", "content": "x" * 4000}))
    assert long.kind == "chat"
    assert 1000 <= long.estimate_tokens <= 1100


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=10,
)


@given(json_values)
def test_no_prompt_raises(value: object) -> None:
    form = prompt_form(body(COMPLETIONS, prompt=value))
    assert (form.ids is not None) == (form.kind == "ids")
    assert form.estimate_tokens >= 0


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1))
def test_valid_ids_come_through_exactly(ids: list[int]) -> None:
    assert prompt_form(body(GENERATE, input_ids=ids)).ids == pack_ids(ids)


@pytest.mark.parametrize("prompts", [[[7] * 3] * 60_000, [[9] * 200_000, [1, 2]], [[1], list(range(150_000)), [3]]])
def test_large_batches_of_ids_are_read_as_small_ones_are(prompts: list[list[int]]) -> None:
    form = prompt_form(body(COMPLETIONS, prompt=prompts))
    assert (form.ids, form.prompts) == (pack_ids(prompts[0]), len(prompts))
    assert (form.estimate_tokens, form.max_id) == (sum(map(len, prompts)), max(map(max, prompts)))


@pytest.mark.parametrize("odd", [-5, 2**40, True, 1.0, [1]])
def test_an_odd_id_in_a_large_batch_is_found(odd: object) -> None:
    """case 48"""
    form = prompt_form(body(COMPLETIONS, prompt=[[1, 2, 3]] * 60_000 + [[4, odd]]))
    assert (form.kind, form.reason) == ("none", "odd_ids")


def test_large_batches_of_texts_are_read_as_small_ones_are() -> None:
    texts = ["hello", *["wide world" * 20] * 4_000, "é" * 400_000]
    form = prompt_form(body(COMPLETIONS, prompt=texts))
    assert (form.text, form.prompts, form.rest_chars) == ("hello", 4002, 200 * 4_000 + 400_000)
    assert prompt_form(body(COMPLETIONS, prompt=[*texts, 5])).reason == "prompt_form"
    assert prompt_form(body(COMPLETIONS, prompt="é" * 400_000)).text == "é" * 400_000
