"""What every admin listener has: its key, no pages of other origins, errors as JSON."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import msgspec
from aiohttp import web

from router.config import Secret
from router.errors import RouterError

log = logging.getLogger("router.admin")

parser_log = logging.getLogger("router.http")
"""aiohttp's own complaints about requests, with traces and the client's bytes: nobody's fault here, so off by default.
Faults of our handlers are logged by the handlers."""
parser_log.setLevel(logging.CRITICAL)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
OPEN_PATHS = ("/health", "/ready", "/ui")
"""Without admin.key; /ui is the page without its data, which asks for the key."""
MAX_ADMIN_BODY_MB = 64


def json_response(value: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def error_response(error: RouterError) -> web.Response:
    response = json_response(
        {"error": {"message": error.message, "type": error.type, "code": error.code}}, error.status
    )
    response.headers["x-kv-router-error"] = error.code
    return response


def guarded_application(key: Callable[[], Secret | None]) -> web.Application:
    """An application for an admin listener. `key` gives the admin key of the moment; None: none is wanted."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            _refuse_foreign_pages(request)
            if request.path not in OPEN_PATHS:
                _check_key(request, key())
            return await handler(request)
        except RouterError as error:
            return error_response(error)
        except web.HTTPMethodNotAllowed as refused:
            response = error_response(RouterError("method_not_allowed", f"{request.method} is not for this path"))
            response.headers["Allow"] = refused.headers["Allow"]
            return response
        except web.HTTPNotFound:
            return error_response(RouterError("not_found", "no such path on the admin listener"))
        except web.HTTPRequestEntityTooLarge:
            return error_response(RouterError("body_too_large", f"the body is over {MAX_ADMIN_BODY_MB} MB"))
        except ConnectionError:
            raise  # the client left: nobody is there to be answered
        except web.RequestPayloadError:
            return error_response(RouterError("bad_request", "the body is not framed or coded as its fields say"))
        except web.HTTPException:
            raise
        except Exception:
            log.exception("admin request failed")
            return error_response(RouterError("internal", "the router's log has the trace"))

    middlewares: list[Any] = [guard]
    return web.Application(middlewares=middlewares, client_max_size=MAX_ADMIN_BODY_MB << 20)


def _refuse_foreign_pages(request: web.Request) -> None:
    """A page open in the operator's browser can POST to loopback, without a preflight and without a key."""
    if request.method in ("GET", "HEAD", "OPTIONS"):
        return
    origin = request.headers.get("Origin")
    foreign = origin is not None and urlsplit(origin).netloc != request.host
    if foreign or request.headers.get("Sec-Fetch-Site") in ("cross-site", "same-site"):
        raise RouterError("forbidden", "requests from web pages of another origin are not taken")


def _check_key(request: web.Request, key: Secret | None) -> None:
    if key is None:
        return
    given = request.headers.get("Authorization", "").removeprefix("Bearer ").encode()
    if not hmac.compare_digest(given, key.reveal().encode()):
        raise RouterError("unauthorized", "the admin listener wants `Authorization: Bearer` with admin.key")
