"""Every setting of one simulated engine, and the `kv-router engine` flags that carry them."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from router.engine.timing import TimingProfile
from router.errors import ConfigError

TINY_MODEL = Path(__file__).parent / "data" / "tiny"
DEFAULT_PORT = 30000


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Port 0 picks a free one (for the ZMQ ports: a free run of `dp_size`); None turns that socket off.

    `tokens` is the KV capacity of ONE rank as a request sees it; /server_info reports it ÷ dcp_size, as SGLang does.
    `time_scale` stretches (> 1) or shrinks (< 1) modelled seconds into real ones.
    """

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    kv_port: int | None = 0
    replay_port: int | None = 0
    load_port: int | None = 0
    page_size: int = 16
    dcp_size: int = 1
    dp_size: int = 1
    tokens: int = 500_000
    context_length: int = 131_072
    format: str = "default"
    eagle: bool = False
    role: str = "plain"
    bootstrap_port: int = 0
    bootstrap_timeout_s: float = 300.0
    transfer_tokens_per_s: float = 200_000.0
    decode_radix_cache: bool = False
    transfer_fault: str = "none"
    transfer_fault_share: float = 1.0
    model: str = "tiny"
    model_path: Path = TINY_MODEL
    topic: str = ""
    buffer_batches: int = 10_000
    cache_report: bool = True
    health_delay_s: float = 0.0
    time_scale: float = 1.0
    timing: TimingProfile = field(default_factory=TimingProfile)

    def __post_init__(self) -> None:
        if self.role not in ("plain", "prefill", "decode"):
            raise ConfigError(f"--role {self.role}: write plain, prefill or decode")
        if self.transfer_fault not in ("none", "never", "fails"):
            raise ConfigError(f"--transfer-fault {self.transfer_fault}: write none, never or fails")
        if self.decode_radix_cache and self.role != "decode":
            raise ConfigError("--decode-radix-cache is for --role decode")
        if self.transfer_tokens_per_s <= 0 or self.bootstrap_timeout_s <= 0 or not 0 <= self.transfer_fault_share <= 1:
            raise ConfigError(
                "--transfer-tokens-per-s and --bootstrap-timeout-s must be above 0, --transfer-fault-share 0 to 1"
            )
        if self.format not in ("default", "dynamo"):
            raise ConfigError(f"--format {self.format}: write default or dynamo")
        for name in ("page_size", "dcp_size", "dp_size", "context_length", "buffer_batches"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{_flag(name)} must be at least 1, got {getattr(self, name)}")
        if self.tokens < self.block_tokens:
            raise ConfigError(f"--tokens {self.tokens} is less than one block of {self.block_tokens} tokens")
        if self.time_scale <= 0:
            raise ConfigError(f"--time-scale must be above 0, got {self.time_scale}")
        if self.timing.prefill_tokens_per_s <= 0 or self.timing.max_running < 1 or self.timing.chunk_tokens < 1:
            raise ConfigError("--prefill-tokens-per-s, --max-running and --chunk-tokens must be above 0")
        for name in ("port", "bootstrap_port", "kv_port", "replay_port", "load_port"):
            port, count = getattr(self, name), 1 if name in ("port", "bootstrap_port") else self.dp_size
            if port is not None and not 0 <= port <= 65536 - count:
                raise ConfigError(f"{_flag(name)} {port}: {count} ports from there do not fit into 0 … 65535")
        if self.kv_port is None and self.replay_port is not None:
            raise ConfigError("--replay-port needs events: give --kv-port, or --replay-port off")

    @property
    def block_tokens(self) -> int:
        """The logical block: page_size × dcp_size (decode-context parallelism pages the tree at the wider size)."""
        return self.page_size * self.dcp_size


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _port(text: str) -> int | None:
    return None if text == "off" else int(text)


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `kv-router engine`; `options_from` reads what they parsed to."""
    default = EngineOptions()
    parser.add_argument("--host", default=default.host)
    parser.add_argument("--port", type=int, default=default.port, help="HTTP port; 0 picks a free one")
    for name, what in (("kv", "KV events"), ("replay", "replay"), ("load", "load reports")):
        parser.add_argument(
            f"--{name}-port", type=_port, default=0, metavar="PORT|off", help=f"{what} of rank 0, rank r at PORT + r"
        )
    parser.add_argument("--page-size", type=int, default=default.page_size, help="tokens a page")
    parser.add_argument("--dcp-size", type=int, default=default.dcp_size, help="a block is page size × this")
    parser.add_argument("--dp-size", type=int, default=default.dp_size, help="data-parallel ranks")
    parser.add_argument("--tokens", type=int, default=default.tokens, help="KV capacity of one rank, in tokens")
    parser.add_argument("--context-length", type=int, default=default.context_length)
    parser.add_argument("--format", default=default.format, help="default or dynamo")
    parser.add_argument("--eagle", action="store_true", help="bigram blocks, as with EAGLE speculative decoding")
    parser.add_argument(
        "--role", "--disaggregation-mode", dest="role", default=default.role, help="plain, prefill or decode"
    )
    parser.add_argument(
        "--bootstrap-port",
        type=int,
        default=default.bootstrap_port,
        help="of a prefill engine: where decode engines meet it; 0 picks a free one",
    )
    parser.add_argument("--bootstrap-timeout-s", type=float, default=default.bootstrap_timeout_s)
    parser.add_argument(
        "--transfer-tokens-per-s", type=float, default=default.transfer_tokens_per_s, help="from prefill to decode"
    )
    parser.add_argument("--decode-radix-cache", action="store_true", help="a decode engine that keeps prefixes")
    parser.add_argument(
        "--transfer-fault", default=default.transfer_fault, help="of a prefill engine: none, never (meets) or fails"
    )
    parser.add_argument("--transfer-fault-share", type=float, default=default.transfer_fault_share)
    parser.add_argument("--model", default=default.model, help="served model name")
    parser.add_argument("--topic", default=default.topic, help="topic of the event stream")
    parser.add_argument("--health-delay-s", type=float, default=default.health_delay_s)
    parser.add_argument("--time-scale", type=float, default=default.time_scale, help="real seconds a modelled second")
    timing = default.timing
    parser.add_argument("--prefill-tokens-per-s", type=float, default=timing.prefill_tokens_per_s)
    parser.add_argument(
        "--decode-ms",
        type=float,
        default=timing.decode_step_s * 1e3,
        help="a decode step's compute; each step costs 3 ms more",
    )
    parser.add_argument("--chunk-tokens", type=int, default=timing.chunk_tokens, help="prefill tokens a step")
    parser.add_argument("--max-running", type=int, default=timing.max_running, help="requests at a time, a rank")


def options_from(args: argparse.Namespace) -> EngineOptions:
    """Raises ConfigError for values that make no engine."""
    timing = replace(
        TimingProfile(),
        prefill_tokens_per_s=args.prefill_tokens_per_s,
        decode_step_s=args.decode_ms / 1e3,
        chunk_tokens=args.chunk_tokens,
        max_running=args.max_running,
    )
    values = {f.name: getattr(args, f.name) for f in fields(EngineOptions) if hasattr(args, f.name)}
    if values["kv_port"] is None:
        values["replay_port"] = None
    return EngineOptions(timing=timing, **values)
