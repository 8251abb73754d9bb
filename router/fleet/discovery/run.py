"""Starts the sources of discovery that the configuration names, and ends them."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Mapping
from pathlib import Path

from router.config import DiscoveryConfig
from router.fleet.discovery.base import DiscoveryObserver, Membership
from router.fleet.discovery.dns import DnsDiscovery
from router.fleet.discovery.kube_api import SERVICE_ACCOUNT, KubeApi, api_access
from router.fleet.discovery.kubernetes import PodDiscovery
from router.fleet.registry import Fleet


class Discovery:
    """Static workers are the fleet's own; this is for what comes and goes."""

    def __init__(
        self,
        config: DiscoveryConfig,
        fleet: Fleet,
        observer: DiscoveryObserver,
        *,
        rng: random.Random,
        environment: Mapping[str, str] = os.environ,
        account: Path = SERVICE_ACCOUNT,
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._observer = observer
        self._rng = rng
        self._environment = environment
        self._account = account
        self._api: KubeApi | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Raises ConfigError when Kubernetes is asked for and nothing says where its API is."""
        config = self._config
        if config.dns is not None:
            dns = DnsDiscovery(config.dns, self._membership("dns"), rng=self._rng)
            self._tasks.append(asyncio.create_task(dns.run(), name="dns discovery"))
        if config.kubernetes is not None:
            access = api_access(config.kubernetes.api, config.kubernetes.namespace, self._environment, self._account)
            self._api = KubeApi(access, config.kubernetes.selector)
            pods = PodDiscovery(
                config.kubernetes, self._api, self._membership("kubernetes"), clock=time.monotonic, rng=self._rng
            )
            self._tasks.append(asyncio.create_task(pods.run(), name="kubernetes discovery"))

    async def close(self) -> None:
        """The workers found stay; the fleet closes them."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._api is not None:
            await self._api.close()

    def _membership(self, source: str) -> Membership:
        return Membership(self._fleet, source, self._observer)
