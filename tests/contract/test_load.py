from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.contract.load import LoadReport, decode_load
from router.errors import ContractError

# One message of a real SGLang 0.5.23 server: captures/engine/sgl_load.jsonl, seq 31.
REAL = bytes.fromhex("9ba84c6f616453746174000000cd4e20000000080bcdd26c")


def encoded(*values: object) -> bytes:
    return msgspec.msgpack.encode(["LoadStat", *values])


def test_a_real_report_is_read_by_position() -> None:
    assert decode_load(REAL) == LoadReport(
        running_requests=0,
        waiting_requests=0,
        kv_tokens_used=0,
        kv_tokens_capacity=20000,
        rank=0,
        waiting_uncached_tokens=0,
        used_plus_queued_tokens=0,
        max_running_requests=8,
        total_prefill_uncached_tokens=11,
        total_prefill_busy_us=53868,
    )


def test_the_six_stable_positions_are_enough() -> None:
    report = decode_load(encoded(3, 2, 100, 20000, 1))
    assert (report.running_requests, report.waiting_requests, report.rank) == (3, 2, 1)
    assert report.total_prefill_busy_us is None


def test_longer_reports_are_read_as_far_as_they_are_known() -> None:
    assert decode_load(encoded(*range(1, 11), "new", {"x": 1})).total_prefill_busy_us == 10


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        REAL[:-1],
        REAL + b"\x00",
        encoded(3, 2, 100, 20000),
        encoded(-1, 0, 0, 1, 0),
        encoded(0, 0, 0, 1.5, 0),
        encoded(0, 0, float("nan"), 1, 0),
        encoded(True, 0, 0, 1, 0),
        encoded("1", 0, 0, 1, 0),
        encoded(None, 0, 0, 1, 0),
        encoded(2**64 - 1, 0, 0, 1, 0),
        encoded(0, 0, 0, 1, 0, -5),
        msgspec.msgpack.encode(["BlockStored", 0, 0, 0, 1, 0]),
        msgspec.msgpack.encode({"LoadStat": 1}),
        b"\x91" * 50_000,
        b"\x9b\xa8LoadStat" + b"\x00" * 70000,
    ],
    ids=range(17),
)
def test_nonsense_is_a_contract_error(payload: bytes) -> None:
    with pytest.raises(ContractError, match="load report"):
        decode_load(payload)


@given(st.one_of(st.binary(max_size=200), st.binary(max_size=60).map(lambda tail: REAL[:10] + tail)))
def test_any_bytes_are_a_report_or_a_contract_error(payload: bytes) -> None:
    try:
        report: Any = decode_load(payload)
    except ContractError:
        return
    assert all(value is None or value >= 0 for value in msgspec.structs.astuple(report))
