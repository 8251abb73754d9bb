"""The bytes each leg receives, against values written by hand from SGLang 0.5.23's PDRoutingFields and GenerateReqInput
and vLLM 0.32's kv_transfer_params."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.pairs.dialects import DIALECTS, MAX_ROOM, Meeting, SglangDialect, VllmDialect, fresh_rooms

ROOM = 5_123_456_789_012_345_678
ONE = Meeting("10.0.0.7", 8998)
RANKED = Meeting("10.0.0.7", 8998, prefill_rank=1, prefill_ranks=2, decode_rank=3)


class Rooms(random.Random):
    """Draws these."""

    def __init__(self, *rooms: int) -> None:
        super().__init__()
        self.left = list(rooms)

    def randint(self, a: int, b: int) -> int:
        drawn = self.left.pop(0)
        assert a <= drawn <= b
        return drawn


def legs(meeting: Meeting, body: bytes, *rooms: int) -> tuple[bytes, bytes]:
    dialect = SglangDialect(meeting, Rooms(*rooms))
    return dialect.prefill(body), dialect.decode(body, b"")


@pytest.mark.parametrize(
    ("meeting", "body", "rooms", "prefill", "decode"),
    [
        (
            ONE,
            b'{"model":"m","prompt":"hi"}',
            (ROOM,),
            b'{"bootstrap_host":"10.0.0.7","bootstrap_port":8998,"bootstrap_room":5123456789012345678,'
            b'"model":"m","prompt":"hi"}',
            b'{"bootstrap_host":"10.0.0.7","bootstrap_port":8998,"bootstrap_room":5123456789012345678,'
            b'"model":"m","prompt":"hi"}',
        ),
        (
            ONE,
            b'{ "messages": [], "stream" : true, "stream_options": {"include_usage": true} }',
            (ROOM,),
            b'{"bootstrap_host":"10.0.0.7","bootstrap_port":8998,"bootstrap_room":5123456789012345678,'
            b' "messages": [], "stream" : false, "stream_options": null }',
            b'{"bootstrap_host":"10.0.0.7","bootstrap_port":8998,"bootstrap_room":5123456789012345678,'
            b' "messages": [], "stream" : true, "stream_options": {"include_usage": true} }',
        ),
        (
            RANKED,
            b'{"text":"hi"}',
            (20,),
            b'{"bootstrap_host":"10.0.0.7","bootstrap_port":8998,"bootstrap_room":41,"disagg_prefill_dp_rank":1,'
            b'"routed_dp_rank":1,"text":"hi"}',
            b'{"bootstrap_host":"10.0.0.7","bootstrap_port":8998,"bootstrap_room":41,"disagg_prefill_dp_rank":1,'
            b'"routed_dp_rank":3,"text":"hi"}',
        ),
        (
            Meeting("fd00::7", 8998, prompts=3),
            b'{"text":["a","b","c"]}',
            (7, 5, 9),
            b'{"bootstrap_host":["fd00::7","fd00::7","fd00::7"],"bootstrap_port":[8998,8998,8998],'
            b'"bootstrap_room":[7,5,9],"text":["a","b","c"]}',
            b'{"bootstrap_host":["fd00::7","fd00::7","fd00::7"],"bootstrap_port":[8998,8998,8998],'
            b'"bootstrap_room":[7,5,9],"text":["a","b","c"]}',
        ),
        (
            Meeting("h", 1, prefill_rank=1, prefill_ranks=2, client_named_rank=True),
            b'{"routed_dp_rank":1,"text":"hi"}',
            (0,),
            b'{"bootstrap_host":"h","bootstrap_port":1,"bootstrap_room":1,"disagg_prefill_dp_rank":1,'
            b'"routed_dp_rank":1,"text":"hi"}',
            b'{"bootstrap_host":"h","bootstrap_port":1,"bootstrap_room":1,"disagg_prefill_dp_rank":1,'
            b'"routed_dp_rank":0,"text":"hi"}',
        ),
    ],
    ids=["completion", "streamed chat", "both sides ranked", "a batch, IPv6", "the client named the prefill rank"],
)
def test_the_bytes_of_both_sglang_legs(
    meeting: Meeting, body: bytes, rooms: tuple[int, ...], prefill: bytes, decode: bytes
) -> None:
    assert legs(meeting, body, *rooms) == (prefill, decode)


def test_the_bytes_of_both_vllm_legs() -> None:
    body = b'{"model":"m","prompt":"hi","max_tokens":50,"stream":true,"stream_options":{"include_usage":true}}'
    dialect = VllmDialect(Meeting("10.0.0.7", None), random.Random(1))
    assert dialect.prefill(body) == (
        b'{"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,'
        b'"remote_block_ids":null,"remote_host":null,"remote_port":null},"model":"m","prompt":"hi","max_tokens":1,'
        b'"stream":false,"stream_options":null}'
    )
    answer = b'{"id":"x","choices":[],"kv_transfer_params":{"do_remote_prefill":true,"remote_block_ids":[[1, 2]]}}'
    assert dialect.decode(body, answer) == (
        b'{"kv_transfer_params":{"do_remote_prefill":true,"remote_block_ids":[[1, 2]]},' + body[1:]
    )


def test_a_vllm_chat_with_the_newer_limit_computes_one_token_only() -> None:
    made = json.loads(
        VllmDialect(ONE, random.Random(1)).prefill(b'{"messages":[],"max_completion_tokens":9,"min_tokens":4}')
    )
    assert (made["max_tokens"], made["max_completion_tokens"], made["min_tokens"]) == (1, 1, 0)


@pytest.mark.parametrize(
    "answer", [b"", b"{}", b"[1]", b'{"kv_transfer_params":null}', b'{"kv_transfer_params":[]}', b"\xff"]
)
def test_a_vllm_answer_that_hands_nothing_over_says_what_to_look_at(answer: bytes) -> None:
    with pytest.raises(ValueError, match="KV connector"):
        VllmDialect(ONE, random.Random(1)).decode(b"{}", answer)


meetings = st.integers(1, 64).flatmap(
    lambda ranks: st.builds(
        Meeting,
        st.sampled_from(["10.0.0.1", "fd00::1", "engine-0.svc"]),
        st.integers(1, 65535),
        st.none() if ranks == 1 else st.integers(0, ranks - 1),
        st.just(ranks),
        st.none() | st.integers(0, 63),
        st.integers(1, 16),
        st.booleans(),
    )
)


@given(meetings, st.integers(0, 2**32))
def test_rooms_are_in_the_engines_range_distinct_and_of_the_prefill_rank(meeting: Meeting, seed: int) -> None:
    """0 means no room, and int64 is what keeps them; room modulo ranks is the rank older engines assume."""
    rooms = fresh_rooms(meeting, random.Random(seed))
    assert len(set(rooms)) == meeting.prompts
    assert all(1 <= room <= MAX_ROOM for room in rooms)
    if meeting.prefill_rank is not None:
        assert {room % meeting.prefill_ranks for room in rooms} == {meeting.prefill_rank}


def test_rooms_of_a_large_batch_are_drawn_in_a_moment() -> None:
    """A body of 200 KB can hold so many prompts, and the loop waits for them."""
    began = time.process_time()
    rooms = fresh_rooms(Meeting("h", 1, prompts=50_000), random.Random(1))
    assert len(set(rooms)) == 50_000
    assert time.process_time() - began < 5.0, "each was compared with all the others"


def test_a_second_pair_for_the_same_request_meets_in_another_room() -> None:
    rng = random.Random(5)
    rooms = [SglangDialect(RANKED, rng).rooms[0] for _ in range(500)]
    assert len(set(rooms)) == 500


bodies = st.dictionaries(
    st.text(max_size=8) | st.sampled_from(["stream", "routed_dp_rank", "bootstrap_room", "model"]),
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.lists(st.integers(), max_size=3),
    max_size=6,
)


@given(meetings, bodies, st.sampled_from(sorted(DIALECTS)))
def test_all_else_of_any_body_stays_as_the_client_wrote_it(
    meeting: Meeting, fields: dict[str, Any], dialect: str
) -> None:
    body = json.dumps(fields).encode()
    made = DIALECTS[dialect](meeting, random.Random(1))
    answer = b'{"kv_transfer_params":{"a":1}}' if dialect == "vllm" else b""
    ours = {"stream", "stream_options", "routed_dp_rank", "disagg_prefill_dp_rank", "kv_transfer_params", "max_tokens"}
    ours |= {"bootstrap_host", "bootstrap_port", "bootstrap_room", "max_completion_tokens", "min_tokens"}
    for leg in (made.prefill(body), made.decode(body, answer)):
        read = json.loads(leg)
        assert {k: v for k, v in read.items() if k not in ours} == {k: v for k, v in fields.items() if k not in ours}
    if dialect == "sglang":
        one, other = json.loads(made.prefill(body)), json.loads(made.decode(body, b""))
        for name in ("bootstrap_host", "bootstrap_port", "bootstrap_room", "disagg_prefill_dp_rank"):
            assert one.get(name) == other.get(name)
