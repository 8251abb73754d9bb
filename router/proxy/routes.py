"""Which requests the public listener takes: the allow-list, and the normalised path that decides (case 81, 101)."""

from __future__ import annotations

from enum import Enum
from urllib.parse import unquote_to_bytes

from router.errors import RouterError
from router.proxy.plan import UNMATCHED

PROXIED = (
    "/v1/chat/completions",
    "/v1/completions",
    "/generate",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/messages",
    "/v1/tokenize",
    "/v1/detokenize",
    "/v1/rerank",
    "/v1/score",
    "/v1/classify",
)
"""POST routes that a worker answers."""

MODELS, HEALTH, READY, METRICS = "/v1/models", "/health", "/ready", "/metrics"
OWN = (MODELS, HEALTH, READY, METRICS)
"""GET routes that the router answers."""

KEYLESS = frozenset({HEALTH, READY, METRICS})
"""Routes that need no client key."""


class Allow(Enum):
    """The methods of a route, as the Allow field says them."""

    POST = "POST"
    READ = "GET, HEAD"


_ALLOWED = dict.fromkeys(PROXIED, Allow.POST) | dict.fromkeys(OWN, Allow.READ)


class MethodNotAllowed(RouterError):
    """405; `allow` is the value of the Allow field."""

    def __init__(self, method: str, route: str, allow: Allow) -> None:
        super().__init__("method_not_allowed", f"{method} is not served on {route}; use {allow.value}")
        self.allow = allow


def origin_form(target: str) -> str:
    """The target as an origin server wants it: `/path?query`, also when the client sent the absolute form.

    Raises RouterError("bad_request") for anything else (`*`, authority form, a fragment).
    """
    if not target.startswith("/"):
        scheme, separator, rest = target.partition("://")
        if not separator or scheme.lower() not in ("http", "https"):
            raise RouterError("bad_request", "the request target is neither a path nor an http URL")
        slash = rest.find("/")
        target = rest[slash:] if slash >= 0 else "/"
    if "#" in target:
        raise RouterError("bad_request", "a request target has no fragment")
    return target


def route_of(target: str) -> str:
    """The route an origin-form target means, or `UNMATCHED`. Only ever used to decide: what is sent on is `target`.

    Percent-encoding is undone once, empty and dot segments are resolved, case counts. An encoded slash, backslash or
    NUL matches nothing, since engines would disagree on what it means; nor does a trailing slash, which FastAPI answers
    with a redirect to the worker's own address.
    """
    path = target.partition("?")[0]
    if path in _ALLOWED:
        return path
    if "%" in path:
        if any(encoded in path.lower() for encoded in ("%2f", "%5c", "%00")):
            return UNMATCHED
        path = unquote_to_bytes(path.encode("utf-8", "surrogateescape")).decode("utf-8", "replace")
    if path.endswith("/"):
        return UNMATCHED
    segments: list[str] = []
    for segment in path.split("/"):
        if segment == "..":
            del segments[-1:]
        elif segment not in ("", "."):
            segments.append(segment)
    path = "/" + "/".join(segments)
    return path if path in _ALLOWED else UNMATCHED


def check(method: str, route: str) -> None:
    """Raises RouterError("not_found") or MethodNotAllowed (OPTIONS too: CORS is for a gateway in front, case 83)."""
    allow = _ALLOWED.get(route)
    if allow is None:
        raise RouterError("not_found", "no such route on this listener")
    if method not in allow.value.split(", "):
        raise MethodNotAllowed(method, route, allow)
