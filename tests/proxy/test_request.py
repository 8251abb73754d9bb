"""The request parser without sockets: bytes in, requests and refusals out."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.errors import RouterError
from router.proxy.request import (
    DISCARD_LIMIT_BYTES,
    FIELDS_LIMIT,
    HEAD_LIMIT_BYTES,
    BodyBudget,
    Request,
    RequestFields,
    RequestParser,
)
from tests.proxy.corpora import ROWS

MAX_BODY = 1 << 20


def parsed(pieces: list[bytes], *, max_body: int = MAX_BODY, budget: BodyBudget | None = None) -> RequestParser:
    parser = RequestParser(max_body, budget or BodyBudget(1 << 30))
    for piece in pieces:
        parser.feed(piece)
    return parser


def seen(parser: RequestParser) -> list[tuple[object, ...]]:
    """All that can be told of the requests that arrived."""
    return [
        (
            request.method,
            request.target,
            tuple(request.fields.raw),
            request.complete,
            request.keep_alive,
            request.failure.code if request.failure is not None else None,
            request.body() if request.complete else None,
        )
        for request in parser.arrived
    ]


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted({place % (len(data) + 1) for place in places}), len(data)]
    return [data[start:end] for start, end in pairwise(edges) if start < end]


TOKEN = st.text("abcdefghijklmnopqrstuvwxyzABCDEFGH-_", min_size=1, max_size=12).map(str.encode)
VALUE = st.binary(max_size=30).map(lambda raw: bytes(b for b in raw if b >= 0x20 and b != 0x7F).strip(b" "))
BODIES = st.binary(max_size=300)


@st.composite
def requests(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """(a well-formed POST, its body)."""
    body = draw(BODIES)
    fields = draw(st.lists(st.tuples(TOKEN, VALUE), max_size=5))
    head = b"POST /generate HTTP/1.1\r\nHost: r\r\n" + b"".join(b"X-%b: %b\r\n" % field for field in fields)
    if draw(st.booleans()):
        return head + b"Content-Length: %d\r\n\r\n" % len(body) + body, body
    framed = b""
    for chunk in cut(body, draw(st.lists(st.integers(0, 300), max_size=4))):
        framed += b"%x\r\n%b\r\n" % (len(chunk), chunk)
    return head + b"Transfer-Encoding: chunked\r\n\r\n" + framed + b"0\r\n\r\n", body


@given(st.lists(requests(), min_size=1, max_size=4), st.lists(st.integers(0, 5000), max_size=8))
@settings(max_examples=300, deadline=None)
def test_however_it_is_cut_every_request_arrives_with_its_body(
    sent: list[tuple[bytes, bytes]], places: list[int]
) -> None:
    stream = b"".join(raw for raw, _ in sent)
    parser = parsed(cut(stream, places))
    assert [request.body() for request in parser.arrived] == [body for _, body in sent]
    assert all(request.complete and request.keep_alive and request.failure is None for request in parser.arrived)
    assert not parser.ended
    assert parser.quiet


@given(
    st.lists(requests(), min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(0, 5000), st.binary(max_size=3), st.integers(0, 3)), min_size=1, max_size=3),
    st.lists(st.integers(0, 5000), max_size=8),
)
@settings(max_examples=500, deadline=None)
def test_damaged_bytes_mean_the_same_however_they_are_cut(
    sent: list[tuple[bytes, bytes]], damage: list[tuple[int, bytes, int]], places: list[int]
) -> None:
    """Case 106: what is read must not depend on how the bytes arrive; after a refusal nothing more is a request."""
    stream = bytearray(b"".join(raw for raw, _ in sent))
    for place, new, drop in damage:
        at = place % (len(stream) + 1)
        stream[at : at + drop] = new
    whole, pieces = parsed([bytes(stream)]), parsed(cut(bytes(stream), places))
    assert seen(whole) == seen(pieces)
    for request in list(whole.arrived)[:-1]:
        assert request.complete
        assert request.failure is None


@given(st.lists(st.binary(max_size=60), max_size=6))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_taken_without_an_exception(pieces: list[bytes]) -> None:
    budget = BodyBudget(1 << 30)
    parser = parsed(pieces, budget=budget)
    for request in parser.arrived:
        request.release()
    assert budget.held == 0


@given(st.sampled_from(ROWS), st.lists(st.integers(0, 20_000), max_size=6))
@settings(max_examples=300, deadline=None)
def test_the_ambiguous_inputs_are_read_alike_however_they_are_cut(row: object, places: list[int]) -> None:
    raw = row.raw + b"GET /health HTTP/1.1\r\nHost: r\r\n\r\n"  # type: ignore[attr-defined]
    assert seen(parsed([raw])) == seen(parsed(cut(raw, places)))


POST = b"POST /generate HTTP/1.1\r\nHost: r\r\n"


def only(parser: RequestParser) -> Request:
    (request,) = parser.arrived
    return request


@pytest.mark.parametrize(
    "fields",
    [
        b"Content-Length: 2\r\nContent-Length: 2\r\n",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: gzip, chunked\r\n",
        b"Host: other\r\n",
        b"Authorization: Bearer a\r\nauthorization: Bearer b\r\n",
        b"X: a\x7fb\r\n",
        b"X: " + b"a" * 17_000 + b"\r\n",
        b"".join(b"X-%d: 1\r\n" % number for number in range(FIELDS_LIMIT + 1)),
    ],
)
def test_what_could_be_read_in_two_ways_is_refused(fields: bytes) -> None:
    """Case 106."""
    request = only(parsed([POST + fields + b"\r\n{}"]))
    assert request.refused
    assert request.failure is not None
    assert request.failure.code == "bad_request"


def test_http_10_has_no_chunks() -> None:
    parser = parsed([b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"])
    assert only(parser).refused


@pytest.mark.parametrize("field", [b"Connection: keep-alive, Upgrade\r\nUpgrade: h2c\r\n", b""])
@pytest.mark.parametrize(
    "framing", [b"Content-Length: 2\r\n\r\n{}", b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"]
)
def test_an_offer_of_another_protocol_does_not_hide_the_body(field: bytes, framing: bytes) -> None:
    """Case 106: httptools takes the body of such a request for the other protocol's bytes, that is for a request."""
    stream = (POST + field + framing) * 2 + b"GET /health HTTP/1.1\r\n\r\n"
    for pieces in ([stream], [stream[i : i + 1] for i in range(len(stream))]):
        parser = parsed(pieces)
        assert [(request.target, request.body()) for request in parser.arrived] == [
            ("/generate", b"{}"),
            ("/generate", b"{}"),
            ("/health", b""),
        ]


def test_an_unfinished_field_is_bounded() -> None:
    """Case 85: llhttp would keep it, however long."""
    parser = parsed([POST + b"X: "])
    for _ in range(HEAD_LIMIT_BYTES // 1000 + 2):
        parser.feed(b"a" * 1000)
    assert only(parser).refused


def test_an_unfinished_trailer_and_endless_chunk_extensions_are_bounded() -> None:
    for noise in (b"0\r\nX: ", b"1;"):
        parser = parsed([POST + b"Transfer-Encoding: chunked\r\n\r\n" + noise])
        for _ in range(HEAD_LIMIT_BYTES // 1000 + 2):
            parser.feed(b"a" * 1000)
        request = only(parser)
        assert request.failure is not None
        assert request.failure.code == "bad_request"
        assert not request.refused


def test_a_body_of_tiny_chunks_is_no_noise() -> None:
    size = 40_000
    parser = parsed(
        [POST + b"Transfer-Encoding: chunked\r\n\r\n", *[b"1\r\nx\r\n" * 1000] * (size // 1000), b"0\r\n\r\n"]
    )
    assert only(parser).body() == b"x" * size


def test_a_long_head_behind_a_long_body_in_one_read_is_taken() -> None:
    stream = POST + b"Content-Length: 200000\r\n\r\n" + bytes(200_000) + POST + b"X: " + b"a" * 15_000
    parser = parsed([stream, b"b\r\nContent-Length: 0\r\n\r\n"])
    assert [request.complete for request in parser.arrived] == [True, True]


def test_a_short_head_behind_a_long_body_is_not_taken_for_the_end_of_a_long_one() -> None:
    """The read that ends one head may hold a body and begin the next head."""
    first = POST + b"Content-Length: 200000\r\n\r\n" + bytes(200_000)
    parser = parsed([first[:20], first[20:] + POST[:10], POST[10:] + b"Content-Length: 0\r\n\r\n"])
    assert [request.complete for request in parser.arrived] == [True, True]


def test_a_chunked_request_behind_a_long_body_is_no_noise() -> None:
    first = POST + b"Content-Length: 200000\r\n\r\n" + bytes(200_000)
    second = POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\n"
    parser = parsed([first + second, b"hello\r\n0\r\n\r\n"])
    assert [(request.complete, request.failure) for request in parser.arrived] == [(True, None)] * 2


def test_a_body_is_counted_as_it_comes_and_given_back() -> None:
    """Case 78."""
    budget = BodyBudget(10)
    first = parsed([POST + b"Content-Length: 8\r\n\r\nabc"], budget=budget)
    assert budget.held == 3
    second = parsed([POST + b"Content-Length: 8\r\n\r\nabcdefgh"], budget=budget)
    failure = only(second).failure
    assert failure is not None
    assert (failure.code, budget.held) == ("overloaded", 3)
    first.feed(b"defgh")
    assert (only(first).body(), budget.held) == (b"abcdefgh", 8)
    only(first).release()
    assert budget.held == 0


def test_an_announced_body_over_the_limit_fails_before_it_comes() -> None:
    parser = parsed([POST + b"Content-Length: 11\r\n\r\n"], max_body=10)
    failure = only(parser).failure
    assert failure is not None
    assert failure.code == "body_too_large"
    parser.feed(b"x" * 11 + POST + b"\r\n")
    assert len(parser.arrived) == 1, "nothing behind it is read"


def test_what_is_left_of_a_refused_request_is_read_up_to_a_limit() -> None:
    parser = parsed([POST + b"Content-Length: %d\r\n\r\n" % MAX_BODY])
    told: list[RouterError | None] = []
    request = only(parser)
    request.release()
    request.changed = lambda: told.append(request.failure)
    for _ in range(DISCARD_LIMIT_BYTES // 10_000 + 1):
        parser.feed(bytes(10_000))
    assert [error.code for error in told if error is not None] == ["body_too_large"]
    assert parser.ended


def test_whoever_waits_for_a_body_is_told_once() -> None:
    parser = parsed([POST + b"Content-Length: 4\r\n\r\nab"])
    calls: list[bool] = []
    request = only(parser)
    request.changed = lambda: calls.append(request.complete)
    parser.feed(b"c")
    assert calls == []
    parser.feed(b"d" + POST + b"Content-Length: 0\r\n\r\n")
    assert calls == [True]


def test_fields_are_found_in_any_case() -> None:
    fields = RequestFields([(b"X-One", b"1"), (b"x-one", b"2"), (b"Accept", b"\xff")])
    assert (fields["x-ONE"], fields.all(b"x-one"), fields.all(b"absent")) == ("1", ["1", "2"], [])
    assert (fields.get("accept"), fields.get("absent"), fields.get("absent", "d")) == ("\udcff", None, "d")
    assert (len(fields), sorted(fields), "ACCEPT" in fields) == (2, ["accept", "x-one"], True)


HEADS = [
    b"POST /generate HTTP/1.1\r\nHost: r\r\nContent-Length: %d\r\n\r\n",
    b"POST /v1/completions?x=1 HTTP/1.1\r\ncontent-length: %d\r\nX-A: \r\nAuthorization: Bearer k\r\n\r\n",
]
STRANGERS = [
    b"GET /health HTTP/1.1\r\nHost: r\r\n\r\n",
    b"\r\nPOST /generate HTTP/1.1\r\nHost: r\r\nContent-Length: 1\r\n\r\n{",
    b"POST /generate HTTP/1.1\r\nHost: r\r\nContent-Length: +1\r\n\r\n{",
    b"POST /generate HTTP/1.1\r\nHost: r\r\nContent-Length:  1 \r\n\r\n{",
    b"POST /generate HTTP/1.1\r\nHost: r\r\nContent-Length: 01\r\n\r\n{",
    b"POST /generate HTTP/1.1\r\nHost: r\r\nContent-Length: \r\n\r\n",
    b"POST /generate HTTP/1.1\r\nHost: r\r\nContent-Length: 99999999999999999999\r\n\r\n",
    b"POST /generate HTTP/1.1\r\nHost: r\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\n{",
    b"POST /generate HTTP/1.1\r\nHost: r\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n{",
    b"POST /generate HTTP/1.1\r\nHost: r\r\nContent-Length: 1\r\nConnection: close\r\n\r\n{",
    b"POST /generate HTTP/1.1\r\nHost: r\r\nContent-Length: 1\r\nExpect: 100-continue\r\n\r\n{",
    b"POST /generate HTTP/1.1\r\nHost: r\r\nContent-Length: 2\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n{}",
    b"POST /generate HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    b"POST /generate HTTP/1.0\r\nHost: r\r\nContent-Length: 1\r\n\r\n{",
    b"nonsense\r\n\r\n",
]


@given(
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from(HEADS), st.binary(max_size=40)).map(lambda one: one[0] % len(one[1]) + one[1]),
            st.tuples(st.sampled_from(HEADS[:1]), st.binary(max_size=40)).map(
                lambda one: one[0] % len(one[1]) + one[1]
            ),
            st.sampled_from(STRANGERS),
        ),
        min_size=1,
        max_size=8,
    ),
    st.lists(st.integers(0, 3000), max_size=8),
    st.integers(10, 100),
    st.integers(20, 400),
)
@settings(max_examples=1000, deadline=None)
def test_a_head_that_was_seen_before_means_what_it_means_to_the_parser(
    stream: list[bytes], places: list[int], max_body: int, budget: int
) -> None:
    """Case 106: heads that repeat are not parsed again; nothing may tell."""
    knows, parses = (RequestParser(max_body, BodyBudget(budget)) for _ in range(2))
    parses._to_know = 0
    for piece in cut(b"".join(stream), places):
        knows.feed(piece)
        parses.feed(piece)
        assert seen(knows) == seen(parses)
        assert (knows.ended, knows.in_head, knows.quiet) == (parses.ended, parses.in_head, parses.quiet)
        assert knows._budget.held == parses._budget.held


def test_the_third_request_with_a_head_is_not_parsed_and_has_its_own_length() -> None:
    parser = parsed([HEADS[0] % 2 + b"{}", HEADS[0] % 3 + b"{ }"])
    assert [request.known is not None for request in parser.arrived] == [False, True]
    assert [request.fields["content-length"] for request in parser.arrived] == ["2", "3"]
    assert [request.length for request in parser.arrived] == [2, 3]
    assert parser.arrived[1].fields.raw == [(b"Host", b"r"), (b"Content-Length", b"3")]


def test_few_heads_are_got_to_know_and_none_that_is_long() -> None:
    parser = parsed([POST + b"X: %d\r\nContent-Length: 0\r\n\r\n" % number for number in range(20)])
    assert parser._known is not None
    assert parser._to_know == 0
    long = POST + b"X: " + b"x" * 4000 + b"\r\nContent-Length: 0\r\n\r\n"
    assert parsed([long])._known is None


def test_of_what_comes_in_one_read_only_the_first_is_cut_off_by_us() -> None:
    """To copy the rest for each of thousands of small requests would take longer than llhttp."""
    parser = parsed([HEADS[0] % 2 + b"{}", (HEADS[0] % 2 + b"{}") * 3])
    assert [request.known is not None for request in parser.arrived] == [False, True, False, False]
    assert [request.body() for request in parser.arrived] == [b"{}"] * 4
