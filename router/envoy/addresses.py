"""Workers as Envoy wants them named: `ip:port`, IPv6 in brackets. Envoy's clusters know addresses, not host names."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import Callable, Iterable

from router.contract.url import WorkerUrl, bracketed
from router.fleet.discovery.dns import Resolve, system_resolve

log = logging.getLogger("router.envoy")

RENEW_S = 10.0
"""A name is asked for again this often, so that a worker which moved is found at its new address."""
RESOLVE_TIMEOUT_S = 5.0


class AddressBook:
    """Names are looked up once before they are needed and renewed in the background; an old answer is used until the
    new one is there, also while the resolver fails."""

    def __init__(self, *, clock: Callable[[], float], resolve: Resolve = system_resolve) -> None:
        self._clock = clock
        self._resolve = resolve
        self._addresses: dict[str, str] = {}
        self._asked_s: dict[str, float] = {}
        """Only of names: literal addresses are never asked for."""
        self._asking: dict[str, asyncio.Task[None]] = {}

    def known(self, url: WorkerUrl) -> str | None:
        """`ip:port`, None while the name's address is not known."""
        address = self._addresses.get(url.host)
        if address is None:
            address = _literal(url.host)
            if address is None:
                return None
            self._addresses[url.host] = address
        return f"{address}:{url.port}"

    async def find(self, url: WorkerUrl) -> str | None:
        """As `known`, after asking when it has to be; None when nobody knows the name."""
        found = self.known(url)
        if found is None:
            await self._ask_for_all(url.host)
            found = self.known(url)
        return found

    async def _ask_for_all(self, host: str) -> None:
        """Requests that come while a slow resolver is asked wait for the same answer: each of them asking would take
        up every thread there is."""
        asking = self._asking.get(host)
        if asking is None:
            asking = self._asking[host] = asyncio.create_task(self._ask(host), name=f"address of {host}")
            asking.add_done_callback(lambda _: self._asking.pop(host))
        await asyncio.shield(asking)

    async def renew(self, urls: Iterable[WorkerUrl]) -> None:
        """Asks for the names among `urls` whose answer is missing or old, and forgets every host that is not there."""
        hosts = {url.host for url in urls}
        for gone in self._addresses.keys() - hosts:
            del self._addresses[gone]
        for gone in self._asked_s.keys() - hosts:
            del self._asked_s[gone]
        now_s = self._clock()
        old = [host for host in hosts if now_s - self._asked_s.get(host, -RENEW_S) >= RENEW_S and not _literal(host)]
        await asyncio.gather(*map(self._ask, old))

    async def _ask(self, host: str) -> None:
        self._asked_s[host] = self._clock()
        try:
            answers = await asyncio.wait_for(self._resolve(host), RESOLVE_TIMEOUT_S)
        except (OSError, TimeoutError) as error:
            log.warning("worker host %s has no address now: %s", host, error or "the resolver is silent")
            return
        addresses = [text for text in map(_literal, answers) if text is not None]
        if addresses and self._addresses.get(host) not in addresses:  # of several, the one already in use stays
            self._addresses[host] = addresses[0]


def _literal(host: str) -> str | None:
    """The address as Envoy writes it, None for a name."""
    try:
        return bracketed(str(ipaddress.ip_address(host)))
    except ValueError:
        return None
