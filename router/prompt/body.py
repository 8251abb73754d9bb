"""A request body, read once: the few fields routing needs are typed, the prompt stays raw JSON until rendered."""

from __future__ import annotations

import codecs
import json
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from router.errors import RouterError
from router.prompt import large

# More than any engine runs for one request; they keep a hostile number from overflowing a cost.
MAX_COPIES = 4096
MAX_NEW_TOKENS = 2**31

ABSENT = msgspec.Raw()

_Value = TypeVar("_Value")


class Fields(msgspec.Struct, gc=False):
    """Known top-level keys as raw JSON, ABSENT where the key is not there; a repeated key keeps its last value."""

    model: msgspec.Raw = ABSENT
    stream: msgspec.Raw = ABSENT
    stream_options: msgspec.Raw = ABSENT
    n: msgspec.Raw = ABSENT
    max_tokens: msgspec.Raw = ABSENT
    max_completion_tokens: msgspec.Raw = ABSENT
    sampling_params: msgspec.Raw = ABSENT
    cache_salt: msgspec.Raw = ABSENT
    extra_key: msgspec.Raw = ABSENT
    lora_path: msgspec.Raw = ABSENT
    rid: msgspec.Raw = ABSENT
    session_id: msgspec.Raw = ABSENT
    routed_dp_rank: msgspec.Raw = ABSENT
    data_parallel_rank: msgspec.Raw = ABSENT
    prompt: msgspec.Raw = ABSENT
    text: msgspec.Raw = ABSENT
    input_ids: msgspec.Raw = ABSENT
    input_embeds: msgspec.Raw = ABSENT
    image_data: msgspec.Raw = ABSENT
    video_data: msgspec.Raw = ABSENT
    audio_data: msgspec.Raw = ABSENT
    messages: msgspec.Raw = ABSENT
    tools: msgspec.Raw = ABSENT
    tool_choice: msgspec.Raw = ABSENT
    chat_template: msgspec.Raw = ABSENT
    chat_template_kwargs: msgspec.Raw = ABSENT
    reasoning: msgspec.Raw = ABSENT
    reasoning_effort: msgspec.Raw = ABSENT
    continue_final_message: msgspec.Raw = ABSENT
    add_generation_prompt: msgspec.Raw = ABSENT
    add_special_tokens: msgspec.Raw = ABSENT
    documents: msgspec.Raw = ABSENT
    system: msgspec.Raw = ABSENT
    thinking: msgspec.Raw = ABSENT
    output_config: msgspec.Raw = ABSENT
    input: msgspec.Raw = ABSENT
    instructions: msgspec.Raw = ABSENT
    previous_response_id: msgspec.Raw = ABSENT
    response_format: msgspec.Raw = ABSENT
    logprobs: msgspec.Raw = ABSENT
    bootstrap_host: msgspec.Raw = ABSENT
    bootstrap_port: msgspec.Raw = ABSENT
    bootstrap_room: msgspec.Raw = ABSENT
    bootstrap_pair_key: msgspec.Raw = ABSENT
    decode_tp_size: msgspec.Raw = ABSENT
    disagg_prefill_dp_rank: msgspec.Raw = ABSENT
    kv_transfer_params: msgspec.Raw = ABSENT


class _StreamOptions(msgspec.Struct, gc=False):
    include_usage: bool | None = None


class _SamplingParams(msgspec.Struct, gc=False):
    n: int | None = None
    max_new_tokens: int | None = None


@dataclass(slots=True)  # not frozen: that costs a microsecond a request
class RequestBody:
    """What routing reads from a body.

    `raw` is the client's bytes, unchanged. A field of a type no engine takes reads as absent, its name is in `odd`.
    `copies` is how many sequences the engine runs for each prompt (`n`), `max_new_tokens` the answer's cap in tokens.
    `cache_salt`, `extra_key` and `lora_path` are the first prompt's when the client sent one for each of a batch.
    """

    path: str
    raw: bytes
    fields: Fields
    model: str | None = None
    stream: bool = False
    include_usage: bool = False
    copies: int = 1
    max_new_tokens: int | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    lora_path: str | None = None
    rids: tuple[str, ...] = ()
    session_id: str | None = None
    routed_dp_rank: int | None = None
    odd: frozenset[str] = frozenset()


def present(raw: msgspec.Raw) -> bool:
    """False for an absent key and for `null`, which every engine reads alike."""
    if raw is ABSENT:
        return False
    return len(memoryview(raw)) > 4 or bytes(raw) not in (b"", b"null")


def plain(raw: msgspec.Raw) -> Any:
    """Python values of one field; None when absent. Raises ValueError (also for JSON nested too deep)."""
    return None if raw is ABSENT else large.value(bytes(raw))


def parse_body(path: str, raw: bytes) -> RequestBody:
    """Read a body. Raises RouterError("bad_json") when it is not one JSON object in UTF-8 (case 84), never for more.

    Takes any object an engine's own parser (Python's `json`) takes: NaN, a byte-order mark, the last of repeated keys.
    A body over `large.LARGE_BYTES` is read in pieces and takes its time: call it in a thread.
    """
    fields = _fields(raw)
    odd: list[str] = []

    def read(name: str, expected: type[_Value]) -> _Value | None:
        value: msgspec.Raw = getattr(fields, name)
        if not present(value):
            return None
        try:
            return msgspec.json.decode(value, type=expected)
        except (msgspec.DecodeError, RecursionError):
            odd.append(name)
            return None

    def first_text(name: str) -> str | None:
        value: msgspec.Raw = getattr(fields, name)
        if not present(value):
            return None
        if bytes(memoryview(value)[:1]) == b"[":
            values = read(name, list[str | None])
            return (values[0] or None) if values else None
        return read(name, str) or None  # engines read "" as not given

    sampling = read("sampling_params", _SamplingParams) if path == "/generate" else None
    n = sampling.n if sampling else read("n", int)
    limit = sampling.max_new_tokens if sampling else read("max_completion_tokens", int) or read("max_tokens", int)
    options = read("stream_options", _StreamOptions)
    rank = read("routed_dp_rank", int)
    if rank is None:
        rank = read("data_parallel_rank", int)  # its name before SGLang 0.5.6
    return RequestBody(
        path=path,
        raw=raw,
        fields=fields,
        model=read("model", str),
        stream=_flag(fields.stream, "stream", odd),
        include_usage=bool(options and options.include_usage),
        copies=min(max(n or 1, 1), MAX_COPIES),
        max_new_tokens=min(limit, MAX_NEW_TOKENS) if limit is not None and limit >= 0 else None,
        cache_salt=first_text("cache_salt"),
        extra_key=first_text("extra_key"),
        lora_path=first_text("lora_path"),
        rids=_rids(fields.rid, odd),
        session_id=read("session_id", str),
        routed_dp_rank=rank,
        odd=frozenset(odd),
    )


_DECODER = msgspec.json.Decoder(Fields)


def _fields(raw: bytes) -> Fields:
    try:
        if len(raw) > large.LARGE_BYTES:
            return _fields_in_pieces(raw)
        if not raw.isascii():
            raw.decode()  # msgspec skips over strings it does not build
        return _DECODER.decode(raw)
    except UnicodeDecodeError as error:
        raise RouterError("bad_json", f"the body is not UTF-8: {error.reason} at byte {error.start}") from None
    except (RecursionError, large.TooDeep):
        raise RouterError("bad_json", "the body is nested too deep") from None
    except large.BadJson as error:
        raise RouterError("bad_json", f"the body is not JSON: {error}") from None
    except msgspec.DecodeError as error:
        return _fields_leniently(raw, str(error))


def _fields_in_pieces(raw: bytes) -> Fields:
    document = raw.removeprefix(codecs.BOM_UTF8).strip(b" \t\r\n")
    found = large.read_object(document)
    if document[:1] != b"{":
        raise _not_an_object("array" if document[:1] == b"[" else "string")
    names = Fields.__struct_fields__
    return Fields(**{name: msgspec.Raw(part) for name, part in found.items() if name in names})


def _fields_leniently(raw: bytes, refusal: str) -> Fields:
    """What msgspec refuses and Python's json takes. `refusal` is msgspec's reason, the clearer one to show."""
    try:
        value = json.loads(raw.decode("utf-8-sig"))
    except RecursionError:
        raise RouterError("bad_json", "the body is nested too deep") from None
    except ValueError:
        raise RouterError("bad_json", f"the body is not JSON: {refusal}") from None
    if not isinstance(value, dict):
        raise _not_an_object(_json_type(value))
    names = Fields.__struct_fields__
    return Fields(**{name: msgspec.Raw(json.dumps(value[name]).encode()) for name in names if name in value})


def _not_an_object(kind: str) -> RouterError:
    return RouterError("bad_json", f"the body is a JSON {kind}; send an object")


def _json_type(value: object) -> str:
    names = {list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


def _flag(raw: msgspec.Raw, name: str, odd: list[str]) -> bool:
    """A boolean as pydantic's lax mode (the engines') reads it: "true", 1 … are noted as odd and obeyed (case 84)."""
    if not present(raw):
        return False
    text = bytes(raw)
    if text in (b"true", b"false"):
        return text == b"true"
    odd.append(name)
    return text.strip(b'"').lower() in (b"1", b"1.0", b"true", b"t", b"yes", b"y", b"on")


def _rids(raw: msgspec.Raw, odd: list[str]) -> tuple[str, ...]:
    if not present(raw):
        return ()
    try:
        value = msgspec.json.decode(raw, type=str | list[str])
    except (msgspec.DecodeError, RecursionError):
        odd.append("rid")
        return ()
    return (value,) if isinstance(value, str) else tuple(value)
