"""One request as Envoy's `ext_proc` filter tells of it: messages in, messages out, no gRPC.

The endpoint picker protocol of the Gateway API Inference Extension (1.0): the destination goes out as header field and
as dynamic metadata of the same value, a subset of endpoints may be prescribed, errors are immediate responses. The
body comes whole (BUFFERED), or in pieces that Envoy hands over for good (FULL_DUPLEX_STREAMED): then nothing may be
answered before the last piece, and every piece must be given back. Answers need not come here (SKIP); what a data plane
sends of them all the same is passed on untouched.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

import msgspec

from router.envoy.messages import (
    BUFFERED,
    FULL_DUPLEX,
    NO_BODY,
    OVERWRITE,
    BodyResponse,
    HeadersResponse,
    ImmediateResponse,
    Message,
    ProcessingResponse,
    TrailersResponse,
)
from router.envoy.pick import DESTINATION, Picked
from router.errors import RouterError
from router.proxy.request import RequestFields

PIECE_BYTES = 64 << 10
"""Envoy refuses larger pieces of a body given back."""
NAMESPACE = "envoy.lb"
SUBSET_NAMESPACE = "envoy.lb.subset_hint"
SUBSET_KEY = "x-gateway-destination-endpoint-subset"


@dataclass(slots=True)
class Asked:
    """A request as far as Envoy has told of it. `among` is the prescribed subset of endpoints."""

    headers: RequestFields
    among: frozenset[str] | None
    pieces: list[bytes] = field(default_factory=list)
    """Of its body."""

    @property
    def method(self) -> str:
        return self.headers.get(":method", "")

    @property
    def target(self) -> str:
        return self.headers.get(":path", "")


@dataclass(frozen=True, slots=True)
class Sent:
    """What is to be done with the request. `withheld` are the client's fields the engine must not see."""

    picked: Picked
    withheld: list[str]


Admit = Callable[[Asked], None]
"""Looks at a request's head. Raises RouterError."""
Grow = Callable[[Asked, bytes], None]
"""Takes a piece of its body. Raises RouterError when it is too much."""
Send = Callable[[Asked], Awaitable[Sent]]
"""Decides about the complete request. Raises RouterError."""


class Exchange:
    """One gRPC stream. RouterError from the three callables becomes an immediate response, and the stream is over."""

    def __init__(self, admit: Admit, grow: Grow, send: Send) -> None:
        self._admit = admit
        self._grow = grow
        self._send = send
        self.asked: Asked | None = None
        self.decided = False
        """Nothing more of this request is to be answered for: it was sent, or refused."""
        self._body_mode: int = BUFFERED
        self._answer_mode: int = NO_BODY

    async def take(self, message: Message) -> list[Message]:
        """What Envoy is to be told now."""
        kind = message.WhichOneof("request")
        if kind == "request_headers":
            return await self._head(message)
        if kind == "request_body":
            return await self._body(message.request_body.body, message.request_body.end_of_stream)
        if kind == "request_trailers":
            return await self._trailers()
        return self._of_answer(kind, message)

    async def _head(self, message: Message) -> list[Message]:
        asked = self.asked = Asked(_fields(message), _subset(message))
        if message.HasField("protocol_config"):
            self._body_mode = message.protocol_config.request_body_mode
            self._answer_mode = message.protocol_config.response_body_mode
        self._admit(asked)
        if message.request_headers.end_of_stream:
            return [_headers(await self._decide(asked))]
        if self._body_mode == BUFFERED:
            return [ProcessingResponse(request_headers=HeadersResponse())]
        if self._body_mode != FULL_DUPLEX:
            text = "this ext_proc filter must send request bodies: request_body_mode BUFFERED or FULL_DUPLEX_STREAMED"
            raise RouterError("internal", text)
        return []

    async def _body(self, piece: bytes, last: bool) -> list[Message]:
        asked = self.asked
        if asked is None or self.decided:
            return []
        self._grow(asked, piece)
        if self._body_mode == BUFFERED:
            return [_buffered(await self._decide(asked))]
        if not last:
            return []
        sent = await self._decide(asked)
        return [_headers(sent), *_given_back(sent.picked.body, last=True)]

    async def _trailers(self) -> list[Message]:
        answers = [ProcessingResponse(request_trailers=TrailersResponse())]
        asked = self.asked
        if asked is None or self.decided:
            return answers
        sent = await self._decide(asked)
        return [_headers(sent), *_given_back(sent.picked.body, last=False), *answers]

    async def _decide(self, asked: Asked) -> Sent:
        self.decided = True
        return await self._send(asked)

    def _of_answer(self, kind: str | None, message: Message) -> list[Message]:
        if kind == "response_headers":
            return [ProcessingResponse(response_headers=HeadersResponse())]
        if kind == "response_trailers":
            return [ProcessingResponse(response_trailers=TrailersResponse())]
        if kind != "response_body":
            return []
        answer = ProcessingResponse(response_body=BodyResponse())
        if self._answer_mode == FULL_DUPLEX:
            part = answer.response_body.response.body_mutation.streamed_response
            part.body, part.end_of_stream = message.response_body.body, message.response_body.end_of_stream
        return [answer]


def refusal(error: RouterError) -> Message:
    """The one error shape of the public listener, as the client's answer."""
    answer = ImmediateResponse()
    answer.status.code = error.status
    answer.details = f"kv_router_{error.code}"
    answer.body = msgspec.json.encode({"error": {"message": error.message, "type": error.type, "code": error.code}})
    fields = [("content-type", "application/json"), ("x-kv-router-error", error.code)]
    if error.retry_after_s is not None:
        fields.append(("retry-after", str(error.retry_after_s)))
    if error.code == "unauthorized":
        fields.append(("www-authenticate", "Bearer"))
    for name, value in fields:
        _set(answer.headers, name, value.encode())
    return ProcessingResponse(immediate_response=answer)


def _fields(message: Message) -> RequestFields:
    """Envoy gives values as bytes, or as text in older versions."""
    given = message.request_headers.headers.headers
    try:
        return RequestFields([(one.key.encode(), one.raw_value or one.value.encode()) for one in given])
    except ValueError:
        raise RouterError("bad_request", "a header field that must be single is repeated") from None


def _subset(message: Message) -> frozenset[str] | None:
    for entry in message.metadata_context.filter_metadata:
        if entry.key == SUBSET_NAMESPACE and SUBSET_KEY in entry.value.fields:
            return frozenset(one.string_value for one in entry.value.fields[SUBSET_KEY].list_value.values)
    return None


def _headers(sent: Sent) -> Message:
    answer = ProcessingResponse(request_headers=HeadersResponse())
    _route(answer, answer.request_headers.response, sent)
    return answer


def _buffered(sent: Sent) -> Message:
    answer = ProcessingResponse(request_body=BodyResponse())
    response = answer.request_body.response
    _route(answer, response, sent)
    if sent.picked.rewritten:  # Envoy 1.40 takes no other length than the stated one
        _set(response.header_mutation, "content-length", str(len(sent.picked.body)).encode())
        response.body_mutation.body = sent.picked.body
    return answer


def _route(answer: Message, response: Message, sent: Sent) -> None:
    for name, value in sent.picked.fields:
        _set(response.header_mutation, name.decode(), value)
    response.header_mutation.remove_headers.extend(sent.withheld)
    metadata = answer.dynamic_metadata.fields[NAMESPACE].struct_value
    metadata.fields[DESTINATION.decode()].string_value = sent.picked.destination


def _set(mutation: Message, name: str, value: bytes) -> None:
    option = mutation.set_headers.add(append_action=OVERWRITE)
    option.header.key, option.header.raw_value = name.lower(), value


def _given_back(body: bytes, *, last: bool) -> Iterator[Message]:
    """The whole body in pieces; an empty one is still one piece."""
    for at in range(0, max(len(body), 1), PIECE_BYTES):
        piece = ProcessingResponse(request_body=BodyResponse())
        part = piece.request_body.response.body_mutation.streamed_response
        part.body = body[at : at + PIECE_BYTES]
        part.end_of_stream = last and at + PIECE_BYTES >= len(body)
        yield piece
