"""The deciding half of the router: a request becomes a plan, a plan a placement on one (worker, rank).

Everything here runs between two awaits on the event loop; the only waiting is for token ids (`PromptSource.resolve`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from router.contract.events import Tier
from router.errors import RouterError
from router.feedback import Feedback
from router.fleet.rank import Rank
from router.fleet.registry import Fleet
from router.fleet.worker import Worker
from router.hashing import NO_NAMESPACE, Scheme, chain_root
from router.index.prefix import PrefixIndex
from router.internal_fields import client_rank_of, refuse_internal, with_rank
from router.matching import PromptKeys, prompt_credits
from router.observe.logs import RateLimit
from router.observe.metrics import Metrics, RankSample, WorkerSample
from router.observe.requests import Requests
from router.observe.traces import NO_HEADERS, Traces
from router.observe.views import capacity_blocks
from router.placement import RankPlacement
from router.policy.decide import Asked, Decision, Policy, Scored
from router.policy.predicted import PredictedBlocks
from router.prompt.body import Fields, RequestBody, parse_body
from router.prompt.models import ModelFacts
from router.prompt.source import Prompt, PromptSource
from router.proxy.plan import NoRoom, Outcome, RequestRecord

log = logging.getLogger("router.request")

FAILED = (Outcome.UPSTREAM_ERROR, Outcome.STREAM_ERROR)
RANK_STATES = ("connecting", "replaying", "live", "gapped", "silent", "drifted", "duplicated", "unreachable", "off")
DRIFT_KINDS = ("block_size", "hash", "ranks", "prompt", "outcome")
RETRY_AFTER_S = 1
DRY_RUN = ""
"""The request id of `POST /route`, which no `request_done` follows."""
MAX_PREDICTED_BLOCKS = 8192
"""Of one prompt: what follows would hold up the loop for longer than it is worth."""
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
    keys: PromptKeys = field(init=False)

    def __post_init__(self) -> None:
        self.keys = PromptKeys(self.prompt.ids, self.prompt.namespace, self.prompt.cached)


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
    ) -> None:
        self.fleet = fleet
        self._metrics = metrics
        self._requests = requests
        self._traces = traces
        self._index = index
        self._prompts = prompts
        self._policy = policy
        self._predicted = predicted
        self._feedback = Feedback(fleet.chains, index, predicted, clock)
        self._expose = expose_routing_headers
        self._allow_internal = allow_internal_fields
        self._clock = clock
        self._log_limit = RateLimit(10.0, clock)

    async def plan(self, route: str, headers: Mapping[str, str], body: bytes, request_id: str) -> RequestPlan:
        """Reads the request and finds its token ids. Raises RouterError (bad_json, model_not_found)."""
        if self._traces is not None and request_id != DRY_RUN:
            self._traces.begin(request_id, route, headers)
        encoded = headers.get("content-encoding", "identity").strip().lower() not in ("", "identity")
        request = RequestBody(route, body, Fields()) if encoded else parse_body(route, body)
        model = request.model or None  # engines read "" as not given
        self._check_model(model)
        if not self._allow_internal:
            refuse_internal(request)
        client_rank = client_rank_of(route, headers, request)
        prompt = await self._prompts.resolve(request, self._facts(model))
        plan = RequestPlan(route, request, prompt, model, client_rank, encoded, request_id)
        if prompt.ids is not None and not self._creditable(plan):
            self._metrics.uncredited_prompts.inc()
        if prompt.ids is not None and len(prompt.ids) > LONG_PROMPT_BYTES:
            for _ in plan.keys.steps(self._schemes(model)):
                await asyncio.sleep(0)
        return plan

    def _creditable(self, plan: RequestPlan) -> bool:
        """False when some worker's stream cannot tell this namespace's blocks from others' (cases 40, 41)."""
        namespace = plan.prompt.namespace
        return namespace == NO_NAMESPACE or all(
            chain_root(scheme, namespace) is not None for scheme in self._schemes(plan.model)
        )

    def _schemes(self, model: str | None) -> set[Scheme]:
        return {worker.scheme.scheme for worker in self._routable(model) if worker.scheme is not None}

    def place(self, plan: RequestPlan, tried: frozenset[str]) -> RankPlacement:
        """Chooses a rank and counts the request as its load. Raises RouterError (no_worker)."""
        started = time.perf_counter()
        now_s = self._clock()
        self._feedback.learn(plan.keys)
        decision = self._decide(plan, tried, now_s, limited=True)
        chosen = decision.chosen
        rank = chosen.target
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
        )
        return RankPlacement(
            rank=rank,
            plan=plan,
            chosen=chosen,
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

    def explain(self, plan: RequestPlan) -> dict[str, Any]:
        """The answer of `POST /route`: the decision, every candidate's terms, and no side effect."""
        decision = self._decide(plan, frozenset(), self._clock())
        chosen = decision.chosen.target
        return {
            "worker": chosen.worker.url.text,
            "rank": chosen.number,
            "reason": decision.reason,
            "prompt_tokens": plan.prompt.tokens,
            "ids_source": plan.prompt.source,
            "ids_reason": plan.prompt.reason,
            "candidates": [_explained(scored) for scored in decision.scored],
        }

    def _decide(
        self, plan: RequestPlan, tried: frozenset[str], now_s: float, *, limited: bool = False
    ) -> Decision[Rank]:
        """`limited`: workers at their limit of requests in flight are no candidates."""
        workers = self._routable(plan.model)
        if tried:
            workers = [w for w in workers if w.url.text not in tried]
        # When every breaker is open the engines' own errors say more than ours would (case 89).
        workers = [w for w in workers if not w.breaker.tripped or w.breaker.admits(now_s)] or workers
        if plan.client_rank is not None:
            workers = with_rank(workers, plan.client_rank)
        if not workers:
            raise RouterError("no_worker", self._nobody(plan.model, tried), retry_after_s=RETRY_AFTER_S)
        if limited:
            workers = [w for w in workers if w.max_inflight is None or w.inflight_requests < w.max_inflight]
            if not workers:
                raise NoRoom()
        ranks = [r for w in workers for r in w.ranks]
        if plan.client_rank is not None:
            ranks = [r for r in ranks if r.number == plan.client_rank] or ranks
        if not ranks:
            raise RouterError("no_worker", self._nobody(plan.model, tried), retry_after_s=RETRY_AFTER_S)
        self._predicted.expire(now_s)
        schemes = {rank.worker.scheme.scheme for rank in ranks if rank.worker.scheme is not None}
        credits = prompt_credits(self._index, self._predicted, plan.keys, schemes)
        self._feedback.temper(credits)
        asked = Asked(plan.prompt.tokens, plan.prompt.ids is not None, plan.client_rank)
        return self._policy.decide(asked, ranks, credits, now_s)

    def pool(self, plan: RequestPlan) -> Hashable:
        return plan.model, plan.client_rank

    def _nobody(self, model: str | None, tried: frozenset[str]) -> str:
        name = f"model {model!r}" if model else "any model"
        return f"no worker can take a request for {name} now" + (f" ({len(tried)} tried)" if tried else "")

    def _facts(self, model: str | None) -> ModelFacts | None:
        """What the prompt stage must know, from the first worker that can take the request."""
        for worker in self._routable(model):
            if worker.info is not None:
                return ModelFacts.from_server_info(worker.info)
        return None

    def _check_model(self, model: str | None) -> None:
        names = self.fleet.models()
        if model:
            if names and not self.fleet.known_model(model):
                known = ", ".join(names[:8])
                raise RouterError("model_not_found", f"no worker serves model {model[:200]!r}; served: {known}")
        elif len({w.models for w in self.fleet.workers if w.models}) > 1:
            raise RouterError("model_not_found", f"name a `model`: this fleet serves {', '.join(names[:8])}")

    def _routable(self, model: str | None) -> list[Worker]:
        """Never a prefill- or decode-only engine: plain traffic would hang there (case 62)."""
        return [worker for worker in self.fleet.routable(model) if worker.role == "plain"]

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
            fields = _record_fields(record)
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
        return bool(self._routable(None))

    async def metrics(self) -> bytes:
        """The Prometheus page. The fleet is read on the loop, the text is made off it."""
        now_s = self._clock()
        snapshot = [_sample(worker, now_s) for worker in self.fleet.workers]
        return await asyncio.to_thread(self._metrics.render, snapshot, RANK_STATES, DRIFT_KINDS)


def _explained(scored: Scored[Rank]) -> dict[str, Any]:
    rank = scored.target
    cached: dict[str, int] = {}
    faster = -1
    for tier in Tier:  # a slower tier that adds nothing is left out, GPU is always there
        if scored.cached_by_tier[tier] > faster:
            cached[tier.name] = faster = scored.cached_by_tier[tier]
    return {
        "worker": rank.worker.url.text,
        "rank": rank.number,
        "state": rank.state,
        "cached_tokens": cached,
        "predicted_tokens": max(0, scored.predicted_tokens - scored.cached_by_tier[3]),
        "uncached_tokens": scored.uncached_tokens,
        "inflight_tokens": rank.account.tokens,
        "cost_s": round(scored.cost_s, 6),
        "cost_terms_tokens": {
            "queue": round(scored.terms.queue, 1),
            "prefill": round(scored.terms.prefill, 1),
            "share": round(scored.terms.share, 1),
        },
    }


def _record_fields(record: RequestRecord) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__slots__ if name != "usage"}


def _sample(worker: Worker, now_s: float) -> WorkerSample:
    return WorkerSample(
        worker.url.text,
        worker.routable,
        tuple(worker.drifts),
        capacity_blocks(worker),
        worker.breaker.state != "closed",
        [_rank_sample(rank, now_s) for rank in worker.ranks],
    )


def _rank_sample(rank: Rank, now_s: float) -> RankSample:
    load = rank.account
    return RankSample(
        rank=rank.number,
        state=rank.state,
        blocks=rank.blocks(),
        inflight_requests=load.requests,
        inflight_tokens=load.tokens,
        queued_tokens=load.queue_tokens(now_s, 0.0),
        prefill_tokens_per_s=load.prefill_tokens_per_s,
        tally=replace(rank.tally),
    )
