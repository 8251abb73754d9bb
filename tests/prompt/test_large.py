"""Large bodies are read as small ones are, in bounded pieces. Here the pieces are a few bytes long."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from router.errors import RouterError
from router.prompt import body as bodies
from router.prompt import large
from router.prompt.body import Fields, parse_body
from tests.prompt.support import COMPLETIONS

SMALL = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)


@pytest.fixture(autouse=True)
def few_bytes_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large, "PIECE_BYTES", 64)
    monkeypatch.setattr(large, "LARGE_BYTES", 128)


texts = st.text(max_size=60) | st.sampled_from(
    ['"', "\\", '\\"' * 20, "漢字" * 20, "👩‍👩‍👧" * 20, "a" * 300, "\x00\x1f\n" * 7, "[{,:}]"]
)
keys = st.text(max_size=4) | st.sampled_from(["messages", "prompt", "[{,:}]", '"', "\\"])
json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(keys, inner, max_size=6),
    max_leaves=25,
)
layouts = st.sampled_from(
    [
        {},
        {"ensure_ascii": False},
        {"indent": 1},
        {"separators": (",", ":")},
        {"separators": (" ,  ", " : "), "ensure_ascii": False},
    ]
)


def spelled(value: object, layout: dict[str, Any]) -> bytes:
    return json.dumps(value, **layout).encode("utf-8", "surrogatepass")


@SMALL
@given(st.dictionaries(keys, json_values, min_size=1, max_size=6), layouts)
def test_what_is_in_a_large_object_comes_out_of_it(value: dict[str, Any], layout: dict[str, Any]) -> None:
    found = large.read_object(spelled(value, layout))
    assert [(key, json.loads(part)) for key, part in found.items()] == list(value.items())


@SMALL
@given(json_values, layouts)
def test_values_are_pythons(value: Any, layout: dict[str, Any]) -> None:
    assert large.value(spelled(value, layout)) == value


@SMALL
@given(st.text(max_size=300), layouts)
def test_a_long_text_is_cut_between_characters(text: str, layout: dict[str, Any]) -> None:
    assert large.text(spelled(text, layout)) == text
    assert large.value(spelled(text, layout)) == text


@pytest.mark.parametrize("lone", ["\\ud83d", "\\ude00", "\\ud83d\\ud83d", "a" * 40 + "\\ud83d" + "b" * 40])
def test_a_lone_surrogate_is_pythons_affair(lone: str) -> None:
    raw = f'"{lone}"'.encode()
    assert large.value(raw) == json.loads(raw)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A body with one byte gone, put in, or changed; mostly at a place where it matters."""
    raw = draw(st.builds(spelled, st.dictionaries(keys, json_values, min_size=1, max_size=4), layouts))
    at = draw(st.integers(0, len(raw) - 1))
    what = draw(
        st.sampled_from([b"", b",", b"]", b"}", b"[", b"{", b'"', b":", b"\\", b"0", b" ", b"NaN", b"\xff", b"x"])
    )
    return raw[:at] + what + raw[at + draw(st.integers(0, 1)) :]


def outcome(raw: bytes) -> Any:
    try:
        fields = parse_body(COMPLETIONS, raw).fields
    except RouterError as error:
        assume("a key of more than" not in error.message)  # the one thing of a large body that is not taken
        return error.code, error.message.partition(":")[0]
    return [
        part if part is bodies.ABSENT else repr(json.loads(bytes(part)))
        for part in map(fields.__getattribute__, Fields.__struct_fields__)
    ]


@SMALL
@example(b'{"prompt":[' + b" " * 40 + b"," + b"12345678901234567890," * 8 + b"1]}")
@example(b'{"prompt":{' + b" " * 40 + b',"a":"' + b"x" * 99 + b'"}}')
@given(damaged() | st.builds(lambda raw: raw.replace(b'"', b'"prompt":"', 1), damaged()))
def test_a_large_body_is_refused_exactly_when_a_small_one_is(raw: bytes) -> None:
    as_large = outcome(raw)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large, "LARGE_BYTES", 1 << 30)
        as_small = outcome(raw)
    assert as_large == as_small, raw
