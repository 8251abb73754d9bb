"""From what the Kubernetes API says of a pod to the workers in it. No I/O."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec

from router.config import KubernetesConfig, WorkerConfig
from router.contract.url import WorkerUrl, diallable_host
from router.fleet.discovery.base import Found
from router.fleet.worker import Hold

Role = Literal["plain", "prefill", "decode"]
ROLES: dict[str, Role] = {"plain": "plain", "prefill": "prefill", "decode": "decode"}
ENDED = frozenset({"Succeeded", "Failed"})


class Metadata(msgspec.Struct, rename="camel"):
    """Any field can be missing or null: pods are seen half-filled when they begin and when they end (case 109)."""

    uid: str | None = None
    name: str | None = None
    namespace: str | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    resource_version: str | None = None


class ContainerPort(msgspec.Struct, rename="camel"):
    container_port: int
    name: str | None = None


class Container(msgspec.Struct):
    name: str
    ports: list[ContainerPort] | None = None


class Spec(msgspec.Struct):
    containers: list[Container] | None = None


class PodIp(msgspec.Struct):
    ip: str | None = None


class Condition(msgspec.Struct):
    type: str
    status: str | None = None


class ContainerStatus(msgspec.Struct, rename="camel"):
    name: str
    ready: bool | None = None
    restart_count: int | None = None


class Status(
    msgspec.Struct, rename={"pod_ip": "podIP", "pod_ips": "podIPs", "container_statuses": "containerStatuses"}
):
    phase: str | None = None
    pod_ip: str | None = None
    pod_ips: list[PodIp] | None = None
    conditions: list[Condition] | None = None
    container_statuses: list[ContainerStatus] | None = None


class Pod(msgspec.Struct):
    """The part of a v1 Pod that is read."""

    metadata: Metadata
    spec: Spec | None = None
    status: Status | None = None

    @property
    def name(self) -> str:
        return f"{self.metadata.namespace}/{self.metadata.name}"


class _Named(msgspec.Struct):
    metadata: Metadata


def decode_pod(raw: bytes | msgspec.Raw) -> Pod | None:
    """A pod whose spec or status is not understood is one without them, so no worker; None without name or UID."""
    try:
        pod = msgspec.json.decode(raw, type=Pod)
    except (msgspec.MsgspecError, ValueError):
        try:
            pod = Pod(msgspec.json.decode(raw, type=_Named).metadata)
        except (msgspec.MsgspecError, ValueError):
            return None
    return pod if pod.metadata.uid and pod.metadata.name else None


def found_in(pod: Pod, config: KubernetesConfig) -> tuple[tuple[Found, ...], tuple[str, ...]]:
    """The pod's workers, one a port, and what is wrong with the pod in words.

    No address, or an end reached: no worker. Terminating, or not ready: its workers get no new requests (case 111).
    """
    notes: list[str] = []
    status = pod.status or Status()
    if status.phase in ENDED or not _addresses(status):
        return (), ()
    host = _host(status, config, notes)
    if host is None:
        return (), tuple(notes)
    labels = {**(pod.metadata.annotations or {}), **(pod.metadata.labels or {})}
    role = labels.get(config.role_label)
    if role and role not in ROLES:
        notes.append(f"{config.role_label} {role[:80]!r} is not plain, prefill or decode: the engine's own counts")
    found = []
    for number, container in _ports(pod, config, notes):
        worker = WorkerConfig(
            url=WorkerUrl("http", host, number),
            api_key=config.api_key,
            model=labels.get(config.model_label) or None,
            role=ROLES.get(role or ""),
            group=labels.get(config.group_label) or None,
            kv_events=config.kv_events,
        )
        identity = f"pod {pod.name} uid {pod.metadata.uid} restarts {_restarts(status, container)}"
        found.append(Found(worker, identity, _hold(pod, status, container)))
    return tuple(found), tuple(notes)


def one_per_url(pods: Iterable[tuple[Pod, tuple[Found, ...]]]) -> list[Found]:
    """On a host network, or after a quick replacement, two pods can claim one URL: one in use beats one on hold, any
    beats one that goes away, then the younger counts (case 110)."""
    best: dict[str, tuple[tuple[int, str, str], Found]] = {}
    for pod, found in pods:
        for each in found:
            held = 0 if each.hold is None else 2 if each.hold.state == "draining" else 1
            rank = (-held, pod.metadata.creation_timestamp or "", pod.metadata.uid or "")
            if each.url not in best or rank > best[each.url][0]:
                best[each.url] = (rank, each)
    return [found for _, found in best.values()]


def _addresses(status: Status) -> list[str]:
    """The primary one first."""
    every = [status.pod_ip, *(each.ip for each in status.pod_ips or ())]
    return list(dict.fromkeys(ip for ip in every if ip))


def _host(status: Status, config: KubernetesConfig, notes: list[str]) -> str | None:
    wanted = {"auto": (4, 6), "ipv4": (4,), "ipv6": (6,)}[config.ip_family]
    seen = _addresses(status)
    for text in seen:
        try:
            host = diallable_host(text)
            if ipaddress.ip_address(host).version in wanted:
                return host
        except ValueError as error:
            notes.append(str(error))
    notes.append(f"no {config.ip_family} address among {', '.join(seen)[:200]}")
    return None


def _ports(pod: Pod, config: KubernetesConfig, notes: list[str]) -> Iterator[tuple[int, str | None]]:
    """(port, name of the container behind it). A number is taken even when no container declares it: declaring is
    optional in Kubernetes. A name must be declared."""
    containers = (pod.spec.containers if pod.spec is not None else None) or []
    declared = [(port.name, port.container_port, c.name) for c in containers for port in c.ports or ()]
    taken: set[int] = set()
    for wanted in config.ports:
        match: tuple[int, str | None] | None = next(
            ((number, owner) for name, number, owner in declared if wanted in (name, number)), None
        )
        if match is None and isinstance(wanted, int):
            match = (wanted, containers[0].name if len(containers) == 1 else None)
        if match is None:
            notes.append(f"no container has a port named {wanted!r}")
        elif match[0] not in taken and 0 < match[0] < 65536:
            taken.add(match[0])
            yield match


def _restarts(status: Status, container: str | None) -> int:
    """Of the container behind the port; of all of them when it cannot be told which that is."""
    return sum(s.restart_count or 0 for s in status.container_statuses or () if container in (None, s.name))


def _hold(pod: Pod, status: Status, container: str | None) -> Hold | None:
    if pod.metadata.deletion_timestamp is not None:
        return Hold("draining", f"pod {pod.name} is terminating; open streams may finish")
    return None if _ready(status, container) else Hold("unhealthy", f"pod {pod.name} is not ready")


def _ready(status: Status, container: str | None) -> bool:
    """The pod's own condition, which has its readiness gates in it; else its containers'."""
    for condition in status.conditions or ():
        if condition.type == "Ready":
            return condition.status == "True"
    ready = [s.ready is True for s in status.container_statuses or () if container in (None, s.name)]
    return bool(ready) and all(ready)
