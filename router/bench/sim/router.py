"""One router of the simulation: the product's own index, predictions, accounting and policy, or a peer's rule."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from router.bench.sim.peers import PEERS, PREDICTION_S, Question, Seat
from router.bench.sim.rank import SimRank
from router.bench.sim.trace import TraceRequest
from router.contract.events import Tier
from router.engine.radix import CacheEvent, Removed, Stored
from router.engine.timing import TimingProfile
from router.hashing import Scheme
from router.index.prefix import PrefixIndex
from router.matching import PromptKeys, prompt_credits
from router.policy.consistent import anchor
from router.policy.cost import CostWeights
from router.policy.decide import NO_CREDIT, Asked, Credit, Policy
from router.policy.load import RankLoad, Ticket
from router.policy.predicted import PredictedBlocks
from router.siblings.placements import Placements
from router.siblings.table import Table


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
    sibling_delay_s: float | None = None
    """How long until a replica's own load and placements are known to the others (router.siblings); None: never."""
    host_capacity_tokens: int = 0
    """Host tier of each rank; 0: none."""
    host_read_tokens_per_s: float = 150_000.0
    """An 8B model's KV (128 KiB a token, bf16) over PCIe at 20 GB/s."""
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
    anchor: int = 0
    account: RankLoad = field(default_factory=RankLoad)


class Router:
    """One replica: the product's index, predictions and accounting, and either its policy or a peer's rule."""

    def __init__(self, name: bytes, setup: Setup, engines: Sequence[SimRank], width: int, rng: random.Random) -> None:
        self._scheme = Scheme("sglang-sha256", width)
        self._index = PrefixIndex()
        self._setup = setup
        self._rng = rng
        ttl_s = setup.prediction_ttl_s if setup.policy not in PEERS else PREDICTION_S.get(setup.policy, 0.0)
        self._predicted = PredictedBlocks(ttl_s)
        self.targets = [SimTarget(0, self._index.open_slot(), anchor("", number)) for number, _ in enumerate(engines)]
        self._seats = [Seat(t.account, engine) for t, engine in zip(self.targets, engines, strict=True)]
        placements = Placements(self._predicted, lambda _, number, scheme: self.targets[number].credit_slot)
        self.siblings = Table(name, lambda place: self.targets[place[1]].account, setup.weights.share_tau_s, placements)
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
            asked = Asked(request.prompt_tokens, chain=keys, width=self._scheme.width)
            decision = self._policy.decide(asked, self.targets, credits, now_s)
            position = decision.targets.index(decision.chosen.target)
        else:
            position = self._peer(number, request, credits)
        target = self.targets[position]
        credit = credits.get(target.credit_slot, NO_CREDIT)
        uncached = max(0, request.prompt_tokens - credit[4])
        ticket = target.account.place(request.prompt_tokens, uncached, now_s, self._setup.weights.share_tau_s)
        soon = keys[credit[3] // self._scheme.width :]
        if self._predicted.add(target.credit_slot, soon, now_s) is not None:
            self.siblings.placements.made("", position, self._scheme, soon)
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

    def tell_siblings(self, woken: Callable[[], None]) -> None:
        """Own load and placements are published from now on: `woken` when there is something to say."""
        for position, target in enumerate(self.targets):
            self.siblings.watch(("", position), target.account, woken)

    def take(self, position: int, events: Sequence[tuple[Tier, CacheEvent]]) -> None:
        """A rank's announcements arrive."""
        slot = self.targets[position].credit_slot
        for tier, event in events:
            if isinstance(event, Stored):
                self._index.store(slot, tier, event.keys)
            elif isinstance(event, Removed):
                self._index.remove(slot, tier, event.keys)
            elif tier is Tier.GPU:  # a new cache begins with a clear, the host's as well
                self._index.clear(slot)
        self._index.sweep(len(events))
