from __future__ import annotations

from datetime import datetime

import jinja2
import pytest

from router.prompt.content_format import sglang_format, vllm_format
from router.prompt.template import ChatTemplate, TemplateFailure

MESSAGES = [{"role": "user", "content": "a<b & 'é'"}]


def render(source: str, **kwargs: object) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>"}, lambda: datetime(2026, 11, 29))
    return template.render(MESSAGES, None, kwargs)


def test_tojson_escapes_neither_html_nor_unicode() -> None:
    assert render("{{ messages[0] | tojson }}") == '{"role": "user", "content": "a<b & \'é\'"}'
    assert render("{{ [1] | tojson(indent=2) }}") == "[\n  1\n]"


def test_blocks_are_trimmed_as_transformers_trims_them() -> None:
    assert render("  {% if true %}\nx\n  {% endif %}\ny\n") == "x\ny"


def test_loop_controls_and_generation_blocks_work() -> None:
    assert render("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "1"
    assert render("{% generation %}a{{ bos_token }}{% endgeneration %}b") == "a<s>b"


def test_the_clock_is_passed_in() -> None:
    """case 37: a template that prints the date."""
    assert render("{{ strftime_now('%d %b %Y') }}") == "29 Nov 2026"


def test_an_undefined_special_token_prints_nothing_and_kwargs_win() -> None:
    """captures fact 17"""
    assert render("[{{ eos_token }}{{ bos_token }}]") == "[<s>]"
    assert render("{{ bos_token }}", bos_token="!") == "!"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no') }}",
        "{{ 1 / 0 }}",
        "{{ nothing.at.all }}",
        "{{ messages[0].content.__class__.__mro__ }}{{ messages.append(1) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_whatever_a_template_raises_is_one_error(source: str) -> None:
    """case 37"""
    with pytest.raises(TemplateFailure):
        render(source)


def test_reserved_kwargs_are_refused() -> None:
    """captures fact 7: add_generation_prompt inside chat_template_kwargs gives 500."""
    with pytest.raises(TemplateFailure, match="add_generation_prompt"):
        render("x", add_generation_prompt=False)


def test_a_template_that_does_not_compile_says_so() -> None:
    with pytest.raises(TemplateFailure, match="does not compile"):
        ChatTemplate("{% if %}", {})


@pytest.mark.parametrize(
    ("source", "sglang", "vllm"),
    [
        ("{% for message in messages %}{{ message.content }}{% endfor %}", "string", "string"),
        ("{% for message in messages %}{% for c in message.content %}{% endfor %}{% endfor %}", "openai", "openai"),
        ("{% for m in messages %}{% for c in m['content'] | list %}{% endfor %}{% endfor %}", "openai", "openai"),
        ("{% for x in messages %}{% for c in x.content %}{% endfor %}{% endfor %}", "string", "openai"),
        (
            "{% set all = messages[1:] %}{% for x in all %}{% for c in x.content %}{% endfor %}{% endfor %}",
            "string",
            "openai",
        ),
        (
            "{% macro f(c) %}{% for p in c %}{% endfor %}{% endmacro %}"
            "{% for message in messages %}{{ f(message.content) }}{% endfor %}",
            "string",
            "openai",
        ),
        (
            "{% macro f(c) %}{% for p in c %}{% endfor %}{% endmacro %}"
            "{% for message in messages %}{{ f(c=message.content) }}{% endfor %}",
            "string",
            "openai",
        ),
        ("{% for p in content %}{% endfor %}", "string", "openai"),
        ("{% macro f(content) %}{% for p in content %}{% endfor %}{% endmacro %}", "string", "string"),
        ("{# an image #}{{ messages[0].content }}", "openai", "string"),
    ],
)
def test_content_format_by_each_engines_rule(source: str, sglang: str, vllm: str) -> None:
    tree = jinja2.Environment().parse(source)
    assert (sglang_format(source, tree), vllm_format(tree)) == (sglang, vllm)
