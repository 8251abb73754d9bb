from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.proxy.plan import Usage
from router.proxy.usage import UsageTap
from tests.proxy.recorded import RECORDINGS

SSE, JSON = b"text/event-stream; charset=utf-8", b"application/json"
REPORTED = {
    "sgl_gen_stream": Usage(40, 0, 6),
    "sgl_chat_stream_usage": Usage(237, 224, 8),
    "sgl_chat": Usage(237, 0, 8),
    "vllm_completion_stream_usage": Usage(70, 0, 6),
    "vllm_chat_stream_usage": Usage(237, 224, 8),
    "vllm_err_too_long_stream": None,
}


def read(route: str, kind: bytes, pieces: list[bytes], coding: bytes = b"") -> Usage | None:
    tap = UsageTap(route, kind, coding)
    for piece in pieces:
        tap.feed(piece)
    return tap.result()


def cut(body: bytes, seed: int) -> list[bytes]:
    chance = random.Random(seed)
    pieces = []
    while body:
        size = chance.choice((1, 3, 50, 700))
        pieces.append(body[:size])
        body = body[size:]
    return pieces


@pytest.mark.parametrize("name", RECORDINGS)
@settings(deadline=None)
@given(seed=st.integers())
def test_what_real_engines_reported_is_found_however_it_is_cut(name: str, seed: int) -> None:
    recording = RECORDINGS[name]
    kind = SSE if b"event-stream" in recording.head else JSON
    tap = UsageTap(recording.path, kind, b"")
    for piece in cut(recording.body(), seed):
        tap.feed(piece)
    assert tap.result() == REPORTED[name]
    assert not tap.broke_off()


def test_a_batch_on_generate_is_summed() -> None:
    metas = [{"meta_info": {"prompt_tokens": n, "cached_tokens": 16, "completion_tokens": 2}} for n in (40, 20)]
    assert read("/generate", JSON, [json.dumps(metas).encode()]) == Usage(60, 32, 4)


@pytest.mark.parametrize("fillers", [1, 300])
def test_a_streamed_batch_on_generate_is_summed_over_its_prompts(fillers: int) -> None:
    """Events of the prompts interleave; the last of each counts, also when it went by long ago."""
    body = b""
    for n, at in [(1, 0), (1, 1), (2, 0), *[(9, 1)] * fillers]:
        meta: dict[str, object] = {"prompt_tokens": 5 + at, "cached_tokens": at, "completion_tokens": n}
        event = {"text": "x" * 1000, "meta_info": meta, "index": at}
        body += b"data: %b\n\n" % json.dumps(event).encode()
    assert read("/generate", SSE, cut(body + b"data: [DONE]\n\n", 7)) == Usage(11, 1, 11)


MESSAGE_START: dict[str, object] = {
    "type": "message_start",
    "message": {"usage": {"input_tokens": 5, "cache_read_input_tokens": 32}},
}
MESSAGE_DELTA: dict[str, object] = {
    "type": "message_delta",
    "delta": {"stop_reason": "end_turn"},
    "usage": {"output_tokens": 7},
}


@pytest.mark.parametrize("text_events", [3, 3000])
def test_messages_report_cached_and_uncached_apart(text_events: int) -> None:
    """Anthropic's input_tokens leave the cached ones out; a stream says them first and the output last."""
    text: dict[str, object] = {"type": "content_block_delta", "delta": {"text": '"message_start" "usage" ' * 3}}
    events: list[dict[str, object]] = [MESSAGE_START, *[text] * text_events, MESSAGE_DELTA, {"type": "message_stop"}]
    tap = UsageTap("/v1/messages", SSE, b"")
    for event in events:
        assert tap.broke_off()
        tap.feed(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode())
        assert tap._held_bytes <= 130 << 10
    assert not tap.broke_off()
    assert tap.result() == Usage(37, 32, 7)
    whole = {"type": "message", "usage": {"input_tokens": 5, "output_tokens": 2}}
    assert read("/v1/messages", JSON, [json.dumps(whole).encode()]) == Usage(5, None, 2)


def test_the_responses_api_names_tokens_otherwise() -> None:
    usage = {"input_tokens": 9, "input_tokens_details": {"cached_tokens": 8}, "output_tokens": 1}
    event = b"data: %b\n\n" % json.dumps({"response": {"usage": usage}}).encode()
    assert read("/v1/responses", SSE, [event]) == Usage(9, 8, 1)


def test_text_that_looks_like_usage_is_not_believed() -> None:
    said = json.dumps({"choices": [{"text": '"usage":{"prompt_tokens":1}'}], "usage": {"prompt_tokens": 7}})
    assert read("/v1/completions", JSON, [said.encode()]) == Usage(7, None, None)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"usage":null}', b'{"usage":[1]}', b'{"usage":{"prompt_tokens":"7"}}', b"[" * 90000]
)
def test_an_odd_answer_reports_nothing(body: bytes) -> None:
    for route in ("/v1/completions", "/generate"):
        assert read(route, JSON, [body]) is None
        assert read(route, SSE, [b"data: " + body + b"\n\n"]) is None


def test_compressed_answers_are_left_alone() -> None:
    """Case 72."""
    assert read("/v1/completions", JSON, [b'{"usage":{"prompt_tokens":7}}'], coding=b"gzip") is None


def test_memory_is_bounded_and_the_last_event_still_read() -> None:
    tap = UsageTap("/v1/completions", SSE, b"")
    for _ in range(4000):
        tap.feed(b"data: " + b"x" * 1000 + b"\n\n")
        assert tap._held_bytes <= 130 << 10
    tap.feed(b'data: {"usage":{"prompt_tokens":7}}\n\ndata: [DONE]\n\n')
    assert tap.result() == Usage(7, None, None)
    large = UsageTap("/v1/completions", JSON, b"")
    for _ in range(2000):
        large.feed(b" " * 1000)
        assert large._held_bytes <= 1 << 20
    assert large.result() is None


def test_a_stream_without_its_done_mark_broke_off() -> None:
    """Case 68: a clean end is no proof of a complete stream, where the route has an end mark."""
    tap = UsageTap("/v1/completions", SSE, b"")
    tap.feed(b'data: {"choices":[]}\n\n')
    assert tap.broke_off()
    tap.feed(b"data: [DO")
    tap.feed(b"NE]\n\n")
    assert not tap.broke_off()
    unmarked = UsageTap("/v1/messages", SSE, b"")
    unmarked.feed(b"event: message_stop\n\n")
    assert not unmarked.broke_off()
