"""Rules between keys: contradictions, and settings that would have no effect."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from router.config.schema import Config, DiscoveryConfig, DnsConfig, KvEventsConfig, SiblingsConfig, WorkerConfig
from router.contract.url import diallable_host, parse_bind_endpoint, parse_tcp_endpoint

COMPARED_ONLY = ("forward_ids", "log_text")
KV_ONLY = (
    "u_weight",
    "decode_weight",
    "share_weight",
    "share_tau_s",
    "attention_tokens",
    "age_rate_factor",
    "same_speed",
)
_ANY_HOST = frozenset({"0.0.0.0", "::", "*"})


def cross_check(config: Config, document: Mapping[object, object]) -> list[str]:
    """One line per problem. `document` is the raw mapping: it tells a given key from a default."""
    return [
        *_listeners(config),
        *_distinct_workers(config),
        *(
            f"workers[{number}].{problem}"
            for number, worker in enumerate(config.workers)
            for problem in check_worker(worker)
        ),
        *_discovery(config.discovery),
        *_siblings(config),
        *_envoy(config, document),
        *_without_effect(config, document),
    ]


def check_worker(worker: WorkerConfig) -> list[str]:
    """One line per problem, keys relative to the worker's entry."""
    return [] if worker.kv_events is None else [f"kv_events.{problem}" for problem in _kv_events(worker.kv_events)]


def _listeners(config: Config) -> Iterator[str]:
    listen, admin = config.listen, config.admin
    same_host = listen.host == admin.host or bool(_ANY_HOST & {listen.host, admin.host})
    if listen.port == admin.port != 0 and same_host:
        yield f"admin.port: {admin.port} is the public listener's port as well; choose another (--admin-port)"


def _distinct_workers(config: Config) -> Iterator[str]:
    first: dict[str, int] = {}
    for number, worker in enumerate(config.workers):
        other = first.setdefault(worker.url.text, number)
        if other != number:
            yield f"workers[{number}].url: {worker.url} is workers[{other}] already; list each engine once"


def _kv_events(events: KvEventsConfig) -> Iterator[str]:
    if events.host is not None:
        yield from _refused("host", diallable_host, events.host)
    for rank, entry in enumerate(events.endpoints):
        for key in ("events", "replay", "load"):
            text = getattr(entry, key)
            if text is not None:
                yield from _refused(f"endpoints[{rank}].{key}", parse_tcp_endpoint, text)
    if events.endpoints:
        for key in ("endpoint_port_base", "replay_endpoint_port_base", "load_endpoint_port_base", "host"):
            if getattr(events, key) is not None:
                yield f"{key}: has no effect beside endpoints; write it into each of them as {{events, replay, load}}"
        if events.dp_size is not None and events.dp_size != len(events.endpoints):
            yield f"dp_size: {events.dp_size} is not the number of endpoints, {len(events.endpoints)}"
    elif events.endpoint_port_base is not None and events.dp_size is not None:
        last = events.endpoint_port_base + events.dp_size - 1
        if last > 65535:
            yield f"endpoint_port_base: the last of {events.dp_size} ranks would be on port {last}, past 65535"


def _discovery(discovery: DiscoveryConfig) -> Iterator[str]:
    for name, source in (("dns", discovery.dns), ("kubernetes", discovery.kubernetes)):
        if source is None:
            continue
        lists: dict[str, tuple[object, ...]] = {"ports": source.ports}
        if isinstance(source, DnsConfig):
            lists["names"] = source.names
        for many, entries in lists.items():
            if not entries or len(set(entries)) < len(entries):
                yield f"discovery.{name}.{many}: give at least one, each once"
        if source.kv_events is not None:
            for problem in _kv_events(source.kv_events):
                yield f"discovery.{name}.kv_events.{problem}"
            for one in ("host", "endpoints"):
                if getattr(source.kv_events, one):
                    yield f"discovery.{name}.kv_events.{one}: names one machine, and this is for many; use the ports"
    if discovery.dns is not None:
        for number, host in enumerate(discovery.dns.names):
            yield from _refused(f"discovery.dns.names[{number}]", diallable_host, host)


def _siblings(config: Config) -> Iterator[str]:
    siblings = config.siblings
    if siblings == SiblingsConfig():
        return
    if siblings.listen is None:
        if config.processes == 1 or siblings != SiblingsConfig(snapshots=siblings.snapshots):
            yield "siblings.listen: missing; without it the others would not hear of this router's load"
        return
    yield from _refused("siblings.listen", parse_bind_endpoint, siblings.listen)
    for number, peer in enumerate(siblings.peers):
        yield from _refused(f"siblings.peers[{number}]", parse_tcp_endpoint, peer)
    if siblings.dns is not None:
        yield from _refused("siblings.dns", diallable_host, siblings.dns)
    if not siblings.peers and siblings.dns is None:
        yield "siblings: name the other routers, by peers or dns"
    if siblings.key is None:
        yield "siblings.key: missing; whoever reaches the port could steer requests"


def _envoy(config: Config, document: Mapping[object, object]) -> Iterator[str]:
    envoy = config.envoy
    asked = {"ext_authz": envoy.ext_authz, "ext_proc": envoy.ext_proc}
    taken = {"listen": config.listen.port, "admin": config.admin.port}
    for name, listen in asked.items():
        if listen is None:
            continue
        for other, port in taken.items():
            if listen.port == port != 0:
                yield f"envoy.{name}.port: {port} is {other}.port as well; choose another"
        if listen.port == 0 and config.processes > 1:
            yield f"envoy.{name}.port: several processes share a port, so it must be a number, not 0"
        taken[f"envoy.{name}"] = listen.port
    if envoy.ext_authz is None and envoy.ext_proc is None:
        for key in _given(document, "envoy").keys() - asked.keys():
            yield f"envoy.{key}: has no effect without envoy.ext_authz or envoy.ext_proc"


def _refused(key: str, check: Callable[[str], object], text: str) -> Iterator[str]:
    try:
        check(text)
    except ValueError as error:
        yield f"{key}: {error}"


def _without_effect(config: Config, document: Mapping[object, object]) -> Iterator[str]:
    if config.policy.name != "kv":
        for key in KV_ONLY:
            if key in _given(document, "policy"):
                yield f"policy.{key}: has no effect with policy.name {config.policy.name}"
    if config.tokenizer.mode in ("engine", "off"):
        for key in ("path", "chat_template", "cache_mb", "verify_every", "forward_ids", "log_text"):
            if _given(document, "tokenizer").get(key) is not None:
                yield f"tokenizer.{key}: has no effect with tokenizer.mode {config.tokenizer.mode}"
    elif config.tokenizer.mode == "local" or config.tokenizer.verify_every == 0:
        why = "with tokenizer.mode local" if config.tokenizer.mode == "local" else "with tokenizer.verify_every 0"
        for key in COMPARED_ONLY:
            if _given(document, "tokenizer").get(key):
                yield f"tokenizer.{key}: has no effect {why}: nothing is compared"
    admission = config.admission
    if admission.max_inflight_per_worker is None and not any(w.max_inflight for w in config.workers):
        for unused in _given(document, "admission").keys() - {"max_inflight_per_worker"}:
            yield f"admission.{unused}: has no effect without admission.max_inflight_per_worker: nobody waits"
    elif admission.max_waiting == 0 and _given(document, "admission").keys() & {"wait_s", "priority_header"}:
        yield "admission.max_waiting: 0 lets nobody wait, so wait_s and priority_header have no effect"
    if config.listen.max_buffered_mb < config.listen.max_body_mb:
        yield f"listen.max_buffered_mb: {config.listen.max_buffered_mb} refuses a body that max_body_mb allows"
    if config.traces.endpoint is None:
        for unused in _given(document, "traces").keys() - {"endpoint"}:
            yield f"traces.{unused}: has no effect without traces.endpoint"
    limits = _given(document, "index")
    if {
        "max_blocks",
        "max_blocks_per_rank",
    } <= limits.keys() and config.index.max_blocks_per_rank > config.index.max_blocks:
        yield f"index.max_blocks_per_rank: {config.index.max_blocks_per_rank} has no effect above index.max_blocks"


def _given(document: Mapping[object, object], section: str) -> Mapping[object, object]:
    value = document.get(section)
    return value if isinstance(value, dict) else {}
