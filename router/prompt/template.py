"""A model's Jinja chat template, rendered as transformers renders it (checked against recorded engine prompts)."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from types import BuiltinMethodType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from router.prompt.content_format import sglang_format, vllm_format
from router.prompt.outline import Outlines

# Named parameters of the engines' own call: as chat_template_kwargs they fail there, or never reach the template.
_RESERVED = frozenset(
    {
        *("messages", "conversation", "tools", "add_generation_prompt", "continue_final_message", "chat_template"),
        *("tokenize", "return_dict", "return_tensors", "return_assistant_tokens_mask", "tokenizer_kwargs"),
        *("padding", "truncation", "max_length"),
    }
)


MAX_OUTLINES = 512  # orders of roles: each turn of a conversation is one
MAX_OUTLINED = 128  # messages


class TemplateFailure(Exception):
    """The template cannot be compiled, or refused these messages."""


_DICT_ATTRIBUTES = frozenset(dir(dict))
_STR_METHODS = frozenset(name for name in dir(str) if not name.startswith(("_", "format")))


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with short ways for what templates do thousands of times: a key of a message, a method of a
    text, a loop's or namespace's own value. Each gives what the long way gives, three times as fast; all else takes it.
    """

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is dict:
            if attribute not in _DICT_ATTRIBUTES:
                return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        elif kind is str:
            if attribute in _STR_METHODS:
                return getattr(obj, attribute)
        elif (kind is LoopContext or kind is Namespace) and attribute[:1] != "_":
            try:
                return getattr(obj, attribute)
            except AttributeError:
                pass
        return super().getattr(obj, attribute)

    # Leading underscores, as in the base class: a template may call with keywords of any plain name.
    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        if type(__obj) is BuiltinMethodType and type(__obj.__self__) is str:
            kwargs.pop("_loop_vars", None)
            kwargs.pop("_block_vars", None)
            return __obj(*args, **kwargs)
        return super().call(__context, __obj, *args, **kwargs)


class _GenerationBlocks(Extension):
    """`{% generation %}…{% endgeneration %}` marks answers for training; for a prompt it is its body."""

    tags = {"generation"}  # noqa: RUF012  (jinja's own declaration is not a ClassVar)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)  # names set inside stay inside, as in transformers


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class ChatTemplate:
    """One compiled template. `specials` are bos_token, eos_token … as the tokenizer's configuration names them; `clock`
    answers `strftime_now` in templates that print the date (local time, as the engine's process sees it).
    Raises TemplateFailure when the source does not compile.
    """

    def __init__(self, source: str, specials: Mapping[str, str], clock: Callable[[], datetime] = datetime.now) -> None:
        environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols])
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda text: clock().strftime(text)
        try:
            self._template = environment.from_string(source)
            tree = environment.parse(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise TemplateFailure(f"the chat template does not compile: {error}") from error
        self._environment = environment
        self._values = {**self._template.globals, "documents": None, **specials}
        self.source = source
        self.sglang_format = sglang_format(source, tree)
        self.vllm_format = vllm_format(tree)
        values = {**self._values, "tools": None, "add_generation_prompt": True}
        outlines = Outlines(environment, source, values, lambda messages: self.render(messages, None, {}))
        self._outline = functools.lru_cache(MAX_OUTLINES)(outlines.find)

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        kwargs: Mapping[str, Any],
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Raises TemplateFailure for whatever the template raises; `kwargs` win over the special tokens."""
        values = self._values.copy()
        if kwargs:
            if reserved := _RESERVED & kwargs.keys():
                raise TemplateFailure(f"chat_template_kwargs may not set {', '.join(sorted(reserved))}")
            values.update(kwargs)
        values["messages"] = messages
        values["tools"] = tools
        values["add_generation_prompt"] = add_generation_prompt
        try:
            # What Template.render does, without its slow walk through the globals for every request.
            context = self._environment.context_class(self._environment, values, None, self._template.blocks)
            return "".join(self._template.root_render_func(context))
        except Exception as error:
            # A template is a program: TypeError, KeyError, ZeroDivisionError, RecursionError … are all its refusals.
            raise TemplateFailure(f"{type(error).__name__}: {error}") from error

    def render_texts(self, roles: Sequence[str], contents: Sequence[str]) -> str:
        """As `render` for messages of a role and a text each, without tools or kwargs."""
        outline = self._outline(tuple(roles)) if len(roles) <= MAX_OUTLINED else None
        if outline is not None:
            return outline.fill(contents)
        messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=True)]
        return self.render(messages, None, {})
