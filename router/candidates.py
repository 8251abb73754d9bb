"""Which ranks a request may go to: by role, breaker, limits, what was tried already, and what the client named.

Runs on the event loop between two awaits. Fleets without prefill or decode engines pay nothing for those.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from router.errors import RouterError
from router.fleet.rank import Rank
from router.fleet.worker import Worker
from router.hashing import Scheme
from router.index.scheme import rekeyed
from router.internal_fields import with_rank
from router.pairs.decode import DecodeChoice, DecodeLoad, choose_decode
from router.pairs.pools import PAIRED_ROUTES, TEXT_ROUTES, Pools, missing_text, partners
from router.policy.decide import NO_CREDIT, Credit, Decision
from router.policy.load import REPORT_FRESH_S
from router.proxy.plan import NoRoom

RETRY_AFTER_S = 1
DEFAULT_ANSWER_TOKENS = 512
"""Of a request that states no limit; what a decode rank must have room for beside the prompt."""
PLAIN_POOL = "plain_pool"
"""Decision reason, see router.policy.decide.REASONS."""


class Wanted(Protocol):
    """What of a request decides where it may go (`router.core.RequestPlan`)."""

    route: str
    model: str | None
    client_rank: int | None
    encoded: bool

    @property
    def copies(self) -> int: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def answer_tokens(self) -> int | None:
        """The answer's limit; None when the client states none."""


class Candidates(NamedTuple):
    """`ranks` are never empty. Of a rank of a prefill worker, `decode` holds the workers to pair it with."""

    ranks: list[Rank]
    decode: Sequence[Worker] = ()


class Roster:
    """What of a model's pools is the same for most requests. Good for as long as the fleet gives these very pools: it
    makes new ones whenever a worker or its ranks come, go or change, and when a breaker opens or closes."""

    __slots__ = ("_limited", "_rekeyed", "_schemes", "found", "is_plain", "pools")

    def __init__(self, pools: Pools[Worker]) -> None:
        self.pools = pools
        self.found = Candidates([rank for worker in pools.plain for rank in worker.ranks])
        """All ranks of plain workers."""
        tripped = any(worker.breaker.tripped for worker in pools.plain)
        self.is_plain = bool(self.found.ranks) and not pools.split and not tripped
        """A request that has not failed anywhere yet and names no rank may go to all of them."""
        self._limited = [worker for worker in pools.plain if worker.max_inflight is not None]
        self._schemes: list[Scheme] = []
        self._rekeyed = -1

    def has_room(self) -> bool:
        """No worker is at its limit of requests in flight."""
        return not self._limited or all(_has_room(worker) for worker in self._limited)

    def schemes(self) -> list[Scheme]:
        """Those of the workers, as `schemes_of` gives them."""
        if self._rekeyed != rekeyed():
            self._rekeyed = rekeyed()
            self._schemes = schemes_of(self.pools.plain)
        return self._schemes


def schemes_of(workers: Iterable[Worker]) -> list[Scheme]:
    """Each once. The first is the one all routers go by where one must be named: they see the same fleet."""
    found = {worker.scheme.scheme for worker in workers if worker.scheme is not None}
    return sorted(found, key=_order) if len(found) > 1 else list(found)


def _order(scheme: Scheme) -> tuple[int, str, bool]:
    return scheme.width, scheme.kind, scheme.bigram


def candidates(
    pools: Pools[Worker], wanted: Wanted, tried: frozenset[str], now_s: float, *, limited: bool = False
) -> Candidates:
    """`limited`: workers at their limit of requests in flight are no candidates.

    Raises RouterError: no_worker, no_prefill_workers, no_decode_workers, bad_request, and NoRoom when `limited`.
    """
    if not pools.split:
        return Candidates(_ranks(pools.plain, wanted, tried, now_s, limited=limited))
    if wanted.route in TEXT_ROUTES:
        return Candidates(_ranks(pools.plain or pools.prefill or pools.decode, wanted, tried, now_s, limited=limited))
    if pools.plain and not _pairable(wanted):
        return Candidates(_ranks(pools.plain, wanted, tried, now_s, limited=limited))
    try:
        prefill, decode = _pairs(pools, wanted, tried, now_s, limited=limited)
    except RouterError:
        if not pools.plain:
            raise
        prefill, decode = [], []
    return Candidates(_ranks([*pools.plain, *prefill], wanted, tried, now_s, limited=limited), decode)


def line(pools: Pools[Worker], wanted: Wanted) -> Hashable:
    """Requests of one line can go to the same engines: one that has to wait for a plain engine holds up none that a
    pair can serve."""
    if not pools.split:
        return None
    pairable = _pairable(wanted)
    dialects = tuple(name for name, routes in PAIRED_ROUTES.items() if pairable and wanted.route in routes)
    return wanted.route in TEXT_ROUTES, dialects


def _pairable(wanted: Wanted) -> bool:
    """SGLang 0.5.23 gives every copy of a prompt (`n`) the same room; a real pair never met over them."""
    return not wanted.encoded and wanted.copies == 1


def _pairs(
    pools: Pools[Worker], wanted: Wanted, tried: frozenset[str], now_s: float, *, limited: bool
) -> tuple[list[Worker], list[Worker]]:
    """The prefill workers that have a partner, and all partners."""
    able = [worker for worker in (*pools.prefill, *pools.decode) if wanted.route in PAIRED_ROUTES[worker.dialect]]
    if not able:
        text = f"{wanted.route} needs a plain engine, and this model has only prefill and decode engines"
        raise RouterError("no_worker", text, retry_after_s=RETRY_AFTER_S)
    if wanted.encoded:
        raise RouterError("bad_request", "this model's engines are split by role: send the body without compression")
    if wanted.copies != 1:
        text = "this model's engines are split by role, where several copies of a prompt (n) cannot be handed over"
        raise RouterError("bad_request", f"{text}: send as many requests")
    code = pools.missing()
    if code is not None:
        raise RouterError(code, missing_text(code, wanted.model), retry_after_s=RETRY_AFTER_S)
    decode = _usable(pools.decode, tried, now_s)
    prefill = [w for w in _usable(pools.prefill, tried, now_s) if wanted.route in PAIRED_ROUTES[w.dialect]]
    prefill = [worker for worker in prefill if not worker.bootstrap_problem] or prefill
    code = "no_prefill_workers" if not prefill else "no_decode_workers"
    prefill = [worker for worker in prefill if partners(worker, decode)]
    if not prefill:
        raise RouterError(code, missing_text(code, wanted.model) + _tried(tried), retry_after_s=RETRY_AFTER_S)
    if limited:
        decode = [worker for worker in decode if _has_room(worker)]
        prefill = [worker for worker in prefill if _has_room(worker) and partners(worker, decode)]
        if not prefill:
            raise NoRoom()
    return prefill, decode


def _ranks(pool: Sequence[Worker], wanted: Wanted, tried: frozenset[str], now_s: float, *, limited: bool) -> list[Rank]:
    workers = _usable(pool, tried, now_s)
    if wanted.client_rank is not None:
        workers = with_rank(workers, wanted.client_rank)
    if not workers:
        raise nobody(wanted.model, tried)
    if limited:
        workers = [worker for worker in workers if _has_room(worker)]
        if not workers:
            raise NoRoom()
    ranks = [rank for worker in workers for rank in worker.ranks]
    if wanted.client_rank is not None:
        ranks = [rank for rank in ranks if rank.number == wanted.client_rank] or ranks
    if not ranks:
        raise nobody(wanted.model, tried)
    return ranks


def _usable(pool: Sequence[Worker], tried: frozenset[str], now_s: float) -> list[Worker]:
    workers = [w for w in pool if w.url.text not in tried] if tried else list(pool)
    # When every breaker is open the engines' own errors say more than ours would (case 89).
    return [w for w in workers if not w.breaker.tripped or w.breaker.admits(now_s)] or workers


def _has_room(worker: Worker) -> bool:
    return worker.max_inflight is None or worker.inflight_requests < worker.max_inflight


def nobody(model: str | None, tried: frozenset[str]) -> RouterError:
    name = f"model {model!r}" if model else "any model"
    return RouterError(
        "no_worker", f"no worker can take a request for {name} now{_tried(tried)}", retry_after_s=RETRY_AFTER_S
    )


def _tried(tried: frozenset[str]) -> str:
    return f" ({len(tried)} tried)" if tried else ""


# ---- the second half


def stay_plain(decision: Decision[Rank], plain_below_tokens: int, handover_s: float) -> None:
    """Of a decision over plain and prefill ranks: short uncached prompts stay whole, and so does one whose hand-over
    would cost more than it saves."""
    if decision.targets[decision.position].worker.role == "plain":
        return
    plain = [at for at, rank in enumerate(decision.targets) if rank.worker.role == "plain"]
    if not plain:
        return
    best = min(plain, key=decision.cost_s.__getitem__)
    uncached = decision.prompt_tokens - decision.credits[best][4]
    costs = decision.cost_s
    if uncached <= plain_below_tokens or costs[best] <= costs[decision.position] + handover_s:
        decision.position, decision.reason = best, PLAIN_POOL


def pair_up(
    prefill: Rank,
    decode: Sequence[Worker],
    wanted: Wanted,
    credits: Mapping[int, Credit],
    now_s: float,
    rng: random.Random,
) -> DecodeChoice[Rank]:
    """The decode rank for a prompt that `prefill` computes."""
    targets = [
        (rank, _decode_load(rank, credits.get(rank.credit_slot, NO_CREDIT)[3], now_s))
        for worker in partners(prefill.worker, decode)
        for rank in worker.ranks
    ]
    limit = wanted.answer_tokens if wanted.answer_tokens is not None else DEFAULT_ANSWER_TOKENS
    return choose_decode(targets, wanted.prompt_tokens, limit, rng)


def _decode_load(rank: Rank, cached_tokens: int, now_s: float) -> DecodeLoad:
    own, info = rank.account, rank.worker.info
    used, requests = own.tokens, own.requests + own.sibling_requests
    capacity = info.max_total_tokens if info is not None else None
    slots = info.max_running_requests if info is not None else None
    report = rank.load_report
    if report is not None and rank.load_report_s is not None and now_s - rank.load_report_s <= REPORT_FRESH_S:
        used = max(used, report.kv_tokens_used)
        requests = max(requests, report.running_requests + report.waiting_requests)
        capacity = report.kv_tokens_capacity or capacity
        slots = report.max_running_requests or slots
    return DecodeLoad(used, requests, capacity, slots, cached_tokens)
