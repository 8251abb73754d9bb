"""Discrete events in virtual time: requests, the product's index and policy, simulated ranks, events on their way.

Nothing here sleeps or reads a clock. Each router replica has its own index, predictions and load view, as in service;
what replicas share is what engines announce and, with `sibling_delay_s`, their load and what they just placed.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from router.bench.sim.rank import IDLE_S, Job, SimRank
from router.bench.sim.router import Router, Setup
from router.bench.sim.trace import Trace
from router.contract.events import Tier
from router.engine.radix import CacheEvent, RadixCache
from router.engine.timing import TimingProfile
from router.policy.load import Report
from router.siblings.frames import Frame


class World:
    """Runs one trace through. `jobs` has every request's times afterwards, in the order they came."""

    def __init__(self, trace: Trace, setup: Setup) -> None:
        self._setup = setup
        self._rng = random.Random(setup.seed)
        self.engines = [
            SimRank(
                _scaled(setup.timing, setup.speeds[i % len(setup.speeds)]),
                trace.width,
                RadixCache(setup.capacity_tokens // trace.width),
                RadixCache(pages) if (pages := setup.host_capacity_tokens // trace.width) else None,
                1 / setup.host_read_tokens_per_s,
            )
            for i in range(setup.engines)
        ]
        self.routers = [
            Router(bytes([number]), setup, self.engines, trace.width, random.Random(self._rng.random()))
            for number in range(setup.replicas)
        ]
        self._now_s = 0.0
        self.jobs = [Job(request, number) for number, request in enumerate(trace.requests)]
        self.placed: list[int] = [-1] * len(self.jobs)
        self._queue: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._order = itertools.count()
        self._published_s = [[0.0] * setup.engines for _ in range(setup.replicas)]
        self._open = len(self.jobs)

    def run(self) -> None:
        start_s = self.jobs[0].request.at_s if self.jobs else 0.0
        for job in self.jobs:
            self._at((job.request.at_s - start_s) / self._setup.time_factor, self._arrive, job)
        if self._setup.report_every_s is not None:
            self._at(0.0, self._report, self._setup.report_every_s)
        if self._setup.sibling_delay_s is not None:
            for router in self.routers:
                router.tell_siblings(partial(self._tell_later, router, self._setup.sibling_delay_s))
        queue = self._queue
        while queue and self._open:
            self._now_s, _, action, arguments = heapq.heappop(queue)
            action(self._now_s, *arguments)

    def _at(self, when_s: float, action: Callable[..., None], *arguments: object) -> None:
        heapq.heappush(self._queue, (when_s, next(self._order), action, arguments))

    def _arrive(self, now_s: float, job: Job) -> None:
        router = self.routers[self._rng.randrange(len(self.routers))]
        position, ticket = router.route(job.number, job.request, now_s)
        self.placed[job.number] = position

        def finished() -> None:
            ticket.finish()
            router.finished(position, job.request, ticket.uncached_tokens)
            self._open -= 1

        job.on_first_token = ticket.first_byte
        job.on_finish = finished
        engine = self.engines[position]
        engine.submit(job, now_s)
        self._wake(position)
        self._publish(position, now_s)

    def _wake(self, position: int) -> None:
        next_s = self.engines[position].next_s
        if next_s != IDLE_S:
            self._at(next_s, self._advance, position)

    def _advance(self, now_s: float, position: int) -> None:
        engine = self.engines[position]
        if engine.next_s != now_s:
            return  # the stretch was cut short: its earlier end has been dealt with
        engine.advance(now_s)
        self._wake(position)
        self._publish(position, now_s)

    def _publish(self, position: int, now_s: float) -> None:
        events = self.engines[position].take_events()
        if not events:
            return
        for number, router in enumerate(self.routers):
            arrives_s = max(now_s + self._rng.uniform(*self._setup.event_delay_s), self._published_s[number][position])
            self._published_s[number][position] = arrives_s
            self._at(arrives_s, self._deliver, router, position, events)

    def _deliver(self, now_s: float, router: Router, position: int, events: list[tuple[Tier, CacheEvent]]) -> None:
        router.take(position, events)

    def _tell_later(self, router: Router, delay_s: float) -> None:
        """Something changed: what has changed until it is told goes with it."""
        self._at(self._now_s + delay_s, self._tell, router)

    def _tell(self, now_s: float, router: Router) -> None:
        table = router.siblings
        frame = Frame(table.sender, 0, now_s, False, table.changed(now_s), table.placements.told())
        for other in self.routers:
            other.siblings.take(frame, now_s)  # its own it ignores

    def _report(self, now_s: float, every_s: float) -> None:
        """Every rank tells every replica its load, and so again after `every_s`."""
        reports = [
            Report(
                now_s + self._setup.report_delay_s,
                engine.running,
                len(engine.waiting),
                engine.queued_uncached_tokens,
                (engine.prefilled_tokens, round(engine.prefill_busy_s * 1e6)),
            )
            for engine in self.engines
        ]
        self._at(now_s + self._setup.report_delay_s, self._reported, reports)
        self._at(now_s + every_s, self._report, every_s)

    def _reported(self, now_s: float, reports: list[Report]) -> None:
        for router in self.routers:
            for target, report in zip(router.targets, reports, strict=True):
                target.account.reported(report)


def _scaled(timing: TimingProfile, speed: float) -> TimingProfile:
    """Prefill and decode at `speed` times the rate; the scheduler's own time stays."""
    return replace(
        timing,
        prefill_tokens_per_s=timing.prefill_tokens_per_s * speed,
        decode_step_s=timing.decode_step_s / speed,
        per_sequence_s=timing.per_sequence_s / speed,
        per_kv_token_s=timing.per_kv_token_s / speed,
    )
