from __future__ import annotations

from typing import Any

import pytest

from router.prompt.body import RequestBody
from router.prompt.template import ChatTemplate, TemplateFailure
from router.prompt.tools import Refused
from router.prompt.vllm_chat import render_vllm_chat
from tests.prompt.support import chat, user

PLAIN = ChatTemplate(
    "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}{% if add_generation_prompt %}>{% endif %}", {}
)
DUMP = ChatTemplate("{{ messages | tojson }}|{{ tools | tojson }}", {})
KNOWS_DEVELOPER = ChatTemplate("{% for m in messages %}{{ m.role == 'developer' }}{% endfor %}", {})


def text(request: RequestBody, template: ChatTemplate = PLAIN, **defaults: Any) -> str:
    return render_vllm_chat(request.fields, template, defaults).text


def test_parts_are_joined_with_a_newline_and_thinking_is_text() -> None:
    """captures fact 20"""
    parts = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a"}, "b"]
    assert text(chat({"role": "assistant", "content": parts}, user())) == "[assistant:hm\na\nb][user:hi]>"


def test_a_developer_joins_the_system_message_unless_the_template_knows_the_role() -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "developer", "content": "d"}, user()]
    assert text(chat(*messages)) == "[system:s\n\nd][user:hi]>"
    assert text(chat(*messages[1:])) == "[system:d][user:hi]>"
    assert text(chat(*messages), KNOWS_DEVELOPER) == "FalseTrueFalse"


def test_a_trailing_answer_stays_one() -> None:
    """captures fact 21"""
    answer = {"role": "assistant", "content": "well "}
    assert text(chat(user(), answer)) == "[user:hi][assistant:well ]>"
    going = chat(user(), answer, continue_final_message=True, add_generation_prompt=False)
    assert text(going) == "[user:hi][assistant:well "
    with pytest.raises(Refused):
        text(chat(user(), answer, continue_final_message=True))


def test_a_template_that_drops_the_last_message_cannot_continue_it() -> None:
    going = chat(user("x"), continue_final_message=True, add_generation_prompt=False)
    with pytest.raises(TemplateFailure):
        text(going, ChatTemplate("nothing", {}))


def test_tools_have_a_fixed_order_and_no_defer_loading() -> None:
    """captures facts 19, 20: tool_choice "none" keeps them."""
    tools = [{"type": "function", "function": {"parameters": {"type": "dict"}, "name": "f", "x": 1, "strict": True}}]
    assert text(chat(tools=tools, tool_choice="none"), DUMP).endswith(
        '[{"type": "function", "function": {"name": "f", "description": null, "parameters": {"type": "dict"}, '
        '"strict": true}}]'
    )
    with pytest.raises(Refused):
        text(chat(tools=[]))


@pytest.mark.parametrize(("arguments", "printed"), [("", "{}"), ("{", "{}"), ("[1]", "{}"), ('{"a": 1}', '{"a": 1}')])
def test_bad_arguments_become_an_empty_object(arguments: str, printed: str) -> None:
    """captures fact 22"""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    rendered = text(chat({"role": "assistant", "content": None, "tool_calls": [call]}, user()), DUMP)
    assert f'"arguments": {printed}, "name": "f"' in rendered


def test_arguments_as_an_object_are_refused_and_unknown_roles_are_not() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}
    with pytest.raises(Refused):
        text(chat({"role": "assistant", "tool_calls": [call]}))
    assert text(chat({"role": "critic", "content": "x"})) == "[critic:x]>"


def test_reasoning_reaches_the_template_under_both_names() -> None:
    answer = {"role": "assistant", "content": "a", "reasoning_content": "r"}
    assert '"reasoning": "r", "reasoning_content": "r"' in text(chat(answer, user()), DUMP)


def test_a_requests_own_template_is_left_to_the_engine() -> None:
    with pytest.raises(TemplateFailure):
        text(chat(chat_template="x"))


def test_effort_beats_kwargs_and_kwargs_beat_server_defaults() -> None:
    template = ChatTemplate("{{ reasoning_effort }}{{ enable_thinking }}", {})
    request = chat(reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "x", "add_generation_prompt": 1})
    assert text(request, template) == "lowTrue"
    assert text(chat(chat_template_kwargs={"enable_thinking": 1}), template, enable_thinking=0) == "1"
