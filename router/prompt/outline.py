"""What a chat template prints for messages of plain text, where that is fixed text with the contents in between.

Most templates print a content and never look at it. Whether one does is found out by rendering it with contents that
cannot be looked at: whatever is done to them but printing, trimming, and joining them to text with `+` is refused, and
the template is then rendered for every request. What it prints for one order of roles is so known for all contents.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, cast

from jinja2 import Environment, Template, TemplateError, nodes
from jinja2.filters import do_trim

_MARK = re.compile("\ue000(\\d+)(s?)\ue000")
# What prints into a value of the template's own, which it could look at.
_CAPTURES = (nodes.AssignBlock, nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.Block)
# Answered by the type alone.
_TYPE_TESTS = ("string", "defined", "undefined", "none", "mapping", "iterable", "sequence", "number", "boolean")
_NOT_ALWAYS_THE_SAME = ("strftime_now", "lipsum")


class _LookedAt(BaseException):
    """No Exception: Jinja's own tests and filters take those for an answer."""


def _refuse(*args: object) -> NoReturn:
    raise _LookedAt


class _Sealed:
    """A content, or several joined to text, as marks. Has no type either: `isinstance` asks for `__class__`."""

    __slots__ = ("_marks",)

    def __init__(self, marks: str) -> None:
        self._marks = marks

    def __add__(self, other: object) -> _Sealed:
        if type(other) is _Sealed:
            return _Sealed(self._marks + other._marks)
        return _Sealed(self._marks + other) if type(other) is str else _refuse()

    def __radd__(self, other: object) -> _Sealed:
        return _Sealed(other + self._marks) if type(other) is str else _refuse()

    __class__ = property(_refuse)
    __getattr__ = __str__ = __repr__ = __format__ = __bytes__ = __hash__ = __bool__ = __len__ = __iter__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __getitem__ = _refuse
    __int__ = __float__ = __complex__ = __index__ = __mul__ = __rmul__ = __mod__ = __rmod__ = _refuse


def _print(value: object) -> object:
    return value._marks if type(value) is _Sealed else value


def _trim(value: Any, chars: str | None = None) -> Any:
    if type(value) is not _Sealed:
        return do_trim(value, chars)
    alone = _MARK.fullmatch(value._marks)
    return _Sealed(f"\ue000{alone[1]}s\ue000") if alone is not None and chars is None else _refuse()


def _by_type(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
    of_text = test("")
    return lambda value: of_text if type(value) is _Sealed else test(value)


class Outline:
    """`fill(contents)` is what the template prints."""

    __slots__ = ("_order", "_parts")

    def __init__(self, printed: str, count: int) -> None:
        """`printed` has marks in the places of `count` contents. Raises IndexError for a mark of none of these."""
        found = _MARK.split(printed)
        self._parts = [part for text in found[::3] for part in (text, "")][:-1]
        """The fixed text, with a place for a content behind each part but the last."""
        order = [(int(index), bool(trimmed)) for index, trimmed in zip(found[1::3], found[2::3], strict=True)]
        if any(index >= count for index, _ in order):
            raise IndexError
        self._order = order if order != [(index, False) for index in range(count)] else None
        """Which content stands in each place, and whether trimmed; None: each once, in order, as it is."""

    def fill(self, contents: Sequence[str]) -> str:
        parts = self._parts.copy()
        if self._order is not None:
            contents = [contents[index].strip() if trimmed else contents[index] for index, trimmed in self._order]
        parts[1::2] = contents
        return "".join(parts)


class Outlines:
    """Of one template. `render(messages)` is what it prints, `values` are its variables besides."""

    def __init__(
        self,
        environment: Environment,
        source: str,
        values: Mapping[str, Any],
        render: Callable[[list[dict[str, Any]]], str],
    ) -> None:
        self._render = render
        sealed = environment.overlay(finalize=_print)
        tests, filters = environment.tests, environment.filters
        sealed.tests = {
            **{name: test for name, test in tests.items() if name != "sameas"},
            **{name: _by_type(cast(Callable[[Any], bool], tests[name])) for name in _TYPE_TESTS},
        }
        sealed.filters = {**{name: each for name, each in filters.items() if name != "random"}, "trim": _trim}
        self._values = {**values, **dict.fromkeys(_NOT_ALWAYS_THE_SAME, _refuse)}
        self._template: Template | None = None
        tree = sealed.parse(source)
        if not any(tree.find_all(_CAPTURES)) and not any(loop.recursive for loop in tree.find_all(nodes.For)):
            try:
                self._template = sealed.from_string(tree)
            except TemplateError:  # a filter that is not among these
                pass

    def find(self, roles: Sequence[str]) -> Outline | None:
        """For messages of these roles; None where there is none."""
        if self._template is None:
            return None
        messages = [{"role": role, "content": _Sealed(f"\ue000{at}\ue000")} for at, role in enumerate(roles)]
        try:
            outline = Outline(self._template.render({**self._values, "messages": messages}), len(roles))
            contents = [f" \n{at} <b> é' " for at in range(len(roles))]
            sent = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=True)]
            return outline if outline.fill(contents) == self._render(sent) else None
        except (_LookedAt, Exception):  # a template is a program
            return None
