"""The deciding half of the router: a request becomes a plan, a plan a placement on one (worker, rank).

Everything here runs between two awaits on the event loop; the only waiting is for token ids (`PromptSource.resolve`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from router.contract.events import Tier
from router.errors import RouterError
from router.fleet.rank import Rank
from router.fleet.registry import Fleet
from router.fleet.worker import Worker
from router.index.prefix import PrefixIndex
from router.matching import NOTHING, PrefixMatch, PromptKeys
from router.observe.logs import RateLimit
from router.observe.metrics import Metrics, RankSample, WorkerSample
from router.placement import RankPlacement
from router.policy.decide import Asked, Candidate, Decision, Policy, Scored
from router.policy.predicted import PredictedBlocks
from router.prompt.body import Fields, RequestBody, parse_body
from router.prompt.models import ModelFacts
from router.prompt.source import Prompt, PromptSource
from router.proxy.plan import Outcome, RequestRecord

log = logging.getLogger("router.request")

RANK_HEADER = "x-data-parallel-rank"
FAILED = (Outcome.UPSTREAM_ERROR, Outcome.STREAM_ERROR)
RANK_STATES = ("connecting", "replaying", "live", "gapped", "silent", "drifted", "duplicated", "unreachable", "off")
DRIFT_KINDS = ("block_size", "hash", "ranks", "prompt", "outcome")
RETRY_AFTER_S = 1


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
    keys: PromptKeys = field(init=False)

    def __post_init__(self) -> None:
        self.keys = PromptKeys(self.prompt.ids, self.prompt.namespace)


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
        expose_routing_headers: bool,
        clock: Callable[[], float],
    ) -> None:
        self.fleet = fleet
        self._metrics = metrics
        self._index = index
        self._prompts = prompts
        self._policy = policy
        self._predicted = predicted
        self._expose = expose_routing_headers
        self._clock = clock
        self._log_limit = RateLimit(10.0, clock)

    async def plan(self, route: str, headers: Mapping[str, str], body: bytes, request_id: str) -> RequestPlan:
        """Reads the request and finds its token ids. Raises RouterError (bad_json, model_not_found)."""
        encoded = headers.get("content-encoding", "identity").strip().lower() not in ("", "identity")
        request = RequestBody(route, body, Fields()) if encoded else parse_body(route, body)
        self._check_model(request.model)
        client_rank = _client_rank(route, headers, request)
        prompt = await self._prompts.resolve(request, self._facts(request.model))
        return RequestPlan(route, request, prompt, request.model, client_rank, encoded)

    def place(self, plan: RequestPlan, tried: frozenset[str]) -> RankPlacement:
        """Chooses a rank and counts the request as its load. Raises RouterError (no_worker)."""
        started = time.perf_counter()
        now_s = self._clock()
        decision = self._decide(plan, tried, now_s)
        candidate = decision.chosen.candidate
        rank: Rank = candidate.ref
        uncached = max(0, plan.prompt.tokens - max(candidate.predicted_tokens, candidate.cached_by_tier[3]))
        ticket = rank.account.place(plan.prompt.tokens, uncached, now_s, self._policy.weights.share_tau_s)
        prediction = None
        if rank.trusted and rank.worker.scheme is not None:
            keys = plan.keys.under(rank.worker.scheme.scheme)
            confirmed = candidate.cached_by_tier[3] // rank.worker.scheme.scheme.width
            prediction = self._predicted.add(rank.slot, keys[confirmed:], now_s)
        self._metrics.decision_seconds.observe(time.perf_counter() - started)
        self._metrics.decisions.inc(decision.reason)
        return RankPlacement(
            rank=rank,
            plan=plan,
            decision=decision,
            ticket=ticket,
            forget_prediction=(lambda: self._predicted.drop(prediction)) if prediction is not None else None,
            metrics=self._metrics,
            fleet=self.fleet,
            expose=self._expose,
        )

    def explain(self, plan: RequestPlan) -> dict[str, Any]:
        """The answer of `POST /route`: the decision, every candidate's terms, and no side effect."""
        decision = self._decide(plan, frozenset(), self._clock())
        chosen = decision.chosen.candidate
        return {
            "worker": chosen.worker,
            "rank": chosen.rank,
            "reason": decision.reason,
            "prompt_tokens": plan.prompt.tokens,
            "ids_source": plan.prompt.source,
            "ids_reason": plan.prompt.reason,
            "candidates": [_explained(scored) for scored in decision.scored],
        }

    def _decide(self, plan: RequestPlan, tried: frozenset[str], now_s: float) -> Decision:
        ranks = [r for w in self._routable(plan.model) if w.url.text not in tried for r in w.ranks]
        if plan.client_rank is not None:
            ranks = [r for r in ranks if r.number == plan.client_rank] or ranks
        if not ranks:
            raise RouterError("no_worker", self._nobody(plan.model, tried), retry_after_s=RETRY_AFTER_S)
        self._predicted.expire(now_s)
        match = PrefixMatch(self._index, self._predicted, plan.keys)
        asked = Asked(plan.prompt.tokens, plan.prompt.ids is not None, plan.client_rank)
        return self._policy.decide(asked, [_candidate(rank, match) for rank in ranks], now_s)

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
        if record.ttft_s is not None:
            self._metrics.ttft_seconds.observe(record.ttft_s, record.route)
        failed = record.outcome in FAILED
        if failed and not self._log_limit.allows(f"{record.outcome} {record.worker}"):
            return
        if failed or log.isEnabledFor(logging.DEBUG):
            fields = msgspec.structs.asdict(record) if isinstance(record, msgspec.Struct) else _record_fields(record)
            log.log(logging.WARNING if failed else logging.DEBUG, "request", extra=fields)

    def models(self) -> bytes:
        """The body of GET /v1/models: every served name once, by its workers' own account."""
        data = [{"id": name, "object": "model", "created": 0, "owned_by": "kv-router"} for name in self.fleet.models()]
        return msgspec.json.encode({"object": "list", "data": data})

    def ready(self) -> bool:
        return bool(self._routable(None))

    async def metrics(self) -> bytes:
        """The Prometheus page. The fleet is read on the loop, the text is made off it."""
        snapshot = [_sample(worker) for worker in self.fleet.workers]
        return await asyncio.to_thread(self._metrics.render, snapshot, RANK_STATES, DRIFT_KINDS)


def _client_rank(route: str, headers: Mapping[str, str], request: RequestBody) -> int | None:
    """The rank the client pinned: the header beats the body on OpenAI routes and is ignored on /generate (contract,
    section 5). A value that is no rank is the engine's to refuse."""
    named = headers.get(RANK_HEADER) if route != "/generate" else None
    if named is not None and named.strip().isascii() and named.strip().isdigit():
        return int(named.strip()[:9])
    return request.routed_dp_rank


def _candidate(rank: Rank, match: PrefixMatch) -> Candidate:
    scheme = rank.worker.scheme
    cached, predicted = NOTHING, 0
    if scheme is not None and rank.trusted:
        cached, predicted = match.tokens(scheme.scheme, rank.slot)
    return Candidate(rank, rank.worker.url.text, rank.number, rank.state, rank.account, cached, predicted)


def _explained(scored: Scored) -> dict[str, Any]:
    candidate = scored.candidate
    cached: dict[str, int] = {}
    faster = -1
    for tier in Tier:  # a slower tier that adds nothing is left out, GPU is always there
        if candidate.cached_by_tier[tier] > faster:
            cached[tier.name] = faster = candidate.cached_by_tier[tier]
    return {
        "worker": candidate.worker,
        "rank": candidate.rank,
        "state": candidate.state,
        "cached_tokens": cached,
        "predicted_tokens": max(0, candidate.predicted_tokens - candidate.cached_by_tier[3]),
        "uncached_tokens": scored.uncached_tokens,
        "inflight_tokens": candidate.load.tokens,
        "cost_s": round(scored.cost_s, 6),
        "cost_terms_tokens": {
            "queue": round(scored.terms.queue, 1),
            "prefill": round(scored.terms.prefill, 1),
            "share": round(scored.terms.share, 1),
        },
    }


def _record_fields(record: RequestRecord) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__slots__ if name != "usage"}


def _sample(worker: Worker) -> WorkerSample:
    return WorkerSample(
        worker.url.text,
        worker.routable,
        tuple(worker.drifts),
        [RankSample(r.number, r.state, r.blocks(), r.account.requests, r.account.tokens) for r in worker.ranks],
    )
