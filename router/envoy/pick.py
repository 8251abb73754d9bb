"""Where Envoy is to send a request: the plan and the placement of the proxy, said in Envoy's words.

The bytes pass this router by. So what a request does to the load is charged and ends by itself (router.policy.unseen),
nothing is learnt from answers, and a second choice is named in advance instead of tried.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from router.core import RequestPlan, RoutingCore
from router.envoy.addresses import AddressBook
from router.fleet.worker import Worker
from router.placement import RankPlacement
from router.policy.unseen import Unseen
from router.proxy.plan import Outcome, RawHeaders

log = logging.getLogger("router.envoy")

DESTINATION = b"x-gateway-destination-endpoint"
"""Gateway API Inference Extension, endpoint picker protocol 1.0: `ip:port`, or several with commas, best first."""
ORIGINAL_DESTINATION = b"x-envoy-original-dst-host"
"""What Envoy's ORIGINAL_DST clusters read; they take only one address."""
CREDENTIALS = (b"authorization", b"x-api-key")
SETTLE_S = 1.0


@dataclass(frozen=True, slots=True)
class Picked:
    """`endpoints`: `ip:port`, best first. `fields` replace the client's of those names. `body` is the client's, or
    `rewritten` with routing fields in it where the route needs them. `told` are fields for the client, when exposed."""

    endpoints: tuple[str, ...]
    fields: RawHeaders
    body: bytes
    rewritten: bool
    worker: str
    told: RawHeaders

    @property
    def destination(self) -> str:
        return ",".join(self.endpoints)


class Picker:
    """Shared by both protocols. `run` while it is in use."""

    def __init__(
        self,
        core: RoutingCore,
        addresses: AddressBook,
        *,
        fallbacks: int,
        charge_limit_s: float,
        clock: Callable[[], float],
    ) -> None:
        """`fallbacks`: how many workers are named after the chosen one."""
        self._core = core
        self._addresses = addresses
        self._fallbacks = fallbacks
        self._clock = clock
        self.unseen = Unseen(charge_limit_s)

    async def run(self) -> None:
        """Until cancelled: ends charges also while nobody asks, and keeps addresses fresh."""
        while True:
            self.unseen.settle(self._clock())
            await self._addresses.renew([worker.url for worker in self._core.fleet.workers])
            await asyncio.sleep(SETTLE_S)

    async def pick(
        self, route: str, headers: Mapping[str, str], body: bytes, request_id: str, among: frozenset[str] | None = None
    ) -> Picked:
        """Chooses, and counts the request as the chosen rank's load. `among`: only these `ip:port` may be named.

        Raises RouterError, as the proxy does before it has sent anything.
        """
        plan = await self._core.plan(route, headers, body, request_id)
        self.unseen.settle(self._clock())
        barred = frozenset() if among is None else self._outside(among)
        while True:
            placement = self._core.place_whole(plan, barred)
            url = placement.url
            try:
                address = self._addresses.known(url) or await self._addresses.find(url)
            except BaseException:  # Envoy gave the request up while its worker's name was looked up
                placement.finish(Outcome.CLIENT_CLOSED)
                raise
            if address is not None and (among is None or address in among):
                break
            # Only a name gets here: no address, or not one of `among` after all. Another worker, then.
            placement.finish(Outcome.UPSTREAM_ERROR, fault=None if address is not None else "connect")
            barred |= {url.text}
        endpoints = (address, *self._second_choices(plan, placement, barred))
        fields = [(DESTINATION, ",".join(endpoints).encode()), *placement.headers]
        if placement.authorization is not None:
            fields.append((b"authorization", placement.authorization))
        ticket, served = placement.let_go()
        self.unseen.add(ticket, placement.decision.chosen.cost_s, served)
        changed = placement.body is not plan.body.raw
        return Picked(endpoints, fields, placement.body, changed, url.text, list(placement.route_headers))

    def _outside(self, among: frozenset[str]) -> frozenset[str]:
        workers = self._core.fleet.workers
        known = [(worker.url.text, self._addresses.known(worker.url)) for worker in workers]
        return frozenset(text for text, address in known if address is not None and address not in among)

    def _second_choices(self, plan: RequestPlan, placement: RankPlacement, barred: frozenset[str]) -> list[str]:
        """The next best workers that can take the very request made for the chosen one: the same rank is pinned, and
        the same key is sent."""
        decision, chosen = placement.decision, placement.rank
        pinned = chosen.pin if plan.client_rank is None else None
        found: dict[Worker, str] = {}
        if not self._fallbacks or len(decision.targets) == 1:
            return []
        for position in sorted(range(len(decision.targets)), key=decision.cost_s.__getitem__):
            rank = decision.targets[position]
            worker = rank.worker
            if worker is chosen.worker or worker in found or (pinned is not None and rank.pin != pinned):
                continue
            if worker.url.text in barred or worker.authorization != chosen.worker.authorization:
                continue
            address = self._addresses.known(worker.url)
            if address is not None:
                found[worker] = address
                if len(found) == self._fallbacks:
                    break
        return list(found.values())


def withheld(fields: Mapping[str, str], kept: RawHeaders, picked: Picked) -> list[bytes]:
    """The client's credentials that are neither for the engine nor replaced by its own (case 103)."""
    stay = {name.lower() for name, _ in (*kept, *picked.fields)}
    return [name for name in CREDENTIALS if name.decode() in fields and name not in stay]


async def cancelled(task: asyncio.Task[None] | None) -> None:
    """Ends a task of ours."""
    if task is not None:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
