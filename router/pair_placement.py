"""One request on a pair: the prefill rank carries its uncached tokens until they are computed, the decode rank all.

Cache credit, prediction and the engine's report of reused tokens belong to the prefill side, and come from its own leg.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import msgspec

from router.config.schema import DisaggregationConfig
from router.contract.url import WorkerUrl
from router.errors import RouterError
from router.fleet.rank import Rank
from router.fleet.registry import Fleet
from router.internal_fields import RANK_HEADER
from router.observe.metrics import Metrics
from router.pairs.dialects import DIALECTS, Dialect, Meeting
from router.placement import RankPlacement
from router.policy.load import Ticket
from router.prompt.body import RequestBody, present
from router.proxy.plan import Fault, Outcome, Usage
from router.request_plan import RequestPlan

SERVED_WELL = frozenset({Outcome.OK, Outcome.CLIENT_CLOSED})
FAILED = frozenset({Outcome.UPSTREAM_ERROR, Outcome.STREAM_ERROR})


class PrefillPlacement:
    """Implements router.proxy.plan.PrefillLeg over the prefill rank's own placement."""

    def __init__(
        self,
        whole: RankPlacement,
        body: bytes,
        headers: Sequence[tuple[bytes, bytes]],
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self.sent = False
        self.headers = headers
        self.outcome: Outcome | None = None
        self.ended_s: float | None = None
        self._body = body
        self._whole = whole
        self._metrics = metrics
        self._clock = clock
        self._placed_s = clock()
        metrics.prefill_legs.inc()

    @property
    def rank(self) -> Rank:
        return self._whole.rank

    @property
    def cached_tokens(self) -> int:
        return self._whole.cached_tokens

    @property
    def url(self) -> WorkerUrl:
        return self._whole.url

    @property
    def authorization(self) -> bytes | None:
        return self._whole.authorization

    @property
    def failed(self) -> bool:
        """It ended in a way that leaves nothing to decode."""
        return self.outcome is not None and self.outcome not in SERVED_WELL

    def take_body(self) -> bytes:
        self.sent = True
        body, self._body = self._body, b""
        return body

    def first_byte(self) -> None:
        """The prompt is computed: its tokens no longer count as queued."""
        self._whole.first_byte()

    def finish(
        self, outcome: Outcome, *, fault: Fault | None = None, status: int | None = None, usage: Usage | None = None
    ) -> None:
        if self.outcome is not None:
            return
        self.outcome, self.ended_s = outcome, self._clock()
        self._metrics.prefill_legs.dec()
        if outcome is Outcome.OK:
            self._metrics.pair_prefill_seconds.observe(self.ended_s - self._placed_s)
            self.first_byte()
        self._whole.finish(outcome, fault=fault, status=status, usage=usage)


class PairPlacement:
    """Implements router.proxy.plan.Pair. A pair that is never sent is finished whole as well."""

    def __init__(
        self,
        *,
        prefill: PrefillPlacement,
        decode: Rank,
        ticket: Ticket,
        plan: RequestPlan,
        dialect: Dialect,
        headers: Sequence[tuple[bytes, bytes]],
        meet_s: float,
        linger_s: float,
        metrics: Metrics,
        fleet: Fleet,
        expose: bool,
        clock: Callable[[], float],
    ) -> None:
        self.prefill = prefill
        self.decode = decode
        self.headers = headers
        self.meet_s = meet_s
        self.linger_s = linger_s
        self.body = b""
        """Made when it is sent: see decode_body."""
        self._ticket = ticket
        self._plan = plan
        self._dialect = dialect
        self._metrics = metrics
        self._fleet = fleet
        self._expose = expose
        self._clock = clock
        self._blamed_prefill = False
        ticket.first_byte()  # a decode rank keeps room for the whole prompt from the start, and computes none of it

    @property
    def pair(self) -> PairPlacement:
        return self

    @property
    def url(self) -> WorkerUrl:
        return self.decode.worker.url

    @property
    def authorization(self) -> bytes | None:
        value = self.decode.worker.authorization
        return None if value is None else value.encode()

    @property
    def together(self) -> bool:
        return self._dialect.together

    @property
    def to_avoid(self) -> tuple[str, ...]:
        return (self.prefill.url.text,) if self._blamed_prefill else (self.url.text,)

    @property
    def route_headers(self) -> Sequence[tuple[bytes, bytes]]:
        if not self._expose:
            return ()
        return (
            (b"x-kv-router-worker", self.prefill.url.text.encode()),
            (b"x-kv-router-rank", str(self.prefill.rank.number).encode()),
            (b"x-kv-router-cached-tokens", str(self.prefill.cached_tokens).encode()),
            (b"x-kv-router-decode-worker", self.url.text.encode()),
            (b"x-kv-router-decode-rank", str(self.decode.number).encode()),
        )

    def decode_body(self, answer: bytes) -> bytes:
        return self._dialect.decode(self._plan.body.raw, answer)

    def first_byte(self) -> None:
        if self.prefill.ended_s is not None:
            self._metrics.pair_handover_seconds.observe(max(0.0, self._clock() - self.prefill.ended_s))
        self.prefill.first_byte()

    def finish(
        self, outcome: Outcome, *, fault: Fault | None = None, status: int | None = None, usage: Usage | None = None
    ) -> None:
        if self._ticket.done:
            return
        self._ticket.finish()
        if not self.prefill.sent:
            self.prefill.finish(outcome)
        worker = self.decode.worker
        self._blamed_prefill = self.prefill.failed and outcome is not Outcome.OK
        if fault is not None and not self._blamed_prefill:
            self._fleet.fault(worker, fault)
        elif outcome is Outcome.OK:
            self._fleet.served(worker)
            self.decode.tally.requests += 1
        else:
            worker.breaker.neutral()
        self._metrics.pairs.inc(self._ending(outcome, met=fault is not None or status is not None))

    def _ending(self, outcome: Outcome, *, met: bool) -> str:
        """Label of pairs_total. Without a fault or an answer of either leg nobody can be blamed."""
        if outcome in FAILED:
            return "prefill_failed" if self._blamed_prefill else "decode_failed" if met else "not_met"
        return str(outcome)


def rank_headers(named: bool, rank: Rank) -> tuple[tuple[bytes, bytes], ...]:
    """The head's way of naming the rank of one leg. Where the client named one, it is replaced on both legs: it meant
    the prefill side, and the head beats the body (contract, section 5)."""
    if rank.pin is None and not named:
        return ()
    return ((RANK_HEADER.encode(), str(rank.pin or 0).encode()),)


class Pairing:
    """Makes pairs of placements. `rng` draws rooms and breaks ties: nobody may guess a room, so it is the system's."""

    def __init__(
        self,
        settings: DisaggregationConfig,
        fleet: Fleet,
        metrics: Metrics,
        *,
        clock: Callable[[], float],
        share_tau_s: float = 120.0,
        rng: random.Random | None = None,
    ) -> None:
        self.settings = settings
        self.rng = rng or random.SystemRandom()
        self._fleet = fleet
        self._metrics = metrics
        self._clock = clock
        self._share_tau_s = share_tau_s

    def pair(self, whole: RankPlacement, decode: Rank, plan: RequestPlan, now_s: float, expose: bool) -> PairPlacement:
        """`whole` is the placement on the prefill rank; from here on it is one half. Raises RouterError (bad_json)."""
        worker = whole.rank.worker
        named = plan.client_rank is not None
        dialect = DIALECTS[worker.dialect](_meeting(whole.rank, decode, plan), self.rng)
        try:
            body = dialect.prefill(plan.body.raw)
        except ValueError as error:
            whole.finish(Outcome.REJECTED)
            raise RouterError("bad_json", f"nothing can be added to this body: {error}") from None
        if decode.worker.breaker.tripped:
            decode.worker.breaker.placed()
        prefill = PrefillPlacement(
            whole,
            body,
            (*whole.trace_headers, *rank_headers(named, whole.rank)),
            self._metrics,
            self._clock,
        )
        return PairPlacement(
            prefill=prefill,
            decode=decode,
            ticket=decode.account.place(plan.prompt.tokens, 0, now_s, self._share_tau_s),
            plan=plan,
            dialect=dialect,
            headers=(*whole.trace_headers, *rank_headers(named, decode)),
            meet_s=self.settings.meet_s,
            linger_s=self.settings.linger_s,
            metrics=self._metrics,
            fleet=self._fleet,
            expose=expose,
            clock=self._clock,
        )


def _meeting(prefill: Rank, decode: Rank, plan: RequestPlan) -> Meeting:
    worker = prefill.worker
    prompts = prompts_in(plan.body)
    return Meeting(
        host=worker.url.host,
        port=worker.bootstrap_port,
        prefill_rank=prefill.pin,
        prefill_ranks=len(worker.ranks),
        decode_rank=decode.pin,
        prompts=prompts,
        client_named_rank=plan.client_rank is not None,
    )


def prompts_in(body: RequestBody) -> int:
    """How many prompts the body holds: a list of texts, or of lists of ids, is a batch. Fields that its route does not
    read count for nothing: an engine given several rooms for one prompt refuses it."""
    fields = body.fields
    read = {"/v1/completions": (fields.prompt,), "/generate": (fields.text, fields.input_ids)}
    for raw in read.get(body.path, ()):
        if not present(raw):
            continue
        head = bytes(memoryview(raw)[:64]).split()
        if b"".join(head)[:2] in (b'["', b"[["):
            try:
                return max(1, len(msgspec.json.decode(raw, type=list[msgspec.Raw])))
            except (msgspec.DecodeError, RecursionError):
                return 1
    return 1
