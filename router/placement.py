"""One request on one rank: its load, what the engine is sent for it, and what is learnt when it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from router.contract.url import WorkerUrl
from router.feedback import Lesson
from router.fleet.rank import Rank
from router.fleet.registry import Fleet
from router.observe.metrics import Metrics
from router.policy.decide import Decision, Scored
from router.policy.load import Ticket
from router.prompt.forward import ids_json
from router.prompt.models import ModelFacts
from router.proxy.plan import Fault, Outcome, Usage
from router.proxy.splice import set_fields

if TYPE_CHECKING:
    from router.core import RequestPlan

SERVED = (Outcome.OK, Outcome.CLIENT_CLOSED, Outcome.STREAM_ERROR)
"""Outcomes after which the worker has taken the prompt: its tokens count in the hit rate."""
CACHING_ROUTES = frozenset({"/v1/chat/completions", "/v1/completions", "/generate", "/v1/responses", "/v1/messages"})
"""Routes after which an engine keeps what it computed of the prompt."""


class RankPlacement:
    """Implements router.proxy.plan.Placement."""

    def __init__(
        self,
        *,
        rank: Rank,
        plan: RequestPlan,
        chosen: Scored[Rank],
        decision: Decision[Rank],
        best_cached_tokens: int,
        blind_cached_tokens: float,
        ticket: Ticket,
        forget_prediction: Callable[[], None] | None,
        metrics: Metrics,
        fleet: Fleet,
        lesson: Lesson,
        expose: bool,
        trace_headers: tuple[tuple[bytes, bytes], ...],
    ) -> None:
        self.rank = rank
        self.cached_tokens = chosen.cached_by_tier[3]
        """What the chosen rank was believed to hold, all tiers."""
        self.decision = decision
        """Every candidate with its cost, for whoever wants to name a second choice."""
        self._best_cached_tokens = best_cached_tokens
        self._blind_cached_tokens = blind_cached_tokens
        self._plan = plan
        self._ticket = ticket
        self._forget_prediction = forget_prediction
        self._metrics = metrics
        self._fleet = fleet
        self._lesson = lesson
        self._expose = expose
        self.body, pinning = _pinned(plan, rank)
        self.headers = (*pinning, *trace_headers)
        self.trace_headers = trace_headers
        forward_for, info = plan.prompt.forward_for, rank.worker.info
        if forward_for is not None and info is not None and ModelFacts.from_server_info(info) == forward_for:
            assert plan.prompt.ids is not None
            self.body = set_fields(self.body, {"input_ids": ids_json(plan.prompt.ids)})
            metrics.forwarded_prompts.inc()

    @property
    def pair(self) -> None:
        """One engine serves it whole."""
        return None

    @property
    def to_avoid(self) -> tuple[str, ...]:
        return (self.url.text,)

    @property
    def url(self) -> WorkerUrl:
        return self.rank.worker.url

    @property
    def authorization(self) -> bytes | None:
        value = self.rank.worker.authorization
        return None if value is None else value.encode()

    @property
    def route_headers(self) -> Sequence[tuple[bytes, bytes]]:
        if not self._expose:
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
        if self._ticket.done:
            return
        self._ticket.finish()
        if outcome not in (Outcome.OK, Outcome.CLIENT_CLOSED) and self._forget_prediction is not None:
            self._forget_prediction()
        if fault is not None:
            self._fleet.fault(self.rank.worker, fault)
        elif outcome is Outcome.OK:
            self._fleet.served(self.rank.worker)
            self._tell_rank(usage)
        else:
            self.rank.worker.breaker.neutral()
        if outcome is not Outcome.OK:
            usage = None
        if usage is None:
            self._lesson.ended(None, None)
        else:
            self._lesson.ended(usage.prompt_tokens, usage.cached_tokens)
        if outcome in SERVED:
            self._count(usage)

    def let_go(self) -> tuple[Ticket, Callable[[], None] | None]:
        """The answer will not pass through this router (router.envoy): all but the load of it ends here, and with what
        was believed. Returns the ticket, whose end is the caller's, and what to call when the engine has most likely
        taken the prompt; neither keeps the request itself in memory."""
        self.rank.worker.breaker.neutral()
        self._lesson.ended(None, None)
        self._count(None)
        new_tokens = self._new_tokens()
        return self._ticket, None if new_tokens is None else partial(self.rank.served, new_tokens, exact=False)

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
        metrics = self._metrics
        known = self._plan.prompt.ids is not None
        reported = usage.prompt_tokens if usage is not None else None
        tokens = self._plan.prompt.tokens if known or reported is None else reported
        metrics.prompt_tokens.inc(tokens)
        metrics.predicted_cached_tokens.inc(self.cached_tokens)
        metrics.best_cached_tokens.inc(self._best_cached_tokens)
        metrics.blind_cached_tokens.inc(self._blind_cached_tokens)
        for tally in (self.rank.tally, metrics.totals):
            tally.placed(tokens, self.cached_tokens, self._best_cached_tokens, self._blind_cached_tokens)
        if usage is None or reported is None:
            return
        metrics.reported_prompt_tokens.inc(reported)
        counted, info = self._plan.prompt.counted, self.rank.worker.info
        if counted is not None and info is not None:
            counted(ModelFacts.from_server_info(info), reported)
        if usage.cached_tokens is None:
            return
        metrics.reported_cached_tokens.inc(usage.cached_tokens)
        for tally in (self.rank.tally, metrics.totals):
            tally.reported(reported, usage.cached_tokens)
        if known and self.rank.trusted:
            error = self.cached_tokens - usage.cached_tokens
            metrics.prediction_error_tokens.inc("over" if error > 0 else "under", by=abs(error))


def _pinned(plan: RequestPlan, rank: Rank) -> tuple[bytes, Sequence[tuple[bytes, bytes]]]:
    """The body and extra headers that name the rank in the way this route supports (contract, section 5): /generate
    reads only the body, the OpenAI routes also a header, which costs no change of the body. A rank the client named is
    left as the client wrote it."""
    if rank.pin is None or plan.client_rank is not None:
        return plan.body.raw, ()
    if plan.route == "/generate" and plan.encoded:
        return plan.body.raw, ()
    if plan.route == "/generate":
        return set_fields(plan.body.raw, {"routed_dp_rank": str(rank.pin).encode()}), ()
    return plan.body.raw, ((b"x-data-parallel-rank", str(rank.pin).encode()),)
