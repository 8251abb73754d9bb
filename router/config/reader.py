"""Walks a decoded document along the structs of `schema`, collecting every problem with its dotted key."""

from __future__ import annotations

import difflib
import math
import os
import reprlib
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin

import msgspec

from router.config.schema import RankConfig, Section, WorkerConfig
from router.config.secret import Secret, resolve_secret
from router.contract.url import WorkerUrl
from router.errors import ConfigError

S = TypeVar("S", bound=Section)


class _BadValue(Exception):
    """Raised once the problem is in the list."""


class Reader:
    """`problems` holds one line per finding. `env` None forbids secrets by reference."""

    def __init__(self, *, env: Mapping[str, str] | None, folder: Path) -> None:
        self._env = env
        self._folder = folder
        self._every_key: list[str] = []
        self.problems: list[str] = []

    def section(self, kind: type[S], value: object) -> S | None:
        """The checked struct of a whole document, or None when any of its keys had a problem."""
        self._every_key = _all_keys(kind)
        try:
            return self._section(kind, value, "")
        except _BadValue:
            return None

    def _section(self, kind: type[S], value: object, where: str) -> S:
        if not isinstance(value, dict):
            example = "{url: http://engine-0:30000}" if kind is WorkerConfig else "keys"
            raise self._bad(where, f"{_shown(value)} is not allowed; expected a mapping of {example}")
        fields = {field.name: field for field in msgspec.structs.fields(kind)}
        before = len(self.problems)
        given: dict[str, Any] = {}
        for key, item in value.items():
            try:
                if key not in fields:
                    raise self._unknown(key, list(fields), where)
                given[key] = self._value(fields[key].type, item, _join(where, key))
            except _BadValue:
                continue
        for name, field in fields.items():
            if field.required and name not in value:
                self._bad(_join(where, name), "missing")
        if len(self.problems) > before:
            raise _BadValue
        return kind(**given)

    def _value(self, kind: Any, value: object, where: str) -> object:
        """Every method from here on returns a checked value, or raises _BadValue after reporting."""
        if NoneType in get_args(kind):
            if value is None:
                return None
            kind = next(option for option in get_args(kind) if option is not NoneType)
        if get_origin(kind) is tuple:
            return self._items(get_args(kind)[0], value, where)
        if isinstance(kind, type) and issubclass(kind, Section):
            if kind is RankConfig and isinstance(value, str):
                value = {"events": value}  # the short form: only the events endpoint
            # A section whose keys are all commented out decodes to null.
            return self._section(kind, {} if value is None else value, where)
        if kind is Secret:
            return self._secret(value, where)
        if kind is WorkerUrl:
            return self._url(value, where)
        if kind is Path:
            return self._path(value, where)
        return self._plain(kind, value, where)

    def _items(self, kind: Any, value: object, where: str) -> tuple[object, ...]:
        if value is None:
            return ()
        if not isinstance(value, list):
            raise self._bad(where, f"{_shown(value)} is not allowed; expected a list")
        items = []
        for number, item in enumerate(value):
            try:
                items.append(self._value(kind, item, f"{where}[{number}]"))
            except _BadValue:
                continue
        if len(items) < len(value):
            raise _BadValue
        return tuple(items)

    def _plain(self, kind: Any, value: object, where: str) -> object:
        info = msgspec.inspect.type_info(kind)
        if value is False and isinstance(info, msgspec.inspect.LiteralType) and "off" in info.values:
            value = "off"  # YAML 1.1 reads a bare off as false
        try:
            result = msgspec.convert(value, type=kind)
        except (msgspec.MsgspecError, ValueError, OverflowError):
            result = math.nan
        if isinstance(result, float) and not math.isfinite(result):
            raise self._bad(where, f"{_shown(value)} is not allowed; expected {_expected(info)}")
        return result

    def _secret(self, value: object, where: str) -> Secret:
        try:
            if self._env is None and not isinstance(value, str):
                raise ValueError("here a secret must be plain text")
            return resolve_secret(value, self._env or {}, self._folder)
        except ValueError as error:
            raise self._bad(where, str(error)) from None

    def _url(self, value: object, where: str) -> WorkerUrl:
        try:
            return WorkerUrl.parse(value)
        except ConfigError as error:
            raise self._bad(where, str(error)) from None

    def _path(self, value: object, where: str) -> Path:
        if not isinstance(value, str) or not value or not value.isprintable():
            raise self._bad(where, f"{_shown(value)} is not allowed; expected the path of a file or folder")
        path = self._folder / value
        if not os.access(path, os.R_OK):
            raise self._bad(where, f"{path} does not exist or cannot be read")
        return path

    def _unknown(self, key: object, known: list[str], where: str) -> _BadValue:
        dotted = _join(where, key if isinstance(key, str) and key.isprintable() else _shown(key))
        close = [_join(where, name) for name in difflib.get_close_matches(str(key)[:100], known, n=1)]
        close = close or [name for name in self._every_key if name.rsplit(".", 1)[-1] == key][:1]
        hint = f"did you mean {close[0]}?" if close else f"known here: {', '.join(known)}"
        return self._bad(dotted, f"unknown key; {hint}")

    def _bad(self, where: str, what: str) -> _BadValue:
        self.problems.append(f"{where}: {what}" if where else what)
        return _BadValue()


def _all_keys(kind: type[Section], where: str = "") -> list[str]:
    """Every dotted key outside of lists."""
    keys = []
    for field in msgspec.structs.fields(kind):
        keys.append(_join(where, field.name))
        for option in (field.type, *get_args(field.type)):
            if isinstance(option, type) and issubclass(option, Section):
                keys += _all_keys(option, keys[-1])
    return keys


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _shown(value: object) -> str:
    return "null" if value is None else reprlib.repr(value)


def _expected(info: msgspec.inspect.Type) -> str:
    match info:
        case msgspec.inspect.IntType(ge=low, le=high):
            return f"an integer from {low} to {high}"
        case msgspec.inspect.FloatType(gt=None, ge=low, le=high):
            return f"a number from {low} to {high}"
        case msgspec.inspect.FloatType(gt=low, le=high):
            return f"a number above {low}, at most {high}"
        case msgspec.inspect.UnionType(types=kinds):
            return " or ".join(map(_expected, kinds))
        case msgspec.inspect.LiteralType(values=values):
            return f"one of {', '.join(map(str, values))}"
        case msgspec.inspect.StrType(max_length=most):
            return f"text of at most {most} characters (in quotes if it looks like a number) without control characters"
    return "true or false"
