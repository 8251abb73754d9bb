"""The deciding half of the router: a request becomes a plan, a plan a placement on one (worker, rank).

Everything here runs between two awaits on the event loop; the only waiting is for token ids (`PromptSource.resolve`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from router.candidates import Candidates, candidates, line, pair_up, stay_plain
from router.config.schema import DisaggregationConfig
from router.describe import explained, explained_decode, record_fields, worker_sample
from router.errors import RouterError
from router.feedback import Feedback
from router.fleet.rank import Rank
from router.fleet.registry import Fleet
from router.fleet.worker import Worker
from router.hashing import NO_NAMESPACE, Scheme, chain_root
from router.index.prefix import PrefixIndex
from router.internal_fields import client_rank_of, refuse_internal
from router.matching import PromptKeys, prompt_credits
from router.observe.logs import RateLimit
from router.observe.metrics import Metrics
from router.observe.requests import Requests
from router.observe.traces import NO_HEADERS, Traces
from router.pair_placement import Pairing, PairPlacement
from router.pairs.decode import DecodeChoice
from router.pairs.pools import Pools, missing_text
from router.placement import RankPlacement
from router.policy.decide import Asked, Credit, Decision, Policy
from router.policy.predicted import PredictedBlocks
from router.prompt.body import Fields, RequestBody, parse_body
from router.prompt.large import LARGE_BYTES
from router.prompt.models import ModelFacts
from router.prompt.rules import Rules, kinds_of, rules_of
from router.prompt.source import Prompt, PromptSource, unseen
from router.proxy.plan import Outcome, RequestRecord

log = logging.getLogger("router.request")

FAILED = (Outcome.UPSTREAM_ERROR, Outcome.STREAM_ERROR)
RANK_STATES = ("connecting", "replaying", "live", "gapped", "silent", "drifted", "duplicated", "unreachable", "off")
DRIFT_KINDS = ("block_size", "hash", "ranks", "prompt", "outcome", "role", "bootstrap")
DRY_RUN = ""
"""The request id of `POST /route`, which no `request_done` follows."""
MAX_PREDICTED_BLOCKS = 4096
"""Of one prompt: what follows would hold up the loop for longer than it is worth."""
MAX_KNOWN_KINDS = 64
LONG_PROMPT_BYTES = 4 * 16_384
"""Ids of a longer prompt are hashed in slices, so that a million tokens do not hold up everybody else."""


@dataclass(slots=True)
class RequestPlan:
    """One request, read once. `client_rank` is the DP rank the client named, never overridden. An `encoded` body
    (Content-Encoding) is not looked into and not changed: it goes by load (case 72)."""

    route: str
    body: RequestBody
    prompt: Prompt
    model: str | None
    client_rank: int | None
    encoded: bool
    request_id: str
    rules: Rules | None = None
    """The kind of engine that `prompt` is made for."""
    others: tuple[RequestPlan, ...] = ()
    """The same request as the model's other kinds of engine read it; mostly there are none."""
    keys: PromptKeys = field(init=False)

    def __post_init__(self) -> None:
        self.keys = PromptKeys(self.prompt.ids, self.prompt.namespace, self.prompt.cached)

    def seen_by(self, worker: Worker) -> RequestPlan:
        """The plan with the prompt as this worker's kind of engine makes it."""
        if not self.others:
            return self
        rules = rules_of(ModelFacts.from_server_info(worker.info)) if worker.info is not None else None
        for plan in (self, *self.others):
            if plan.rules == rules:
                return plan
        return replace(self, prompt=unseen(self.prompt), others=())

    @property
    def copies(self) -> int:
        return self.body.copies

    @property
    def prompt_tokens(self) -> int:
        return self.prompt.tokens

    @property
    def answer_tokens(self) -> int | None:
        return self.body.max_new_tokens


@dataclass(frozen=True, slots=True)
class Decided:
    """A decision over whole and prefill ranks; of a prefill rank, with the decode rank it is paired with."""

    decision: Decision[Rank]
    decode: DecodeChoice[Rank] | None


class RoutingCore:
    """Implements router.proxy.plan.Core over the fleet, the index and a policy."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        index: PrefixIndex,
        prompts: PromptSource,
        policy: Policy,
        predicted: PredictedBlocks,
        metrics: Metrics,
        requests: Requests,
        traces: Traces | None = None,
        expose_routing_headers: bool,
        allow_internal_fields: bool = False,
        clock: Callable[[], float],
        pairing: Pairing | None = None,
        shared_page: Callable[[], Awaitable[bytes]] | None = None,
        on_predicted: Callable[[Rank, Sequence[int]], None] | None = None,
    ) -> None:
        """`shared_page`: the metrics of all processes together, where this is one of several. `on_predicted` is told
        which blocks (keys) a rank will hold soon: siblings want to know."""
        self.fleet = fleet
        self._metrics = metrics
        self._requests = requests
        self._traces = traces
        self._index = index
        self._prompts = prompts
        self._policy = policy
        self._predicted = predicted
        self._on_predicted = on_predicted
        self._feedback = Feedback(fleet.chains, index, predicted, clock)
        self._expose = expose_routing_headers
        self._allow_internal = allow_internal_fields
        self._clock = clock
        self._pairing = pairing or Pairing(DisaggregationConfig(), fleet, metrics, clock=clock)
        self._shared_page = shared_page
        self._log_limit = RateLimit(10.0, clock)
        self._known_kinds: dict[str | None, tuple[Pools[Worker], dict[Rules, ModelFacts]]] = {}

    async def plan(self, route: str, headers: Mapping[str, str], body: bytes, request_id: str) -> RequestPlan:
        """Reads the request and finds its token ids. Raises RouterError (bad_json, model_not_found)."""
        if self._traces is not None and request_id != DRY_RUN:
            self._traces.begin(request_id, route, headers)
        encoded = headers.get("content-encoding", "identity").strip().lower() not in ("", "identity")
        if encoded:
            request = RequestBody(route, body, Fields())
        else:
            request = parse_body(route, body) if len(body) <= LARGE_BYTES else await self._prompts.read(route, body)
        model = request.model or None  # engines read "" as not given
        self._check_model(model)
        if not self._allow_internal:
            refuse_internal(request)
        client_rank = client_rank_of(route, headers, request)
        kinds = self._kinds(model)
        rules = next(iter(kinds), None)
        prompt = await self._prompts.resolve(request, kinds[rules] if rules is not None else None)
        plan = RequestPlan(route, request, prompt, model, client_rank, encoded, request_id, rules)
        if len(kinds) > 1:
            plan = await self._for_all(plan, kinds)
        if prompt.ids is not None and not self._creditable(plan):
            self._metrics.uncredited_prompts.inc()
        if prompt.ids is not None and len(prompt.ids) > LONG_PROMPT_BYTES:
            for each in (plan, *plan.others):
                for _ in each.keys.steps(self._schemes(model)):
                    await asyncio.sleep(0)
            await asyncio.sleep(0)  # placing it takes a turn of its own
        return plan

    async def _for_all(self, plan: RequestPlan, kinds: Mapping[Rules, ModelFacts]) -> RequestPlan:
        """The plan with its prompt as every kind of engine makes it; where the ids are the same, so are the keys."""
        views = [plan]
        for rules, facts in kinds.items():
            if rules == plan.rules:
                continue
            view = replace(plan, rules=rules, prompt=await self._prompts.resolve(plan.body, facts, again=True))
            same = next((v for v in views if v.prompt.ids == view.prompt.ids), None)
            if same is not None and same.prompt.namespace == view.prompt.namespace:
                view.keys = same.keys
            views.append(view)
        first = next((view for view in views if view.prompt.ids is not None), plan)
        first.others = tuple(view for view in views if view is not first)
        return first

    def _creditable(self, plan: RequestPlan) -> bool:
        """False when some worker's stream cannot tell this namespace's blocks from others' (cases 40, 41)."""
        namespace = plan.prompt.namespace
        return namespace == NO_NAMESPACE or all(
            chain_root(scheme, namespace) is not None for scheme in self._schemes(plan.model)
        )

    def _schemes(self, model: str | None) -> set[Scheme]:
        pools = self.fleet.pools(model)
        return {w.scheme.scheme for pool in (pools.plain, pools.prefill) for w in pool if w.scheme is not None}

    def place(self, plan: RequestPlan, tried: frozenset[str]) -> RankPlacement | PairPlacement:
        """Chooses a rank, or a pair of them, and counts the request as its load.

        Raises RouterError (no_worker, no_prefill_workers, no_decode_workers)."""
        return self._place(plan, tried, self.fleet.pools(plan.model))

    def place_whole(self, plan: RequestPlan, tried: frozenset[str]) -> RankPlacement:
        """As `place`, for who cannot send pairs: only plain engines are candidates."""
        placement = self._place(plan, tried, Pools(plain=self.fleet.pools(plan.model).plain))
        assert isinstance(placement, RankPlacement), "nothing is split in that pool"
        return placement

    def _place(self, plan: RequestPlan, tried: frozenset[str], pools: Pools[Worker]) -> RankPlacement | PairPlacement:
        started = time.perf_counter()
        now_s = self._clock()
        for each in (plan, *plan.others):
            self._feedback.learn(each.keys)
        decided = self._decide(plan, tried, now_s, pools, limited=True)
        decision = decided.decision
        chosen = decision.chosen
        rank = chosen.target
        plan = plan.seen_by(rank.worker)
        if rank.worker.breaker.tripped:
            rank.worker.breaker.placed()
        uncached = max(0, plan.prompt.tokens - chosen.predicted_tokens)
        ticket = rank.account.place(plan.prompt.tokens, uncached, now_s, self._policy.weights.share_tau_s)
        lesson = self._feedback.placed(chosen, plan.prompt, plan.keys)
        prediction = None
        if rank.trusted and rank.worker.scheme is not None:
            keys = plan.keys.under(rank.worker.scheme.scheme)
            confirmed = chosen.cached_by_tier[3] // rank.worker.scheme.scheme.width
            soon = keys[confirmed : confirmed + MAX_PREDICTED_BLOCKS]
            prediction = self._predicted.add(rank.slot, soon, now_s)
            if prediction is not None and self._on_predicted is not None:
                self._on_predicted(rank, soon)
        self._metrics.decision_seconds.observe(time.perf_counter() - started)
        self._metrics.decisions.inc(decision.reason)
        self._requests.placed(
            at_s=now_s,
            request_id=plan.request_id,
            route=plan.route,
            model=plan.model,
            ids_source=plan.prompt.source,
            ids_reason=plan.prompt.reason,
            prompt_tokens=plan.prompt.tokens,
            decision=decision,
            decode=decided.decode.chosen.target if decided.decode is not None else None,
        )
        whole = RankPlacement(
            rank=rank,
            plan=plan,
            chosen=chosen,
            decision=decision,
            best_cached_tokens=decision.best_cached_tokens,
            blind_cached_tokens=decision.blind_cached_tokens,
            ticket=ticket,
            forget_prediction=(lambda: self._predicted.drop(prediction)) if prediction is not None else None,
            trace_headers=self._traces.headers(plan.request_id) if self._traces is not None else NO_HEADERS,
            metrics=self._metrics,
            fleet=self.fleet,
            lesson=lesson,
            expose=self._expose,
        )
        if decided.decode is None:
            return whole
        return self._pairing.pair(whole, decided.decode.chosen.target, plan, now_s, self._expose)

    def explain(self, plan: RequestPlan) -> dict[str, Any]:
        """The answer of `POST /route`: the decision, every candidate's terms, and no side effect."""
        decided = self._decide(plan, frozenset(), self._clock(), self.fleet.pools(plan.model))
        decision = decided.decision
        chosen = decision.chosen.target
        plan = plan.seen_by(chosen.worker)
        answer = {
            "worker": chosen.worker.url.text,
            "rank": chosen.number,
            "reason": decision.reason,
            "prompt_tokens": plan.prompt.tokens,
            "ids_source": plan.prompt.source,
            "ids_reason": plan.prompt.reason,
            "candidates": [explained(scored) for scored in decision.scored],
        }
        return answer if decided.decode is None else {**answer, "decode": explained_decode(decided.decode)}

    def _decide(
        self,
        plan: RequestPlan,
        tried: frozenset[str],
        now_s: float,
        pools: Pools[Worker],
        *,
        limited: bool = False,
    ) -> Decided:
        """`limited`: workers at their limit of requests in flight are no candidates."""
        found = candidates(pools, plan, tried, now_s, limited=limited)
        self._predicted.expire(now_s)
        schemes = {rank.worker.scheme.scheme for rank in found.ranks if rank.worker.scheme is not None}
        if found.decode:
            schemes |= {worker.scheme.scheme for worker in found.decode if worker.scheme is not None}
        credits = self._credits(plan, found, schemes)
        self._feedback.temper(credits)
        asked = _asked(plan, schemes)
        decision = self._policy.decide(asked, found.ranks, credits, now_s)
        return Decided(decision, self._second_half(decision, found, plan, credits, now_s) if found.decode else None)

    def _credits(self, plan: RequestPlan, found: Candidates, schemes: set[Scheme]) -> dict[int, Credit]:
        """Each rank is credited with the ids that its own kind of engine makes."""
        if not plan.others:
            return prompt_credits(self._index, self._predicted, plan.keys, schemes)
        made: dict[int, dict[int, Credit]] = {}
        credits: dict[int, Credit] = {}
        for rank in (*found.ranks, *(rank for worker in found.decode for rank in worker.ranks)):
            keys = plan.seen_by(rank.worker).keys
            if id(keys) not in made:
                made[id(keys)] = prompt_credits(self._index, self._predicted, keys, schemes)
            credit = made[id(keys)].get(rank.slot)
            if credit is not None:
                credits[rank.slot] = credit
        return credits

    def _second_half(
        self, decision: Decision[Rank], found: Candidates, plan: RequestPlan, credits: dict[int, Credit], now_s: float
    ) -> DecodeChoice[Rank] | None:
        """None when the prompt stays on a plain engine."""
        settings = self._pairing.settings
        stay_plain(decision, settings.plain_below_tokens, settings.handover_s)
        chosen = decision.chosen.target
        if chosen.worker.role != "prefill":
            return None
        return pair_up(chosen, found.decode, plan, credits, now_s, self._pairing.rng)

    def pool(self, plan: RequestPlan) -> Hashable:
        return plan.model, plan.client_rank, line(self.fleet.pools(plan.model), plan)

    def _kinds(self, model: str | None) -> dict[Rules, ModelFacts]:
        """The kinds of engine that can take the request, by the rules their prompts are made by."""
        pools = self.fleet.pools(model)
        known = self._known_kinds.get(model)
        if known is not None and known[0] is pools:
            return known[1]
        kinds = kinds_of((*pools.plain, *pools.prefill))
        if len(self._known_kinds) >= MAX_KNOWN_KINDS:
            self._known_kinds.clear()
        self._known_kinds[model] = pools, kinds
        return kinds

    def _check_model(self, model: str | None) -> None:
        if model:
            if not self.fleet.known_model(model) and (names := self.fleet.models()):
                known = ", ".join(names[:8])
                raise RouterError("model_not_found", f"no worker serves model {model[:200]!r}; served: {known}")
        elif len({w.models for w in self.fleet.workers if w.models}) > 1:
            known = ", ".join(self.fleet.models()[:8])
            raise RouterError("model_not_found", f"name a `model`: this fleet serves {known}")

    def request_done(self, record: RequestRecord) -> None:
        self._metrics.requests.inc(record.route, record.outcome)
        self._metrics.request_seconds.observe(record.duration_s, record.route)
        if record.queued_s is not None:
            self._metrics.queue_wait_seconds.observe(record.queued_s)
        if record.ttft_s is not None:
            self._metrics.ttft_seconds.observe(record.ttft_s, record.route)
        failed = record.outcome in FAILED
        self._requests.done(record, failed=failed)
        if failed and not self._log_limit.allows(f"{record.outcome} {record.worker}"):
            return
        if failed or log.isEnabledFor(logging.DEBUG):
            fields = record_fields(record)
            log.log(logging.WARNING if failed else logging.DEBUG, "request", extra=fields)

    def prompts(self) -> list[dict[str, Any]]:
        """Where the ids of each kind of engine's prompts come from, for the admin page."""
        found: list[ModelFacts] = []
        for worker in self.fleet.workers:
            facts = ModelFacts.from_server_info(worker.info) if worker.info is not None else None
            if facts is not None and facts not in found:
                found.append(facts)
        return [
            {"engine": f.engine, "version": f.version, "models": list(f.names), **self._prompts.describe(f)}
            for f in found
        ]

    def models(self) -> bytes:
        """The body of GET /v1/models: every served name once, by its workers' own account."""
        data = [{"id": name, "object": "model", "created": 0, "owned_by": "kv-router"} for name in self.fleet.models()]
        return msgspec.json.encode({"object": "list", "data": data})

    def ready(self) -> bool:
        """Some model can be served."""
        if self.fleet.pools(None).plain:
            return True
        by_model = (self.fleet.pools(name) for name in self.fleet.models() or (None,))
        return any(pools.split and pools.missing() is None for pools in by_model)

    def not_ready(self) -> RouterError:
        code = self.fleet.pools(None).missing()
        if code is None:
            return RouterError("no_worker", "no worker can take a request now", retry_after_s=1)
        return RouterError(code, missing_text(code, None), retry_after_s=1)

    async def metrics(self) -> bytes:
        """The Prometheus page of the whole router."""
        return await (self.own_metrics() if self._shared_page is None else self._shared_page())

    async def own_metrics(self) -> bytes:
        """The Prometheus page of this process. The fleet is read on the loop, the text is made off it."""
        now_s = self._clock()
        snapshot = [worker_sample(worker, now_s) for worker in self.fleet.workers]
        return await asyncio.to_thread(self._metrics.render, snapshot, RANK_STATES, DRIFT_KINDS)


def _asked(plan: RequestPlan, schemes: Collection[Scheme]) -> Asked:
    """In a fleet of several schemes all routers must look at the same one's keys."""
    known, rank = plan.prompt.ids is not None, plan.client_rank
    if not known or not schemes:
        return Asked(plan.prompt.tokens, known, rank)
    scheme = min(schemes, key=lambda scheme: (scheme.width, scheme.kind, scheme.bigram))
    return Asked(plan.prompt.tokens, known, rank, plan.keys.under(scheme), scheme.width)
