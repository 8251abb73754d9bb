"""The simulated rank against the step-by-step scheduler of router.engine, and against what can be computed by hand."""

from __future__ import annotations

import random
from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from router.bench.sim.rank import IDLE_S, Job, SimRank
from router.bench.sim.trace import TraceRequest
from router.contract.events import Tier
from router.engine.radix import RadixCache, Removed, Stored
from router.engine.scheduler import Request, Scheduler
from router.engine.timing import TimingProfile
from router.engine.wire import PageHasher
from router.hashing import NO_NAMESPACE, pack_ids

WIDTH = 16
TIMING = TimingProfile(chunk_tokens=64, max_running=6)


@dataclass(frozen=True)
class Ask:
    at_s: float
    ids: tuple[int, ...]
    output_tokens: int


def simulated(asks: list[Ask], pages: int) -> list[Job]:
    rank = SimRank(TIMING, WIDTH, RadixCache(pages))
    hasher = PageHasher(WIDTH)
    jobs = []
    for number, ask in enumerate(asks):
        while rank.next_s <= ask.at_s:
            rank.advance(rank.next_s)
        keys = tuple(hasher.keys(pack_ids(ask.ids), NO_NAMESPACE))
        jobs.append(Job(TraceRequest(ask.at_s, len(ask.ids), ask.output_tokens, keys), number))
        rank.submit(jobs[-1], ask.at_s)
    while rank.next_s != IDLE_S:
        rank.advance(rank.next_s)
    assert rank.kv_tokens == 0, "every token of a finished request was given back"
    assert rank.waiting_uncached_tokens == 0
    assert rank.cache.pinned_pages == rank.cache.private_pages == 0
    return jobs


def stepped(asks: list[Ask], pages: int) -> list[Request]:
    scheduler = Scheduler(RadixCache(pages), PageHasher(WIDTH), TIMING)
    requests = [
        Request(str(i), pack_ids(ask.ids), NO_NAMESPACE, ask.output_tokens, lambda token: 10**6 + token)
        for i, ask in enumerate(asks)
    ]
    pending = list(zip(asks, requests, strict=True))
    now_s = 0.0
    while pending or scheduler.running or scheduler.waiting:
        while pending and pending[0][0].at_s <= now_s:
            scheduler.submit(pending.pop(0)[1], now_s)
        step_s = scheduler.begin_step(now_s)
        if step_s is None:
            now_s = pending[0][0].at_s
        else:
            now_s += step_s
            scheduler.end_step(now_s)
    return requests


def same_times(asks: list[Ask], pages: int) -> None:
    for job, request in zip(simulated(asks, pages), stepped(asks, pages), strict=True):
        assert job.cached_tokens == request.cached_tokens
        assert job.first_token_s == pytest.approx(request.first_token_s, abs=1e-9)
        assert job.finished_s == pytest.approx(request.finished_s, abs=1e-9)


def asks_of(rng: random.Random, count: int, *, shared: bool) -> list[Ask]:
    made, at_s = [], 0.0
    for number in range(count):
        at_s += rng.expovariate(20)
        tail = rng.randrange(1, 16) + 16 * rng.randrange(0, 12)
        head = tuple(range(16 * rng.randrange(0, 6))) if shared else ()
        ids = (*head, *(1000 * (number + 1) + i for i in range(tail)))
        made.append(Ask(at_s, ids if len(ids) % WIDTH else ids[:-1], rng.randrange(1, 60)))
    return made


@given(seed=st.integers(0, 10**6), count=st.integers(1, 30))
@settings(max_examples=40, deadline=None)
def test_times_and_cached_tokens_equal_the_step_by_step_schedulers(seed: int, count: int) -> None:
    same_times(asks_of(random.Random(seed), count, shared=True), pages=4000)


@given(seed=st.integers(0, 10**6), count=st.integers(1, 30))
@settings(max_examples=40, deadline=None)
def test_waiting_for_kv_is_the_same_as_well(seed: int, count: int) -> None:
    """Unshared prompts: where pages are taken earlier than in the engine, only what is evicted when can differ."""
    same_times(asks_of(random.Random(seed), count, shared=False), pages=40)


def test_the_first_token_of_a_lone_prompt_comes_after_its_prefill() -> None:
    asks = [Ask(0.0, tuple(range(33)), 3)]
    job = simulated(asks, 100)[0]
    prefill_s = 0.003 + 33 / 20_000 * (1 + 16.5 / 100_000)
    assert job.first_token_s == pytest.approx(prefill_s)
    first, second = 0.012 + 40e-6 + 34 * 30e-9, 0.012 + 40e-6 + 35 * 30e-9
    assert job.finished_s == pytest.approx(prefill_s + first + second)


def test_blocks_are_announced_when_prefill_ends_and_evictions_before_them() -> None:
    rank = SimRank(TIMING, WIDTH, RadixCache(4))
    seen: list[tuple[str, list[int]]] = []
    for number, keys in enumerate([(1, 2, 3), (7, 8, 9)]):
        rank.submit(Job(TraceRequest(0.0, 48, 1, keys), number), float(number))
        while rank.next_s != IDLE_S:
            rank.advance(rank.next_s)
            for _, event in rank.take_events():
                if isinstance(event, Stored | Removed):
                    seen.append((type(event).__name__, event.keys))
    assert seen == [("Stored", [1, 2, 3]), ("Removed", [1, 2, 3]), ("Stored", [7, 8, 9])]


def test_what_the_gpu_evicted_is_read_back_from_the_host_and_announced_by_tier() -> None:
    rank = SimRank(TIMING, WIDTH, RadixCache(4), RadixCache(100), host_read_s=0.001)
    jobs, seen = [], []
    for number, keys in enumerate([(1, 2, 3), (7, 8, 9), (1, 2, 3)]):
        jobs.append(Job(TraceRequest(0.0, 48, 1, keys), number))
        rank.submit(jobs[-1], float(number))
        while rank.next_s != IDLE_S:
            rank.advance(rank.next_s)
        seen.append([(tier, event.keys) for tier, event in rank.take_events() if isinstance(event, Stored)])
    assert [(job.cached_tokens, job.host_tokens) for job in jobs] == [(0, 0), (0, 0), (47, 47)]
    assert jobs[2].first_token_s == pytest.approx(2.0 + 0.003 + 47 * 0.001 + TIMING.prefill_s(1, 48))
    assert seen[0] == [(Tier.GPU, [1, 2, 3]), (Tier.CPU_PINNED, [1, 2, 3])]
    assert seen[2] == [(Tier.GPU, [1, 2, 3])], "the host has its copy still"


def test_a_host_smaller_than_a_chain_keeps_the_beginning_and_the_oldest_leaves_it() -> None:
    rank = SimRank(TIMING, WIDTH, RadixCache(10), RadixCache(2))
    for number, keys in enumerate([(1, 2, 3), (7, 8, 9)]):
        rank.submit(Job(TraceRequest(0.0, 48, 1, keys), number), float(number))
        while rank.next_s != IDLE_S:
            rank.advance(rank.next_s)
    host = [event for tier, event in rank.take_events() if tier is Tier.CPU_PINNED]
    assert [event.keys for event in host if isinstance(event, Stored | Removed)] == [[1, 2], [1, 2], [7, 8]]


def test_a_backend_that_attends_anew_for_the_cached_context_takes_longer_for_it() -> None:
    fast = TimingProfile(prefill_tokens_per_s=1000.0, attention_context_tokens=1000.0)
    padded = TimingProfile(prefill_tokens_per_s=1000.0, attention_context_tokens=1000.0, cached_attention=1.0)
    assert fast.prefill_s(100, 500) == pytest.approx(0.1 * 1.45)
    assert padded.prefill_s(100, 500) == pytest.approx(0.1 * 1.45 + 400 * 400 / 2 / 1e6)
    assert padded.prefill_s(100, 100) == fast.prefill_s(100, 100)


def test_a_request_larger_than_the_cache_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity"):
        SimRank(TIMING, WIDTH, RadixCache(4)).submit(Job(TraceRequest(0.0, 64, 10, (1, 2, 3, 4)), 0), 0.0)
