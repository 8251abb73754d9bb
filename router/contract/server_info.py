"""The `/server_info` body of an engine: the few of its ~556 keys that routing needs (engine contract, section 1)."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import msgspec
from msgspec import UNSET, Raw, UnsetType

from router.errors import ContractError

MAX_BODY_BYTES = 4 * 1024 * 1024
MAX_NAMES = 64
MAX_TEXT_CHARS = 4096

# SGLang's radix tree is keyed by token PAIRS exactly for these (its SpeculativeAlgorithm.is_eagle()); NEXTN is an alias
# that older releases report as it is. DFLASH, STANDALONE and NGRAM keep plain keys. (dynamo#10982, dynamo#6872)
BIGRAM_ALGORITHMS = frozenset({"EAGLE", "EAGLE3", "NEXTN", "FROZEN_KV_MTP"})

Engine = Literal["sglang", "vllm", "unknown"]
Role = Literal["plain", "prefill", "decode"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What an engine says about itself. None or empty where it says nothing usable.

    `max_total_tokens` is the KV capacity in tokens that a request sees on one rank: the pool × `dcp_size`.
    `startup_fingerprint` changes when the process was started anew; it is opaque, and empty when the engine gives none.
    `kv_events` is the decoded value for `parse_descriptor`. `adapters` are those of `model_names` that are LoRA
    adapters (vLLM lists them as models). `says_role`: the engine knows of roles and names its own; without, `role` is
    only the default.
    """

    engine: Engine = "unknown"
    version: str | None = None
    status: str | None = None
    model_names: tuple[str, ...] = ()
    model_path: str | None = None
    tokenizer_path: str | None = None
    chat_template: str | None = None
    default_chat_template_kwargs: dict[str, object] = field(default_factory=dict)
    role: Role = "plain"
    says_role: bool = False
    bootstrap_port: int | None = None
    page_size: int | None = None
    dcp_size: int = 1
    dp_size: int = 1
    max_total_tokens: int | None = None
    max_running_requests: int | None = None
    context_length: int | None = None
    speculative_algorithm: str | None = None
    bigram: bool = False
    cache_report: bool = False
    startup_fingerprint: str = ""
    kv_events: object = None
    adapters: frozenset[str] = frozenset()


class _State(msgspec.Struct):
    """One of `internal_states`: the scheduler's own, live values."""

    page_size: Raw | UnsetType = UNSET
    dcp_size: Raw | UnsetType = UNSET
    speculative_algorithm: Raw | UnsetType = UNSET
    effective_max_running_requests_per_dp: Raw | UnsetType = UNSET
    memory_usage: Raw | UnsetType = UNSET


class _Memory(msgspec.Struct):
    token_capacity: Raw | UnsetType = UNSET


class _Body(msgspec.Struct):
    """Every field stays raw until it is read, so that one of a wrong type costs only itself."""

    vllm_config: Raw | UnsetType = UNSET
    version: Raw | UnsetType = UNSET
    status: Raw | UnsetType = UNSET
    served_model_name: Raw | UnsetType = UNSET
    model_path: Raw | UnsetType = UNSET
    tokenizer_path: Raw | UnsetType = UNSET
    chat_template: Raw | UnsetType = UNSET
    default_chat_template_kwargs: Raw | UnsetType = UNSET
    disaggregation_mode: Raw | UnsetType = UNSET
    disaggregation_bootstrap_port: Raw | UnsetType = UNSET
    page_size: Raw | UnsetType = UNSET
    dcp_size: Raw | UnsetType = UNSET
    dp_size: Raw | UnsetType = UNSET
    max_total_num_tokens: Raw | UnsetType = UNSET
    max_running_requests: Raw | UnsetType = UNSET
    context_length: Raw | UnsetType = UNSET
    speculative_algorithm: Raw | UnsetType = UNSET
    enable_cache_report: Raw | UnsetType = UNSET
    startup_time: Raw | UnsetType = UNSET
    internal_states: Raw | UnsetType = UNSET
    kv_events: Raw | UnsetType = UNSET


_UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)


def parse_server_info(body: bytes) -> ServerInfo:
    """Raises ContractError when the body is no JSON object; any single field of a wrong type counts as absent."""
    if len(body) > MAX_BODY_BYTES:
        raise ContractError(f"/server_info is {len(body)} bytes, over {MAX_BODY_BYTES}: is this an engine?")
    try:
        fields = _fields(body)
    except _UNREADABLE as error:
        raise ContractError(f"/server_info is not a JSON object ({error}): is this an SGLang or vLLM engine?") from None
    return _vllm_info(fields) if fields.vllm_config is not UNSET else _sglang_info(fields)


def _fields(body: bytes) -> _Body:
    try:
        return msgspec.json.decode(body, type=_Body)
    except msgspec.MsgspecError:
        # Python servers can print NaN, Infinity and lone surrogates: whichever key has one, the others still count.
        document = json.loads(body)
    if not isinstance(document, dict):
        raise ValueError(f"it is a {type(document).__name__}")
    known = document.keys() & set(_Body.__struct_fields__)
    return _Body(**{name: Raw(json.dumps(document[name]).encode()) for name in known})


def _sglang_info(fields: _Body) -> ServerInfo:
    state = _first_state(fields.internal_states)
    model_path = _text(fields.model_path)
    # The scheduler's value is what runs, the top-level one what was asked for (contract, section 1).
    algorithm = _text(state.speculative_algorithm) or _text(fields.speculative_algorithm)
    dcp_size = _count(state.dcp_size) or _count(fields.dcp_size) or 1
    memory = _read(state.memory_usage, _Memory) or _Memory()
    pool = _count(fields.max_total_num_tokens) or _count(memory.token_capacity)
    says_sglang = model_path is not None or fields.internal_states is not UNSET or fields.kv_events is not UNSET
    return ServerInfo(
        engine="sglang" if says_sglang else "unknown",
        version=_text(fields.version),
        status=_text(fields.status),
        model_names=_names(fields.served_model_name) or ((model_path,) if model_path else ()),
        model_path=model_path,
        tokenizer_path=_text(fields.tokenizer_path) or model_path,
        chat_template=_text(fields.chat_template),
        default_chat_template_kwargs=_mapping(fields.default_chat_template_kwargs),
        role=_role(fields.disaggregation_mode),
        says_role=_text(fields.disaggregation_mode) in ("null", "prefill", "decode"),
        bootstrap_port=_port(fields.disaggregation_bootstrap_port),
        page_size=_count(state.page_size) or _count(fields.page_size),
        dcp_size=dcp_size,
        dp_size=_count(fields.dp_size) or 1,
        max_total_tokens=None if pool is None else pool * dcp_size,
        max_running_requests=_count(state.effective_max_running_requests_per_dp) or _count(fields.max_running_requests),
        context_length=_count(fields.context_length),
        speculative_algorithm=algorithm,
        bigram=algorithm is not None and algorithm.upper() in BIGRAM_ALGORITHMS,
        cache_report=_read(fields.enable_cache_report, bool) is True,
        startup_fingerprint=_fingerprint(fields.startup_time),
        kv_events=_read(fields.kv_events, object),
    )


def _vllm_info(fields: _Body) -> ServerInfo:
    """vLLM prints its configuration as one text; ports, topic and width must come from the router's configuration."""
    said = _read(fields.vllm_config, str) or ""
    model_path = _said(said, "model")
    name = _said(said, "served_model_name") or model_path
    dp_size = _said(said, "data_parallel_size")
    return ServerInfo(
        engine="vllm",
        version=_text(fields.version),
        model_names=(name,) if name else (),
        model_path=model_path,
        tokenizer_path=_said(said, "tokenizer") or model_path,
        dp_size=int(dp_size) if dp_size is not None and re.fullmatch(r"[1-9][0-9]{0,3}", dp_size) else 1,
    )


def _said(config: str, key: str) -> str | None:
    """`key='value'` or `key=value` in vLLM's printed configuration (0.32.0 prints both forms)."""
    match = re.search(rf"(?:^|, ){key}=(?:'([^']*)'|([^',\[\]]+?))(?:,|$)", config[: 64 * 1024])
    value = (match[1] or match[2]) if match else None
    return None if value in (None, "", "None") else value[:MAX_TEXT_CHARS]


def _first_state(raw: Raw | UnsetType) -> _State:
    """Ranks run the same arguments, so the first rank's live values stand for all."""
    states = _read(raw, list[Raw])
    return (_read(states[0], _State) if states else None) or _State()


def _read(raw: Raw | UnsetType, kind: type[T]) -> T | None:
    if raw is UNSET:
        return None
    try:
        return msgspec.json.decode(raw, type=kind)
    except _UNREADABLE:
        return None


def _text(raw: Raw | UnsetType) -> str | None:
    text = _read(raw, str)
    return text if text and len(text) <= MAX_TEXT_CHARS else None


def _count(raw: Raw | UnsetType) -> int | None:
    number = _read(raw, int)
    return number if number is not None and 1 <= number < 2**53 else None


def _port(raw: Raw | UnsetType) -> int | None:
    port = _count(raw)
    return port if port is not None and port <= 65535 else None


def _names(raw: Raw | UnsetType) -> tuple[str, ...]:
    """`served_model_name` is a text, or a list of texts."""
    single = _text(raw)
    if single is not None:
        return (single,)
    texts = (_text(item) for item in (_read(raw, list[Raw]) or [])[:MAX_NAMES])
    return tuple(dict.fromkeys(text for text in texts if text is not None))


def _mapping(raw: Raw | UnsetType) -> dict[str, object]:
    """An object, or an object printed into a text as command lines pass it."""
    text = _read(raw, str)
    return _read(Raw(text.encode(errors="replace")) if text is not None else raw, dict[str, object]) or {}


def _role(raw: Raw | UnsetType) -> Role:
    """SGLang says the text "null" when it does not disaggregate."""
    return _read(raw, Literal["prefill", "decode"]) or "plain"  # type: ignore[arg-type]


def _fingerprint(raw: Raw | UnsetType) -> str:
    """`startup_time` holds durations, not a time: compared whole (contract, section 1)."""
    started = _read(raw, object)
    if started is None:
        return ""
    return hashlib.sha256(msgspec.json.encode(started, order="sorted")).hexdigest()[:16]
