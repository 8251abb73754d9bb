"""A template's output put together from its outline is what the template itself prints."""

from __future__ import annotations

from datetime import datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.prompt.template import MAX_OUTLINED, ChatTemplate, TemplateFailure
from tests.prompt.support import tiny

PRINTING = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}<|assistant|>",
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}Be kind.{% endif %}"
    "{{ m.role }}: {{ m.content }}{% if not loop.last %}\n{% endif %}{% endfor %}",
    "{{ bos_token }}{% for m in messages %}{% set text = m.role + '\n' + m.content | trim + '!' %}"
    "{% if loop.index0 == 0 %}{% set text = '>' + text %}{% endif %}{{ text }}{% endfor %}",
    "{% set ns = namespace(system='') %}{% for m in messages %}{% if m.role == 'system' %}"
    "{% set ns.system = ns.system + m.content %}{% endif %}{% endfor %}{{ ns.system }}|{{ messages[-1].content }}",
    "{% for m in messages %}{% if m.content is string and m.content is not mapping and not m.tool_calls %}"
    "{% generation %}[{{ m.content }}]{% endgeneration %}{% else %}?{% endif %}{% endfor %}",
    "{% for m in messages | rejectattr('role', 'eq', 'system') %}{{ m.content + messages[0].content }}{% endfor %}",
    "never mind",
)
LOOKING = (
    "{% if messages[0].content %}x{% endif %}",
    "{% if 'x' in messages[0].content %}x{% endif %}",
    "{% if messages[0].content == 'x' %}x{% endif %}",
    "{% if messages[0].content in ['x', 'y'] %}x{% endif %}",
    "{{ messages[0].content | length }}",
    "{{ messages[0].content.strip() }}",
    "{{ messages[0].content.split('</think>')[-1] }}",
    "{{ messages[0].content[:3] }}",
    "{{ messages[0].content | int }}{{ messages[0].content | float }}",
    "{{ messages[0].content | tojson }}",
    "{{ messages[0].content | replace('a', 'b') }}",
    "{{ messages[0].content | trim('x') }}",
    "{{ ('a' + messages[0].content) | trim }}",
    "{{ messages[0].content | reverse }}",
    "{{ messages[0].content | default('x', true) }}",
    "{{ messages[0] }}",
    "{{ messages | map(attribute='content') | join }}",
    "{{ '%s' % messages[0].content }}",
    "{{ messages[0].content % 'x' }}",
    "{{ '{}'.format(messages[0].content) }}",
    "{{ 2 * messages[0].content }}",
    "{{ {'x': 1}[messages[0].content] }}",
    "{% for m in messages %}{{ loop[m.content] }}{{ [1, 2][m.content] }}{% endfor %}",
    "{% for m in messages %}{% if loop.changed(m.content) %}x{% endif %}{% endfor %}",
    "{{ messages | sum(start=messages[0].content, attribute='content') }}",
    "{% if messages[0].content is sameas '' %}x{% endif %}",
    "{% if messages[0].content is lower %}x{% endif %}",
    "{% set text %}{{ messages[0].content }}{% endset %}{{ text | upper }}",
    "{% macro f(text) %}{{ text }}{% endmacro %}{{ f(messages[0].content) | upper }}",
    "{% filter upper %}{{ messages[0].content }}{% endfilter %}",
    "{% for m in messages recursive %}{{ m.content }}{% if loop.depth0 == 0 %}{{ loop([m]) | upper }}{% endif %}"
    "{% endfor %}",
    "{% autoescape true %}{{ messages[0].content }}{% endautoescape %}",
    "{{ '<b>' | safe + messages[0].content }}",
    "{{ strftime_now('%d') + messages[0].content }}",
    "{{ [1, 2, 3, 4, 5] | random }}",
    "{{ lipsum(n=1) }}",
    "\ue0007\ue000{{ messages[0].content }}",
)
ROLES = ("user", "assistant", "system")
messages = st.lists(
    st.tuples(st.sampled_from(ROLES), st.text() | st.sampled_from(["", " x\n", "{{ x }}", "\ue0000\ue000"])), min_size=1
)


def printed(template: ChatTemplate, roles: list[str], contents: list[str], *, short: bool) -> str:
    try:
        if short:
            return template.render_texts(roles, contents)
        sent = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=True)]
        return template.render(sent, None, {})
    except TemplateFailure:
        return "refused"


@settings(deadline=None)
@given(
    st.sampled_from([*PRINTING, *LOOKING[:-3]]).map(lambda source: ChatTemplate(source, {"bos_token": "<s>"})), messages
)
def test_the_short_way_prints_what_the_template_prints(template: ChatTemplate, sent: list[tuple[str, str]]) -> None:
    roles, contents = [role for role, _ in sent], [text for _, text in sent]
    expected = printed(template, roles, contents, short=False)
    assert printed(template, roles, contents, short=True) == expected
    assert printed(template, roles, contents[::-1], short=True) == printed(template, roles, contents[::-1], short=False)


@pytest.mark.parametrize("source", PRINTING)
def test_a_template_that_only_prints_contents_has_an_outline(source: str) -> None:
    template = ChatTemplate(source, {"bos_token": "<s>"})
    assert all(template._outline(roles) is not None for roles in (ROLES[:1], ("system", "user", "assistant", "user")))


@pytest.mark.parametrize("source", LOOKING)
def test_a_template_that_looks_at_a_content_has_none(source: str) -> None:
    assert ChatTemplate(source, {})._outline(("user", "user")) is None


def test_the_tiny_models_template_has_one() -> None:
    template = tiny().template
    assert template is not None
    assert template._outline(("system", "user")) is not None


def test_a_date_is_that_of_each_request() -> None:
    days = iter(range(1, 28))
    template = ChatTemplate(
        "{% if strftime_now is defined %}{{ strftime_now('%d') }}{% endif %}",
        {},
        lambda: datetime(2026, 11, next(days)),
    )
    seen = [template.render_texts(["user"], ["x"]) for _ in range(2)]
    assert seen[0] != seen[1]


def test_a_conversation_of_very_many_messages_is_rendered_each_time() -> None:
    template = ChatTemplate(PRINTING[0], {})
    roles, contents = ["user"] * (MAX_OUTLINED + 1), ["x"] * (MAX_OUTLINED + 1)
    assert template.render_texts(roles, contents) == printed(template, roles, contents, short=False)
    assert template._outline.cache_info().currsize == 0
