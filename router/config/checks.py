"""Rules between keys: contradictions, and settings that would have no effect."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from router.config.schema import Config, KvEventsConfig, WorkerConfig
from router.contract.url import diallable_host, parse_tcp_endpoint

KV_ONLY = ("u_weight", "decode_weight", "share_weight", "share_tau_s")
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
        for key in ("path", "chat_template"):
            if getattr(config.tokenizer, key) is not None:
                yield f"tokenizer.{key}: has no effect with tokenizer.mode {config.tokenizer.mode}"
    limits = _given(document, "index")
    if {
        "max_blocks",
        "max_blocks_per_rank",
    } <= limits.keys() and config.index.max_blocks_per_rank > config.index.max_blocks:
        yield f"index.max_blocks_per_rank: {config.index.max_blocks_per_rank} has no effect above index.max_blocks"


def _given(document: Mapping[object, object], section: str) -> Mapping[object, object]:
    value = document.get(section)
    return value if isinstance(value, dict) else {}
