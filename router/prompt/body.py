"""A request body, read once: the few fields routing needs are typed, the prompt stays raw JSON until rendered."""

from __future__ import annotations

import codecs
import json
from typing import Any, TypeVar

import msgspec

from router.errors import RouterError
from router.prompt import large
from router.prompt.fields import ABSENT as ABSENT
from router.prompt.fields import Fields as Fields
from router.prompt.fields import SamplingParams, StreamOptions, Usual, decode_fields, decode_usual, has_seldom

CHAT = "/v1/chat/completions"
GENERATE = "/generate"

# More than any engine runs for one request; they keep a hostile number from overflowing a cost.
MAX_COPIES = 4096
MAX_NEW_TOKENS = 2**31

IN_ONE_GO_BYTES = 65_536
"""A longer chat body's messages are decoded by the thread that tokenises them."""
_NOTHING_ODD: frozenset[str] = frozenset()

_Value = TypeVar("_Value")


class RequestBody:
    """What routing reads from a body.

    `raw` is the client's bytes, unchanged. A field of a type no engine takes reads as absent, its name is in `odd`.
    `copies` is how many sequences the engine runs for each prompt (`n`), `max_new_tokens` the answer's cap in tokens.
    `cache_salt`, `extra_key` and `lora_path` are the first prompt's when the client sent one for each of a batch.
    `usual`: a chat body with messages and, of the other fields that shape a prompt or choose a rank, none.
    """

    __slots__ = (
        "_fields",
        "_messages",
        "cache_salt",
        "copies",
        "extra_key",
        "include_usage",
        "lora_path",
        "max_new_tokens",
        "model",
        "odd",
        "path",
        "raw",
        "rids",
        "routed_dp_rank",
        "session_id",
        "stream",
        "unresolved",
        "usual",
    )

    def __init__(self, path: str, raw: bytes, fields: Fields | None) -> None:
        """`fields` None: they are decoded when they are asked for."""
        self.path = path
        self.raw = raw
        self._fields = fields
        self._messages: list[Any] | None = None
        self.usual = False
        self.unresolved: object = None
        """What PromptSource.resolve_now left for `resolve`."""
        self.model: str | None = None
        self.stream = False
        self.include_usage = False
        self.copies = 1
        self.max_new_tokens: int | None = None
        self.cache_salt: str | None = None
        self.extra_key: str | None = None
        self.lora_path: str | None = None
        self.rids: tuple[str, ...] = ()
        self.session_id: str | None = None
        self.routed_dp_rank: int | None = None
        self.odd: frozenset[str] = _NOTHING_ODD

    @property
    def fields(self) -> Fields:
        if self._fields is None:
            self._fields = decode_fields(self.raw)
        return self._fields

    def take_messages(self) -> list[Any] | None:
        """`messages` as Python values, where they were decoded with the body: given away once, since whoever renders
        them may change them, and they are as large as the body itself. None: see `fields`."""
        found = self._messages
        self._messages = None
        return found

    def with_fields(self, path: str, fields: Fields) -> RequestBody:
        """The same request on another route, or with another prompt."""
        made = RequestBody(path, self.raw, fields)
        made.model = self.model
        made.stream = self.stream
        made.include_usage = self.include_usage
        made.copies = self.copies
        made.max_new_tokens = self.max_new_tokens
        made.cache_salt = self.cache_salt
        made.extra_key = self.extra_key
        made.lora_path = self.lora_path
        made.rids = self.rids
        made.session_id = self.session_id
        made.routed_dp_rank = self.routed_dp_rank
        made.odd = self.odd
        return made


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
    if path == CHAT and len(raw) <= IN_ONE_GO_BYTES and (usual := _usual(raw)) is not None:
        messages = usual.messages
        if messages is not None and not has_seldom(usual):
            return _usual_body(raw, usual, messages)
        body = _body(path, raw, _fields(raw))
        body._messages = messages
        return body
    return _body(path, raw, _fields(raw))


def _usual(raw: bytes) -> Usual | None:
    """None when the body is not quite as usual, or no JSON: to be read field by field."""
    try:
        if not raw.isascii():
            raw.decode()  # msgspec skips over strings it does not build
        return decode_usual(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _usual_body(raw: bytes, usual: Usual, messages: list[Any]) -> RequestBody:
    body = RequestBody(CHAT, raw, None)
    body._messages = messages
    body.usual = True
    body.model = usual.model
    body.stream = usual.stream is True
    options = usual.stream_options
    body.include_usage = options is not None and options.include_usage is True
    body.copies = _copies(usual.n)
    body.max_new_tokens = _limit(usual.max_completion_tokens or usual.max_tokens)
    body.cache_salt = usual.cache_salt or None
    body.session_id = usual.session_id
    return body


def _copies(n: int | None) -> int:
    return min(max(n or 1, 1), MAX_COPIES)


def _limit(tokens: int | None) -> int | None:
    return min(tokens, MAX_NEW_TOKENS) if tokens is not None and tokens >= 0 else None


def _body(path: str, raw: bytes, fields: Fields) -> RequestBody:
    odd: list[str] = []
    sampling = _read(fields.sampling_params, "sampling_params", SamplingParams, odd) if path == GENERATE else None
    if sampling is not None:
        n, limit = sampling.n, sampling.max_new_tokens
    else:
        n = _read(fields.n, "n", int, odd)
        limit = _read(fields.max_completion_tokens, "max_completion_tokens", int, odd)
        limit = limit or _read(fields.max_tokens, "max_tokens", int, odd)
    options = _read(fields.stream_options, "stream_options", StreamOptions, odd)
    rank = _read(fields.routed_dp_rank, "routed_dp_rank", int, odd)
    if rank is None:  # its name before SGLang 0.5.6
        rank = _read(fields.data_parallel_rank, "data_parallel_rank", int, odd)
    body = RequestBody(path, raw, fields)
    body.model = _read(fields.model, "model", str, odd)
    body.stream = _flag(fields.stream, "stream", odd)
    body.include_usage = options is not None and options.include_usage is True
    body.copies = _copies(n)
    body.max_new_tokens = _limit(limit)
    body.cache_salt = _first_text(fields.cache_salt, "cache_salt", odd)
    body.extra_key = _first_text(fields.extra_key, "extra_key", odd)
    body.lora_path = _first_text(fields.lora_path, "lora_path", odd)
    body.rids = _rids(fields.rid, odd)
    body.session_id = _read(fields.session_id, "session_id", str, odd)
    body.routed_dp_rank = rank
    if odd:
        body.odd = frozenset(odd)
    return body


def _read(value: msgspec.Raw, name: str, expected: type[_Value], odd: list[str]) -> _Value | None:
    if not present(value):
        return None
    try:
        return msgspec.json.decode(value, type=expected)
    except (msgspec.DecodeError, RecursionError):
        odd.append(name)
        return None


def _first_text(value: msgspec.Raw, name: str, odd: list[str]) -> str | None:
    if not present(value):
        return None
    if bytes(memoryview(value)[:1]) == b"[":
        values = _read(value, name, list[str | None], odd)
        return (values[0] or None) if values else None
    return _read(value, name, str, odd) or None  # engines read "" as not given


def _fields(raw: bytes) -> Fields:
    try:
        if len(raw) > large.LARGE_BYTES:
            return _fields_in_pieces(raw)
        if not raw.isascii():
            raw.decode()  # msgspec skips over strings it does not build
        return decode_fields(raw)
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
