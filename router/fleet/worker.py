"""A worker as the router sees it: who it is, whether it can be given requests, and the ranks of its incarnation."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from router.config import WorkerConfig
from router.contract.descriptor import Descriptor
from router.contract.server_info import ServerInfo
from router.contract.url import WorkerUrl
from router.fleet.breaker import Breaker
from router.fleet.doubt import judge_ranks
from router.fleet.observer import FleetObserver
from router.fleet.rank import Rank
from router.fleet.roles import RoleWatch
from router.index.scheme import Finding, WorkerScheme
from router.observe.logs import RateLimit

log = logging.getLogger("router.fleet")

REFUSED_LIMIT = 2
"""Refused connections in a row after which nobody is at home: a busy engine is slow, it does not refuse."""
DRIFT_LOG_EVERY_S = 60.0
"""A drift that only shows differently is logged again at most this often."""
FAULT_LIMIT = 2
"""Connect failures or resets in a row that the data plane met."""


class Health:
    """Turns what probes and the data plane met into one of: passing, down, neither yet. Pure.

    A worker that has never passed and answers 503 is still loading its model (contract, section 1): that is not `down`.
    """

    def __init__(self, unhealthy_after: int) -> None:
        self._unhealthy_after = unhealthy_after
        self.passing = False
        self.down = False
        self.why = "not probed yet"
        self._failures = 0
        self._refused = 0
        self._faults = 0
        self._provisional = False

    @property
    def suspect(self) -> bool:
        """The last thing seen was a failure: look again soon."""
        return self._failures > 0 or self._faults > 0

    def passed(self) -> None:
        self.passing, self.down, self.why = True, False, ""
        self._failures = self._refused = self._faults = 0
        self._provisional = False

    def failed(self, why: str, *, refused: bool = False, loading: bool = False) -> None:
        """A probe failed. `refused`: nothing accepted the connection. `loading`: it was answered 503."""
        self.why = why
        self._failures += 1
        self._refused = self._refused + 1 if refused else 0
        if self._provisional:
            self.passing = False
        if loading and not self.passing:
            return
        if self._failures >= self._unhealthy_after or self._refused >= REFUSED_LIMIT:
            self._drop(why)

    def fault(self, kind: str) -> None:
        """A request met a connect failure or a reset."""
        self._faults += 1
        if self._faults >= FAULT_LIMIT:
            self._drop(f"{self._faults} requests in a row failed: {kind}")

    def served(self) -> None:
        """A request was answered."""
        self._faults = 0

    def reborn(self) -> None:
        """Another process answers now. What passed before is believed until the next look, and no longer."""
        self.down = False
        self._failures = self._refused = self._faults = 0
        self._provisional = self.passing

    def _drop(self, why: str) -> None:
        self.passing, self.down, self.why = False, True, why


@dataclass(frozen=True, slots=True)
class Hold:
    """Why discovery wants no new requests sent to a worker. Its streams and blocks stay: a pod that is back in a moment
    is still warm."""

    state: Literal["unhealthy", "draining"]
    reason: str


@dataclass(slots=True)
class Drift:
    """One broken promise of the engine. `since_s` is the clock time it was first seen."""

    kind: str
    advertised: Any
    observed: Any
    advice: str
    since_s: float


class Worker:
    """Mutable, one object from POST to DELETE; `incarnation` counts what ran behind the URL in the meantime.

    State `starting` (never described, or loading), `ready`, `unhealthy`, `draining` (removed; open streams may finish).
    `scheme` is how this incarnation names blocks, None without a usable descriptor.
    """

    def __init__(
        self,
        settings: WorkerConfig,
        *,
        authorization: str | None,
        unhealthy_after: int,
        clock: Callable[[], float],
        observer: FleetObserver,
        identity: str | None = None,
    ) -> None:
        """`authorization` is the whole value of that header, or None. `identity`: see `Fleet.add`."""
        self.url: WorkerUrl = settings.url
        self.settings = settings
        self.authorization = authorization
        self.identity = identity
        self.hold: Hold | None = None
        self.incarnation = 0
        self.prepared: int | None = None
        """The incarnation whose prompts were prepared for last (router.service)."""
        self.info: ServerInfo | None = None
        self.descriptor: Descriptor | None = None
        self.models: tuple[str, ...] = (settings.model,) if settings.model else ()
        """Served names, for GET /v1/models."""
        self.role: str = settings.role or "plain"
        self.group = settings.group
        """Transfer group: prefill and decode engines of different groups are not paired."""
        self.bootstrap_problem = ""
        """Of a prefill engine: why decode engines cannot meet it, as far as the router can see."""
        self.state = "starting"
        self.reason = "not described yet"
        self.ranks: tuple[Rank, ...] = ()
        self.scheme: WorkerScheme | None = None
        self.drifts: dict[str, Drift] = {}
        self.roles = RoleWatch(clock)
        self.health = Health(unhealthy_after)
        self.breaker = Breaker()
        self.max_inflight = settings.max_inflight
        """Own requests in flight at a time, all ranks; None: no limit."""
        self.info_problem = "not described yet"
        """Why the last look at /server_info failed; empty when it did not."""
        self.stale = False
        """Health was lost since the last good look at /server_info: another process may be there now."""
        self.removed = False
        self.on_anomaly: Callable[[], None] | None = None
        """Set by who watches the worker; called when /server_info should be read at once."""
        self._lost_s = 0.0
        self._findings: tuple[Finding, ...] = ()
        self._drift_log = RateLimit(DRIFT_LOG_EVERY_S, clock)
        self._clock = clock
        self._observer = observer

    @property
    def routable(self) -> bool:
        return self.state == "ready"

    @property
    def dialect(self) -> str:
        """How the engine hands KV over to another (router.pairs)."""
        return "vllm" if self.info is not None and self.info.engine == "vllm" else "sglang"

    @property
    def bootstrap_port(self) -> int | None:
        """Where decode engines meet this prefill engine; None: nowhere, or it needs no such place (vLLM)."""
        return self.info.bootstrap_port if self.info is not None and self.role == "prefill" else None

    @property
    def can_meet(self) -> bool:
        return self.dialect == "vllm" or self.bootstrap_port is not None

    @property
    def names(self) -> tuple[str, ...]:
        """Every name a request may use: the served ones, and the model's path unless the operator named the model."""
        path = self.info.model_path if self.info is not None else None
        return self.models if self.settings.model or path is None or path in self.models else (*self.models, path)

    @property
    def inflight_requests(self) -> int:
        """Requests from placement to last byte, all ranks, siblings' too."""
        found = 0
        for rank in self.ranks:
            account = rank.account
            found += account.requests + account.sibling_requests
        return found

    def serves(self, model: str) -> bool:
        """By name, or as `base:adapter` by its base."""
        names = self.names
        return model in names or model.rpartition(":")[0] in names

    def settle(self) -> bool:
        """Recomputes `state` and `reason`; True when the state changed."""
        before = self.state
        self.state, self.reason = self._judge()
        if self.health.down and self.info is not None:
            self.stale = True
            if before != "unhealthy":
                self._lost_s = self._clock()
        return self.state != before

    def _judge(self) -> tuple[str, str]:
        if self.removed:
            return "draining", "removed; open streams may finish"
        if self.hold is not None:
            loading = self.info is None and self.hold.state == "unhealthy"
            return "starting" if loading else self.hold.state, self.hold.reason
        if self.health.down:
            return "unhealthy", self.health.why
        if self.info is None:
            return "starting", self.info_problem
        if self.stale:
            return "starting", self.info_problem or "back from unhealthy; waiting for /server_info"
        if not self.health.passing:
            return "starting", self.health.why
        return "ready", self.info_problem

    def heard_since_loss(self) -> bool:
        """An event came after health was last lost."""
        return any(rank.last_event_s is not None and rank.last_event_s > self._lost_s for rank in self.ranks)

    def take_info(self, info: ServerInfo) -> None:
        """The operator's `model` beats the engine's. A role is the engine's to say: only it knows what it can do."""
        self.roles.took(self.info, info)
        self.info = info
        self.models = (self.settings.model,) if self.settings.model else info.model_names
        self.role = info.role if info.says_role else self.settings.role or "plain"

    def forget(self) -> None:
        """Everything that belonged to the incarnation that ended."""
        self.ranks, self.scheme, self.descriptor = (), None, None
        self.bootstrap_problem = ""
        self.breaker = Breaker()
        for kind in self.drifts:
            self._observer.drift(self.url.text, kind, False)
        self.drifts = {}
        self._findings = ()

    def anomaly(self) -> None:
        """A stream saw its publisher start again: is this still the engine that was described?"""
        if self.on_anomaly is not None and not self.removed:
            self.on_anomaly()

    def check_drift(self) -> None:
        """Takes over what the scheme found to differ from what was advertised. Cheap when nothing changed."""
        if self.scheme is None or self.scheme.findings is self._findings:
            return
        before, self._findings = self._findings, self.scheme.findings
        kinds = {finding.kind for finding in self._findings}
        for finding in before:
            if finding.kind not in kinds:
                self.drift_over(finding.kind)
        for found in self._findings:
            self.drifted(found.kind, found.advertised, found.observed, found.advice)

    def check_ranks(self) -> None:
        """Compares what is advertised with which ranks are heard, and where. Not while the engine itself is away: that
        its ranks are deaf then is no drift."""
        found = judge_ranks([rank.view() for rank in self.ranks]) if self.routable and self.descriptor else None
        if found is None or self.descriptor is None:
            self.drift_over("ranks")
        else:
            self.drifted("ranks", f"{self.descriptor.dp_size} ranks", found.observed, found.advice)

    def watch(self) -> None:
        """Time passed."""
        for rank in self.ranks:
            rank.watch()
        self.check_ranks()
        self.roles.check(self)

    def drifted(self, kind: str, advertised: Any, observed: Any, advice: str) -> None:
        """A promise of the engine is broken in this way, or differently from before. Says so once in the log."""
        drift = self.drifts.get(kind)
        if drift is not None and (drift.advertised, drift.observed, drift.advice) == (advertised, observed, advice):
            return
        since_s = drift.since_s if drift is not None else self._clock()
        self.drifts[kind] = Drift(kind, advertised, observed, advice, since_s)
        self._observer.drift(self.url.text, kind, True)
        if drift is None or self._drift_log.allows(kind):
            log.warning(
                "%s: contract drift (%s): advertised %s, observed %s: %s", self.url, kind, advertised, observed, advice
            )

    def drift_over(self, kind: str) -> None:
        """It is kept again, unless the scheme itself still finds otherwise."""
        if any(finding.kind == kind for finding in self._findings):
            return
        if self.drifts.pop(kind, None) is not None:
            self._observer.drift(self.url.text, kind, False)
            log.info("%s: contract drift (%s) is over", self.url, kind)

    def describe(self) -> dict[str, Any]:
        """One item of `GET /workers` (interface.md). Holds no secret."""
        now_s = self._clock()
        info, scheme = self.info, self.scheme
        return {
            "url": self.url.text,
            "identity": self.identity,
            "incarnation": self.incarnation,
            "engine": info.engine if info else None,
            "version": info.version if info else None,
            "model": self.models[0] if self.models else None,
            "models": list(self.models),
            "role": self.role,
            "group": self.group,
            "bootstrap_port": self.bootstrap_port,
            "state": self.state,
            "reason": self.reason,
            "breaker": self.breaker.state,
            "block_size": scheme.scheme.width if scheme else None,
            "advertised_block_size": self.descriptor.block_size if self.descriptor else None,
            "hash": scheme.scheme.kind if scheme else None,
            "capacity_tokens": info.max_total_tokens if info else None,
            "topic": self.descriptor.topic if self.descriptor else None,
            "load_topic": self.descriptor.load_topic if self.descriptor else None,
            "advertised_ranks": self.descriptor.dp_size if self.descriptor else None,
            "notes": list(self.descriptor.notes) if self.descriptor else [],
            "drift": [
                {
                    "kind": drift.kind,
                    "advertised": drift.advertised,
                    "observed": drift.observed,
                    "since_s": round(now_s - drift.since_s, 3),
                    "advice": drift.advice,
                }
                for drift in self.drifts.values()
            ],
            "ranks": [rank.describe() for rank in self.ranks],
        }
