"""The gRPC server of `ext_proc`: admits a request as the public listener does, lets the picker decide, reports it.

Needs `pip install '.[envoy]'` (grpcio and protobuf); nothing else imports this module.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import grpc
from grpc import aio

from router.envoy.exchange import Asked, Exchange, Sent, refusal
from router.envoy.health import health_handler
from router.envoy.messages import Message, ProcessingRequest, ProcessingResponse
from router.envoy.pick import Picker, withheld
from router.errors import ConfigError, RouterError
from router.proxy import routes
from router.proxy.headers import ClientKeys, forwardable, request_id
from router.proxy.plan import UNMATCHED, Outcome, RequestRecord
from router.proxy.request import BodyBudget

log = logging.getLogger("router.envoy")

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
MAX_STREAMS = 16384
"""Requests under way at a time; Envoy is told RESOURCE_EXHAUSTED beyond it."""
HEAD_ROOM_BYTES = 1 << 20
"""Of a message beside the body it carries."""


@dataclass(frozen=True, slots=True)
class ExtProcOptions:
    """Port 0 takes a free one. `tls` is (private key, certificate chain), both PEM."""

    host: str
    port: int
    max_body_bytes: int
    body_s: float
    api_keys: tuple[str, ...] = ()
    forward_authorization: bool = False
    tls: tuple[bytes, bytes] | None = None
    reuse_port: bool = False


class ExtProcServer:
    """`start`, then `leave` (not ready any more, still serving) and `close`."""

    def __init__(
        self,
        picker: Picker,
        bodies: BodyBudget,
        options: ExtProcOptions,
        *,
        ready: Callable[[], bool],
        report: Callable[[RequestRecord], None],
    ) -> None:
        """`bodies` is the public listener's: both hold bodies in the same memory."""
        self._picker = picker
        self._bodies = bodies
        self._options = options
        self._keys = ClientKeys(options.api_keys)
        self._ready = ready
        self._report = report
        self._loop = asyncio.get_running_loop()
        self._leaving = False
        self._server: aio.Server | None = None
        self.port = 0

    async def start(self) -> None:
        """Bind and listen. Raises ConfigError when the address cannot be had."""
        options = self._options
        server = aio.server(
            options=[
                ("grpc.max_receive_message_length", options.max_body_bytes + HEAD_ROOM_BYTES),
                ("grpc.so_reuseport", int(options.reuse_port)),
            ],
            maximum_concurrent_rpcs=MAX_STREAMS,
        )
        method = grpc.stream_stream_rpc_method_handler(
            self._process, ProcessingRequest.FromString, ProcessingResponse.SerializeToString
        )
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {"Process": method}), health_handler(SERVICE, self._serving))
        )
        where = f"{f'[{options.host}]' if ':' in options.host else options.host}:{options.port}"
        try:
            if options.tls is None:
                self.port = server.add_insecure_port(where)
            else:
                self.port = server.add_secure_port(where, grpc.ssl_server_credentials([options.tls]))
        except RuntimeError as error:
            raise ConfigError(f"envoy.ext_proc: cannot bind {where}: {error}") from None
        await server.start()
        self._server = server

    def _serving(self) -> bool:
        return self._ready() and not self._leaving

    def set_api_keys(self, keys: Iterable[str]) -> None:
        """Replace the client keys for requests that arrive from now on."""
        self._keys = ClientKeys(keys)

    def leave(self) -> None:
        self._leaving = True

    async def close(self, grace_s: float) -> None:
        """Take no request any more and give those under way `grace_s`."""
        self._leaving = True
        if self._server is not None:
            await self._server.stop(grace_s)
            self._server = None

    async def _process(
        self,
        _: object,
        context: aio.ServicerContext[Message, Message],
    ) -> None:
        """One request of a client: one stream."""
        request = _Request(self)
        exchange = Exchange(request.admit, request.grow, request.send)
        try:
            async with asyncio.timeout(self._options.body_s) as patience:
                while (message := await context.read()) is not aio.EOF:
                    for answer in await exchange.take(message):
                        await context.write(answer)
                    if exchange.decided:
                        patience.reschedule(None)  # what follows is the engine's answer, if it comes here at all
                        request.release()
        except TimeoutError:
            late = RouterError("request_timeout", f"the body did not arrive within {self._options.body_s:g} s")
            await context.write(refusal(request.refused(late)))
        except RouterError as error:
            await context.write(refusal(request.refused(error)))
        except Exception:
            log.exception("request %s failed", request.request_id)
            fault = RouterError("internal", "the router failed; its log says more")
            await context.write(refusal(request.refused(fault)))
        finally:
            request.end()


class _Request:
    """One request's way through, and its one record."""

    __slots__ = ("_error", "_held", "_outcome", "_owner", "_route", "_started", "_worker", "asked", "request_id")

    def __init__(self, owner: ExtProcServer) -> None:
        self._owner = owner
        self._started = owner._loop.time()
        self._route = UNMATCHED
        self._held = 0
        self._worker: str | None = None
        self._error: RouterError | None = None
        self._outcome: Outcome | None = Outcome.CLIENT_CLOSED
        self.asked: Asked | None = None
        self.request_id = ""

    def admit(self, asked: Asked) -> None:
        owner, options = self._owner, self._owner._options
        self.asked = asked
        self.request_id = request_id(asked.headers.all(b"x-request-id"))
        self._route = routes.route_of(routes.origin_form(asked.target))
        if self._route in routes.OWN:
            raise RouterError("not_found", "the router's own routes are on its public listener")
        routes.check(asked.method, self._route)
        if not owner._keys.admit(asked.headers):
            raise RouterError("unauthorized", "a client key is needed: Authorization: Bearer KEY, or x-api-key: KEY")
        stated = asked.headers.get("content-length", "")
        if stated.isdecimal() and int(stated) > options.max_body_bytes:
            raise _too_large(options.max_body_bytes)

    def grow(self, asked: Asked, piece: bytes) -> None:
        owner = self._owner
        owner._bodies.take(len(piece))
        self._held += len(piece)
        if self._held > owner._options.max_body_bytes:
            raise _too_large(owner._options.max_body_bytes)
        asked.pieces.append(piece)

    async def send(self, asked: Asked) -> Sent:
        owner = self._owner
        body = b"".join(asked.pieces)
        asked.pieces.clear()
        picked = await owner._picker.pick(self._route, asked.headers, body, self.request_id, asked.among)
        self._worker, self._outcome = picked.worker, Outcome.OK
        self._finish()
        kept = forwardable(asked.headers.raw, owner._keys, forward_authorization=owner._options.forward_authorization)
        return Sent(picked, [name.decode() for name in withheld(asked.headers, kept, picked)])

    def refused(self, error: RouterError) -> RouterError:
        self._error = error
        self._outcome = Outcome.UPSTREAM_ERROR if error.status in (500, 502, 504) else Outcome.REJECTED
        return error

    def release(self) -> None:
        """The body is held no longer."""
        self._owner._bodies.give(self._held)
        self._held = 0

    def end(self) -> None:
        self.release()
        if self.asked is not None:
            self._finish()

    def _finish(self) -> None:
        """Tells of the request, the first time."""
        outcome, self._outcome = self._outcome, None
        if outcome is None or self.asked is None:
            return
        error = self._error
        status = 499 if outcome is Outcome.CLIENT_CLOSED else 200 if error is None else error.status
        self._owner._report(
            RequestRecord(
                request_id=self.request_id,
                method=self.asked.method,
                route=self._route,
                outcome=outcome,
                status=status,
                error=None if error is None else error.code,
                worker=self._worker,
                attempts=int(self._worker is not None),
                duration_s=self._owner._loop.time() - self._started,
                ttft_s=None,
                usage=None,
            )
        )


def _too_large(limit: int) -> RouterError:
    return RouterError("body_too_large", f"the body is over {limit} bytes (listen.max_body_mb)")
