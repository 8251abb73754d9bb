"""What the proxy needs from the rest of the router: a plan for a request, a placement on a worker, and who is told.

The proxy moves bytes and keeps the life of a request straight; it never decides. Everything that decides implements
`Core`. A request goes `plan` (once) → `place` (once, or again after a failure that is safe to retry) → bytes →
`Placement.finish` (exactly once per placement) → `Core.request_done` (exactly once per request, placed or not).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Protocol, TypeVar

from router.errors import RouterError

UNMATCHED = "unmatched"
"""The `route` of every request whose path is not on the allow-list (case 97: no raw path becomes a label)."""

RawHeaders = list[tuple[bytes, bytes]]
"""Header fields as they stand on the wire, in order, names in any case."""


class Outcome(StrEnum):
    """The one terminal class of a request, and of each placement (case 99)."""

    OK = "ok"
    CLIENT_CLOSED = "client_closed"
    """The client went away before the last byte: says nothing about the worker."""
    REJECTED = "rejected"
    """A 4xx, 429 or 503, ours or the worker's: nobody is at fault."""
    UPSTREAM_ERROR = "upstream_error"
    """No usable answer: connect failure, reset, silence, a 5xx of the worker — and faults of the router itself."""
    STREAM_ERROR = "stream_error"
    """The answer broke off after its first byte."""


Fault = Literal["connect", "reset", "timeout", "protocol", "http_500", "http_502", "http_504"]
"""What a circuit breaker may count against a worker. 4xx, 429, 503 and leaving clients are no faults (case 89)."""


FAULTS: dict[int, Fault] = {500: "http_500", 502: "http_502", 504: "http_504"}
OVERLOADED = frozenset({429, 503})


def outcome_of(status: int) -> Outcome:
    """The class of a complete answer by its status (case 99)."""
    if status < 400:
        return Outcome.OK
    if status < 500 or status in OVERLOADED:
        return Outcome.REJECTED
    return Outcome.UPSTREAM_ERROR


class NoRoom(RouterError):
    """Workers could serve the request, and each is at its limit of requests in flight."""

    def __init__(self) -> None:
        super().__init__("queue_full", "every worker is at its limit; try again soon", retry_after_s=1)


@dataclass(frozen=True, slots=True)
class Usage:
    """What the engine reported for one request, in tokens, summed over the prompts of a batch. None: not reported."""

    prompt_tokens: int | None
    cached_tokens: int | None
    completion_tokens: int | None


class Origin(Protocol):
    """Where a worker listens. `router.contract.url.WorkerUrl` is one."""

    @property
    def scheme(self) -> str:
        """`http` or `https`."""

    @property
    def host(self) -> str:
        """Host name or address; IPv6 without brackets."""

    @property
    def port(self) -> int: ...
    @property
    def text(self) -> str:
        """The normalised `scheme://host:port`: the worker's name in labels, in `tried` and in the pool."""


class Placement(Protocol):
    """One request on one worker: its load counts from `Core.place` until `finish`."""

    @property
    def url(self) -> Origin: ...
    @property
    def authorization(self) -> bytes | None:
        """The whole value of the Authorization field for the worker (`Bearer KEY`), None when the worker has no key."""

    @property
    def body(self) -> bytes:
        """The body to send: the client's bytes, with routing fields spliced in where this route needs them."""

    @property
    def headers(self) -> Sequence[tuple[bytes, bytes]]:
        """Fields to add to the request to the worker, such as a DP rank's. They replace the client's of that name."""

    @property
    def route_headers(self) -> Sequence[tuple[bytes, bytes]]:
        """x-kv-router-worker, -rank and -cached-tokens for the client's answer, or nothing when not exposed."""

    @property
    def to_avoid(self) -> tuple[str, ...]:
        """`Origin.text` of the workers that failed here; a second try does without them."""

    @property
    def pair(self) -> Pair | None:
        """This placement itself when two engines serve it, else None."""

    def first_byte(self) -> None:
        """The first byte of the answer's body arrived (called at most once, never for an error status)."""

    def finish(
        self, outcome: Outcome, *, fault: Fault | None = None, status: int | None = None, usage: Usage | None = None
    ) -> None:
        """The end of this placement. The proxy calls it exactly once; implementations should tolerate a second call.

        `status` is the worker's HTTP status, None when it gave none.
        """


class PrefillLeg(Protocol):
    """The half of a pair that computes the prompt. Accounted for apart: it may end long before or after the other."""

    @property
    def url(self) -> Origin: ...
    @property
    def authorization(self) -> bytes | None: ...
    @property
    def headers(self) -> Sequence[tuple[bytes, bytes]]: ...
    def take_body(self) -> bytes:
        """The body to send, once: from here on the leg ends apart from its pair, and the bytes need not be kept."""

    def finish(
        self, outcome: Outcome, *, fault: Fault | None = None, status: int | None = None, usage: Usage | None = None
    ) -> None:
        """As Placement.finish; exactly once as well."""


class Pair(Placement, Protocol):
    """A placement on two engines (router.pairs). As a Placement it is the decode leg, which answers the client."""

    @property
    def prefill(self) -> PrefillLeg: ...
    @property
    def together(self) -> bool:
        """Both legs are sent at once; else the decode leg is made from the prefill leg's answer."""

    @property
    def meet_s(self) -> float:
        """From sending to the decode leg's first byte."""

    @property
    def linger_s(self) -> float:
        """How long the prefill leg is kept without a client."""

    def decode_body(self, answer: bytes) -> bytes:
        """The decode leg's body; `answer` is the prefill leg's, empty when together. Raises ValueError when the answer
        cannot be used."""


@dataclass(slots=True)  # not frozen: that costs 2 µs a request
class RequestRecord:
    """One finished request, for metrics, the access log and traces. Everything here is of bounded size."""

    request_id: str
    method: str
    """"-" when the request was not well-formed HTTP."""
    route: str
    """A route of interface.md or `UNMATCHED`."""
    outcome: Outcome
    status: int
    """The status the client got (or would have got: 499 when it left before the answer began)."""
    error: str | None
    """The code of x-kv-router-error when the answer was the router's own."""
    worker: str | None
    """`Origin.text` of the last worker tried, None when none was."""
    attempts: int
    duration_s: float
    ttft_s: float | None
    """Seconds from the request's head to the first byte of the worker's answer, None when there was none."""
    usage: Usage | None
    queued_s: float | None = None
    """Seconds the request waited for room on a worker, None when it did not have to."""


P = TypeVar("P")


class Unplanned:
    """A request whose plan has to be waited for; a Core may keep in its own kind of it how far it came."""


class Core(Protocol[P]):
    """The deciding half of the router, as the proxy sees it. `P` is whatever `plan` hands to `place`."""

    async def plan(
        self,
        route: str,
        headers: Mapping[str, str],
        body: bytes,
        request_id: str,
        unplanned: Unplanned | None = None,
    ) -> P:
        """Read the request: model, prompt, namespace. Holds no load. `headers` is case-insensitive. `unplanned`: what
        `plan_now` gave for this very request.

        Raises RouterError (`bad_json`, `model_not_found`, …). Cancelled when the client leaves.
        """

    def plan_now(self, route: str, headers: Mapping[str, str], body: bytes, request_id: str) -> P | Unplanned:
        """`plan` where nothing has to be waited for. Unplanned: it is to be awaited, and given this to go on from."""

    def place(self, plan: P, tried: frozenset[str]) -> Placement:
        """Choose a worker whose `url.text` is not in `tried` and count the request as its load from now on.

        Raises RouterError("no_worker", retry_after_s=…) when none is left, NoRoom when those left are at their limits;
        nothing is counted then.
        """

    def pool(self, plan: P) -> Hashable:
        """Requests of one pool can go to the same workers, so they wait in one line."""

    def request_done(self, record: RequestRecord) -> None:
        """Called exactly once for every request, health, metrics and what is not well-formed HTTP included."""

    def models(self) -> bytes:
        """The JSON of GET /v1/models: every served name once."""

    def ready(self) -> bool:
        """At least one worker, or pair of them, can take a request now."""

    def not_ready(self) -> RouterError:
        """What /ready answers while that is not so: which half of a pair is missing, or that nobody is there."""

    async def metrics(self) -> bytes:
        """The Prometheus text page, rendered off the event loop."""
