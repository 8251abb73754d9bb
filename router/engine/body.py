"""What a generation request asked for: prompts as token ids, namespace, sampling limits, the pinned rank."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from router.engine.options import EngineOptions
from router.engine.text import PromptRefused, TextCodec
from router.hashing import Namespace, TokenIds, pack_ids, token_count

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
DEFAULT_OUTPUT_TOKENS = 128
MAX_SEQUENCES = 1024


class BadRequest(Exception):
    """Answered in the route's own error shape, with `status`."""

    def __init__(self, message: str, *, status: int = 400, type: str = "BadRequestError") -> None:
        super().__init__(message)
        self.status = status
        self.type = type


@dataclass(frozen=True, slots=True)
class Sequence:
    """One sequence to generate. `choice` numbers it within the answer."""

    rid: str
    ids: TokenIds
    namespace: Namespace
    session_id: str | None
    choice: int


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request. `batched`: /generate answers with a list. `rank` None: the engine chooses."""

    path: str
    rid: str
    model: str
    sequences: list[Sequence]
    batched: bool
    copies: int
    max_new_tokens: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    rank: int | None


def json_object(raw: bytes) -> dict[str, Any]:
    """Raises BadRequest; a body that is JSON but no object is SGLang's plain-text 500."""
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRequest(f"1 validation error:\n  JSON decode error: {error}", type="Bad Request") from None
    if not isinstance(body, dict):
        raise BadRequest("Internal Server Error", status=500, type="plain")
    return body


def read_call(path: str, raw: bytes, headers: Mapping[str, str], options: EngineOptions, codec: TextCodec) -> Call:
    """Raises BadRequest for what SGLang 0.5.23 refuses."""
    body = json_object(raw)
    try:
        prompts, batched = _prompts(path, raw, body, codec)
    except PromptRefused as error:
        raise BadRequest(str(error)) from error
    sampling = body.get("sampling_params") if path == GENERATE else body
    sampling = sampling if isinstance(sampling, dict) else {}
    copies = _integer(sampling, "n", 1)
    if not 1 <= copies * len(prompts) <= MAX_SEQUENCES:
        raise BadRequest(f"{len(prompts)} prompts with n={copies}: write 1 to {MAX_SEQUENCES} sequences in all")
    names = ("max_new_tokens",) if path == GENERATE else ("max_completion_tokens", "max_tokens")
    limit = next((_integer(sampling, name, 0) for name in names if sampling.get(name) is not None), None)
    max_new_tokens = DEFAULT_OUTPUT_TOKENS if limit is None else limit
    if max_new_tokens < 0:
        raise BadRequest(f"max_new_tokens must be at least 0, got {max_new_tokens}.")
    for ids in prompts:
        _check_length(token_count(ids), max_new_tokens, limit is not None, options.context_length)
    session_id = body["session_id"] if isinstance(body.get("session_id"), str) else None
    rid, rids = _rids(body, len(prompts), copies)
    stream_options = body.get("stream_options")
    stream_options = stream_options if isinstance(stream_options, dict) else {}
    return Call(
        path=path,
        rid=rid,
        model=body["model"] if isinstance(body.get("model"), str) else "default",
        sequences=[
            Sequence(rids[i], prompts[i // copies], _namespace(body, i // copies, options), session_id, i)
            for i in range(len(prompts) * copies)
        ],
        batched=batched or copies > 1,
        copies=copies,
        max_new_tokens=max_new_tokens,
        stream=body.get("stream") is True,
        include_usage=stream_options.get("include_usage") is True,
        continuous_usage=stream_options.get("continuous_usage_stats") is True,
        rank=_rank(path, body, headers, options.dp_size),
    )


def read_tokenize(raw: bytes, codec: TextCodec) -> tuple[list[TokenIds], bool]:
    """A /v1/tokenize body, messages or prompt → prompts, and whether it was a batch. Raises BadRequest."""
    body = json_object(raw)
    try:
        if body.get("messages") is not None:
            return [codec.render_chat("/v1/tokenize", raw)], False
        return _prompts_of(body.get("prompt"), codec)
    except PromptRefused as error:
        raise BadRequest(str(error)) from error


def _prompts_of(value: object, codec: TextCodec) -> tuple[list[TokenIds], bool]:
    """`"text"`, `["text", …]`, `[ids]` or `[[ids], …]` → prompts, and whether it was a batch."""
    if isinstance(value, str):
        return [codec.encode(value)], False
    if isinstance(value, list) and value:
        if all(isinstance(item, str) for item in value):
            return [codec.encode(item) for item in value], True
        if all(isinstance(item, list) and item for item in value):
            return [_ids(item, codec) for item in value], True
        return [_ids(value, codec)], False
    raise BadRequest("the prompt must be text, a list of texts, token ids, or a list of token id lists; none empty")


def _prompts(path: str, raw: bytes, body: dict[str, Any], codec: TextCodec) -> tuple[list[TokenIds], bool]:
    if path == CHAT:
        if body.get("input_ids") is not None:
            return _prompts_of(body["input_ids"], codec)
        messages = body.get("messages")
        if not isinstance(messages, list):
            raise BadRequest("1 validation error:\n  body.messages: Input should be a valid list", type="Bad Request")
        if not messages:
            raise BadRequest("Messages cannot be empty.")
        return [codec.render_chat(path, raw)], False
    if path == COMPLETIONS:
        return _prompts_of(body.get("prompt"), codec)
    given = [body[name] for name in ("text", "input_ids") if body.get(name) is not None]
    if len(given) != 1:
        raise BadRequest("Either text or input_ids should be provided, and not both.")
    return _prompts_of(given[0], codec)


def _ids(value: list[Any], codec: TextCodec) -> TokenIds:
    if any(type(token) is not int or not 0 <= token < codec.vocabulary_size for token in value):
        raise BadRequest(f"token ids must be integers from 0 to {codec.vocabulary_size - 1}")
    return pack_ids(value)


def _integer(body: dict[str, Any], name: str, default: int) -> int:
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not int:
        raise BadRequest(f"1 validation error:\n  body.{name}: Input should be a valid integer", type="Bad Request")
    return value


def _check_length(prompt_tokens: int, max_new_tokens: int, asked: bool, context_length: int) -> None:
    if prompt_tokens >= context_length:
        raise BadRequest(
            f"The input ({prompt_tokens} tokens) is longer than the model's context length ({context_length} tokens)."
        )
    if asked and prompt_tokens + max_new_tokens > context_length:
        raise BadRequest(
            f"Requested token count exceeds the model's maximum context length of {context_length} tokens. You "
            f"requested a total of {prompt_tokens + max_new_tokens} tokens: {prompt_tokens} tokens from the input "
            f"messages and {max_new_tokens} tokens for the completion. Please reduce the number of tokens in the "
            "input messages or the completion to fit within the limit."
        )


def _rids(body: dict[str, Any], prompts: int, copies: int) -> tuple[str, list[str]]:
    """The answer's id and one a sequence: suffixed when there are several, so that an abort by the rid finds all."""
    given = body.get("rid")
    if isinstance(given, list) and len(given) == prompts and all(isinstance(rid, str) for rid in given):
        return given[0], [rid if copies == 1 else f"{rid}_{copy}" for rid in given for copy in range(copies)]
    base = given if isinstance(given, str) and given else uuid.uuid4().hex
    count = prompts * copies
    return base, [base] if count == 1 else [f"{base}_{i}" for i in range(count)]


def _namespace(body: dict[str, Any], prompt: int, options: EngineOptions) -> Namespace:
    """What keeps caches apart; "base:adapter" in `model` beats `lora_path`."""

    def text(name: str) -> str | None:
        value = body.get(name)
        if isinstance(value, list):
            value = value[prompt] if prompt < len(value) else None
        return value if isinstance(value, str) and value else None

    base, _, adapter = (text("model") or "").partition(":")
    lora_name = adapter if adapter and base == options.model else text("lora_path")
    return Namespace(cache_salt=text("cache_salt"), lora_name=lora_name, extra_key=text("extra_key"))


def _rank(path: str, body: dict[str, Any], headers: Mapping[str, str], dp_size: int) -> int | None:
    """The header beats the body on OpenAI routes and is ignored on /generate (engine contract, section 5)."""
    header = headers.get("X-Data-Parallel-Rank") if path != GENERATE else None
    if header is not None:
        try:
            rank: int | None = int(header)
        except ValueError:
            message = f"Invalid X-Data-Parallel-Rank header: must be an integer, got '{header}'"
            raise BadRequest(message, type="400") from None
    else:
        name = "routed_dp_rank" if body.get("routed_dp_rank") is not None else "data_parallel_rank"
        rank = _integer(body, name, 0) if body.get(name) is not None else None
    if rank is not None and not 0 <= rank < dp_size:
        raise BadRequest(f"routed_dp_rank={rank} out of range [0, {dp_size})")
    return rank
