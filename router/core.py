"""The deciding half of the router: a request becomes a plan, a plan a placement on one (worker, rank).

Everything here runs between two awaits on the event loop; the only waiting is for token ids (`PromptSource.resolve`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from typing import Any, Final

import msgspec

from router.candidates import Candidates, Roster, candidates, line, pair_up, schemes_of, stay_plain
from router.config.schema import DisaggregationConfig
from router.describe import explained, explained_decode, record_fields, worker_sample
from router.errors import RouterError
from router.feedback import Feedback, Lesson
from router.fleet.rank import Rank
from router.fleet.registry import Fleet
from router.fleet.worker import Worker
from router.hashing import NO_NAMESPACE, Scheme, TokenIds, chain_root
from router.index.prefix import PrefixIndex
from router.internal_fields import client_rank_of, refuse_internal
from router.matching import prompt_credits
from router.observe.logs import RateLimit
from router.observe.metrics import Metrics
from router.observe.requests import Requests
from router.observe.traces import NO_HEADERS, Traces
from router.pair_placement import Pairing, PairPlacement
from router.pairs.decode import DecodeChoice
from router.pairs.pools import Pools, missing_text
from router.placement import RankPlacement, Shared
from router.policy.decide import Asked, Credit, Decision, Policy
from router.policy.predicted import PredictedBlocks, Prediction
from router.prompt.body import Fields, RequestBody, parse_body
from router.prompt.large import LARGE_BYTES
from router.prompt.models import ModelFacts
from router.prompt.rules import Rules, kinds_of
from router.prompt.source import PromptSource
from router.proxy.plan import Outcome, RequestRecord, Unplanned
from router.request_plan import RequestPlan as RequestPlan

log = logging.getLogger("router.request")

FAILED = (Outcome.UPSTREAM_ERROR, Outcome.STREAM_ERROR)
RANK_STATES = ("connecting", "replaying", "live", "gapped", "silent", "drifted", "duplicated", "unreachable", "off")
DRIFT_KINDS = ("block_size", "hash", "ranks", "prompt", "outcome", "role", "bootstrap")
DRY_RUN: Final = ""
"""The request id of `POST /route`, which no `request_done` follows."""
MAX_PREDICTED_BLOCKS: Final = 4096
"""Of one prompt: what follows would hold up the loop for longer than it is worth."""
MAX_KNOWN_MODELS: Final = 64
LONG_PROMPT_BYTES: Final = 4 * 16_384
"""Ids of a longer prompt are hashed in slices, so that a million tokens do not hold up everybody else."""


class Known:
    """What of a model is the same until its pools change."""

    __slots__ = ("facts", "kinds", "roster", "rules")

    def __init__(self, pools: Pools[Worker]) -> None:
        self.roster = Roster(pools)
        self.kinds = kinds_of((*pools.plain, *pools.prefill))
        """The kinds of engine that can take a request, by the rules their prompts are made by."""
        self.rules = next(iter(self.kinds), None)
        """The first kind's; None while there is no engine."""
        self.facts = self.kinds[self.rules] if self.rules is not None else None


class Begun(Unplanned):
    """A body that was read. `plan`: of a long prompt, which is counted already and whose keys are to be made."""

    __slots__ = ("plan", "request")

    def __init__(self, request: RequestBody, plan: RequestPlan | None) -> None:
        self.request = request
        self.plan = plan


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
        self._shared = Shared(metrics, fleet, predicted, self._feedback, expose_routing_headers)
        self._allow_internal = allow_internal_fields
        self._clock = clock
        self._pairing = pairing or Pairing(DisaggregationConfig(), fleet, metrics, clock=clock)
        self._shared_page = shared_page
        self._log_limit = RateLimit(10.0, clock)
        self._known: dict[str | None, Known] = {}

    def plan_now(self, route: str, headers: Mapping[str, str], body: bytes, request_id: str) -> RequestPlan | Unplanned:
        """As `plan`, where nothing has to be waited for. Unplanned: `plan` is to be awaited, and goes on from there."""
        if self._traces is not None or len(body) > LARGE_BYTES:
            return Unplanned()
        encoded = _is_encoded(headers)
        request = RequestBody(route, body, Fields()) if encoded else parse_body(route, body)
        client_rank = self._checked(route, headers, request)
        model = request.model or None
        known = self._known_of(model)
        plan: RequestPlan | None = None
        if len(known.kinds) <= 1:
            prompt = self._prompts.resolve_now(request, known.facts)
            if prompt is not None:
                plan = RequestPlan(route, request, prompt, model, client_rank, encoded, request_id, known.rules)
                if prompt.ids is None or not self._takes_turns(plan, prompt.ids):
                    return plan
        return Begun(request, plan)

    async def plan(
        self,
        route: str,
        headers: Mapping[str, str],
        body: bytes,
        request_id: str,
        unplanned: Unplanned | None = None,
    ) -> RequestPlan:
        """Reads the request and finds its token ids; `unplanned` is what `plan_now` gave for it. Raises RouterError
        (bad_json, model_not_found)."""
        if self._traces is not None and request_id != DRY_RUN:
            self._traces.begin(request_id, route, headers)
        if isinstance(unplanned, Begun):
            if unplanned.plan is not None:
                return await self._in_turns(unplanned.plan)
            request = unplanned.request
        elif _is_encoded(headers):
            request = RequestBody(route, body, Fields())
        else:
            request = parse_body(route, body) if len(body) <= LARGE_BYTES else await self._prompts.read(route, body)
        client_rank = self._checked(route, headers, request)
        model = request.model or None
        known = self._known_of(model)
        prompt = await self._prompts.resolve(request, known.facts)
        plan = RequestPlan(route, request, prompt, model, client_rank, _is_encoded(headers), request_id, known.rules)
        if len(known.kinds) > 1:
            plan = await self._for_all(plan, known.kinds)
        if prompt.ids is None or not self._takes_turns(plan, prompt.ids):
            return plan
        return await self._in_turns(plan)

    def _checked(self, route: str, headers: Mapping[str, str], request: RequestBody) -> int | None:
        """The rank the client named. Raises RouterError for what nobody here may be asked."""
        self._check_model(request.model or None)  # engines read "" as not given
        if not self._allow_internal:
            refuse_internal(request)
        return client_rank_of(route, headers, request)

    def _takes_turns(self, plan: RequestPlan, ids: TokenIds) -> bool:
        """Whether the prompt is so long that its keys are to be made in turns; counts one that earns no credit."""
        if plan.prompt.namespace != NO_NAMESPACE and not self._creditable(plan):
            self._metrics.uncredited_prompts.inc()
        return len(ids) > LONG_PROMPT_BYTES

    async def _in_turns(self, plan: RequestPlan) -> RequestPlan:
        for each in (plan, *plan.others):
            for _ in each.keys.steps(self._schemes(plan.model)):
                await asyncio.sleep(0)
        await asyncio.sleep(0)  # placing it takes a turn of its own
        return plan

    async def _for_all(self, plan: RequestPlan, kinds: Mapping[Rules, ModelFacts]) -> RequestPlan:
        """The plan with its prompt as every kind of engine makes it; where the ids are the same, so are the keys."""
        views = [plan]
        for rules, facts in kinds.items():
            if rules == plan.rules:
                continue
            view = plan.of(await self._prompts.resolve(plan.body, facts, again=True), rules)
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
        return all(chain_root(scheme, namespace) is not None for scheme in self._schemes(plan.model))

    def _schemes(self, model: str | None) -> set[Scheme]:
        pools = self.fleet.pools(model)
        return set(schemes_of((*pools.plain, *pools.prefill)))

    def place(self, plan: RequestPlan, tried: frozenset[str]) -> RankPlacement | PairPlacement:
        """Chooses a rank, or a pair of them, and counts the request as its load.

        Raises RouterError (no_worker, no_prefill_workers, no_decode_workers)."""
        return self._place(plan, tried, self.fleet.pools(plan.model))

    def place_whole(self, plan: RequestPlan, tried: frozenset[str]) -> RankPlacement:
        """As `place`, for who cannot send pairs: only plain engines are candidates."""
        pools = self.fleet.pools(plan.model)
        placement = self._place(plan, tried, Pools(plain=pools.plain) if pools.split else pools)
        assert isinstance(placement, RankPlacement), "nothing is split in that pool"
        return placement

    def _place(self, plan: RequestPlan, tried: frozenset[str], pools: Pools[Worker]) -> RankPlacement | PairPlacement:
        started = time.perf_counter()
        now_s = self._clock()
        feedback, metrics = self._feedback, self._metrics
        feedback.learn(plan.keys)
        for other in plan.others:
            feedback.learn(other.keys)
        decision, choice = self._decide(plan, tried, now_s, pools, limited=True)
        rank, credit = decision.targets[decision.position], decision.credits[decision.position]
        worker = rank.worker
        if plan.others:
            plan = plan.seen_by(worker)
        if worker.breaker.tripped:
            worker.breaker.placed()
        prompt = plan.prompt
        uncached = prompt.tokens - credit[4] if prompt.tokens > credit[4] else 0
        ticket = rank.account.place(prompt.tokens, uncached, now_s, self._policy.weights.share_tau_s)
        lesson: Lesson | None = None
        prediction: Prediction | None = None
        if rank.trusted and worker.scheme is not None:
            scheme = worker.scheme.scheme
            own = plan.keys.under(scheme)
            if own:
                lesson = feedback.placed(rank, credit, prompt, plan.keys)
                prediction = self._predict(rank, own, credit[3] // scheme.width, now_s)
        metrics.decision_seconds.observe(time.perf_counter() - started)
        metrics.decisions.inc(decision.reason)
        decode = choice.chosen.target if choice is not None else None
        self._requests.placed(
            now_s,
            plan.request_id,
            plan.route,
            plan.model,
            prompt.source,
            prompt.reason,
            prompt.tokens,
            decision,
            decode,
        )
        traced = self._traces.headers(plan.request_id) if self._traces is not None else NO_HEADERS
        whole = RankPlacement(self._shared, rank, plan, decision, ticket, lesson, prediction, traced)
        return whole if decode is None else self._pairing.pair(whole, decode, plan, now_s, self._shared.expose)

    def _predict(self, rank: Rank, own: list[int], held_blocks: int, now_s: float) -> Prediction | None:
        """The blocks of the prompt that `rank` does not hold yet, and will soon."""
        soon = own[held_blocks : held_blocks + MAX_PREDICTED_BLOCKS]
        prediction = self._predicted.add(rank.slot, soon, now_s)
        if prediction is not None and self._on_predicted is not None:
            self._on_predicted(rank, soon)
        return prediction

    def explain(self, plan: RequestPlan) -> dict[str, Any]:
        """The answer of `POST /route`: the decision, every candidate's terms, and no side effect."""
        decision, choice = self._decide(plan, frozenset(), self._clock(), self.fleet.pools(plan.model))
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
        return answer if choice is None else {**answer, "decode": explained_decode(choice)}

    def _decide(
        self,
        plan: RequestPlan,
        tried: frozenset[str],
        now_s: float,
        pools: Pools[Worker],
        *,
        limited: bool = False,
    ) -> tuple[Decision[Rank], DecodeChoice[Rank] | None]:
        """A decision over whole and prefill ranks; of a prefill rank, with the decode rank it is paired with.

        `limited`: workers at their limit of requests in flight are no candidates.
        """
        known = self._known.get(plan.model)
        roster = known.roster if known is not None and known.roster.pools is pools else None
        if roster is None or not roster.is_plain or tried or plan.client_rank is not None:
            roster = None
        if roster is not None and (not limited or roster.has_room()):
            found, schemes = roster.found, roster.schemes()
        else:
            found = candidates(pools, plan, tried, now_s, limited=limited)
            schemes = schemes_of([*[rank.worker for rank in found.ranks], *found.decode])
        self._predicted.expire(now_s)
        credits = self._credits(plan, found, schemes)
        self._feedback.temper(credits)
        asked = _asked(plan, schemes)
        decision = self._policy.decide(asked, found.ranks, credits, now_s)
        return decision, self._second_half(decision, found, plan, credits, now_s) if found.decode else None

    def _credits(self, plan: RequestPlan, found: Candidates, schemes: list[Scheme]) -> dict[int, Credit]:
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
        chosen = decision.targets[decision.position]
        if chosen.worker.role != "prefill":
            return None
        return pair_up(chosen, found.decode, plan, credits, now_s, self._pairing.rng)

    def pool(self, plan: RequestPlan) -> Hashable:
        return plan.model, plan.client_rank, line(self.fleet.pools(plan.model), plan)

    def _known_of(self, model: str | None) -> Known:
        pools = self.fleet.pools(model)
        known = self._known.get(model)
        if known is None or known.roster.pools is not pools:
            if len(self._known) >= MAX_KNOWN_MODELS:
                self._known.clear()
            known = self._known[model] = Known(pools)
        return known

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


def _is_encoded(headers: Mapping[str, str]) -> bool:
    coding = headers.get("content-encoding")
    return coding is not None and coding.strip().lower() not in ("", "identity")


def _asked(plan: RequestPlan, schemes: list[Scheme]) -> Asked:
    """In a fleet of several schemes all routers must look at the same one's keys: at the first one's."""
    prompt = plan.prompt
    if prompt.ids is None or not schemes:
        return Asked(prompt.tokens, prompt.ids is not None, plan.client_rank)
    return Asked(prompt.tokens, True, plan.client_rank, plan.keys.under(schemes[0]), schemes[0].width)
