"""One simulated rank: the scheduler model of router.engine.scheduler, in stretches instead of steps.

Between two admissions or finishes nothing changes but the growing KV, so many decode steps are one stretch whose length
has a closed form: a trace of 12,000 requests costs some 60,000 stretches instead of over a million steps. A test holds
its times equal to the step-by-step scheduler's. One difference is meant: pages for the whole output are taken at
admission, not one by one.

A rank may have a host tier: what becomes resident is copied there as well (write-through), stays when the GPU evicts
it, and is read back, at `host_read_s` a token, before the rest of a prompt is computed.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from router.bench.sim.trace import TraceRequest
from router.contract.events import Tier
from router.engine.radix import CacheEvent, Node, RadixCache
from router.engine.timing import TimingProfile
from router.hashing import Namespace

NAMESPACE = Namespace()
IDLE_S = math.inf


@dataclass(slots=True, eq=False)
class Job:
    """One request on its way through a rank. Times in seconds, None until they happened."""

    request: TraceRequest
    number: int
    on_first_token: Callable[[], None] = lambda: None
    on_finish: Callable[[], None] = lambda: None
    submitted_s: float = 0.0
    first_token_s: float | None = None
    finished_s: float | None = None
    cached_tokens: int = 0
    """Not computed: resident on the GPU or read back from the host."""
    host_tokens: int = 0
    """Those of them that were read back."""
    computed_tokens: int = 0
    waiting_tokens: int = 0
    chunk_tokens: int = 0
    total_pages: int = 0
    tree_pages: int = 0
    own_pages: int = 0
    node: Node | None = None


@dataclass(slots=True)
class _Stretch:
    """What runs now: one step with prefill in it (`steps` 1), or `steps` decode steps."""

    start_s: float
    end_s: float
    steps: int
    decode_only: bool


@dataclass(slots=True, eq=False)
class SimRank:
    """`next_s` is when the present stretch ends: call `advance` then, and again after every `submit` that moved it."""

    timing: TimingProfile
    width: int
    cache: RadixCache
    host: RadixCache | None = None
    host_read_s: float = 0.0
    next_s: float = IDLE_S
    waiting: deque[Job] = field(default_factory=deque)
    waiting_uncached_tokens: int = 0
    prefilled_tokens: int = 0
    prefill_busy_s: float = 0.0
    kv_tokens: int = 0
    _prefilling: list[Job] = field(default_factory=list)
    _decoding: list[tuple[int, int, Job]] = field(default_factory=list)
    _steps: int = 0
    _stretch: _Stretch | None = None
    _blocked: bool = False
    _output_keys: int = -1

    @property
    def running(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    @property
    def queued_uncached_tokens(self) -> int:
        """Prompt tokens that wait for prefill, those of half prefilled prompts too (as SGLang 0.5.23 reports it)."""
        begun = sum(job.request.prompt_tokens - job.computed_tokens for job in self._prefilling)
        return self.waiting_uncached_tokens + begun

    @property
    def kv_used(self) -> float:
        """Share of the cache that running requests hold."""
        return (self.cache.pinned_pages + self.cache.private_pages) / self.cache.capacity_pages

    def submit(self, job: Job, now_s: float) -> None:
        """Queues a job. Raises ValueError when prompt and output exceed the whole cache."""
        request = job.request
        pages = -(-(request.prompt_tokens + request.output_tokens) // self.width)
        job.total_pages = max(len(request.keys), pages)
        if job.total_pages > self.cache.capacity_pages:
            raise ValueError(
                f"a request of {request.prompt_tokens + request.output_tokens} tokens is over one rank's capacity"
            )
        job.submitted_s = now_s
        cached = self._reusable_pages(request.keys) * self.width
        job.waiting_tokens = max(1, request.prompt_tokens - cached)
        self.waiting_uncached_tokens += job.waiting_tokens
        self.waiting.append(job)
        if self._stretch is None:
            self._plan(now_s)
        elif self._stretch.decode_only and not self._blocked:
            self._cut(self._stretch, now_s)

    def _reusable_pages(self, keys: Sequence[int]) -> int:
        """Pages of the prefix that need not be computed, on the GPU or on the host."""
        pages = self.cache.peek(NAMESPACE, keys)
        return pages if self.host is None else max(pages, self.host.peek(NAMESPACE, keys))

    def advance(self, now_s: float) -> None:
        """Ends the stretch that was due at `now_s` and plans the next."""
        stretch = self._stretch
        assert stretch is not None
        self._steps += stretch.steps
        self.kv_tokens += stretch.steps * len(self._decoding)
        while self._decoding and self._decoding[0][0] <= self._steps:
            self._finish(heapq.heappop(self._decoding)[2], now_s)
        if self._prefilling:
            self._prefilling = [job for job in self._prefilling if self._computed(job, now_s)]
        self._plan(now_s)

    def take_events(self) -> list[tuple[Tier, CacheEvent]]:
        """What the caches announced since the last call."""
        host = [] if self.host is None else self.host.take_events()
        return [(Tier.GPU, event) for event in self.cache.take_events()] + [(Tier.CPU_PINNED, event) for event in host]

    def _plan(self, now_s: float) -> None:
        timing = self.timing
        decoding = len(self._decoding)
        budget = max(0, timing.chunk_tokens - decoding)
        prefill_s = 0.0
        for job in self._prefilling:
            budget, prefill_s = self._chunk(job, budget, prefill_s)
        self._blocked = False
        while budget and self.waiting and self.running < timing.max_running:
            if not self._admit(self.waiting[0]):
                break
            job = self.waiting.popleft()
            self._prefilling.append(job)
            budget, prefill_s = self._chunk(job, budget, prefill_s)
        self._blocked = bool(self.waiting)
        if self._prefilling:
            length_s = timing.step_s(prefill_s, decoding, self.kv_tokens)
            self.prefill_busy_s += prefill_s + timing.step_overhead_s
            self._stretch = _Stretch(now_s, now_s + length_s, 1, decode_only=False)
        elif decoding:
            steps = self._decoding[0][0] - self._steps
            self._stretch = _Stretch(now_s, now_s + self._decode_s(steps), steps, decode_only=True)
        else:
            self._stretch = None
        self.next_s = self._stretch.end_s if self._stretch is not None else IDLE_S

    def _decode_s(self, steps: int) -> float:
        """Length of `steps` decode steps from here: each has one KV token a sequence more than the one before."""
        decoding = len(self._decoding)
        growth = self.timing.per_kv_token_s * decoding * steps * (steps - 1) / 2
        return steps * self.timing.step_s(0.0, decoding, self.kv_tokens) + growth

    def _cut(self, stretch: _Stretch, now_s: float) -> None:
        """Lets the stretch end with the step that runs at `now_s`: the new job is looked at before the next."""
        first_s = self.timing.step_s(0.0, len(self._decoding), self.kv_tokens)
        growth_s = self.timing.per_kv_token_s * len(self._decoding)
        elapsed_s = now_s - stretch.start_s
        half = first_s - growth_s / 2
        steps = max(1, math.ceil(2 * elapsed_s / (half + math.sqrt(half * half + 2 * growth_s * elapsed_s)) - 1e-9))
        while stretch.start_s + self._decode_s(steps) < now_s:
            steps += 1
        if steps < stretch.steps:
            stretch.steps, stretch.end_s = steps, stretch.start_s + self._decode_s(steps)
            self.next_s = stretch.end_s

    def _admit(self, job: Job) -> bool:
        reusable = self._reusable_pages(job.request.keys)
        found = self.cache.match(NAMESPACE, job.request.keys)
        self.cache.pin(found.node)
        need = job.total_pages - found.pages
        if not self.cache.allocate(need):
            self.cache.unpin(found.node)
            return False
        job.node, job.tree_pages, job.own_pages = found.node, found.pages, need
        job.cached_tokens = job.computed_tokens = min(reusable * self.width, job.request.prompt_tokens - 1)
        job.host_tokens = max(0, job.cached_tokens - found.pages * self.width)
        self.kv_tokens += job.cached_tokens
        self.waiting_uncached_tokens -= job.waiting_tokens
        return True

    def _chunk(self, job: Job, budget: int, prefill_s: float) -> tuple[int, float]:
        job.chunk_tokens = min(budget, job.request.prompt_tokens - job.computed_tokens)
        end = job.computed_tokens + job.chunk_tokens
        if job.computed_tokens == job.cached_tokens:  # its first chunk
            prefill_s += job.host_tokens * self.host_read_s
        return budget - job.chunk_tokens, prefill_s + self.timing.prefill_s(job.chunk_tokens, end)

    def _computed(self, job: Job, now_s: float) -> bool:
        """Applies the job's chunk; False when its prefill is over."""
        request = job.request
        job.computed_tokens += job.chunk_tokens
        self.prefilled_tokens += job.chunk_tokens
        self.kv_tokens += job.chunk_tokens
        if job.computed_tokens < request.prompt_tokens:
            self._make_resident(job, list(request.keys[: job.computed_tokens // self.width]))
            return True
        self._make_resident(job, list(request.keys))
        job.first_token_s = now_s
        job.on_first_token()
        self.kv_tokens += 1
        if request.output_tokens <= 1:
            self._finish(job, now_s)
        else:
            heapq.heappush(self._decoding, (self._steps + request.output_tokens - 1, job.number, job))
        return False

    def _make_resident(self, job: Job, keys: list[int]) -> None:
        if len(keys) <= job.tree_pages:
            return
        found = self.cache.insert(NAMESPACE, keys, b"")
        self.cache.release(found.pages - job.tree_pages)
        job.own_pages -= len(keys) - job.tree_pages
        assert job.node is not None
        self.cache.pin(found.node)
        self.cache.unpin(job.node)
        job.node, job.tree_pages = found.node, len(keys)
        if self.host is not None:
            _copy(self.host, keys)

    def _finish(self, job: Job, now_s: float) -> None:
        request = job.request
        self.kv_tokens -= request.prompt_tokens + request.output_tokens
        full_pages = (request.prompt_tokens + request.output_tokens - 1) // self.width
        if full_pages > len(request.keys):
            first = self._output_keys
            self._output_keys -= full_pages - len(request.keys)
            self._make_resident(job, [*request.keys, *range(first, self._output_keys, -1)])
        else:
            self.cache.match(NAMESPACE, request.keys)  # its prefix was used until now
        self.cache.release(job.own_pages)
        assert job.node is not None
        self.cache.unpin(job.node)
        job.node, job.own_pages = None, 0
        job.finished_s = now_s
        job.on_finish()


def _copy(host: RadixCache, keys: list[int]) -> None:
    """Keeps a copy of the chain, as far as the host has room for it at all."""
    keys = keys[: host.capacity_pages]
    found = host.match(NAMESPACE, keys)
    host.pin(found.node)
    host.allocate(len(keys) - found.pages)
    host.insert(NAMESPACE, keys, b"")
    host.unpin(found.node)
