"""Every setting, with its type, range and default. What each is for is said in config.example.yaml."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct

from router.config.secret import MASK, Secret
from router.contract.url import WorkerUrl

MAX_BLOCK_SIZE = 65536
MAX_DP_SIZE = 4096
MAX_PROCESSES = 64
LOOPBACK_HOSTS = frozenset({"127.0.0.1", "::1", "localhost"})

ListenPort = Annotated[int, Meta(ge=0, le=65535)]
Port = Annotated[int, Meta(ge=1, le=65535)]
Seconds = Annotated[float, Meta(gt=0, le=86400)]
SecondsOrZero = Annotated[float, Meta(ge=0, le=86400)]
Inflight = Annotated[int, Meta(ge=1, le=1_000_000)]
Share = Annotated[float, Meta(ge=0, le=1)]
# Control characters and lone surrogates can be neither a path, a host nor a log line.
Text = Annotated[str, Meta(min_length=1, max_length=4096, pattern=r"^[^\x00-\x1f\x7f\ud800-\udfff]+\Z")]
IpFamily = Literal["auto", "ipv4", "ipv6"]
# What Kubernetes allows as the name of a container port.
PortName = Annotated[str, Meta(max_length=15, pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?\Z")]
Topic = Annotated[str, Meta(max_length=256, pattern=r"^[^\ud800-\udfff]*\Z")]


class Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A mapping of the configuration file."""


class TlsConfig(Section, frozen=True):
    cert: Path
    key: Path


class ListenConfig(Section, frozen=True):
    host: Text = "0.0.0.0"
    port: ListenPort = 8080
    max_body_mb: Annotated[int, Meta(ge=1, le=4096)] = 64
    max_buffered_mb: Annotated[int, Meta(ge=1, le=1 << 20)] = 1024
    allow_internal_fields: bool = False
    metrics: bool = True
    tls: TlsConfig | None = None


class AdminConfig(Section, frozen=True):
    host: Text = "127.0.0.1"
    port: ListenPort = 8081
    key: Secret | None = None
    expose_routing_headers: bool = False


class RankConfig(Section, frozen=True):
    """Where one data-parallel rank's publisher listens, each `tcp://host:port`."""

    events: Text
    replay: Text | None = None
    load: Text | None = None


class KvEventsConfig(Section, frozen=True):
    """What the engine does not say (vLLM) or says wrongly; every key given here beats the engine's descriptor."""

    endpoint_port_base: Port | None = None
    dp_size: Annotated[int, Meta(ge=1, le=MAX_DP_SIZE)] | None = None
    block_size: Annotated[int, Meta(ge=1, le=MAX_BLOCK_SIZE)] | None = None
    topic: Topic | None = None
    replay_endpoint_port_base: Port | None = None
    load_endpoint_port_base: Port | None = None
    host: Text | None = None
    endpoints: tuple[RankConfig, ...] = ()


class WorkerConfig(Section, frozen=True):
    url: WorkerUrl
    api_key: Secret | None = None
    model: Text | None = None
    role: Literal["plain", "prefill", "decode"] | None = None
    group: Text | None = None
    max_inflight: Inflight | None = None
    kv_events: KvEventsConfig | None = None


class WorkerTlsConfig(Section, frozen=True):
    ca: Path | None = None


class TimeoutsConfig(Section, frozen=True):
    connect_s: Seconds = 5.0
    idle_s: Seconds = 600.0
    body_s: Seconds = 60.0
    drain_s: SecondsOrZero = 5.0
    grace_s: SecondsOrZero = 60.0


class DnsConfig(Section, frozen=True):
    """Headless services: every address of `names`, with each of `ports`, is a worker."""

    names: tuple[Text, ...]
    ports: tuple[Port, ...] = (30000,)
    ip_family: IpFamily = "auto"
    interval_s: Annotated[float, Meta(ge=0.1, le=3600)] = 5.0
    api_key: Secret | None = None
    kv_events: KvEventsConfig | None = None


class KubernetesApiConfig(Section, frozen=True):
    """For a router outside of the cluster; each key given beats what the pod's service account says."""

    url: WorkerUrl | None = None
    token_file: Path | None = None
    ca: Path | None = None


class KubernetesConfig(Section, frozen=True):
    """Pods by label: every pod that `selector` matches, with each of `ports`, is a worker."""

    selector: Text
    namespace: Text | None = None
    ports: tuple[Port | PortName, ...] = (30000,)
    ip_family: IpFamily = "auto"
    model_label: Text = "kv-router/model"
    role_label: Text = "kv-router/role"
    group_label: Text = "kv-router/group"
    relist_s: Annotated[float, Meta(ge=1, le=3600)] = 300.0
    api_key: Secret | None = None
    kv_events: KvEventsConfig | None = None
    api: KubernetesApiConfig = KubernetesApiConfig()


class AdmissionConfig(Section, frozen=True):
    """Limits on requests in flight per worker, and the line of those that wait for room."""

    max_inflight_per_worker: Inflight | None = None
    max_waiting: Annotated[int, Meta(ge=0, le=1_000_000)] = 1024
    wait_s: Seconds = 30.0
    priority_header: Annotated[str, Meta(pattern=r"^[A-Za-z0-9-]{1,64}\Z")] | None = None


class DiscoveryConfig(Section, frozen=True):
    static: tuple[WorkerConfig, ...] = ()
    dns: DnsConfig | None = None
    kubernetes: KubernetesConfig | None = None


class TokenizerConfig(Section, frozen=True):
    path: Path | None = None
    chat_template: Path | None = None
    mode: Literal["auto", "local", "engine", "off"] = "auto"
    cache_mb: Annotated[int, Meta(ge=0, le=65536)] = 256
    verify_every: Annotated[int, Meta(ge=0, le=1_000_000)] = 1000
    forward_ids: bool = False
    log_text: bool = False


class PolicyConfig(Section, frozen=True):
    """kv: queue + uncached × (u_weight + decode_weight × decodes) + share_weight × recent uncached, all in tokens."""

    name: Literal["kv", "overlap", "round_robin", "random", "least_inflight", "power_of_two"] = "kv"
    u_weight: Annotated[float, Meta(ge=0, le=100)] = 1.5
    decode_weight: Annotated[float, Meta(ge=0, le=10)] = 0.03
    share_weight: Annotated[float, Meta(ge=0, le=10)] = 0.01
    share_tau_s: Annotated[float, Meta(ge=1, le=3600)] = 120.0
    attention_tokens: Annotated[float, Meta(ge=100, le=1e12)] = 100_000.0
    age_rate_factor: Annotated[float, Meta(ge=0, le=2)] = 0.5
    same_speed: Annotated[float, Meta(ge=1, le=100)] = 1.5
    consistent_tolerance: Annotated[float, Meta(ge=0, le=1)] = 0.0
    prediction_ttl_s: Annotated[float, Meta(ge=0, le=600)] = 10.0
    prefill_tokens_per_s: Annotated[float, Meta(ge=1, le=10_000_000)] = 8000.0
    cpu_pinned_credit: Share = 0.8
    disk_credit: Share = 0.4
    external_credit: Share = 0.3


class DisaggregationConfig(Section, frozen=True):
    """Pairs of prefill and decode engines."""

    meet_s: Seconds = 300.0
    linger_s: SecondsOrZero = 30.0
    plain_below_tokens: Annotated[int, Meta(ge=0, le=1_000_000_000)] = 256
    handover_s: Annotated[float, Meta(ge=0, le=60)] = 0.02


class FleetConfig(Section, frozen=True):
    probe_interval_s: Annotated[float, Meta(ge=0.1, le=3600)] = 5.0
    probe_timeout_s: Annotated[float, Meta(ge=1.5, le=600)] = 10.0
    info_interval_s: Annotated[float, Meta(ge=0.1, le=3600)] = 10.0
    unhealthy_after: Annotated[int, Meta(ge=1, le=100)] = 3
    load_poll_s: Annotated[float, Meta(ge=0, le=60)] = 1.0


class IndexConfig(Section, frozen=True):
    max_blocks: Annotated[int, Meta(ge=1024, le=1_000_000_000)] = 20_000_000
    max_blocks_per_rank: Annotated[int, Meta(ge=1024, le=1_000_000_000)] = 4_000_000


class SiblingsConfig(Section, frozen=True):
    """Other routers of the same fleet. Processes of one router find each other without it."""

    listen: Text | None = None
    peers: tuple[Text, ...] = ()
    dns: Text | None = None
    key: Secret | None = None
    snapshots: bool = True


class EnvoyListenConfig(Section, frozen=True):
    """Where Envoy asks."""

    port: ListenPort
    host: Text = "127.0.0.1"
    tls: TlsConfig | None = None


class EnvoyConfig(Section, frozen=True):
    """The router as Envoy's endpoint picker."""

    ext_authz: EnvoyListenConfig | None = None
    ext_proc: EnvoyListenConfig | None = None
    fallbacks: Annotated[int, Meta(ge=0, le=16)] = 2
    charge_limit_s: Annotated[float, Meta(ge=0, le=600)] = 30.0


class LogConfig(Section, frozen=True):
    format: Literal["console", "json"] = "console"
    level: Literal["debug", "info", "warning", "error"] = "info"
    access: bool = False


class TracesConfig(Section, frozen=True):
    endpoint: Annotated[str, Meta(max_length=4096, pattern=r"^https?://[^\s/]+\S*\Z")] | None = None
    sample: Share = 1.0
    service_name: Text = "kv-router"


class Config(Section, frozen=True):
    """The whole configuration, checked. `workers` holds every static worker, each with a distinct URL."""

    listen: ListenConfig = ListenConfig()
    processes: Annotated[int, Meta(ge=1, le=MAX_PROCESSES)] = 1
    admin: AdminConfig = AdminConfig()
    workers: tuple[WorkerConfig, ...] = ()
    worker_api_key: Secret | None = None
    forward_authorization: bool = False
    api_keys: tuple[Secret, ...] = ()
    worker_tls: WorkerTlsConfig = WorkerTlsConfig()
    timeouts: TimeoutsConfig = TimeoutsConfig()
    admission: AdmissionConfig = AdmissionConfig()
    discovery: DiscoveryConfig = DiscoveryConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    policy: PolicyConfig = PolicyConfig()
    disaggregation: DisaggregationConfig = DisaggregationConfig()
    fleet: FleetConfig = FleetConfig()
    index: IndexConfig = IndexConfig()
    siblings: SiblingsConfig = SiblingsConfig()
    envoy: EnvoyConfig = EnvoyConfig()
    log: LogConfig = LogConfig()
    traces: TracesConfig = TracesConfig()

    def warnings(self) -> tuple[str, ...]:
        """What is allowed but should be seen in the log at start."""
        found = []
        if self.admin.key is None and self.admin.host not in LOOPBACK_HOSTS:
            found.append(
                f"admin.host {self.admin.host} is reachable from other machines and admin.key is not set (case 101)"
            )
        keyed = self.worker_api_key is not None or any(worker.api_key is not None for worker in self.workers)
        for name, listen in (("ext_authz", self.envoy.ext_authz), ("ext_proc", self.envoy.ext_proc)):
            if keyed and listen is not None and listen.host not in LOOPBACK_HOSTS:
                found.append(
                    f"envoy.{name}.host {listen.host} is reachable from other machines, and whoever asks there is told "
                    "workers' keys: let only Envoy reach it"
                )
        return tuple(found)

    def masked(self) -> dict[str, object]:
        """Plain JSON-able values with every secret masked, for `GET /config`."""
        return {name: _masked(getattr(self, name)) for name in self.__struct_fields__}


def _masked(value: object) -> object:
    if isinstance(value, Section):
        return {name: _masked(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, tuple):
        return [_masked(item) for item in value]
    if isinstance(value, Secret):
        return MASK
    return str(value) if isinstance(value, WorkerUrl | Path) else value
