"""Heads that repeat: a client or a worker says the same on its connection again and again, but for the body's length.

llhttp's callbacks for one head cost more than all that is done with it. So a head that llhttp took is kept, if it is
byte for byte what was read of it; one that differs from it in nothing but the digits of its length says the same.
"""

from __future__ import annotations

from typing import Final

from router.proxy.plan import RawHeaders

_LONGEST_BYTES: Final = 2 << 10
"""A longer head is parsed each time: a connection must not keep much while it is idle."""
_LENGTH_DIGITS: Final = 12


class KnownHead:
    """A head with exactly one Content-Length."""

    __slots__ = ("_back", "_digits", "_front", "_index", "_raw")

    def __init__(self, first_line: bytes, raw: RawHeaders) -> None:
        """As the parser read it; `first_line` without its end."""
        self._raw = raw
        self._digits = b""
        self._index = 0
        self._front = b""
        parts = [first_line, b"\r\n"]
        for index, (name, value) in enumerate(raw):
            if name.lower() == b"content-length":
                self._front = b"".join([*parts, name, b": "])
                self._digits, self._index = value, index
                parts = [b"\r\n"]
            else:
                parts += (name, b": ", value, b"\r\n")
        parts.append(b"\r\n")
        self._back = b"".join(parts)

    def was(self, data: bytes) -> bool:
        """`data` begins with the very bytes of this head, and they are few enough to be kept."""
        whole = self._front + self._digits + self._back
        return len(whole) <= _LONGEST_BYTES and data.startswith(whole)

    def find(self, data: bytes) -> tuple[bytes, int]:
        """(the digits of the length, where the body begins) when `data` begins with this head; else (b"", 0)."""
        if not data.startswith(self._front):
            return b"", 0
        at = len(self._front)
        end = data.find(b"\r\n", at, at + _LENGTH_DIGITS + 2)
        if end < 0 or not data.startswith(self._back, end):
            return b"", 0
        digits = data[at:end]
        if not digits.isdigit():
            return b"", 0
        return digits, end + len(self._back)

    def fields(self, digits: bytes) -> RawHeaders:
        """All fields, with that length."""
        if digits == self._digits:
            return self._raw
        raw = self._raw.copy()
        raw[self._index] = (raw[self._index][0], digits)
        return raw
