"""The ext_proc exchange without gRPC: whatever Envoy sends in whatever order, one decision and the body unchanged."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("grpc")
pytest.importorskip("google.protobuf")

from router.envoy.exchange import PIECE_BYTES, Asked, Exchange, Sent, refusal
from router.envoy.messages import (
    BUFFERED,
    FULL_DUPLEX,
    HttpBody,
    HttpHeaders,
    HttpTrailers,
    Message,
    ProcessingRequest,
)
from router.envoy.pick import Picked
from router.errors import ERRORS, RouterError

MODES = [BUFFERED, FULL_DUPLEX]


class Told:
    """An Exchange with everything behind it replaced by the simplest thing."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.answers: list[Message] = []
        self.exchange = Exchange(lambda asked: None, self._grow, self._send)

    def _grow(self, asked: Asked, piece: bytes) -> None:
        asked.pieces.append(piece)

    async def _send(self, asked: Asked) -> Sent:
        self.bodies.append(b"".join(asked.pieces))
        return Sent(Picked(("10.0.0.1:1",), [], self.bodies[-1], False, "w", []), [])

    def take(self, message: Message) -> None:
        self.answers += asyncio.run(self.exchange.take(message))

    @property
    def given_back(self) -> bytes:
        parts = [answer.request_body.response.body_mutation.streamed_response for answer in self.answers]
        assert all(len(part.body) <= PIECE_BYTES for part in parts)
        return b"".join(part.body for part in parts)


def head(mode: int, last: bool = False) -> Message:
    message = ProcessingRequest(request_headers=HttpHeaders(end_of_stream=last))
    message.protocol_config.request_body_mode = mode
    return message


def body(piece: bytes, last: bool) -> Message:
    return ProcessingRequest(request_body=HttpBody(body=piece, end_of_stream=last))


NAMES = st.text(max_size=8) | st.sampled_from(["host", "Host", "authorization", "expect", "x-request-id"])
MESSAGES = st.one_of(
    st.builds(head, st.sampled_from(MODES), st.booleans()),
    st.builds(body, st.binary(max_size=20), st.booleans()),
    st.just(ProcessingRequest(request_trailers=HttpTrailers())),
    st.just(ProcessingRequest(response_headers=HttpHeaders())),
    st.builds(lambda piece: ProcessingRequest(response_body=HttpBody(body=piece)), st.binary(max_size=20)),
    st.just(ProcessingRequest(response_trailers=HttpTrailers())),
    st.just(ProcessingRequest()),
)


@given(st.lists(MESSAGES, max_size=12))
def test_no_order_of_messages_breaks_it(messages: list[ProcessingRequest]) -> None:
    told = Told()
    for message in messages:
        told.take(message)
    assert len(told.bodies) <= sum(message.HasField("request_headers") for message in messages)


@given(st.lists(st.binary(max_size=3 * PIECE_BYTES // 2), min_size=1, max_size=6), st.booleans())
def test_a_streamed_body_comes_back_as_it_was_however_it_is_cut(pieces: list[bytes], trailers: bool) -> None:
    told = Told()
    told.take(head(FULL_DUPLEX))
    for number, piece in enumerate(pieces, 1):
        told.take(body(piece, last=number == len(pieces) and not trailers))
    if trailers:
        assert told.answers == []
        told.take(ProcessingRequest(request_trailers=HttpTrailers()))
    assert told.bodies == [b"".join(pieces)]
    assert told.answers[0].HasField("request_headers")
    assert told.given_back == b"".join(pieces)


@given(st.lists(st.tuples(NAMES, st.binary(max_size=8)), max_size=6))
def test_odd_header_fields_are_read_or_refused(fields: list[tuple[str, bytes]]) -> None:
    message = head(BUFFERED)
    for name, value in fields:
        message.request_headers.headers.headers.add(key=name, raw_value=value)
    names = [name.lower() for name, _ in fields]
    repeated = [name for name in ("authorization", "host", "expect") if names.count(name) > 1]
    with pytest.raises(RouterError) if repeated else nullcontext():
        Told().take(message)


@pytest.mark.parametrize("code", sorted(ERRORS))
def test_every_error_becomes_an_immediate_response_with_its_status(code: str) -> None:
    answer = refusal(RouterError(code, "why", retry_after_s=2)).immediate_response
    assert answer.status.code == ERRORS[code].status
    assert ("retry-after", b"2") in [(one.header.key, one.header.raw_value) for one in answer.headers.set_headers]
