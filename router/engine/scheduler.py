"""One rank's scheduler in modelled time: FCFS, chunked prefill, decodes alongside, pages from the radix cache. No I/O.

The caller owns the clock: `begin_step` says how long the step takes, `end_step` applies what it computed. Prompt pages
become resident when their chunk ends, output pages when the request ends (without the last sampled token, whose KV
was never computed), partial pages never. A request is admitted only when its whole output fits too, so none is ever
preempted; while the first in the queue does not fit, those behind it wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from router.engine.radix import Node, RadixCache
from router.engine.timing import TimingProfile
from router.engine.wire import PageHasher
from router.hashing import Namespace, TokenIds, creditable_blocks, pack_ids, token_count


class DoesNotFit(Exception):
    """Prompt plus output are more than one rank's whole cache."""


@dataclass(slots=True, eq=False)
class Request:
    """One sequence. `sample` gives output token i; `progressed` is called after every step that moved it."""

    rid: str
    ids: TokenIds
    namespace: Namespace
    max_new_tokens: int
    sample: Callable[[int], int]
    session_id: str | None = None
    handed_cached_tokens: int | None = None
    """Its prompt was computed by a prefill engine, which had so much of it cached; None: it is computed here."""
    progressed: Callable[[Request], None] | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    output: list[int] = field(default_factory=list)
    finish: Literal["length", "abort"] | None = None
    submitted_s: float = 0.0
    admitted_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    keys: list[int] = field(default_factory=list)
    uncached_estimate_tokens: int = 0
    node: Node | None = None
    tree_pages: int = 0
    own_pages: int = 0
    promised_pages: int = 0
    chunk_tokens: int = 0
    aborting: bool = False


@dataclass(frozen=True, slots=True)
class Load:
    """The positions of a LoadStat after its name and without the rank (engine contract, section 4).

    What waits counts as uncached by what was resident when it came; of a prompt half prefilled the rest counts too, as
    SGLang 0.5.23 has it (routers that do not see it take a rank with a long prompt under way for an idle one).
    """

    running: int
    waiting: int
    kv_tokens_used: int
    kv_capacity: int
    waiting_uncached_tokens: int
    used_plus_queued_tokens: int
    max_running: int
    total_prefill_uncached_tokens: int
    total_prefill_busy_s: float


class Scheduler:
    def __init__(
        self, cache: RadixCache, hasher: PageHasher, timing: TimingProfile, *, keeps_prefixes: bool = True
    ) -> None:
        """`keeps_prefixes` False: a decode engine without a radix cache, nothing outlives its request."""
        self.cache = cache
        self._keeps_prefixes = keeps_prefixes
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self._hasher = hasher
        self._timing = timing
        self._width = hasher.scheme.width
        self._promised_pages = 0
        self._prefilled_tokens = 0
        self._prefill_busy_s = 0.0
        self._step_prefill_s = 0.0

    def held_tokens(self, ids: TokenIds, namespace: Namespace) -> int:
        """Tokens of a prompt's full pages that are resident now."""
        return self.cache.peek(namespace, self._hasher.keys(ids, namespace)) * self._width

    def capacity_tokens(self) -> int:
        return self.cache.capacity_pages * self._width

    def submit(self, request: Request, now_s: float) -> None:
        """Queue a request. Raises DoesNotFit."""
        request.prompt_tokens = token_count(request.ids)
        total = request.prompt_tokens + request.max_new_tokens
        if total > self.capacity_tokens():
            raise DoesNotFit(f"{total} tokens asked for, but one rank holds {self.capacity_tokens()}")
        request.submitted_s = now_s
        request.keys = self._hasher.keys(request.ids, request.namespace)
        cached = self.cache.peek(request.namespace, self._creditable(request)) * self._width
        request.uncached_estimate_tokens = request.prompt_tokens - cached
        self.waiting.append(request)

    def abort(self, request: Request, now_s: float) -> None:
        """End a request: at once while it waits, at the end of the current step once it runs."""
        if request.finish is None and request.admitted_s is None:
            self.waiting.remove(request)
            request.finish, request.finished_s = "abort", now_s
            self._notify([request])
        request.aborting = True

    def flush(self) -> bool:
        """Empty the cache; False while anything runs or waits."""
        if self.running or self.waiting:
            return False
        self.cache.clear()
        return True

    def begin_step(self, now_s: float) -> float | None:
        """Plan the next step. Its length in seconds, or None when there is nothing to do."""
        decoding = sum(1 for request in self.running if request.computed_tokens == request.prompt_tokens)
        budget = max(0, self._timing.chunk_tokens - decoding)
        prefill_s = 0.0
        for request in self.running:
            if request.computed_tokens < request.prompt_tokens:
                budget, prefill_s = self._plan_chunk(request, budget, prefill_s)
        while budget and self.waiting and len(self.running) < self._timing.max_running:
            if not self._admit(self.waiting[0], now_s):
                break
            request = self.waiting.popleft()
            self.running.append(request)
            budget, prefill_s = self._plan_chunk(request, budget, prefill_s)
        if not self.running:
            return None
        self._step_prefill_s = prefill_s
        kv_tokens = sum(r.computed_tokens + len(r.output) for r in self.running)
        return self._timing.step_s(prefill_s, decoding, kv_tokens)

    def end_step(self, now_s: float) -> list[Request]:
        """Apply the step that `begin_step` planned; the requests that moved on, those that finished included."""
        moved = [request for request in self.running if self._advance(request, now_s)]
        if self._step_prefill_s:
            self._prefill_busy_s += self._step_prefill_s + self._timing.step_overhead_s
        self.running = [request for request in self.running if request.finish is None]
        self._notify(moved)
        return moved

    def load(self) -> Load:
        used = (self.cache.pinned_pages + self.cache.private_pages) * self._width
        return Load(
            running=len(self.running),
            waiting=len(self.waiting),
            kv_tokens_used=used,
            kv_capacity=self.capacity_tokens(),
            waiting_uncached_tokens=sum(r.uncached_estimate_tokens for r in self.waiting)
            + sum(r.prompt_tokens - r.computed_tokens for r in self.running),
            used_plus_queued_tokens=used + sum(r.prompt_tokens for r in self.waiting),
            max_running=self._timing.max_running,
            total_prefill_uncached_tokens=self._prefilled_tokens,
            total_prefill_busy_s=self._prefill_busy_s,
        )

    def _creditable(self, request: Request) -> list[int]:
        """The last prompt token is always computed, so a prompt never hits in full."""
        return request.keys[: creditable_blocks(self._hasher.scheme, request.prompt_tokens)]

    def _admit(self, request: Request, now_s: float) -> bool:
        found = self.cache.match(request.namespace, self._creditable(request))
        self.cache.pin(found.node)
        prompt_pages = self._pages(request.prompt_tokens)
        output_pages = self._pages(request.prompt_tokens + request.max_new_tokens) - prompt_pages
        need = prompt_pages - found.pages
        available = self.cache.free_pages + self.cache.evictable_pages - self._promised_pages
        if need + output_pages > available:
            self.cache.unpin(found.node)
            return False
        self._take(request, need)
        request.node, request.tree_pages = found.node, found.pages
        request.promised_pages = output_pages
        self._promised_pages += output_pages
        request.cached_tokens = request.computed_tokens = found.pages * self._width
        request.admitted_s = now_s
        if request.handed_cached_tokens is not None:
            request.cached_tokens, request.computed_tokens = request.handed_cached_tokens, request.prompt_tokens
            self._make_resident(request, request.keys[: self._hasher.full_pages(request.prompt_tokens)], request.ids)
        return True

    def _plan_chunk(self, request: Request, budget: int, prefill_s: float) -> tuple[int, float]:
        request.chunk_tokens = min(budget, request.prompt_tokens - request.computed_tokens)
        end = request.computed_tokens + request.chunk_tokens
        return budget - request.chunk_tokens, prefill_s + self._timing.prefill_s(request.chunk_tokens, end)

    def _advance(self, request: Request, now_s: float) -> bool:
        if request.chunk_tokens:
            request.computed_tokens += request.chunk_tokens
            self._prefilled_tokens += request.chunk_tokens
            request.chunk_tokens = 0
            self._make_resident(request, request.keys[: self._hasher.full_pages(request.computed_tokens)], request.ids)
        prefilled = request.computed_tokens == request.prompt_tokens
        if request.aborting:
            self._finish(request, "abort", now_s)
            return True
        if not prefilled:
            return False
        if len(request.output) < request.max_new_tokens:
            self._sample(request, now_s)
        if len(request.output) >= request.max_new_tokens:
            self._finish(request, "length", now_s)
        return True

    def _sample(self, request: Request, now_s: float) -> None:
        request.output.append(request.sample(len(request.output)))
        if request.first_token_s is None:
            request.first_token_s = now_s
        held = request.tree_pages + request.own_pages
        if request.promised_pages and self._pages(request.prompt_tokens + len(request.output)) > held:
            request.promised_pages -= 1
            self._promised_pages -= 1
            self._take(request, 1)

    def _finish(self, request: Request, reason: Literal["length", "abort"], now_s: float) -> None:
        ids = request.ids + pack_ids(request.output[:-1])
        if request.output and self._hasher.full_pages(token_count(ids)) > request.tree_pages:
            self._make_resident(request, self._hasher.keys(ids, request.namespace), ids)
        else:
            self.cache.match(request.namespace, request.keys[: request.tree_pages])  # its prefix was used until now
        self.cache.release(request.own_pages)
        self._promised_pages -= request.promised_pages
        assert request.node is not None
        self.cache.unpin(request.node)
        request.node, request.own_pages, request.promised_pages = None, 0, 0
        request.finish, request.finished_s = reason, now_s

    def _make_resident(self, request: Request, keys: list[int], ids: TokenIds) -> None:
        """Hand the request's own full pages to the tree; pages another request put there meanwhile are freed."""
        if len(keys) <= request.tree_pages or not self._keeps_prefixes:
            return
        found = self.cache.insert(request.namespace, keys, ids, request.session_id)
        self.cache.release(found.pages - request.tree_pages)
        request.own_pages -= len(keys) - request.tree_pages
        assert request.node is not None
        self.cache.pin(found.node)
        self.cache.unpin(request.node)
        request.node, request.tree_pages = found.node, len(keys)

    def _take(self, request: Request, pages: int) -> None:
        if not self.cache.allocate(pages):
            raise RuntimeError("KV pages promised at admission are gone: the page accounting is wrong")
        request.own_pages += pages

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self._width)

    def _notify(self, requests: list[Request]) -> None:
        for request in requests:
            if request.progressed is not None:
                request.progressed(request)
