"""The scheduler in virtual time: no test waits, `now` is a number."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from router.engine.radix import RadixCache, Removed, Stored
from router.engine.scheduler import DoesNotFit, Request, Scheduler
from router.engine.timing import TimingProfile
from router.engine.wire import PageHasher
from router.hashing import Namespace, pack_ids

WIDTH = 4
FLAT = TimingProfile(
    prefill_tokens_per_s=100.0,
    attention_context_tokens=1e18,
    step_overhead_s=0.0,
    decode_step_s=0.5,
    per_sequence_s=0.0,
    per_kv_token_s=0.0,
    chunk_tokens=100,
    max_running=8,
)


def scheduler(pages: int = 100, timing: TimingProfile = FLAT, *, bigram: bool = False) -> Scheduler:
    made = Scheduler(RadixCache(pages), PageHasher(WIDTH, bigram=bigram), timing)
    made.cache.take_events()
    return made


def request(tokens: int | list[int], output: int = 1, rid: str = "r", namespace: Namespace | None = None) -> Request:
    ids = list(range(1, tokens + 1)) if isinstance(tokens, int) else tokens
    return Request(rid, pack_ids(ids), namespace or Namespace(), output, lambda i: 1000 + i)


def run(engine: Scheduler, now_s: float = 0.0) -> float:
    """Step until idle; the time then."""
    while (step_s := engine.begin_step(now_s)) is not None:
        now_s += step_s
        engine.end_step(now_s)
    return now_s


def stored_pages(engine: Scheduler) -> list[int]:
    return [len(event.keys) for event in engine.cache.take_events() if isinstance(event, Stored)]


def test_the_first_token_comes_after_queue_and_prefill_and_each_next_one_after_a_decode_step() -> None:
    engine, first, second = scheduler(), request(100, 3), request([7] * 50, 1)
    engine.submit(first, 0.0)
    engine.submit(second, 0.0)
    run(engine)
    assert first.first_token_s == 1.0  # 100 tokens at 100 a second fill the first chunk
    assert second.first_token_s == 1.5  # waited for it, then shared its step with the first decode
    assert (first.output, first.finished_s) == ([1000, 1001, 1002], 2.0)


def test_only_uncached_tokens_are_prefilled_and_the_last_prompt_token_always_is() -> None:
    """Engine contract, section 2: cached = floor((n − 1) / block) × block at most."""
    engine = scheduler()
    for expected in (0, 36):
        again = request(40)
        engine.submit(again, 0.0)
        run(engine)
        assert again.cached_tokens == expected
    assert engine.load().total_prefill_uncached_tokens == 40 + 4


def test_a_bigram_engine_recomputes_one_token_more() -> None:
    engine = scheduler(bigram=True)
    for expected in (0, 36):
        again = request(41)
        engine.submit(again, 0.0)
        run(engine)
        assert again.cached_tokens == expected  # floor(39 / 4) pages, not floor(40 / 4)


def test_a_long_prompt_is_published_chunk_by_chunk() -> None:
    engine = scheduler()
    engine.submit(request(250), 0.0)
    steps = []
    now_s = 0.0
    while (step_s := engine.begin_step(now_s)) is not None:
        now_s += step_s
        engine.end_step(now_s)
        steps.append((round(step_s, 6), stored_pages(engine)))
    assert steps == [(1.0, [25]), (1.0, [25]), (0.5, [12])]


def test_output_pages_appear_at_the_end_without_the_last_sampled_token() -> None:
    """Engine contract, section 2: output tokens are published at finish, page-aligned, never a partial page."""
    for output, pages in ((4, []), (5, [1]), (8, [1]), (9, [2])):
        engine = scheduler()
        engine.submit(request(8, output), 0.0)
        engine.end_step(engine.begin_step(0.0) or 0.0)
        assert stored_pages(engine) == [2]
        run(engine)
        assert stored_pages(engine) == pages


def test_an_aborted_request_publishes_what_it_computed_and_frees_the_rest() -> None:
    engine, victim = scheduler(), request(8, 90)
    engine.submit(victim, 0.0)
    for _ in range(6):
        engine.begin_step(0.0)
        engine.end_step(0.0)
    engine.begin_step(0.0)
    engine.abort(victim, 0.0)
    engine.end_step(0.0)
    assert (victim.finish, len(victim.output)) == ("abort", 6)
    assert sum(stored_pages(engine)) == 3  # 8 prompt tokens and 5 of the 6 output tokens make 3 full pages
    assert engine.load().kv_tokens_used == 0
    assert engine.flush()


def test_a_waiting_request_is_aborted_at_once() -> None:
    engine, victim = scheduler(), request(8)
    engine.submit(victim, 0.0)
    engine.abort(victim, 1.0)
    assert victim.finish == "abort"
    assert engine.begin_step(1.0) is None


def test_the_head_of_the_queue_blocks_those_behind_it_until_it_fits() -> None:
    engine = scheduler(pages=20)
    running, big, small = request([1] * 40, 8), request([2] * 60, 1), request([3] * 4, 1)
    for each in (running, big, small):
        engine.submit(each, 0.0)
    run(engine)
    assert running.finished_s is not None
    assert big.admitted_s == running.finished_s
    assert small.admitted_s == running.finished_s


def test_what_can_never_fit_is_refused() -> None:
    with pytest.raises(DoesNotFit, match="one rank holds 80"):
        scheduler(pages=20).submit(request(70, 11), 0.0)


def test_the_removal_precedes_the_store_that_needed_the_room() -> None:
    engine = scheduler(pages=10)
    engine.submit(request([1] * 32), 0.0)
    run(engine)
    engine.cache.take_events()
    engine.submit(request([2] * 32), 0.0)
    run(engine)
    assert [type(event) for event in engine.cache.take_events()] == [Removed, Stored]


def test_two_equal_prompts_at_once_are_stored_once_and_the_duplicate_is_freed() -> None:
    engine = scheduler()
    engine.submit(request(40), 0.0)
    engine.submit(request(40), 0.0)
    run(engine)
    assert stored_pages(engine) == [10]
    assert engine.load().kv_tokens_used == 0


def test_no_more_than_max_running_run() -> None:
    engine = scheduler()
    for i in range(10):
        engine.submit(request([i] * 4, 2), 0.0)
    engine.begin_step(0.0)
    load = engine.load()
    assert (load.running, load.waiting) == (8, 2)
    assert load.waiting_uncached_tokens == 2 * 4 + 8 * 4, "what is being prefilled counts until it is done"


def test_a_request_without_output_ends_with_its_prefill() -> None:
    engine, empty = scheduler(), request(8, 0)
    engine.submit(empty, 0.0)
    run(engine)
    assert (empty.finish, empty.output) == ("length", [])


def test_load_counters_give_the_real_prefill_speed() -> None:
    """Engine contract, section 4: the differences of the two cumulative counters."""
    engine = scheduler(pages=1000)
    engine.submit(request(1000), 0.0)
    run(engine)
    load = engine.load()
    assert load.total_prefill_uncached_tokens / load.total_prefill_busy_s == pytest.approx(100.0)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 60), st.integers(0, 12), st.integers(0, 15)),
        min_size=1,
        max_size=12,
    )
)
def test_any_mix_of_requests_ends_with_no_page_lost(jobs: list[tuple[int, int, int, int]]) -> None:
    """(family of prompts, prompt length, output length, step at which it is aborted; 0: never)."""
    engine = scheduler(pages=24)
    requests = [request([family, *range(length)], output) for family, length, output, _ in jobs]
    for each in requests:
        engine.submit(each, 0.0)
    for step in range(1, 2000):
        if engine.begin_step(float(step)) is None:
            break
        for each, (_, _, _, abort_at) in zip(requests, jobs, strict=True):
            if abort_at == step and each.finish is None:
                engine.abort(each, float(step))
        assert engine.cache.free_pages >= 0
        engine.end_step(float(step))
    assert all(each.finish is not None for each in requests)
    assert engine.cache.private_pages == engine.cache.pinned_pages == 0
    assert engine.load().kv_tokens_used == 0
    assert all(each.cached_tokens < each.prompt_tokens for each in requests)
