"""GET /server_info: the keys of SGLang 0.5.23's answer that anyone reads, with this engine's values."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from router.engine.options import EngineOptions

VERSION = "0.5.23"
DEFAULT_BOOTSTRAP_PORT = 8998
"""SGLang's; engines of every role print one."""


@dataclass(frozen=True, slots=True)
class BoundPorts:
    """What the sockets were bound to; None where that socket is off."""

    kv: int | None
    replay: int | None
    load: int | None
    bootstrap: int = DEFAULT_BOOTSTRAP_PORT

    def describe(self) -> str:
        named = {"events": self.kv, "replay": self.replay, "load": self.load}
        return "  ".join(f"{name} :{port}" for name, port in named.items() if port is not None)


def startup_times() -> dict[str, Any]:
    """Durations, different at every start: the fingerprint by which a router notices a restart."""
    return {
        "load_weight": random.uniform(0.01, 0.1),
        "kv_cache_allocation": random.uniform(0.2, 0.6),
        "scheduler_e2e": random.uniform(1.5, 3.0),
        "tokenizer_e2e": random.uniform(5.0, 25.0),
    }


def descriptor(options: EngineOptions, ports: BoundPorts) -> dict[str, Any] | None:
    """The `kv_events` object (engine contract, section 1); None when publishing is off."""
    if ports.kv is None:
        return None
    found: dict[str, Any] = {
        "publisher": "zmq",
        "endpoint_host": "*",
        "endpoint_port_base": ports.kv,
        "topic": options.topic,
        "block_size": options.block_tokens,
        "dp_size": options.dp_size,
    }
    if ports.load is not None:
        found |= {"load_endpoint_port_base": ports.load, "load_topic": "load"}
    if ports.replay is not None:
        found["replay_endpoint_port_base"] = ports.replay
    return found


def server_info(options: EngineOptions, ports: BoundPorts, startup: dict[str, Any]) -> dict[str, Any]:
    capacity_tokens = options.tokens // options.block_tokens * options.page_size
    arguments: dict[str, Any] = {
        "model_path": str(options.model_path),
        "tokenizer_path": str(options.model_path),
        "tokenizer_mode": "auto",
        "context_length": options.context_length,
        "chat_template": None,
        "default_chat_template_kwargs": None,
        "served_model_name": options.model,
        "host": options.host,
        "page_size": options.page_size,
        "dp_size": options.dp_size,
        "dcp_size": options.dcp_size,
        "tp_size": 1,
        "max_running_requests": options.timing.max_running,
        "max_total_tokens": capacity_tokens,
        "chunked_prefill_size": options.timing.chunk_tokens,
        "schedule_policy": "fcfs",
        "disable_radix_cache": options.role == "decode" and not options.decode_radix_cache,
        "radix_eviction_policy": "lru",
        "speculative_algorithm": "EAGLE" if options.eagle else None,
        "disaggregation_mode": "null" if options.role == "plain" else options.role,
        "disaggregation_bootstrap_port": ports.bootstrap,
        "enable_cache_report": options.cache_report,
        "enable_hierarchical_cache": False,
        "kv_events_format": options.format,
    }
    memory = {"token_capacity": capacity_tokens}
    state = {
        **arguments,
        "startup_time": startup,
        "memory_usage": memory,
        "effective_max_running_requests_per_dp": options.timing.max_running,
    }
    return {
        **arguments,
        "status": "ready",
        "max_total_num_tokens": capacity_tokens,
        "max_req_input_len": min(options.context_length, options.tokens) - 1,
        "startup_time": startup,
        "kv_events": descriptor(options, ports),
        "internal_states": [state for _ in range(options.dp_size)],
        "version": VERSION,
    }
