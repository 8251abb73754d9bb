"""Pods by label: list, watch, and list again whenever the watch ended, for whatever reason, and periodically."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

import msgspec

from router.config import KubernetesConfig
from router.fleet.discovery.base import Found, Membership
from router.fleet.discovery.kube_api import KubeApi, KubeError
from router.fleet.discovery.pods import Pod, decode_pod, found_in, one_per_url
from router.fleet.probe import Backoff

log = logging.getLogger("router.discovery")

_Read = tuple[Pod, tuple[Found, ...], tuple[str, ...]]
"""A pod, its workers, and what is wrong with it in words."""
MAX_RETRY_S = 10.0
STEADY_S = 5.0
"""A watch that lasted this long shows a working API: the next list comes at once."""


class PodDiscovery:
    """The pods known, by name (a name has one pod at a time), and the fleet's membership that follows them.

    Every cycle begins with a whole list, so that a deletion that no watch delivered is noticed (case 108); until a list
    succeeds nothing that was known is given up.
    """

    def __init__(
        self,
        config: KubernetesConfig,
        api: KubeApi,
        membership: Membership,
        *,
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self._config = config
        self._api = api
        self._membership = membership
        self._clock = clock
        self._rng = rng
        self._pods: dict[str, tuple[Pod, tuple[Found, ...]]] = {}
        self._notes: dict[str, tuple[str, ...]] = {}

    async def run(self) -> None:
        """Until cancelled."""
        retry = Backoff(MAX_RETRY_S, self._rng)
        while True:
            started_s = self._clock()
            try:
                await self._cycle()
            except KubeError as error:
                if error.routine:
                    log.info("kubernetes discovery: listing again: %s", error)
                else:
                    self._membership.failed(str(error))
            except Exception:
                log.exception("kubernetes discovery failed in the router itself")
                self._membership.failed("a fault of the router")
            if self._clock() - started_s >= STEADY_S:
                retry.reset()
            await asyncio.sleep(retry.next_s())

    async def _cycle(self) -> None:
        pods, version = await self._api.list_pods()
        self._pods.clear()
        for read in await asyncio.to_thread(lambda: [self._read(raw) for raw in pods]):  # 1,000 pods take 50 ms
            self._take(read)
        self._notes = {name: notes for name, notes in self._notes.items() if name in self._pods}
        self._follow()
        # Spread, so that the replicas of a router do not all list at the same moment.
        async for change in self._api.watch_pods(version, self._config.relist_s * self._rng.uniform(0.8, 1.2)):
            if change.kind != "BOOKMARK":
                read = self._read(change.object)
                if change.kind == "DELETED":
                    self._forget(read)
                else:
                    self._take(read)
                self._follow()
            self._membership.synced()

    def _follow(self) -> None:
        self._membership.update(one_per_url(self._pods.values()))
        self._membership.synced()

    def _read(self, raw: msgspec.Raw) -> _Read | None:
        pod = decode_pod(raw)
        return None if pod is None else (pod, *found_in(pod, self._config))

    def _take(self, read: _Read | None) -> None:
        if read is None:
            log.warning("kubernetes discovery: an object without name or UID was skipped")
            return
        pod, found, notes = read
        self._pods[pod.name] = (pod, found)
        if notes != self._notes.get(pod.name, ()):
            self._notes[pod.name] = notes
            for note in notes:
                log.warning("kubernetes discovery: pod %s: %s", pod.name, note)

    def _forget(self, read: _Read | None) -> None:
        known = self._pods.get(read[0].name) if read is not None else None
        if read is not None and known is not None and known[0].metadata.uid == read[0].metadata.uid:
            del self._pods[read[0].name]
            self._notes.pop(read[0].name, None)
