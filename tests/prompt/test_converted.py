"""Bodies of the Anthropic and Responses routes → the chat SGLang makes of them (counts compared live in tests/real)."""

from __future__ import annotations

from typing import Any

import pytest

from router.prompt.body import plain
from router.prompt.converted import MESSAGES, RESPONSES
from router.prompt.forms import prompt_form
from router.prompt.local import NoIds, as_chat, local_prompt
from tests.prompt.support import FACTS, body, chat, tiny, user


def messages(path: str, **fields: Any) -> Any:
    return plain(as_chat(body(path, **fields)).fields.messages)


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def test_system_text_comes_first_and_blocks_are_joined_by_lines() -> None:
    talk = [{"role": "user", "content": "hi"}]
    assert messages(MESSAGES, system="Be kind.", messages=talk)[0] == {"role": "system", "content": "Be kind."}
    blocks = [text("a"), text(""), text("b")]
    assert messages(MESSAGES, system=blocks, messages=talk)[0] == {"role": "system", "content": "a\nb"}
    assert messages(MESSAGES, system="  ", messages=talk) == talk


def test_tool_calls_and_results_keep_their_order() -> None:
    talk = [
        {
            "role": "assistant",
            "content": [text("let me see"), {"type": "tool_use", "id": "1", "name": "f", "input": {}}],
        },
        {
            "role": "user",
            "content": [text("before"), {"type": "tool_result", "tool_use_id": "1", "content": "42"}, text("x")],
        },
    ]
    assert messages(MESSAGES, messages=talk) == [
        {
            "role": "assistant",
            "content": "let me see",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "user", "content": "before"},
        {"role": "tool", "tool_call_id": "1", "content": "42"},
        {"role": "user", "content": "x"},
    ]


def test_tools_are_functions_with_a_strict_flag() -> None:
    tools = [{"name": "f", "input_schema": {"properties": {}}, "cache_control": {"type": "ephemeral"}}]
    made = as_chat(body(MESSAGES, messages=[user()], tools=tools, tool_choice={"type": "any"})).fields
    schema = {"properties": {}, "type": "object"}
    function = {"name": "f", "description": "", "parameters": schema, "strict": False}
    assert plain(made.tools) == [{"type": "function", "defer_loading": None, "function": function}]
    assert plain(made.tool_choice) == "required"


def test_a_plain_anthropic_body_has_the_ids_of_its_chat() -> None:
    request = body(MESSAGES, system="s", messages=[user("hi")], max_tokens=5)
    ids = local_prompt(request, prompt_form(request, "sglang"), tiny(), FACTS).ids
    same = chat({"role": "system", "content": "s"}, user("hi"))
    assert ids == local_prompt(same, prompt_form(same), tiny(), FACTS).ids


def test_responses_input_is_a_chat() -> None:
    assert messages(RESPONSES, input="hi", instructions="s") == [{"role": "system", "content": "s"}, user("hi")]
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "message", "role": "assistant", "id": "m", "content": [{"type": "output_text", "text": "b"}]},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    assert messages(RESPONSES, input=items) == [user("a"), {"role": "assistant", "content": "b\n\nc"}, user("d")]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (MESSAGES, {"messages": [user()], "thinking": {"type": "enabled", "budget_tokens": 2000}}),
        (MESSAGES, {"messages": [{"role": "system", "content": "x"}]}),
        (MESSAGES, {"messages": [{"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}]}]}),
        (MESSAGES, {"messages": [user()], "tools": [{"type": "bash_20250124", "name": "bash"}]}),
        (MESSAGES, {"messages": 5}),
        (MESSAGES, {"messages": [user(5)]}),
        (RESPONSES, {"input": "x", "previous_response_id": "r"}),
        (RESPONSES, {"input": [{"type": "function_call", "name": "f", "arguments": "{}", "call_id": "1"}]}),
        (RESPONSES, {"input": "x", "tools": [{"type": "web_search"}]}),
        (RESPONSES, {"input": 5}),
    ],
)
def test_what_is_not_certain_goes_by_load(path: str, fields: dict[str, Any]) -> None:
    """case 38: unknown forms never raise and never go to a wrong prompt."""
    request = body(path, **fields)
    with pytest.raises(NoIds) as none:
        local_prompt(request, prompt_form(request, "sglang"), tiny(), FACTS)
    assert not none.value.ask_engine


def test_vllms_own_conversion_is_not_guessed() -> None:
    """It is asked of the engine, which renders these bodies on a route of its own."""
    assert prompt_form(body(MESSAGES, messages=[user()]), "vllm").kind == "rendered"
    assert prompt_form(body(RESPONSES, input="x"), "vllm").kind == "rendered"
    assert prompt_form(body(MESSAGES, messages=[user()])).kind == "none", "an engine of unknown kind"
