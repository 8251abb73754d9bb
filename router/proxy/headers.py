"""What happens to header fields on their way through: hop-by-hop ones stay, framing and identity are ours (pure)."""

from __future__ import annotations

import hmac
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from router.proxy.plan import RawHeaders

_HOP = frozenset(
    {
        b"connection",
        b"http2-settings",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
"""RFC 9110 section 7.6.1; fields named by Connection come on top (case 71)."""

_CREDENTIALS = frozenset({b"authorization", b"x-api-key"})
_NEVER_SENT = _HOP | {b"host", b"content-length", b"expect", b"x-request-id"}
_NEVER_RETURNED = _HOP | {b"content-length", b"x-request-id"}
_OURS = b"x-kv-router-"
"""No field of this prefix crosses the router in either direction, except those it sets itself (case 107)."""

_OVERRIDES = b"x-override-"
"""Heads that SGLang 0.5.23 lets beat the body: bootstrap host, rank, priority, rid. Between router and engine only."""

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class ClientKeys:
    """The keys of `api_keys`. Comparison takes the same time whichever key is wrong and wherever it differs."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._keys = tuple(key.encode() for key in keys)

    def __bool__(self) -> bool:
        return bool(self._keys)

    def admit(self, fields: Mapping[str, str]) -> bool:
        """True when no keys are configured, or the request presents one as bearer token or x-api-key."""
        if not self._keys:
            return True
        bearer = self.holds(b"authorization", fields.get("Authorization", "").encode("utf-8", "surrogateescape"))
        plain = self.holds(b"x-api-key", fields.get("x-api-key", "").encode("utf-8", "surrogateescape"))
        return bearer or plain

    def holds(self, name: bytes, value: bytes) -> bool:
        """This credential field carries one of our keys."""
        if name == b"authorization":
            scheme, _, value = value.partition(b" ")
            if scheme.lower() != b"bearer":
                return False
        value = value.strip()
        found = False
        for key in self._keys:
            found |= hmac.compare_digest(key, value)
        return found


def request_id(given: Sequence[str]) -> str:
    """The client's X-Request-Id when it is exactly one, of at most 128 printable characters; else a fresh one."""
    if len(given) == 1 and _REQUEST_ID.fullmatch(given[0]):
        return given[0]
    return random.randbytes(16).hex()  # must be unique, need not be secret


def named_by_connection(fields: Iterable[tuple[bytes, bytes]]) -> frozenset[bytes]:
    """Lower-case names that the Connection fields nominate as hop-by-hop."""
    names: set[bytes] = set()
    for name, value in fields:
        if name.lower() == b"connection":
            names.update(token.strip().lower() for token in value.split(b","))
    return frozenset(names)


def forwardable(fields: Iterable[tuple[bytes, bytes]], keys: ClientKeys, *, forward_authorization: bool) -> RawHeaders:
    """The client's fields that may go to a worker, before those a placement sets.

    Credentials go on only when `forward_authorization` is set, and never one of our own keys (case 103).
    """
    fields = list(fields)
    nominated = named_by_connection(fields)
    kept: RawHeaders = []
    for name, value in fields:
        lower = name.lower()
        if lower in nominated or lower.startswith((_OURS, _OVERRIDES)):
            continue
        if lower in _CREDENTIALS:
            if not forward_authorization or keys.holds(lower, value):
                continue
        elif lower in _NEVER_SENT:
            continue
        kept.append((name, value))
    return kept


def for_worker(
    kept: RawHeaders, request_id_text: str, authorization: bytes | None, extra: Sequence[tuple[bytes, bytes]]
) -> RawHeaders:
    """All fields for one worker except Host and framing, which the upstream client writes.

    A worker's own key replaces whatever credentials the client sent.
    """
    replaced = {name.lower() for name, _ in extra}
    if authorization is not None:
        replaced |= _CREDENTIALS
    fields = [field for field in kept if field[0].lower() not in replaced] if replaced else list(kept)
    if authorization is not None:
        fields.append((b"Authorization", authorization))
    fields.append((b"X-Request-Id", request_id_text.encode("ascii")))
    fields.extend(extra)
    return fields


class Screened:
    """What a listener made of a request's head: all that will be the same for the next one with that head."""

    __slots__ = ("kept", "keys", "lines", "route", "target")

    def __init__(self, keys: ClientKeys, route: str, target: bytes, kept: RawHeaders) -> None:
        """Admitted by `keys`, to be sent to `target` of a worker. `kept`: see `forwardable`."""
        self.keys = keys
        self.route = route
        self.target = target
        self.kept = kept
        self.lines = lines_of(kept)


def lines_of(fields: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The fields as they go on the wire."""
    parts: list[bytes] = []
    for name, value in fields:
        parts += (name, b": ", value, b"\r\n")
    return b"".join(parts)


_KEEP: Final = 0
_DROP: Final = 1
_CONNECTION: Final = 2
_CONTENT_TYPE: Final = 3
_CONTENT_ENCODING: Final = 4
_BUFFERING: Final = 5
_SPECIAL = {
    b"connection": _CONNECTION,
    b"content-type": _CONTENT_TYPE,
    b"content-encoding": _CONTENT_ENCODING,
    b"x-accel-buffering": _BUFFERING,
}
_MAX_KNOWN_NAMES: Final = 1024
_known_names: dict[bytes, int] = {}
"""What is to be done with an answer's field of that name, as it was spelt: workers use the same few all the time."""


def _what_to_do(name: bytes) -> int:
    lower = name.lower()
    what = _SPECIAL.get(lower, _DROP if lower in _NEVER_RETURNED or lower.startswith(_OURS) else _KEEP)
    if len(_known_names) < _MAX_KNOWN_NAMES:
        _known_names[name] = what
    return what


class AnswerFields:
    """A worker's answer fields, sorted into what the client gets and what the router needs to know of them."""

    __slots__ = ("content_encoding", "content_type", "kept", "lines")

    def __init__(self, fields: RawHeaders) -> None:
        kept: RawHeaders = []
        content_type, content_encoding = b"", b""
        nominated: frozenset[bytes] | None = None
        buffering_hint = False
        for field in fields:
            name, value = field
            what = _known_names.get(name, -1)
            if what < 0:
                what = _what_to_do(name)
            if what == _DROP:
                continue
            if what == _CONNECTION:
                if nominated is None:
                    nominated = named_by_connection(fields)
                continue
            if what == _CONTENT_TYPE:
                content_type = value.lower()
            elif what == _CONTENT_ENCODING:
                content_encoding += (b"," if content_encoding else b"") + value.lower()
            elif what == _BUFFERING:
                buffering_hint = True
            kept.append(field)
        if nominated:
            kept = [field for field in kept if field[0].lower() not in nominated]
        if not buffering_hint and content_type.startswith(b"text/event-stream"):
            kept.append((b"X-Accel-Buffering", b"no"))  # nginx in front must not hold events back (case 76)
        self.kept = kept
        self.content_type = content_type
        self.content_encoding = content_encoding
        self.lines = lines_of(kept)
        """`kept` as it goes on the wire."""
