from __future__ import annotations

import pytest

from tests.proxy.corpora import ROWS, Row
from tests.proxy.fakes import bench
from tests.support.http import RawClient


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.group}: {row.name[:40]}")
async def test_each_input_has_its_one_answer(row: Row) -> None:
    """Cases 71, 81, 82, 83, 105 and 106. What is refused ends the connection, so nothing behind it is a request."""
    async with bench() as b:
        client = await RawClient.to(b.port)
        smuggled = b"GET /health HTTP/1.1\r\nHost: r\r\n\r\n"
        await client.send(row.raw + smuggled)
        answer = await client.answer()
        while answer.status == 100:
            answer = await client.answer()
        assert (answer.status, answer.one("x-kv-router-error")) == (row.status, row.code)
        if row.code == "bad_request":
            assert answer.one("connection") == "close"
            assert await client.at_end()
        assert [seen.target for seen in b.worker.requests] == ([row.target] if row.target else [])
        for seen in b.worker.requests:
            assert seen.body == b"{}"
            assert seen.all("transfer-encoding") == []
            assert seen.one("content-length") == "2"
            assert [
                name for name, _ in seen.fields if name.lower().startswith(("x-secret", "x-kv-router", "x-trailer"))
            ] == []
            if "X-Request-Id" in row.name:
                assert len(seen.one("x-request-id") or "") == 32, "a fresh one"
        client.leave()
