"""What happens to header fields on their way through: hop-by-hop ones stay, framing and identity are ours (pure)."""

from __future__ import annotations

import hmac
import random
import re
from collections.abc import Iterable, Mapping, Sequence

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
    return f"{random.getrandbits(128):032x}"  # must be unique, need not be secret


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


class AnswerFields:
    """A worker's answer fields, sorted into what the client gets and what the router needs to know of them."""

    __slots__ = ("content_encoding", "content_type", "kept")

    def __init__(self, fields: RawHeaders) -> None:
        self.kept: RawHeaders = []
        self.content_type = b""
        self.content_encoding = b""
        nominated: frozenset[bytes] | None = None
        buffering_hint = False
        for name, value in fields:
            lower = name.lower()
            if lower in _NEVER_RETURNED:
                if lower == b"connection" and nominated is None:
                    nominated = named_by_connection(fields)
                continue
            if lower.startswith(_OURS):
                continue
            if lower == b"content-type":
                self.content_type = value.lower()
            elif lower == b"content-encoding":
                self.content_encoding += (b"," if self.content_encoding else b"") + value.lower()
            elif lower == b"x-accel-buffering":
                buffering_hint = True
            self.kept.append((name, value))
        if nominated:
            self.kept = [field for field in self.kept if field[0].lower() not in nominated]
        if not buffering_hint and self.content_type.startswith(b"text/event-stream"):
            self.kept.append((b"X-Accel-Buffering", b"no"))  # nginx in front must not hold events back (case 76)
