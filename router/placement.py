"""One request on one rank: its load, what the engine is sent for it, and what is learnt when it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from router.contract.url import WorkerUrl
from router.feedback import Feedback, Lesson
from router.fleet.rank import Rank
from router.fleet.registry import Fleet
from router.observe.metrics import Metrics
from router.policy.decide import Decision
from router.policy.load import Ticket
from router.policy.predicted import PredictedBlocks, Prediction
from router.prompt.forward import ids_json
from router.prompt.models import ModelFacts
from router.proxy.plan import Fault, Outcome, Usage
from router.proxy.splice import set_fields
from router.request_plan import RequestPlan

SERVED = (Outcome.OK, Outcome.CLIENT_CLOSED, Outcome.STREAM_ERROR)
"""Outcomes after which the worker has taken the prompt: its tokens count in the hit rate."""
CACHING_ROUTES = frozenset({"/v1/chat/completions", "/v1/completions", "/generate", "/v1/responses", "/v1/messages"})
"""Routes after which an engine keeps what it computed of the prompt."""


class Shared:
    """What all placements of a router have in common. `expose`: clients are told where their request went."""

    __slots__ = ("expose", "feedback", "fleet", "metrics", "predicted")

    def __init__(
        self, metrics: Metrics, fleet: Fleet, predicted: PredictedBlocks, feedback: Feedback, expose: bool
    ) -> None:
        self.metrics = metrics
        self.fleet = fleet
        self.predicted = predicted
        self.feedback = feedback
        self.expose = expose


class RankPlacement:
    """Implements router.proxy.plan.Placement."""

    __slots__ = (
        "_lesson",
        "_plan",
        "_prediction",
        "_shared",
        "_ticket",
        "body",
        "cached_tokens",
        "decision",
        "headers",
        "rank",
        "trace_headers",
        "url",
    )

    def __init__(
        self,
        shared: Shared,
        rank: Rank,
        plan: RequestPlan,
        decision: Decision[Rank],
        ticket: Ticket,
        lesson: Lesson | None,
        prediction: Prediction | None,
        trace_headers: tuple[tuple[bytes, bytes], ...],
    ) -> None:
        self.rank = rank
        self.url: WorkerUrl = rank.worker.url
        self.cached_tokens = decision.credits[decision.position][3]
        """What the chosen rank was believed to hold, all tiers."""
        self.decision = decision
        """Every candidate with its cost, for whoever wants to name a second choice."""
        self.trace_headers = trace_headers
        self._shared = shared
        self._plan = plan
        self._ticket = ticket
        self._lesson = lesson
        self._prediction = prediction
        self.body = plan.body.raw
        self.headers: Sequence[tuple[bytes, bytes]] = trace_headers
        if rank.pin is not None:
            self.body, pinning = _pinned(plan, rank.pin)
            self.headers = (*pinning, *trace_headers)
        prompt, info = plan.prompt, rank.worker.info
        if prompt.forward_for is not None and info is not None:
            facts = ModelFacts.from_server_info(info)
            if facts is prompt.forward_for or facts == prompt.forward_for:
                assert prompt.ids is not None
                self.body = set_fields(self.body, {"input_ids": ids_json(prompt.ids)})
                shared.metrics.forwarded_prompts.inc()

    @property
    def pair(self) -> None:
        """One engine serves it whole."""
        return None

    @property
    def to_avoid(self) -> tuple[str, ...]:
        return (self.url.text,)

    @property
    def authorization(self) -> bytes | None:
        value = self.rank.worker.authorization
        return None if value is None else value.encode()

    @property
    def route_headers(self) -> Sequence[tuple[bytes, bytes]]:
        if not self._shared.expose:
            return ()
        return (
            (b"x-kv-router-worker", self.url.text.encode()),
            (b"x-kv-router-rank", str(self.rank.number).encode()),
            (b"x-kv-router-cached-tokens", str(self.cached_tokens).encode()),
        )

    def first_byte(self) -> None:
        self._ticket.first_byte()

    def finish(
        self, outcome: Outcome, *, fault: Fault | None = None, status: int | None = None, usage: Usage | None = None
    ) -> None:
        ticket = self._ticket
        if ticket.done:
            return
        ticket.finish()
        shared = self._shared
        if outcome is Outcome.OK and fault is None:
            shared.fleet.served(self.rank.worker)
            self._tell_rank(usage)
            self._teach(usage)
            self._count(usage)
            return
        if self._prediction is not None and outcome not in (Outcome.OK, Outcome.CLIENT_CLOSED):
            shared.predicted.drop(self._prediction)
        if fault is not None:
            shared.fleet.fault(self.rank.worker, fault)
        else:
            self.rank.worker.breaker.neutral()
        if outcome is not Outcome.OK:
            usage = None
        self._teach(usage)
        if outcome in SERVED:
            self._count(usage)

    def let_go(self) -> tuple[Ticket, Callable[[], None] | None]:
        """The answer will not pass through this router (router.envoy): all but the load of it ends here, and with what
        was believed. Returns the ticket, whose end is the caller's, and what to call when the engine has most likely
        taken the prompt; neither keeps the request itself in memory."""
        self.rank.worker.breaker.neutral()
        self._teach(None)
        self._count(None)
        new_tokens = self._new_tokens()
        return self._ticket, None if new_tokens is None else partial(self.rank.served, new_tokens, exact=False)

    def _teach(self, usage: Usage | None) -> None:
        if self._lesson is None:
            return
        if usage is None:
            self._shared.feedback.ended(self._lesson, None, None)
        else:
            self._shared.feedback.ended(self._lesson, usage.prompt_tokens, usage.cached_tokens)

    def _tell_rank(self, usage: Usage | None) -> None:
        """How many prompt tokens were new to the rank: if no event tells of them, its stream is not heard."""
        plan = self._plan
        if plan.route not in CACHING_ROUTES or plan.encoded:
            return
        if usage is not None and usage.prompt_tokens is not None and usage.cached_tokens is not None:
            self.rank.served(usage.prompt_tokens - usage.cached_tokens, exact=True)
        elif (new_tokens := self._new_tokens()) is not None:
            self.rank.served(new_tokens, exact=False)

    def _new_tokens(self) -> int | None:
        """By the router's own view; None when that cannot be told, or the route leaves nothing in the cache."""
        plan = self._plan
        if plan.route not in CACHING_ROUTES or plan.encoded or plan.prompt.ids is None:
            return None
        return plan.prompt.tokens - self.cached_tokens

    def _count(self, usage: Usage | None) -> None:
        metrics, prompt, decision, rank = self._shared.metrics, self._plan.prompt, self.decision, self.rank
        cached, best, blind = self.cached_tokens, decision.best_cached_tokens, decision.blind_cached_tokens
        tokens = prompt.tokens
        reported = usage.prompt_tokens if usage is not None else None
        if prompt.ids is None and reported is not None:
            tokens = reported
        rank.tally.placed(tokens, cached, best, blind)
        metrics.totals.placed(tokens, cached, best, blind)
        if usage is None or reported is None:
            return
        metrics.reported_prompt_tokens.inc(reported)
        info = rank.worker.info
        if prompt.counted is not None and info is not None:
            prompt.counted(ModelFacts.from_server_info(info), reported)
        if usage.cached_tokens is None:
            return
        metrics.reported_cached_tokens.inc(usage.cached_tokens)
        rank.tally.reported(reported, usage.cached_tokens)
        metrics.totals.reported(reported, usage.cached_tokens)
        if prompt.ids is not None and rank.trusted:
            error = cached - usage.cached_tokens
            metrics.prediction_error_tokens.inc("over" if error > 0 else "under", by=abs(error))


def _pinned(plan: RequestPlan, pin: int) -> tuple[bytes, tuple[tuple[bytes, bytes], ...]]:
    """The body and extra headers that name the rank in the way this route supports (contract, section 5): /generate
    reads only the body, the OpenAI routes also a header, which costs no change of the body. A rank the client named is
    left as the client wrote it."""
    if plan.client_rank is not None:
        return plan.body.raw, ()
    if plan.route == "/generate" and plan.encoded:
        return plan.body.raw, ()
    if plan.route == "/generate":
        return set_fields(plan.body.raw, {"routed_dp_rank": str(pin).encode()}), ()
    return plan.body.raw, ((b"x-data-parallel-rank", str(pin).encode()),)
