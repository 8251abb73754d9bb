"""The replay wire and its budget."""

from __future__ import annotations

import pytest

from router.stream.replay import END_SEQ, Recovery, ReplayBatch, StreamLimits, decode_reply, encode_request
from tests.captures import capture, names

SEQ = (7).to_bytes(8, "big")


def test_a_request_is_an_empty_delimiter_and_eight_bytes() -> None:
    assert encode_request(258) == [b"", b"\0\0\0\0\0\0\x01\x02"]


@pytest.mark.parametrize("frames", [[b"", SEQ, b"x"], [b"", b"", SEQ, b"x"], [b"", b"kv@worker", SEQ, b"x"]])
def test_both_reply_forms_are_read(frames: list[bytes]) -> None:
    """Case 21: [seq, payload] and [topic, seq, payload]."""
    assert decode_reply(frames) == ReplayBatch(7, b"x")


@pytest.mark.parametrize(
    "frames",
    [[], [b""], [b"", SEQ], [SEQ, b"x"], [b"", SEQ[:4], b"x"], [b"x", SEQ, b"x"], [b"", b"", b"", SEQ, b"x"]],
)
def test_other_shapes_are_no_reply(frames: list[bytes]) -> None:
    assert decode_reply(frames) is None


@pytest.mark.parametrize("name", names())
def test_recorded_replies_give_what_was_published(name: str) -> None:
    recorded = capture(name)
    published = {frame.seq: frame.payload for frame in recorded.frames}
    ends = 0
    for reply in recorded.replies:
        batch = decode_reply(reply.frames)
        assert batch is not None
        if batch.seq == END_SEQ:
            ends += 1
        else:
            assert published[batch.seq] == batch.payload
            assert batch.seq >= reply.request_seq
    assert ends == len({reply.request_seq for reply in recorded.replies})


def test_progress_renews_the_budget_and_stalls_or_time_spend_it() -> None:
    limits = StreamLimits(replay_stalls=2, replay_quiet_s=1.0, replay_total_s=10.0)
    recovery = Recovery("gap", 0.0)
    recovery.asked(1, 0.0)
    assert recovery.deadline_s(limits) == 1.0
    assert not recovery.spent(limits, 1.0)
    recovery.progressed = True
    assert not recovery.spent(limits, 2.0)
    recovery.asked(2, 2.0)
    assert not recovery.spent(limits, 3.0)
    assert recovery.spent(limits, 4.0)
    recovery.asked(3, 9.5)
    recovery.progressed = True
    assert recovery.deadline_s(limits) == 10.0
    assert recovery.spent(limits, 10.0)
