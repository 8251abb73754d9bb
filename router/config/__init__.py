"""Configuration: `schema` says what can be set, `load` reads and checks it, `secret` keeps keys from being printed."""

from router.config.load import Overrides, build_config, load_config, parse_worker
from router.config.schema import (
    AdminConfig,
    Config,
    DiscoveryConfig,
    FleetConfig,
    IndexConfig,
    KvEventsConfig,
    ListenConfig,
    LogConfig,
    PolicyConfig,
    RankConfig,
    TimeoutsConfig,
    TlsConfig,
    TokenizerConfig,
    WorkerConfig,
    WorkerTlsConfig,
)
from router.config.secret import Secret

__all__ = [
    "AdminConfig",
    "Config",
    "DiscoveryConfig",
    "FleetConfig",
    "IndexConfig",
    "KvEventsConfig",
    "ListenConfig",
    "LogConfig",
    "Overrides",
    "PolicyConfig",
    "RankConfig",
    "Secret",
    "TimeoutsConfig",
    "TlsConfig",
    "TokenizerConfig",
    "WorkerConfig",
    "WorkerTlsConfig",
    "build_config",
    "load_config",
    "parse_worker",
]
