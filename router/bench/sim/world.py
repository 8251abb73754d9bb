"""Discrete events in virtual time: requests, the product's index and policy, simulated ranks, events on their way.

Nothing here sleeps or reads a clock. Each router replica has its own index, predictions and load view, as in service;
what replicas share is what engines announce.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from router.bench.sim.peers import PEERS, PREDICTION_S, Question, Seat
from router.bench.sim.rank import IDLE_S, Job, SimRank
from router.bench.sim.trace import Trace, TraceRequest
from router.contract.events import Tier
from router.engine.radix import CacheEvent, RadixCache, Removed, Stored
from router.engine.timing import TimingProfile
from router.hashing import Scheme
from router.index.prefix import PrefixIndex
from router.matching import PromptKeys, prompt_credits
from router.policy.cost import CostWeights
from router.policy.decide import NO_CREDIT, Asked, Credit, Policy
from router.policy.load import RankLoad, Report, Ticket
from router.policy.predicted import PredictedBlocks


@dataclass(frozen=True, slots=True)
class Setup:
    """What is simulated. `policy` is one of the product's names or a peer's."""

    policy: str
    engines: int
    capacity_tokens: int
    seed: int = 1
    time_factor: float = 1.0
    """Trace time is divided by it: above 1 the load is higher."""
    replicas: int = 1
    event_delay_s: tuple[float, float] = (0.005, 0.05)
    report_every_s: float | None = None
    """Load reports of the engines; None: routers know only what they sent."""
    report_delay_s: float = 0.0
    prediction_ttl_s: float = 10.0
    weights: CostWeights = field(default_factory=CostWeights)
    default_rate_tokens_per_s: float = 8000.0
    timing: TimingProfile = field(default_factory=TimingProfile)
    speeds: tuple[float, ...] = (1.0,)
    """Relative prefill speeds, given to the ranks in turn."""


@dataclass(slots=True, eq=False)
class SimTarget:
    """A rank as one replica sees it; implements router.policy.decide.Target."""

    number: int
    credit_slot: int
    account: RankLoad = field(default_factory=RankLoad)


class Router:
    """One replica: the product's index, predictions and accounting, and either its policy or a peer's rule."""

    def __init__(self, setup: Setup, engines: Sequence[SimRank], width: int, rng: random.Random) -> None:
        self._scheme = Scheme("sglang-sha256", width)
        self._index = PrefixIndex()
        self._setup = setup
        self._rng = rng
        ttl_s = setup.prediction_ttl_s if setup.policy not in PEERS else PREDICTION_S.get(setup.policy, 0.0)
        self._predicted = PredictedBlocks(ttl_s)
        self.targets = [SimTarget(0, self._index.open_slot()) for _ in engines]
        self._seats = [Seat(t.account, engine) for t, engine in zip(self.targets, engines, strict=True)]
        self._policy: Policy | None = None
        if setup.policy not in PEERS:
            self._policy = Policy(
                setup.policy, setup.weights, default_rate_tokens_per_s=setup.default_rate_tokens_per_s, rng=rng
            )

    def route(self, number: int, request: TraceRequest, now_s: float) -> tuple[int, Ticket]:
        """(position of the chosen rank, its ticket)."""
        keys = list(request.keys[: (request.prompt_tokens - 1) // self._scheme.width])
        self._predicted.expire(now_s)
        prompt = PromptKeys.known(self._scheme, keys)
        credits = prompt_credits(self._index, self._predicted, prompt, (self._scheme,))
        if self._policy is not None:
            decision = self._policy.decide(Asked(request.prompt_tokens), self.targets, credits, now_s)
            position = decision.targets.index(decision.chosen.target)
        else:
            position = self._peer(number, request, credits)
        target = self.targets[position]
        credit = credits.get(target.credit_slot, NO_CREDIT)
        uncached = max(0, request.prompt_tokens - credit[4])
        ticket = target.account.place(request.prompt_tokens, uncached, now_s, self._setup.weights.share_tau_s)
        self._predicted.add(target.credit_slot, keys[credit[3] // self._scheme.width :], now_s)
        return position, ticket

    def _peer(self, number: int, request: TraceRequest, credits: dict[int, Credit]) -> int:
        for target, seat in zip(self.targets, self._seats, strict=True):
            seat.matched_tokens = credits.get(target.credit_slot, NO_CREDIT)[4]
        question = Question(request.prompt_tokens, request.keys, self._scheme.width, number)
        position = PEERS[self._setup.policy](question, self._seats, self._rng)
        seat = self._seats[position]
        seat.active_blocks.update(request.keys)
        seat.inflight_uncached_tokens += max(1, request.prompt_tokens - seat.matched_tokens)
        return position

    def finished(self, position: int, request: TraceRequest, uncached_tokens: int) -> None:
        """What peers count until a request's end; the product's own accounting hangs on its ticket."""
        if self._policy is not None:
            return
        self._seats[position].inflight_uncached_tokens -= max(1, uncached_tokens)
        active = self._seats[position].active_blocks
        for key in request.keys:
            if active[key] > 1:
                active[key] -= 1
            else:
                del active[key]

    def take(self, position: int, events: Sequence[CacheEvent]) -> None:
        """A rank's announcements arrive."""
        slot = self.targets[position].credit_slot
        for event in events:
            if isinstance(event, Stored):
                self._index.store(slot, Tier.GPU, event.keys)
            elif isinstance(event, Removed):
                self._index.remove(slot, Tier.GPU, event.keys)
            else:
                self._index.clear(slot)
        self._index.sweep(len(events))


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
            )
            for i in range(setup.engines)
        ]
        self.routers = [
            Router(setup, self.engines, trace.width, random.Random(self._rng.random())) for _ in range(setup.replicas)
        ]
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
        queue = self._queue
        while queue and self._open:
            now_s, _, action, arguments = heapq.heappop(queue)
            action(now_s, *arguments)

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
        self._publish(position, engine.cache.take_events(), now_s)

    def _wake(self, position: int) -> None:
        next_s = self.engines[position].next_s
        if next_s != IDLE_S:
            self._at(next_s, self._advance, position)

    def _advance(self, now_s: float, position: int) -> None:
        engine = self.engines[position]
        if engine.next_s != now_s:
            return  # the stretch was cut short: its earlier end has been dealt with
        events = engine.advance(now_s)
        self._wake(position)
        self._publish(position, events, now_s)

    def _publish(self, position: int, events: list[CacheEvent], now_s: float) -> None:
        if not events:
            return
        for number, router in enumerate(self.routers):
            arrives_s = max(now_s + self._rng.uniform(*self._setup.event_delay_s), self._published_s[number][position])
            self._published_s[number][position] = arrives_s
            self._at(arrives_s, self._deliver, router, position, events)

    def _deliver(self, now_s: float, router: Router, position: int, events: list[CacheEvent]) -> None:
        router.take(position, events)

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
    if speed == 1.0:
        return timing
    return TimingProfile(
        prefill_tokens_per_s=timing.prefill_tokens_per_s * speed,
        attention_context_tokens=timing.attention_context_tokens,
        step_overhead_s=timing.step_overhead_s,
        decode_step_s=timing.decode_step_s / speed,
        per_sequence_s=timing.per_sequence_s / speed,
        per_kv_token_s=timing.per_kv_token_s / speed,
        chunk_tokens=timing.chunk_tokens,
        max_running=timing.max_running,
    )
