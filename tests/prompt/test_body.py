from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.errors import RouterError
from router.prompt.body import ABSENT, MAX_COPIES, parse_body, plain, present
from router.prompt.fields import Fields, Usual
from tests.prompt.support import CHAT, COMPLETIONS, GENERATE, body


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b'{"a":1} x', "not JSON"),
        (b"[1, 2]", "array"),
        (b'"text"', "string"),
        (b"null", "null"),
        (b"true", "boolean"),
        (b"3.5", "number"),
        (b'{"prompt":"\xff"}', "UTF-8"),
        (b'{"unknown":"\xc3"}', "UTF-8"),
        ('{"prompt":"x"}'.encode("utf-16"), "UTF-8"),
        (b'{"a":' + b"[" * 20_000 + b"]" * 20_000 + b"}", "deep"),
        (b'{"a":' + b"[" * 20_000 + b"NaN" + b"]" * 20_000 + b"}", "deep"),
        (b'{"messages":' + b'{"a":' * 20_000 + b"1" + b"}" * 20_000 + b"}", "deep"),
    ],
)
def test_what_is_no_json_object_is_a_400(raw: bytes, says: str) -> None:
    """case 84"""
    with pytest.raises(RouterError, match=says) as caught:
        parse_body(CHAT, raw)
    assert (caught.value.code, caught.value.status) == ("bad_json", 400)


@pytest.mark.parametrize(
    "raw",
    [
        b'\xef\xbb\xbf{"model":"m","stream":true}',
        b'{"model":"m","stream":true,"temperature":NaN}',
        b'{"model":"m","stream":true,"temperature":1e400}',
        b'{"model":"m","stream":true,"user":"\\ud800"}',
        b' {"model":"x","model":"m","stream":false,"stream":true}\n',
    ],
)
def test_what_the_engines_own_parser_takes_is_read(raw: bytes) -> None:
    """cases 79, 84: the bytes are kept as they came."""
    read = parse_body(CHAT, raw)
    assert (read.model, read.stream, read.raw) == ("m", True, raw)


def test_fields_of_a_wrong_type_are_absent_and_noted() -> None:
    """case 84"""
    wrong: dict[str, Any] = {
        "model": 3,
        "n": "two",
        "max_tokens": [],
        "cache_salt": 5,
        "extra_key": {},
        "lora_path": True,
        "rid": 7,
        "session_id": [],
        "routed_dp_rank": "0",
        "stream_options": "yes",
    }
    read = parse_body(CHAT, json.dumps(wrong).encode())
    assert read.odd == wrong.keys()
    assert (read.model, read.copies, read.max_new_tokens, read.cache_salt) == (None, 1, None, None)
    assert (read.rids, read.session_id, read.routed_dp_rank, read.include_usage) == ((), None, None, False)


@pytest.mark.parametrize("value", ["true", "True", "1", 1, "yes", "on"])
def test_a_stream_flag_that_is_not_a_boolean_is_read_as_engines_read_it(value: object) -> None:
    """case 84"""
    read = body(CHAT, stream=value)
    assert read.stream
    assert read.odd == {"stream"}
    assert not body(CHAT, stream="false").stream
    assert not body(CHAT, stream=None).odd


def test_generate_keeps_its_sampling_apart() -> None:
    read = body(GENERATE, sampling_params={"n": 3, "max_new_tokens": 40}, n=9, max_tokens=9)
    assert (read.copies, read.max_new_tokens) == (3, 40)
    assert body(GENERATE, sampling_params=[{"n": 2}]).odd == {"sampling_params"}


def test_the_newer_name_of_a_limit_or_a_rank_wins() -> None:
    read = body(CHAT, max_tokens=10, max_completion_tokens=20, data_parallel_rank=1, routed_dp_rank=0)
    assert (read.max_new_tokens, read.routed_dp_rank) == (20, 0)
    assert body(CHAT, data_parallel_rank=3, max_tokens=7).routed_dp_rank == 3


@pytest.mark.parametrize(
    ("n", "copies"), [(0, 1), (-3, 1), (2, 2), (10**9, MAX_COPIES), (2**70, MAX_COPIES), (None, 1)]
)
def test_copies_are_at_least_one_and_bounded(n: int | None, copies: int) -> None:
    """case 61"""
    assert body(COMPLETIONS, n=n).copies == copies


def test_a_batchs_namespace_is_its_first_prompts() -> None:
    """case 41"""
    read = body(COMPLETIONS, cache_salt=["a", "b"], extra_key=[None, "x"], lora_path=["l"], rid=["r1", "r2"])
    assert (read.cache_salt, read.extra_key, read.lora_path, read.rids) == ("a", None, "l", ("r1", "r2"))
    assert body(COMPLETIONS, cache_salt="", extra_key=[]).cache_salt is None


def test_usage_is_asked_for_by_stream_options() -> None:
    assert body(CHAT, stream_options={"include_usage": True}).include_usage
    assert not body(CHAT, stream_options={}).include_usage


def test_absent_and_null_are_alike() -> None:
    assert not present(ABSENT)
    assert not present(msgspec.Raw(b"null"))
    assert present(msgspec.Raw(b"0"))
    assert present(msgspec.Raw(b"nulls"))
    assert plain(ABSENT) is None


def test_a_deep_field_raises_value_error_only() -> None:
    with pytest.raises(ValueError):
        plain(msgspec.Raw(b"[" * 50_000 + b"]" * 50_000))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
field_names = st.sampled_from(
    ["model", "stream", "n", "rid", "prompt", "messages", "cache_salt", "sampling_params", "max_tokens", "x"]
)


@settings(deadline=None)
@given(st.dictionaries(field_names, json_values), st.sampled_from([CHAT, COMPLETIONS, GENERATE]))
def test_any_json_object_is_read(fields: dict[str, Any], path: str) -> None:
    read = parse_body(path, json.dumps(fields).encode())
    model = fields.get("model")
    assert read.model == (model if isinstance(model, str) and model.isascii() else read.model)
    assert 1 <= read.copies <= MAX_COPIES


usual_values: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(("model", "session_id", "cache_salt"), st.text(max_size=5)),
    **dict.fromkeys(("n", "max_tokens", "max_completion_tokens"), st.integers() | st.sampled_from([1.0, 1e3, 2.5])),
    "stream": st.booleans(),
    "stream_options": st.dictionaries(st.sampled_from(["include_usage", "x"]), st.booleans()),
    "messages": st.lists(st.fixed_dictionaries({"role": st.text(max_size=5), "content": st.text()}), max_size=3),
}
seldom_values = st.sampled_from(["rid", "tools", "lora_path", "routed_dp_rank", "input_ids", "bootstrap_host", "x"])


def usually(draw: st.DrawFn) -> bytes:
    """Mostly a body as engines expect it, now and then with something odd, and with a key twice."""
    fields = [(name, draw(usual_values[name])) for name in draw(st.lists(st.sampled_from([*usual_values])))]
    fields += draw(st.lists(st.tuples(st.sampled_from([*usual_values]) | seldom_values, json_values), max_size=2))
    parts = [f"{json.dumps(name)}:{json.dumps(value)}" for name, value in draw(st.permutations(fields))]
    return ("{" + ",".join(parts) + "}").encode()


READ = (
    *("model", "stream", "include_usage", "copies", "max_new_tokens", "cache_salt", "extra_key", "lora_path"),
    *("rids", "session_id", "routed_dp_rank", "odd", "fields"),
)


@settings(deadline=None, max_examples=300)
@given(st.composite(usually)())
def test_a_chat_body_read_in_one_go_is_what_its_fields_are_one_by_one(raw: bytes) -> None:
    """Other routes' bodies are read field by field."""
    read, other = parse_body(CHAT, raw), parse_body(COMPLETIONS, raw)
    for name in READ:
        assert getattr(read, name) == getattr(other, name), name
    assert other.take_messages() is None
    messages = read.take_messages()
    assert messages is None or messages == plain(read.fields.messages)
    assert read.take_messages() is None, "they are given away once"


def test_a_usual_chat_body_has_nothing_but_messages_to_make_a_prompt_of() -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert body(CHAT, messages=messages, temperature=0.5, n=2, cache_salt="s").usual
    assert not body(CHAT, messages=messages, tools=[]).usual
    assert not body(CHAT, messages=messages, tools=None).usual
    assert not body(CHAT, messages=messages, n="2").usual
    assert not body(CHAT, messages=None).usual
    assert not body(COMPLETIONS, messages=messages).usual


def test_every_field_that_is_read_makes_a_body_unusual_but_those_that_are_decoded_with_it() -> None:
    """A key that one of the two ways of reading did not know would be ignored in silence."""
    assert set(Usual.__struct_fields__) == set(Fields.__struct_fields__)
    for name in set(Fields.__struct_fields__) - {*usual_values}:
        request = body(CHAT, **{"messages": [{"role": "user", "content": "hi"}], name: "x"})
        assert not request.usual, name
        assert bytes(getattr(request.fields, name)) == b'"x"'


@given(st.binary(max_size=64) | st.binary(max_size=40).map(lambda inner: b'{"prompt":"' + inner + b'"}'))
def test_bytes_are_refused_exactly_when_pythons_json_refuses_them(raw: bytes) -> None:
    try:
        valid = isinstance(json.loads(raw.decode("utf-8-sig")), dict)
    except ValueError:
        valid = False
    if valid:
        assert parse_body(CHAT, raw).raw == raw
    else:
        with pytest.raises(RouterError):
            parse_body(CHAT, raw)
