"""Large JSON, read in pieces.

msgspec, json and re hold the interpreter's lock for the whole of a call, so that a thread of its own does not keep a
5 MB body from stopping the event loop. Here no call sees more than about 64 KiB; run it in a thread. A piece ends in
front of a comma, and is put between the brackets that are open around it: a JSON document of its own, which msgspec
checks or decodes as it does a small body, and Python's json has the second word.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import msgspec

PIECE_BYTES = 65_536
LARGE_BYTES = 8 * PIECE_BYTES
"""A smaller document is read in one call, in about a millisecond."""
MAX_DEPTH = 500

_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_STRINGS = re.compile(_STRING, re.DOTALL)
_CLOSED = re.compile(rb'(?:[^"]++|' + _STRING + rb")*+", re.DOTALL)
"""Matches up to a string that does not end."""
_TOKEN = re.compile(_STRING + rb"|[\[\]{}]", re.DOTALL)
_BLANK = re.compile(rb"[ \t\r\n]*+")
_SCALAR = re.compile(rb"[^,}\s]*+")
_HIGH_SURROGATE = re.compile(rb"\\u[dD][89abAB]..", re.DOTALL)
_NUMBERS = b"0123456789,.+-eE \t\r\n"
_NO_BRACKET = bytes(set(range(256)) - set(b"[]{}"))
_CLOSING = bytes.maketrans(b"[{", b"]}")
_QUOTE, _ARRAY = b'"['
_LONGEST_ESCAPE = 12  # a surrogate pair
_OPEN = "\ue000"
"""The key under which a piece holds what goes on from the piece before."""


class BadJson(ValueError):
    """Not JSON, by msgspec and by Python's json. The text says what is wrong and near which byte."""


class TooDeep(ValueError):
    """Nested too deep."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """`opened` are the brackets open in front of it, `depth` how many of them stay so throughout. `text` is a string
    too long for any piece, right behind it: (start, end)."""

    start: int
    end: int
    opened: bytes
    open_after: bytes
    depth: int
    text: tuple[int, int] | None
    document: bytes


def read_object(raw: bytes) -> dict[str, bytes]:
    """The members of an object, values as JSON; of a repeated key the last. Raises BadJson, TooDeep, and
    UnicodeDecodeError for what is not UTF-8."""
    _check_utf8(raw)
    found: dict[str, bytes] = {}
    key, begin = b"", -1
    for piece in _pieces(raw):
        _check(raw, piece)
        if piece.depth > 1:
            continue
        depth = len(piece.opened)
        tokens = (match.span() for match in _TOKEN.finditer(raw, piece.start, piece.end))
        for start, end in chain(tokens, () if piece.text is None else (piece.text,)):
            byte = raw[start]
            if byte == _QUOTE:
                if depth == 1 and raw[(colon := _skip_blank(raw, end)) : colon + 1] == b":":
                    key, begin = raw[start:end], _skip_blank(raw, colon + 1)
                    if raw[begin] not in b'"[{' and (scalar := _SCALAR.match(raw, begin)) is not None:
                        found[_decode(key)] = scalar.group()
                        begin = -1
                    continue
            else:
                depth += 1 if byte in b"[{" else -1
            if depth == 1 and begin >= 0 and byte not in b"[{":
                found[_decode(key)] = raw[begin:end]
                begin = -1
    return found


def text(raw: bytes) -> str:
    """A JSON string. Raises msgspec.DecodeError where it holds a lone surrogate."""
    return "".join([msgspec.json.decode(part, type=str) for part in _text_parts(raw, 0, len(raw))])


def id_lists(raw: bytes) -> Iterator[tuple[bool, list[int]]]:
    """The lists in a checked array of lists of integers, in order; True: this one goes on from the one before. Raises
    ValueError or msgspec.DecodeError for anything else."""
    for piece in _pieces(raw):
        lists = msgspec.json.decode(piece.document, type=list[list[int] | int])
        goes_on = len(piece.opened) > 1
        for number, ids in enumerate(lists):
            if isinstance(ids, list):
                yield goes_on and not number, ids[1:] if goes_on and not number else ids
            elif number or not piece.opened:
                raise ValueError("not a list of ids")


def value(raw: bytes) -> Any:
    """Python values of checked JSON, lone surrogates and NaN as Python's json has them. Raises ValueError."""
    if len(raw) <= LARGE_BYTES:
        return _decode(raw)
    if raw[:1] == b'"':
        return "".join([_decode(part) for part in _text_parts(raw, 0, len(raw))])
    whole: Any = None
    for piece in _pieces(raw):
        part = _decode(piece.document)
        try:
            whole = _joined(whole, part, piece.opened) if piece.opened else part
            if piece.text is not None:
                start, end = piece.text
                _set_last(whole, piece.open_after, value(raw[start:end]))
        except (LookupError, TypeError, AttributeError):
            raise ValueError("a key comes twice, once with a large value") from None
    return whole


def _joined(whole: Any, part: Any, opened: bytes) -> Any:
    """`part` behind `whole`: what the two have in common are the containers along `opened`."""
    left, right = whole, part
    for level, bracket in enumerate(opened):
        last = level == len(opened) - 1
        if bracket == _ARRAY:
            left_next, right_next = (None, None) if last else (left[-1], right[0])
            left.extend(right[1:])
        else:
            right_next = right.pop(_OPEN)
            left_next = None if last else left[next(reversed(left))]
            left.update(right)
        left, right = left_next, right_next
    return whole


def _set_last(whole: Any, opened: bytes, text: str) -> None:
    """The last value inside the containers along `opened` is this text."""
    for bracket in opened[:-1]:
        whole = whole[-1] if bracket == _ARRAY else whole[next(reversed(whole))]
    whole[-1 if opened[-1] == _ARRAY else next(reversed(whole))] = text


def _decode(raw: bytes) -> Any:
    try:
        return msgspec.json.decode(raw)
    except RecursionError:
        raise TooDeep("nested too deep") from None
    except msgspec.DecodeError:
        # Lone surrogates, NaN: Python's json (and so the engine's) takes what msgspec refuses.
        try:
            return json.loads(raw)
        except RecursionError:
            raise TooDeep("nested too deep") from None


def _check(raw: bytes, piece: _Piece) -> None:
    _check_document(piece.document, piece.start)
    if piece.text is not None:
        for part in _text_parts(raw, *piece.text):
            _check_document(part, piece.text[0])


def _check_document(document: bytes, near: int) -> None:
    try:
        msgspec.json.decode(document, type=msgspec.Raw)
    except RecursionError:
        raise TooDeep("nested too deep") from None
    except msgspec.DecodeError as error:
        try:
            json.loads(document)
        except RecursionError:
            raise TooDeep("nested too deep") from None
        except ValueError:
            raise BadJson(f"{str(error).partition(' (byte')[0]} (near byte {near})") from None


def _check_utf8(raw: bytes) -> None:
    """Raises UnicodeDecodeError with positions in the whole."""
    if raw.isascii():
        return
    at = 0
    while at < len(raw):
        end = _character_start(raw, min(at + PIECE_BYTES, len(raw)))
        try:
            raw[at:end].decode()
        except UnicodeDecodeError as error:
            raise UnicodeDecodeError("utf-8", raw, at + error.start, at + error.end, error.reason) from None
        at = end


def _pieces(raw: bytes) -> Iterator[_Piece]:
    at, stack = 0, b""
    while True:
        cut, text = _cut(raw, at)
        inside = raw[at:cut]
        if inside.translate(None, _NUMBERS):
            depth, after = _follow(stack, _STRINGS.sub(b"", inside).translate(None, _NO_BRACKET), at)
        else:
            depth, after = len(stack), stack
        if text is not None and raw[(colon := _skip_blank(raw, text[1])) : colon + 1] == b":":
            raise BadJson(f"a key of more than {PIECE_BYTES} bytes (byte {text[0]})")
        document = _opened(stack) + inside + (b'""' if text is not None else b"") + after[::-1].translate(_CLOSING)
        if not after and cut < len(raw) and raw[cut:].strip():
            raise BadJson(f"characters behind the JSON value (byte {cut})")
        at_end = cut == len(raw)
        if text is None and not at_end and inside.rstrip(b" \t\r\n")[-1:] in (b"[", b"{"):
            raise BadJson(f"a comma and nothing in front of it (byte {cut})")  # the pieces on its sides are both JSON
        yield _Piece(at, cut, stack, after, depth, text, _opened(stack) + inside if at_end else document)
        if at_end:
            return
        at, stack = text[1] if text is not None else cut, after


def _cut(raw: bytes, at: int) -> tuple[int, tuple[int, int] | None]:
    """Where the piece from `at` on ends: in front of a comma outside of strings, in front of a string that is longer
    than a piece, or at the end of it all."""
    limit = at
    while True:
        limit += PIECE_BYTES
        if limit >= len(raw):
            closed = _closed(raw, at, len(raw))
            if closed == len(raw):
                return len(raw), None
            end = _string_end(raw, closed)
            return closed, (closed, end)
        numbers = not raw[at:limit].translate(None, _NUMBERS)
        closed = limit if numbers else _closed(raw, at, limit)
        outside = closed
        while (comma := raw.rfind(b",", at + 1, outside)) >= 0:
            outside = comma if numbers else _closed(raw, at, comma)
            if outside == comma:
                return comma, None
        if limit - closed >= PIECE_BYTES:
            return closed, (closed, _string_end(raw, closed))
        if limit - at > LARGE_BYTES:
            if raw[at:limit].count(b"[") + raw[at:limit].count(b"{") > MAX_DEPTH:
                raise TooDeep("nested too deep")
            raise BadJson(f"no JSON value (near byte {at})")


def _closed(raw: bytes, at: int, end: int) -> int:
    match = _CLOSED.match(raw, at, end)
    return match.end() if match is not None else at


def _follow(stack: bytes, brackets: bytes, near: int) -> tuple[int, bytes]:
    """(how many of `stack` stay open throughout, the open brackets behind `brackets`)."""
    for _ in range(MAX_DEPTH):
        shorter = brackets.replace(b"[]", b"").replace(b"{}", b"")
        if len(shorter) == len(brackets):
            break
        brackets = shorter
    else:
        raise TooDeep("nested too deep")
    new = brackets.lstrip(b"]}")
    kept = len(stack) - len(brackets) + len(new)
    if kept < 0 or new.strip(b"[{"):
        raise BadJson(f"brackets do not match (near byte {near})")
    if kept + len(new) > MAX_DEPTH:
        raise TooDeep("nested too deep")
    return kept, stack[:kept] + new


def _opened(stack: bytes) -> bytes:
    """Puts a piece, which begins with a comma or closes brackets, where it stood."""
    if not stack:
        return b""
    key = b'{"' + _OPEN.encode() + b'":'
    return b"".join([b"[" if bracket == _ARRAY else key for bracket in stack]) + b"0"


def _string_end(raw: bytes, start: int) -> int:
    at = start
    while (at := raw.find(b'"', at + 1)) >= 0:
        if _escape_start(raw, start, at) == at:
            return at + 1
    raise BadJson(f"a string does not end (byte {start})")


def _escape_start(raw: bytes, floor: int, at: int) -> int:
    """`at`, or one before it when that is a backslash which escapes it. `floor`: not inside of an escape."""
    if raw[at - 1] != 92:
        return at
    ahead = raw[max(floor, at - PIECE_BYTES) : at]
    return at - (len(ahead) - len(ahead.rstrip(b"\\"))) % 2


def _text_parts(raw: bytes, start: int, end: int) -> Iterator[bytes]:
    """A string in parts that are strings themselves; no character and no surrogate pair is cut."""
    at, last = start + 1, end - 1
    while at < last:
        cut = at + PIECE_BYTES
        if cut >= last:
            cut = last
        elif (escape := raw.rfind(b"\\", cut - _LONGEST_ESCAPE, cut)) >= 0:
            cut = _escape_start(raw, at, escape)
            high = cut - 6
            if _HIGH_SURROGATE.match(raw, high, cut) and _escape_start(raw, at, high) == high:
                cut = high
        else:
            cut = _character_start(raw, cut)
        yield b'"' + raw[at:cut] + b'"'
        at = cut


def _character_start(raw: bytes, at: int) -> int:
    """`at` or up to three bytes before it: where a UTF-8 character starts."""
    for start in range(at, max(at - 4, 0), -1):
        if start == len(raw) or raw[start] & 0xC0 != 0x80:
            return start
    return at


def _skip_blank(raw: bytes, at: int) -> int:
    while (match := _BLANK.match(raw, at, at + PIECE_BYTES)) is not None and match.end() > at:
        at = match.end()
    return at
