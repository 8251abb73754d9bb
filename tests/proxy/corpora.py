"""Inputs that try to be read in two ways, and the one answer each gets: the tables behind cases 71, 81, 105 and 106.

`target` is what reaches the worker, None when nothing does.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.support.http import get, post


@dataclass(frozen=True)
class Row:
    group: str
    name: str
    raw: bytes
    status: int
    code: str | None = None
    target: str | None = None


def _framed(
    name: str, rest: bytes, status: int = 400, code: str | None = "bad_request", target: str | None = None
) -> Row:
    return Row("framing", name, b"POST /generate HTTP/1.1\r\nHost: r\r\n" + rest, status, code, target)


def _line(name: str, line: bytes, status: int, code: str | None, target: str | None = None) -> Row:
    return Row("request line", name, line + b"\r\nHost: r\r\nContent-Length: 2\r\n\r\n{}", status, code, target)


def _field(name: str, fields: bytes, status: int, code: str | None = None) -> Row:
    raw = b"POST /generate HTTP/1.1\r\nHost: r\r\n" + fields + b"Content-Length: 2\r\n\r\n{}"
    return Row("field", name, raw, status, code, "/generate" if status == 200 else None)


def _url(target: str, status: int, code: str | None = None, sent: str | None = None) -> Row:
    return Row("url", target, post(target), status, code, sent)


ROWS = [
    _framed("length then coding", b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
    _framed("coding then length", b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n"),
    _framed("two equal lengths", b"Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}"),
    _framed("two different lengths", b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}x"),
    _framed("list of equal lengths", b"Content-Length: 2, 2\r\n\r\n{}"),
    _framed("negative length", b"Content-Length: -2\r\n\r\n{}"),
    _framed("length with underscore", b"Content-Length: 1_0\r\n\r\n{}"),
    _framed("length beyond 64 bits", b"Content-Length: 99999999999999999999\r\n\r\n{}"),
    _framed("length with a letter", b"Content-Length: 2a\r\n\r\n{}"),
    _framed("coding twice", b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
    _framed("coding with a vertical tab", b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n"),
    _framed("coding in quotes", b'Transfer-Encoding: "chunked"\r\n\r\n0\r\n\r\n'),
    _framed("coding identity", b"Transfer-Encoding: identity\r\nContent-Length: 2\r\n\r\n{}"),
    _framed("gzip, chunked", b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n"),
    _framed("coding name with a space", b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n"),
    _framed("chunk size with plus", b"Transfer-Encoding: chunked\r\n\r\n+2\r\n{}\r\n0\r\n\r\n"),
    _framed("chunk size 0x2", b"Transfer-Encoding: chunked\r\n\r\n0x2\r\n{}\r\n0\r\n\r\n"),
    _framed("chunk size beyond 64 bits", b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n{}\r\n0\r\n\r\n"),
    _framed("chunk longer than its size", b"Transfer-Encoding: chunked\r\n\r\n1\r\n{}\r\n0\r\n\r\n"),
    _framed("bare LF after a chunk size", b"Transfer-Encoding: chunked\r\n\r\n2\n{}\r\n0\r\n\r\n"),
    _framed("chunked, well-formed", b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", 200, None, "/generate"),
    _framed(
        "chunked, extension and trailer",
        b"Transfer-Encoding: chunked\r\n\r\n2;a=b\r\n{}\r\n0\r\nX-Trailer: 1\r\n\r\n",
        200,
        None,
        "/generate",
    ),
    _line("no target", b"POST  HTTP/1.1", 400, "bad_request"),
    _line("two targets", b"POST /generate /generate HTTP/1.1", 400, "bad_request"),
    _line("version 0.9", b"POST /generate HTTP/0.9", 400, "bad_request"),
    _line("version 2.0", b"POST /generate HTTP/2.0", 400, "bad_request"),
    _line("no version", b"POST /generate", 400, "bad_request"),
    _line("lower-case method", b"post /generate HTTP/1.1", 400, "bad_request"),
    _line("method with a tab", b"PO\tST /generate HTTP/1.1", 400, "bad_request"),
    _line("absolute form", b"POST http://elsewhere/generate HTTP/1.1", 200, None, "/generate"),
    _line("absolute form, other scheme", b"POST ftp://elsewhere/generate HTTP/1.1", 400, "bad_request"),
    _line("CONNECT", b"CONNECT elsewhere:443 HTTP/1.1", 400, "bad_request"),
    Row("request line", "preface of HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, "bad_request"),
    _field("field without colon", b"X\r\n", 400, "bad_request"),
    _field("empty field name", b": x\r\n", 400, "bad_request"),
    _field("control character in a name", b"X\x01Y: 1\r\n", 400, "bad_request"),
    _field("NUL in a value", b"X: a\x00b\r\n", 400, "bad_request"),
    _field("bare LF in a value", b"X: a\nContent-Length: 9\r\n", 400, "bad_request"),
    _field("bare CR in a value", b"X: a\rb\r\n", 400, "bad_request"),
    _field("folded field", b"X: a\r\n b\r\n", 400, "bad_request"),
    _field("two hosts", b"Host: other\r\n", 400, "bad_request"),
    _field("value over 16 KiB", b"X: " + b"a" * 17_000 + b"\r\n", 400, "bad_request"),
    _field("value of 15 KiB", b"X: " + b"a" * 15_000 + b"\r\n", 200),
    _field("bytes beyond ASCII in a value", b"X: \xff\xe9\r\n", 200),
    _field("Connection names a field", b"Connection: keep-alive, X-Secret\r\nX-Secret: 1\r\n", 200),
    _field("Upgrade: websocket", b"Connection: Upgrade\r\nUpgrade: websocket\r\n", 501, "not_implemented"),
    _field("Upgrade: h2c", b"Connection: Upgrade\r\nUpgrade: h2c\r\n", 200),
    _field("Expect: 100-continue", b"Expect: 100-continue\r\n", 200),
    _field("Expect: other", b"Expect: other\r\n", 417, "expectation_failed"),
    _field("DEL in a value", b"X: a\x7fb\r\n", 400, "bad_request"),
    _field("X-Request-Id with a space", b"X-Request-Id: a b\r\n", 200),
    _field("X-Request-Id of 15 KiB", b"X-Request-Id: " + b"a" * 15_000 + b"\r\n", 200),
    _field("X-Request-Id twice", b"X-Request-Id: a\r\nX-Request-Id: b\r\n", 200),
    _field("x-kv-router-worker from a client", b"x-kv-router-worker: http://evil\r\n", 200),
    _url("/generate", 200, None, "/generate"),
    _url("/generate?q=%25s3&x=a+b", 200, None, "/generate?q=%25s3&x=a+b"),
    _url("//generate", 200, None, "//generate"),
    _url("/./generate", 200, None, "/./generate"),
    _url("/x/../generate", 200, None, "/x/../generate"),
    _url("/%67enerate", 200, None, "/%67enerate"),
    _url("/generate/", 404, "not_found"),
    _url("/Generate", 404, "not_found"),
    _url("/generate%2f", 404, "not_found"),
    _url("/generate;x=1", 404, "not_found"),
    _url("/generate\\..\\flush_cache", 404, "not_found"),
    _url("/generate/../flush_cache", 404, "not_found"),
    _url("/generate/%2e%2e/flush_cache", 404, "not_found"),
    _url("/generate%2f..%2fflush_cache", 404, "not_found"),
    _url("/generate/..%252fflush_cache", 404, "not_found"),
    _url("/generate%00", 404, "not_found"),
    _url("/%c0%af", 404, "not_found"),
    _url("/server_info", 404, "not_found"),
    _url("/v1/models/tiny", 404, "not_found"),
    _url("/generate#x", 400, "bad_request"),
    _url("*", 400, "bad_request"),
    _url("/generate?" + "q" * 17_000, 400, "bad_request"),
    Row("url", "GET /generate", get("/generate"), 405, "method_not_allowed"),
    Row("url", "OPTIONS * ", get("*", method="OPTIONS"), 400, "bad_request"),
]


def table() -> str:
    """The rows as Markdown."""
    lines = ["| group | input | answer | reaches the worker as |", "|---|---|---|---|"]
    for row in ROWS:
        answer = f"{row.status} {row.code}" if row.code else str(row.status)
        lines.append(f"| {row.group} | `{row.name[:60]}` | {answer} | {f'`{row.target}`' if row.target else '–'} |")
    return "\n".join(lines)
