"""Case 107: fields of the traffic between router and engine, sent by a client."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.errors import RouterError
from router.internal_fields import INTERNAL_FIELDS, client_rank_of, refuse_internal
from router.prompt.body import parse_body

CHAT, GENERATE = "/v1/chat/completions", "/generate"


def refusal(call: Any, *args: Any) -> str:
    with pytest.raises(RouterError) as refused:
        call(*args)
    assert refused.value.code == "bad_request"
    return refused.value.message


@pytest.mark.parametrize("name", INTERNAL_FIELDS)
@pytest.mark.parametrize("escaped", [False, True])
def test_a_field_that_makes_an_engine_connect_elsewhere_is_refused(name: str, escaped: bool) -> None:
    """However it is spelt: \\u escapes are the same key to the engine."""
    key = f"\\u{ord(name[0]):04x}{name[1:]}" if escaped else name
    body = b'{"messages": [], "%b": "10.0.0.1"}' % key.encode()
    assert name in refusal(refuse_internal, parse_body(CHAT, body))


def test_null_and_text_that_only_mentions_a_field_pass() -> None:
    refuse_internal(parse_body(CHAT, b'{"bootstrap_host": null, "messages": [{"bootstrap_room": 1}]}'))
    refuse_internal(parse_body(GENERATE, json.dumps({"text": '"bootstrap_host": "x"'}).encode()))


@pytest.mark.parametrize("named", ["-1", "abc", "", "1,2", "1.0", "²", "9999999", "0x1", "+1", "1 2"])
def test_a_rank_header_that_is_no_rank_is_refused(named: str) -> None:
    assert "x-data-parallel-rank" in refusal(
        client_rank_of, CHAT, {"x-data-parallel-rank": named}, parse_body(CHAT, b"{}")
    )


@pytest.mark.parametrize("value", ["-1", '"3"', "1.5", "true", "[0]", "{}", "1e400"])
@pytest.mark.parametrize("name", ["routed_dp_rank", "data_parallel_rank"])
def test_a_rank_field_that_is_no_rank_is_refused(name: str, value: str) -> None:
    """ "3" too: an engine's lax parser would read it as 3, past every check of ours."""
    body = parse_body(GENERATE, b'{"%b": %b}' % (name.encode(), value.encode()))
    assert "routed_dp_rank" in refusal(client_rank_of, GENERATE, {}, body)


def test_the_header_beats_the_body_and_generate_reads_only_the_body() -> None:
    header = {"x-data-parallel-rank": " 2 "}
    body = b'{"routed_dp_rank": 1}'
    assert client_rank_of(CHAT, header, parse_body(CHAT, body)) == 2
    assert client_rank_of(GENERATE, header, parse_body(GENERATE, body)) == 1
    assert client_rank_of(GENERATE, {"x-data-parallel-rank": "zzz"}, parse_body(GENERATE, b"{}")) is None
