from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.prompt.body import RequestBody
from router.prompt.chat import HasMedia, Rendered, render_chat, render_usual
from router.prompt.template import ChatTemplate, TemplateFailure
from router.prompt.tools import Refused
from tests.prompt.support import CHAT, body, chat, user

# Prints everything the template gets.
DUMP = "{{ messages | tojson }}|{{ tools | tojson }}|{{ add_generation_prompt }}|{{ thinking }}{{ enable_thinking }}"
STRING = ChatTemplate("{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}", {})
OPENAI = ChatTemplate(
    "{% for m in messages %}[{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}({{ part | tojson }}){% endfor %}{% endif %}]{% endfor %}",
    {},
)


def text(request: RequestBody, template: ChatTemplate = STRING, **defaults: Any) -> str:
    return render_chat(request.fields, template, defaults).text


def dumped(request: RequestBody, **defaults: Any) -> str:
    return text(request, ChatTemplate(DUMP, {}), **defaults)


def test_text_parts_are_joined_with_one_space_or_stay_parts() -> None:
    """captures fact 8"""
    parts = [{"type": "text", "text": "a", "cache_control": {}}, {"type": "text", "text": "b"}]
    assert text(chat(user(parts))) == "[user:a b]"
    assert text(chat(user(parts)), OPENAI) == ('[user:({"type": "text", "text": "a"})({"type": "text", "text": "b"})]')


def test_tool_text_lists_are_joined_under_every_template() -> None:
    tool = {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": t} for t in "ab"]}
    assert text(chat(user(), tool), OPENAI) == "[user:hi][tool:a b]"


def test_thinking_parts_vanish_and_only_answers_may_hold_them() -> None:
    parts = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a"}]
    assert text(chat({"role": "assistant", "content": parts}, user())) == "[assistant:a][user:hi]"
    with pytest.raises(Refused):
        text(chat(user(parts)))


def test_a_trailing_answer_becomes_the_users() -> None:
    """captures fact 5"""
    answer = {"role": "assistant", "content": "well", "tool_calls": [], "reasoning_content": "hm"}
    assert text(chat(user(), answer)) == "[user:hi][user:well]"
    parts = {"role": "assistant", "content": [{"type": "text", "text": "well"}]}
    assert text(chat(user(), parts), OPENAI) == '[user:hi][assistant:({"type": "text", "text": "well"})]'


def test_continue_final_message_cuts_the_answer_off() -> None:
    """case 37, captures fact 6"""
    answer = {"role": "assistant", "content": "well"}
    request = chat(user(), answer, continue_final_message=True)
    rendered = render_chat(request.fields, STRING, {})
    assert (rendered.text, rendered.continuation) == ("[user:hi]", "well")
    rendered = render_chat(chat(user(), continue_final_message=True).fields, STRING, {})
    assert (rendered.text, rendered.continuation) == ("[user:hi]", "")


def test_messages_keep_only_the_keys_the_engine_knows() -> None:
    """captures facts 4, 13"""
    messages: list[dict[str, Any]] = [
        {"role": "System", "content": "s", "name": "n", "colour": 1},
        {"role": "user", "content": "u", "name": "n"},
        {"role": "assistant", "reasoning_content": "r", "reasoning": "x", "content": None},
        {"role": "user", "content": "v"},
    ]
    assert dumped(chat(*messages)).startswith(
        '[{"role": "system", "content": "s", "name": "n"}, {"role": "user", "content": "u"}, '
        '{"role": "assistant", "content": "", "reasoning_content": "r"}, {"role": "user", "content": "v"}]'
    )


def test_tool_calls_gain_an_index_and_their_arguments_are_parsed() -> None:
    """captures facts 3, 4"""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"b":1e5,"a":"\\u00e9","b":2.0}'}}
    printed = dumped(chat({"role": "assistant", "tool_calls": [call]}, user()))
    assert (
        '{"id": "c", "index": null, "type": "function", "function": {"name": "f", "arguments": {"b": 2.0, "a": "é"}}}'
    ) in printed


@pytest.mark.parametrize("arguments", ["", "{", "[1]", "3", '{"a":NaN}', 7])
def test_arguments_that_are_no_json_object_are_refused(arguments: object) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    with pytest.raises(Refused):
        text(chat({"role": "assistant", "tool_calls": [call]}, user()))


@pytest.mark.parametrize(
    "messages",
    [
        [],
        ["hi"],
        [{"content": "x"}],
        [{"role": "USER", "content": "x"}],
        [{"role": "user", "content": None}],
        [{"role": "user"}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": ["x"]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{"type": "poem", "text": "x"}]}],
        [{"role": "tool", "content": "x", "tool_call_id": 3}],
        [{"role": "assistant", "tool_calls": {}}],
        [{"role": "assistant", "tool_calls": [{"id": "c", "function": None}]}],
        [{"role": "assistant", "tool_calls": [{"type": "custom", "function": {}}]}],
    ],
)
def test_messages_the_engine_refuses_are_refused(messages: list[Any]) -> None:
    with pytest.raises(Refused):
        text(body("/v1/chat/completions", messages=messages))


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video_url"])
def test_media_have_no_ids_outside_the_engine(kind: str) -> None:
    """case 42"""
    with pytest.raises(HasMedia):
        text(chat(user([{"type": "text", "text": "look"}, {"type": kind, kind: {"url": "data:x"}}])))


@pytest.mark.parametrize(
    ("fields", "thinking", "effort"),
    [
        ({}, "", ""),
        ({"reasoning_effort": "none"}, "FalseFalse", "none"),
        ({"reasoning_effort": "low"}, "TrueTrue", "low"),
        ({"reasoning_effort": 0.5}, "TrueTrue", "0.5"),
        ({"reasoning": {"effort": "high"}}, "TrueTrue", "high"),
        ({"reasoning": {"enabled": "yes"}}, "TrueTrue", ""),
        ({"reasoning": {"enabled": False}}, "", ""),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}}, "TrueFalse", "low"),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "x"}}, "TrueTrue", "x"),
    ],
)
def test_reasoning_effort_sets_the_thinking_kwargs(fields: dict[str, Any], thinking: str, effort: str) -> None:
    """case 37, captures fact 10"""
    template = ChatTemplate("{{ thinking }}{{ enable_thinking }}|{{ reasoning_effort }}", {})
    assert text(chat(**fields), template) == f"{thinking}|{effort}"


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_effort": "huge"},
        {"reasoning_effort": 1.5},
        {"reasoning_effort": True},
        {"chat_template_kwargs": []},
        {"chat_template_kwargs": {"chat_template": "x"}},
        {"continue_final_message": "perhaps"},
    ],
)
def test_fields_the_engine_refuses_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(Refused):
        text(chat(**fields))


def test_server_defaults_fill_only_what_the_request_left_unset() -> None:
    """captures fact 18"""
    template = ChatTemplate("{{ enable_thinking }}", {})
    assert text(chat(), template, enable_thinking=False) == "False"
    assert text(chat(reasoning_effort="low"), template, enable_thinking=False) == "True"
    assert text(chat(chat_template_kwargs={"enable_thinking": 1}), template, enable_thinking=False) == "1"


def test_a_template_that_wants_bare_functions_gets_a_second_try() -> None:
    """captures fact 11"""
    template = ChatTemplate("{% if not tools[0].name %}{{ raise_exception('x') }}{% endif %}{{ tools[0].name }}", {})
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert text(chat(tools=tools), template) == "f"
    with pytest.raises(TemplateFailure):
        text(chat(), template)


def test_only_tokenize_obeys_add_generation_prompt() -> None:
    """captures fact 7"""
    template = ChatTemplate("{{ add_generation_prompt }}", {})
    request = chat(add_generation_prompt=False)
    assert render_chat(request.fields, template, {}).text == "True"
    assert render_chat(request.fields, template, {}, obey_generation_prompt=True).text == "False"


def outcome(render: Callable[[], Rendered]) -> object:
    try:
        made = render()
    except (Refused, HasMedia, TemplateFailure) as error:
        return type(error), str(error)
    return made.text, made.continuation, made.features


roles = st.sampled_from(["user", "assistant", "system", "tool", "User", "developer", "x", 3, None])
contents = st.text(max_size=5) | st.sampled_from(
    [None, 7, [], [{"type": "text", "text": "a"}], [{"type": "image_url"}]]
)
odd_messages = st.fixed_dictionaries(
    {"content": contents, "role": roles}, optional={"name": st.text(), "tool_calls": st.just([]), "tools": st.just([])}
)
plain_messages = st.fixed_dictionaries(
    {"content": st.text(max_size=5), "role": st.sampled_from(["user", "assistant", "system"])}
)


@settings(deadline=None)
@given(
    st.lists(plain_messages, max_size=4) | st.lists(plain_messages | odd_messages | st.just("x"), max_size=4),
    st.sampled_from([{}, {"reasoning_effort": "low"}, {"enable_thinking": False}]),
    st.sampled_from(
        [STRING, OPENAI, ChatTemplate(DUMP, {"eos_token": "</s>"}), ChatTemplate("{{ raise_exception('no') }}", {})]
    ),
)
def test_a_body_of_messages_only_is_rendered_as_any_other(
    sent: list[Any], defaults: dict[str, Any], template: ChatTemplate
) -> None:
    """The short way of `render_usual` against the long one."""
    request = body(CHAT, messages=sent)
    expected = outcome(lambda: render_chat(request.fields, template, defaults))
    assert outcome(lambda: render_usual(sent, template, defaults)) == expected
