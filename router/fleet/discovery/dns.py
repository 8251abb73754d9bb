"""Every address of headless services: looked up again and again, since DNS tells nobody when it changes."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import random
import socket
from collections.abc import Awaitable, Callable

from router.config import DnsConfig, WorkerConfig
from router.contract.url import WorkerUrl, diallable_host
from router.fleet.discovery.base import Found, Membership

log = logging.getLogger("router.discovery")

Resolve = Callable[[str], Awaitable[list[str]]]
"""A name's addresses, [] when it has none. Raises OSError when that cannot be told now."""
FORGET_LOOKS = 3
"""Answers in a row without an address after which its worker leaves: resolvers give partial answers."""
LOOK_TIMEOUT_S = 10.0
NO_ADDRESS = frozenset({socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)})


async def system_resolve(name: str) -> list[str]:
    """What the system's resolver says, both families."""
    try:
        answers = await asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno in NO_ADDRESS:
            return []  # a headless service without a ready pod has no name
        raise
    return [str(answer[4][0]) for answer in answers]


class DnsDiscovery:
    """DNS neither tells pods apart nor says when one goes away: a new process at an old address shows in its
    /server_info, and what no longer answers is taken out by its health until its address is forgotten."""

    def __init__(
        self, config: DnsConfig, membership: Membership, *, rng: random.Random, resolve: Resolve = system_resolve
    ) -> None:
        self._config = config
        self._membership = membership
        self._rng = rng
        self._resolve = resolve
        self._absent: dict[tuple[str, str], int] = {}
        """(name, address) → answers in a row that did not have it."""

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(self._config.interval_s * self._rng.uniform(0.8, 1.2))

    async def look(self) -> None:
        """Asks for every name once and makes the fleet follow. A name that could not be asked for keeps its workers."""
        problems = []
        for name in self._config.names:
            try:
                async with asyncio.timeout(LOOK_TIMEOUT_S):
                    addresses = await self._resolve(name)
            except TimeoutError:
                problems.append(f"{name}: no answer within {LOOK_TIMEOUT_S:g} s")
            except (OSError, UnicodeError) as error:
                problems.append(f"{name}: {error}")
            else:
                self._count(name, self._usable(name, addresses))
        urls: dict[str, Found] = {}
        for name, address in self._absent:
            for found in self._found(name, address):
                urls.setdefault(found.url, found)
        self._membership.update(urls.values())
        if problems:
            self._membership.failed("; ".join(problems))
        else:
            self._membership.synced()

    def _count(self, name: str, addresses: set[str]) -> None:
        for known in [at for at in self._absent if at[0] == name and at[1] not in addresses]:
            self._absent[known] += 1
            if self._absent[known] >= FORGET_LOOKS:
                del self._absent[known]
        for address in addresses:
            self._absent[name, address] = 0

    def _usable(self, name: str, addresses: list[str]) -> set[str]:
        """Of one family: a dual-stack pod has an address in each, and is one worker."""
        by_version: dict[int, set[str]] = {4: set(), 6: set()}
        for text in addresses:
            try:
                host = diallable_host(text)
            except ValueError as error:
                log.warning("dns discovery: %s: %s", name, error)
                continue
            by_version[ipaddress.ip_address(host).version].add(host)
        if self._config.ip_family == "auto":
            return by_version[4] or by_version[6]
        return by_version[4 if self._config.ip_family == "ipv4" else 6]

    def _found(self, name: str, address: str) -> list[Found]:
        config = self._config
        return [
            Found(
                WorkerConfig(url=WorkerUrl("http", address, port), api_key=config.api_key, kv_events=config.kv_events),
                f"dns {name}",
            )
            for port in config.ports
        ]
