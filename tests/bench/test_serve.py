"""`bench serve` gives the promised shape over real processes; its speed is for people to judge."""

from __future__ import annotations

import io
import sys

import pytest
from rich.console import Console

from router.bench.serve import SCENARIOS, BenchFailure, print_table, run
from router.bench.serve_bodies import CONVERSATIONS, PREFIX_BYTES, TAIL_BYTES, TURNS, long_prompt, small_body, turn_body

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def test_result_has_the_promised_shape_and_is_printed() -> None:
    result = run(0.5)
    for key in ("cpu_us", "requests_per_s", "cached_share"):
        assert list(result[key]) == list(SCENARIOS)
    assert all(us > 0 for us in result["cpu_us"].values())
    assert result["errors"] == 0
    assert result["prompt_tokens_match"], "every prompt's ids were made here, and counted as the engine counts them"
    assert 0.6 < result["cached_share"]["chat_32k"] < 0.8, "the shared 24 KB of 32 were found"
    assert result["cached_share"]["small"] == 0
    out = io.StringIO()
    print_table(result, Console(file=out, width=120))
    assert f"{result['cpu_us']['turns']:,} µs" in out.getvalue()
    assert "less work" not in out.getvalue()
    print_table(result | {"prompt_tokens_match": False}, Console(file=out, width=120))
    assert "less work" in out.getvalue()


def test_it_says_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(BenchFailure, match="only Linux"):
        run(0.1)


def test_no_two_requests_are_alike_and_sizes_are_as_said() -> None:
    bodies = [small_body(n) for n in range(500)] + [long_prompt(n) for n in range(50)]
    assert len(set(bodies)) == len(bodies)
    assert len(small_body(1)) < 250
    assert PREFIX_BYTES + TAIL_BYTES < len(long_prompt(1)) < PREFIX_BYTES + TAIL_BYTES + 400


def test_conversations_grow_from_turn_to_turn_and_then_begin_anew() -> None:
    first, second = turn_body(3), turn_body(3 + CONVERSATIONS)
    assert second.startswith(first[:-3])
    last = turn_body(3 + CONVERSATIONS * (TURNS - 1))
    assert 30_000 < len(last) < 36_000
    anew = turn_body(3 + CONVERSATIONS * TURNS)
    assert len(anew) == len(first)
    assert anew != first
