"""Setting top-level fields of a JSON body without re-serialising it: every other byte stays as the client wrote it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

_BOM = b"\xef\xbb\xbf"
_SPACE = re.compile(rb"[ \t\r\n]*")
_STRING = rb'"[^"\\]*(?:\\.[^"\\]*)*"'
_KEY = re.compile(_STRING, re.DOTALL)
_NESTING = re.compile(_STRING + rb"|[{}\[\]]", re.DOTALL)
_SCALAR = re.compile(rb"[^,\]}\s\"\[{]+")


def set_fields(body: bytes, fields: dict[str, bytes]) -> bytes:
    """`body` with each top-level field set to the JSON text given for it.

    A field the body has keeps its place; all of its duplicates get the new value, so the result reads the same whether
    a parser takes the first or the last one (case 79). A new field goes in front. `fields` maps ASCII identifiers to
    JSON. Raises ValueError when the body, as far as it had to be looked at, is not a JSON object, or a name is none.

    >>> set_fields(b'{"model":"m"}', {"routed_dp_rank": b"1"})
    b'{"routed_dp_rank":1,"model":"m"}'
    """
    start = _object_start(body)
    if not all(name.isidentifier() and name.isascii() for name in fields):
        raise ValueError("field names must be ASCII identifiers: others have more than one plain spelling")
    quoted = {name: b'"%b"' % name.encode() for name in fields}
    pieces: list[bytes] = []
    missing = dict(fields)
    end = start
    # A key can hide behind \u escapes, so both spellings send us to the scan; nearly every body skips it.
    if b"\\u" in body or any(key in body for key in quoted.values()):
        for name, value_start, value_end in _members(body, start):
            if name in fields:
                missing.pop(name, None)
                pieces += (body[end:value_start], fields[name])
                end = value_end
    pieces.append(body[end:])
    if not missing:
        return body[:start] + b"".join(pieces)
    added = b",".join(quoted[name] + b":" + value for name, value in missing.items())
    empty = body.startswith(b"}", _skip_space(body, start))
    return body[:start] + added + (b"" if empty else b",") + b"".join(pieces)


def _object_start(body: bytes) -> int:
    """Where the first member would stand. Python's json, which engines use, takes a byte order mark; so do we."""
    at = _skip_space(body, len(_BOM) if body.startswith(_BOM) else 0)
    if not body.startswith(b"{", at):
        raise ValueError("the body is not a JSON object")
    return at + 1


def _skip_space(body: bytes, at: int) -> int:
    found = _SPACE.match(body, at)
    return found.end() if found else at


def _members(body: bytes, at: int) -> Iterator[tuple[str, int, int]]:
    """(name, value start, value end) of each top-level member, `at` standing behind the opening brace."""
    at = _skip_space(body, at)
    if body.startswith(b"}", at):
        return
    while True:
        key = _KEY.match(body, at)
        if key is None:
            raise ValueError(f"a member name was expected at byte {at}")
        at = _skip_space(body, key.end())
        if not body.startswith(b":", at):
            raise ValueError(f"a colon was expected at byte {at}")
        start = _skip_space(body, at + 1)
        end = _value_end(body, start)
        yield _name(key.group()), start, end
        at = _skip_space(body, end)
        if body.startswith(b"}", at):
            return
        if not body.startswith(b",", at):
            raise ValueError(f"a comma was expected at byte {at}")
        at = _skip_space(body, at + 1)


def _name(quoted: bytes) -> str:
    try:
        return str(json.loads(quoted))
    except ValueError:  # an odd key (raw control character, bad escape) is not one of ours
        return ""


def _value_end(body: bytes, start: int) -> int:
    opening = body[start : start + 1]
    if opening in (b"{", b"["):
        depth = 0
        for token in _NESTING.finditer(body, start):
            character = token.group()[:1]
            if character in (b"{", b"["):
                depth += 1
            elif character != b'"':
                depth -= 1
                if depth == 0:
                    return token.end()
        raise ValueError(f"the value at byte {start} does not end")
    found = (_KEY if opening == b'"' else _SCALAR).match(body, start)
    if found is None:
        raise ValueError(f"a value was expected at byte {start}")
    return found.end()
