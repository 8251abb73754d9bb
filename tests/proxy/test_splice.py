from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.proxy.splice import set_fields

leaves = st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False)
values = st.recursive(leaves, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=12)
names = st.sampled_from(["rank", "routed_dp_rank", "bootstrap_host"])
objects = st.dictionaries(st.text() | names, values)


@settings(deadline=None)
@given(objects, st.dictionaries(names, values, max_size=3), st.booleans(), st.sampled_from([None, 1]))
def test_the_result_reads_as_the_object_with_the_fields_set(
    body: dict[str, Any], fields: dict[str, Any], ascii_only: bool, indent: int | None
) -> None:
    raw = json.dumps(body, ensure_ascii=ascii_only, indent=indent).encode("utf-8", "surrogatepass")
    spliced = set_fields(raw, {name: json.dumps(value).encode() for name, value in fields.items()})
    assert json.loads(spliced) == {**body, **fields}


@settings(deadline=None)
@given(st.dictionaries(st.text(), values))
def test_a_new_field_leaves_every_other_byte_as_it_was(body: dict[str, Any]) -> None:
    body.pop("rank", None)
    raw = json.dumps(body).encode()
    spliced = set_fields(raw, {"rank": b"3"})
    assert spliced == (b'{"rank":3,' if body else b'{"rank":3') + raw[1:]


def test_what_re_serialising_would_lose_stays() -> None:
    """Case 79: integers above 2^53, 1.0 against 1, key order, duplicate keys, NaN, escapes, spacing."""
    rest = b' "z": 9007199254740993, "a": 1.0, "n": NaN, "d": 1, "d": 2, "e": "\\u00e9\\/", "x":1e400 } \n'
    assert set_fields(b"{" + rest, {"rank": b"0"}) == b'{"rank":0,' + rest


def test_every_duplicate_of_a_field_gets_the_value() -> None:
    """Case 79: whichever of them a parser takes, it reads the same."""
    assert (
        set_fields(b'{"r": 1,"x":{"r":5}, "r":[2, {}] ,"r":"}"}', {"r": b"7"}) == b'{"r": 7,"x":{"r":5}, "r":7 ,"r":7}'
    )


def test_a_field_spelled_with_escapes_is_the_same_field() -> None:
    assert set_fields(b'{"\\u0072": 1}', {"r": b"7"}) == b'{"\\u0072": 7}'


def test_the_name_inside_a_string_or_deeper_is_no_field() -> None:
    raw = b'{"prompt":"say \\"r\\": 1","deep":{"r":2},"list":["r"]}'
    assert set_fields(raw, {"r": b"7"}) == b'{"r":7,' + raw[1:]


def test_a_byte_order_mark_stays_in_front() -> None:
    """Case 79: Python's json, which engines use, takes it."""
    assert set_fields(b"\xef\xbb\xbf {}", {"r": b"7"}) == b'\xef\xbb\xbf {"r":7}'


@pytest.mark.parametrize(
    "body", [b"", b"[1]", b"  ", b'"x"', b'{"r"', b'{"r":', b'{"r":[', b'{"r" 1}', b'{"r":1 "x"}', b'{,"r"}']
)
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError):
        set_fields(body, {"r": b"7"})


def test_a_name_with_several_spellings_is_refused() -> None:
    with pytest.raises(ValueError, match="identifiers"):
        set_fields(b"{}", {"é": b"7"})


@settings(deadline=None)
@given(st.binary(max_size=60))
def test_no_body_raises_anything_but_value_error(noise: bytes) -> None:
    for body in (noise, b'{"r":' + noise, b'{"r":1,' + noise + b"}"):
        try:
            set_fields(body, {"r": b"7"})
        except ValueError:
            pass
