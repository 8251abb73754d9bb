"""`/server_info` → `kv_events`: where each data-parallel rank publishes its KV events (engine contract, section 1)."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeGuard

from router.config.schema import MAX_BLOCK_SIZE, MAX_DP_SIZE, KvEventsConfig, RankConfig
from router.contract.url import WorkerUrl, canonical_host, diallable_host, parse_tcp_endpoint, tcp_endpoint
from router.errors import ContractError

MAX_PORT = 65535
MAX_TOPIC_BYTES = 1024
DEFAULT_LOAD_TOPIC = "load"
# An engine that binds to one of these is reached at the host its URL names (case 15).
WILDCARD_HOSTS = frozenset({"", "*", "0.0.0.0", "::", "[::]"})


@dataclass(frozen=True, slots=True)
class RankEndpoints:
    """The three sockets of one rank as `tcp://host:port`; None where there is none.

    `problem` says why the events cannot be had (then `events` is None) and what to do; the other ranks still work.
    """

    rank: int
    events: str | None
    replay: str | None
    load: str | None
    problem: str | None


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A usable descriptor. `block_size` is the LOGICAL width in tokens, as advertised, never re-derived (case 46).

    `notes` are oddities in words for people: they change nothing, and name the setting that would.
    """

    block_size: int
    dp_size: int
    topic: str
    load_topic: str
    ranks: tuple[RankEndpoints, ...]
    notes: tuple[str, ...]


def parse_descriptor(kv_events: object, worker_url: WorkerUrl, override: KvEventsConfig | None = None) -> Descriptor:
    """`kv_events` is the decoded value of that key (None when absent); each key of `override` beats the engine's.

    Raises ContractError when no rank could ever be heard; such a worker is routed by load only (case 14).
    """
    return _Parser(kv_events, worker_url, override or KvEventsConfig()).parse()


class _Parser:
    """The engine's words, the operator's words, and the notes gathered on the way."""

    def __init__(self, kv_events: object, worker_url: WorkerUrl, override: KvEventsConfig) -> None:
        self.worker_url = worker_url
        self.override = override
        self.notes: list[str] = []
        self.raw = self._advertised(kv_events)

    def _advertised(self, kv_events: object) -> dict[str, object]:
        configured = self.override.endpoint_port_base is not None or bool(self.override.endpoints)
        if kv_events is None and configured:
            return {}
        if kv_events is None:
            raise ContractError(
                "the engine describes no KV events (kv_events is null or absent): start SGLang with "
                '--kv-events-config \'{"publisher":"zmq"}\' and a page size; for vLLM set workers[].kv_events'
            )
        if not isinstance(kv_events, dict):
            raise ContractError(f"kv_events is {_shown(kv_events)}, not an object: is this engine a supported release?")
        raw = {key: value for key, value in kv_events.items() if isinstance(key, str)}
        publisher = raw.get("publisher", "zmq")
        if publisher != "zmq":
            raise ContractError(
                f"kv_events.publisher is {_shown(publisher)}; only zmq can be subscribed to: "
                'use "publisher":"zmq" in --kv-events-config'
            )
        return raw

    def parse(self) -> Descriptor:
        block_size = self._merged("block_size", MAX_BLOCK_SIZE, self.override.block_size)
        dp_size = self._dp_size()
        topic = self.override.topic if self.override.topic is not None else self._topic()
        if self.override.endpoints:
            ranks = tuple(self._configured_ranks(dp_size))
        else:
            ranks = tuple(self._counted_ranks(dp_size))
        return Descriptor(block_size, dp_size, topic, self._load_topic(), ranks, tuple(self.notes))

    def _dp_size(self) -> int:
        configured = self.override.dp_size
        if configured is None and self.override.endpoints and "dp_size" not in self.raw:
            configured = len(self.override.endpoints)
        return self._merged("dp_size", MAX_DP_SIZE, configured, default=1 if not self.raw else None)

    def _merged(self, key: str, most: int, configured: int | None, default: int | None = None) -> int:
        """The configured number, else the advertised one, which must be an integer from 1 to `most`."""
        advertised = self.raw.get(key)
        if configured is not None:
            if advertised is not None and advertised != configured:
                self.notes.append(f"kv_events.{key}: {configured} is configured, the engine says {_shown(advertised)}")
            return configured
        if key not in self.raw:
            if default is not None:
                return default
            raise ContractError(f"kv_events.{key} is missing: set workers[].kv_events.{key}")
        if not _is_count(advertised, most):
            raise ContractError(
                f"kv_events.{key} is {_shown(advertised)}, not an integer from 1 to {most}: "
                f"correct the engine or set workers[].kv_events.{key}"
            )
        return advertised

    def _topic(self) -> str:
        topic = self.raw.get("topic", "")
        if not _is_topic(topic):
            raise ContractError(
                f"kv_events.topic is {_shown(topic)}, not text of at most {MAX_TOPIC_BYTES} UTF-8 bytes: "
                "correct the engine or set workers[].kv_events.topic"
            )
        return topic

    def _load_topic(self) -> str:
        topic = self.raw.get("load_topic", DEFAULT_LOAD_TOPIC)
        if not _is_topic(topic):
            self.notes.append(f"kv_events.load_topic is {_shown(topic)}, no topic: {DEFAULT_LOAD_TOPIC!r} is used")
            return DEFAULT_LOAD_TOPIC
        return topic

    def _host(self) -> str:
        """The host to dial: the worker's own, unless the operator names another (case 102)."""
        own = self.worker_url.host
        if self.override.host is not None:
            return _configured_host(self.override.host)
        if not self.raw:
            return own
        advertised = self.raw.get("endpoint_host", "*")
        if not isinstance(advertised, str):
            raise ContractError(
                f"kv_events.endpoint_host is {_shown(advertised)}, not text: set workers[].kv_events.host"
            )
        if advertised in WILDCARD_HOSTS:
            return own
        try:
            concrete = canonical_host(advertised)
        except ValueError as error:
            raise ContractError(
                f"kv_events.endpoint_host cannot be dialled: {error}; use tcp://*:PORT as the engine's endpoint"
            ) from None
        # The publisher binds wildcard addresses only; to a concrete one it connects, and nothing arrives (case 17).
        note = (
            f"the engine's event endpoint names the concrete host {concrete}: its publisher connects there and nothing "
            'arrives, unless it was started with "bind":true; tcp://*:PORT is safe'
        )
        if concrete != own:
            note += f". Dialling the worker's own host {own}; to dial {concrete} set workers[].kv_events.host"
        self.notes.append(note)
        return own

    def _counted_ranks(self, dp_size: int) -> Iterator[RankEndpoints]:
        """Rank r at port base + r."""
        host = self._host()
        base = self._merged("endpoint_port_base", MAX_PORT, self.override.endpoint_port_base)
        taken = range(base, base + dp_size)
        replay = self._optional_base("replay_endpoint_port_base", self.override.replay_endpoint_port_base, taken)
        load = self._optional_base("load_endpoint_port_base", self.override.load_endpoint_port_base, taken)
        for rank in range(dp_size):
            port = base + rank
            problem = None
            if port > MAX_PORT:
                problem = (
                    f"its port would be {port}, past {MAX_PORT}: "
                    f"lower the engine's event port to {MAX_PORT + 1 - dp_size} or less"
                )
            yield RankEndpoints(
                rank,
                None if problem else tcp_endpoint(host, port),
                None if problem else _side_endpoint(host, replay, rank, taken),
                _side_endpoint(host, load, rank, taken),
                problem,
            )

    def _optional_base(self, key: str, configured: int | None, taken: range) -> int | None:
        """Base port of the replay or load sockets; None, with a note when there is a reason to give."""
        base: object = configured if configured is not None else self.raw.get(key)
        if base is None:
            return None
        if not _is_count(base, MAX_PORT):
            self.notes.append(f"kv_events.{key} is {_shown(base)}, not a port: ignored")
            return None
        last = base + len(taken) - 1
        if last > MAX_PORT:
            self.notes.append(f"kv_events.{key} runs to port {last}: ranks past {MAX_PORT} go without")
        if base < taken.stop and last >= taken.start:
            # SGLang 0.5.23 advertises this as it is (describe_matrix: "replay adjacent" with dp_size > 1).
            self.notes.append(
                f"kv_events.{key} {base}-{last} overlaps the event ports {taken.start}-{taken.stop - 1}: "
                f"the ranks concerned go without; move it {len(taken)} or more ports away"
            )
        return base

    def _configured_ranks(self, dp_size: int) -> Iterator[RankEndpoints]:
        """One entry a rank, for ranks on several hosts (case 16)."""
        listed = self.override.endpoints
        if len(listed) > dp_size:
            self.notes.append(
                f"kv_events.endpoints lists {len(listed)} ranks, the engine has {dp_size}: the rest is ignored"
            )
        for rank in range(dp_size):
            if rank < len(listed):
                yield _configured_rank(rank, listed[rank])
            else:
                yield RankEndpoints(
                    rank, None, None, None, "not listed in workers[].kv_events.endpoints: add its endpoint"
                )


def _side_endpoint(host: str, base: int | None, rank: int, taken: range) -> str | None:
    """A replay or load endpoint; a port that the events already use cannot be that as well."""
    if base is None or base + rank > MAX_PORT or base + rank in taken:
        return None
    return tcp_endpoint(host, base + rank)


def _configured_rank(rank: int, entry: RankConfig) -> RankEndpoints:
    def canonical(text: str | None) -> str | None:
        return None if text is None else tcp_endpoint(*parse_tcp_endpoint(text))

    try:
        return RankEndpoints(rank, canonical(entry.events), canonical(entry.replay), canonical(entry.load), None)
    except ValueError as error:
        raise ContractError(f"kv_events.endpoints[{rank}]: {error}") from None


def _configured_host(text: str) -> str:
    try:
        return diallable_host(text)
    except ValueError as error:
        raise ContractError(f"kv_events.host: {error}") from None


def _is_count(value: object, most: int) -> TypeGuard[int]:
    return type(value) is int and 1 <= value <= most


def _is_topic(value: object) -> TypeGuard[str]:
    try:
        return isinstance(value, str) and len(value.encode()) <= MAX_TOPIC_BYTES
    except UnicodeEncodeError:  # a lone surrogate: legal in JSON, impossible as a ZMQ frame
        return False


def _shown(value: object) -> str:
    """What the engine said, short enough for a log line."""
    return reprlib.repr(value)
