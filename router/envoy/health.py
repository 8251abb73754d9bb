"""gRPC's health checking protocol, as endpoint pickers must offer it: readiness, liveness, and the service itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import grpc
from grpc import aio

NAME = "grpc.health.v1.Health"
WATCH_S = 1.0
# The messages have one field each: a request's tag 1 is the service's name, an answer's tag 1 the status.
SERVING, NOT_SERVING, SERVICE_UNKNOWN = b"\x08\x01", b"\x08\x02", b"\x08\x03"


def health_handler(service: str, serving: Callable[[], bool]) -> grpc.GenericRpcHandler:
    """`serving` is asked for each check of `""`, `readiness` and `service`; `liveness` is always serving."""
    known: dict[str, Callable[[], bool]] = {
        "": serving,
        "readiness": serving,
        service: serving,
        "liveness": lambda: True,
    }

    async def check(name: str, context: aio.ServicerContext[str, bytes]) -> bytes:
        if name not in known:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return SERVING if known[name]() else NOT_SERVING

    async def watch(name: str, context: aio.ServicerContext[str, bytes]) -> AsyncIterator[bytes]:
        told = b""
        while True:
            status = SERVICE_UNKNOWN if name not in known else SERVING if known[name]() else NOT_SERVING
            if status != told:
                told = status
                yield status
            await asyncio.sleep(WATCH_S)

    handlers = {
        "Check": grpc.unary_unary_rpc_method_handler(check, _service, _as_is),
        "Watch": grpc.unary_stream_rpc_method_handler(watch, _service, _as_is),
    }
    return grpc.method_handlers_generic_handler(NAME, handlers)


def _as_is(message: bytes) -> bytes:
    return message


def _service(message: bytes) -> str:
    """The name in a HealthCheckRequest; one that cannot be read is no name of ours."""
    if not message:
        return ""
    if message[0] != 0x0A or len(message) < 2 or message[1] != len(message) - 2:
        return "?"
    return message[2:].decode("utf-8", "replace")
