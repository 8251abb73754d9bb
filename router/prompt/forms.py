"""The legal prompt forms of each route (case 38), told apart without tokenising anything."""

from __future__ import annotations

from typing import Literal

import msgspec

from router.hashing import TokenIds, pack_ids, token_count
from router.prompt import large
from router.prompt.body import CHAT as CHAT
from router.prompt.body import GENERATE, RequestBody, present
from router.prompt.converted import MESSAGES, RESPONSES

_MAX_STEP = 65_536
CHARS_PER_TOKEN = 4  # the estimate where no tokenizer answers

COMPLETIONS = "/v1/completions"
TOKENIZE = "/v1/tokenize"


class PromptForm:
    """What the body asks the engine to prefill. "rendered": as "chat", by rules that only the engine knows.

    A batch is routed by its FIRST prompt: `ids` or `text` is that one, `prompts` how many there are. `rest_tokens` is
    exact when they came as ids; `rest_chars` is characters when they came as text. `ids` is None for ids no engine can
    have (−5, 2^40, true, 1.0); `max_id` is the highest of all prompts' ids. `estimate_tokens` covers the whole batch,
    from characters where that is all there is.
    """

    __slots__ = (
        "_chat",
        "_estimate_tokens",
        "ids",
        "kind",
        "max_id",
        "prompts",
        "reason",
        "rest_chars",
        "rest_tokens",
        "text",
    )

    def __init__(
        self,
        kind: Literal["ids", "text", "chat", "rendered", "none"],
        reason: str = "",
        ids: TokenIds | None = None,
        text: str | None = None,
        prompts: int = 1,
        rest_tokens: int = 0,
        rest_chars: int = 0,
        estimate_tokens: int = 0,
        max_id: int | None = None,
        chat: RequestBody | None = None,
    ) -> None:
        """`chat`: the estimate is made from this body's fields, if it is asked for."""
        self.kind = kind
        self.reason = reason
        self.ids = ids
        self.text = text
        self.prompts = prompts
        self.rest_tokens = rest_tokens
        self.rest_chars = rest_chars
        self.max_id = max_id
        self._estimate_tokens = estimate_tokens
        self._chat = chat

    @property
    def estimate_tokens(self) -> int:
        if self._chat is None:
            return self._estimate_tokens
        return _size(self._chat.fields.messages) + _size(self._chat.fields.tools)


def prompt_form(body: RequestBody, engine: str = "unknown") -> PromptForm:
    """Never raises: what cannot be understood is kind "none" with a reason, and is routed by load. A body over
    `large.LARGE_BYTES` takes its time: call it in a thread."""
    if body.usual:
        return PromptForm("chat", chat=body)
    fields = body.fields
    if body.path == CHAT or (body.path == TOKENIZE and present(fields.messages)):
        if present(fields.input_ids) and engine != "vllm":  # SGLang: replaces the rendered prompt (fact 14)
            return _ids(fields.input_ids)
        return PromptForm("chat", chat=body)
    if body.path in (COMPLETIONS, TOKENIZE):
        return _prompt(fields.prompt)
    if body.path == GENERATE:
        if any(present(media) for media in (fields.image_data, fields.video_data, fields.audio_data)):
            return PromptForm("none", "media", estimate_tokens=_size(fields.text) + _size(fields.input_ids))
        given = [raw for raw in (fields.text, fields.input_ids, fields.input_embeds) if present(raw)]
        if len(given) != 1:  # the engine answers 400 to none and to several
            return PromptForm("none", "no_prompt", estimate_tokens=sum(_size(raw) for raw in given))
        if present(fields.input_embeds):
            return PromptForm("none", "embeds", estimate_tokens=_size(fields.input_embeds) // CHARS_PER_TOKEN)
        return _prompt(given[0])
    if body.path in (MESSAGES, RESPONSES) and engine in ("sglang", "vllm"):
        kind: Literal["chat", "rendered"] = "chat" if engine == "sglang" else "rendered"
        return PromptForm(kind, estimate_tokens=len(body.raw) // CHARS_PER_TOKEN)
    return PromptForm("none", "route", estimate_tokens=len(body.raw) // CHARS_PER_TOKEN)


def _size(raw: msgspec.Raw) -> int:
    """Tokens guessed from the length of the JSON text."""
    return len(memoryview(raw)) // CHARS_PER_TOKEN


def _prompt(raw: msgspec.Raw) -> PromptForm:
    if not present(raw):
        return PromptForm("none", "no_prompt")
    opening = _opening(raw)
    if opening in (b'"', b'["'):
        return _texts(bytes(raw))
    if opening == b"[]":
        return PromptForm("none", "empty")
    return _ids(raw)


def _opening(raw: msgspec.Raw) -> bytes:
    """The value's first character; for an array the first of its first item too."""
    head = bytes(memoryview(raw)[:64])
    return b"[" + head[1:].lstrip()[:1] if head[:1] == b"[" else head[:1]


def _texts(raw: bytes) -> PromptForm:
    """A text, or an array that begins with one."""
    try:
        texts = [large.text(raw)] if raw[:1] == b'"' else _batch(raw)
    except (msgspec.DecodeError, ValueError):
        # A lone surrogate, or a batch of mixed types: no engine tokenises either.
        return PromptForm("none", "prompt_form", estimate_tokens=len(raw) // CHARS_PER_TOKEN)
    rest = sum(len(text) for text in texts) - len(texts[0])
    estimate = (len(texts[0]) + rest) // CHARS_PER_TOKEN
    if not texts[0]:
        return PromptForm("none", "empty", prompts=len(texts), rest_chars=rest, estimate_tokens=estimate)
    return PromptForm("text", text=texts[0], prompts=len(texts), rest_chars=rest, estimate_tokens=estimate)


def _batch(raw: bytes) -> list[str]:
    if len(raw) <= large.LARGE_BYTES:
        return msgspec.json.decode(raw, type=list[str])
    texts = large.value(raw)
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("a batch of mixed types")
    return list(texts)


def _ids(raw: msgspec.Raw) -> PromptForm:
    """Flat ids are one prompt, nested ids a batch. A bool or a float is not an id, nor is anything outside u32."""
    try:
        prompts = _nested(bytes(raw)) if _opening(raw) == b"[[" else [read_ids(bytes(raw))]
    except (msgspec.DecodeError, ValueError, RecursionError):
        return PromptForm("none", "odd_ids", estimate_tokens=_size(raw))
    first = prompts[0]
    rest = sum(map(token_count, prompts[1:]))
    highest = max((_highest(ids) for ids in prompts if ids), default=None)
    if not first:
        return PromptForm("none", "empty", prompts=len(prompts), rest_tokens=rest, estimate_tokens=rest, max_id=highest)
    return PromptForm(
        "ids",
        ids=first,
        prompts=len(prompts),
        rest_tokens=rest,
        estimate_tokens=token_count(first) + rest,
        max_id=highest,
    )


def _nested(raw: bytes) -> list[TokenIds]:
    if len(raw) <= large.LARGE_BYTES:
        return [pack_ids(prompt) for prompt in msgspec.json.decode(raw, type=list[list[int]])]
    prompts: list[TokenIds] = []
    parts: list[TokenIds] = []
    for goes_on, ids in large.id_lists(raw):
        if parts and not goes_on:
            prompts.append(b"".join(parts))
            parts = []
        parts.append(pack_ids(ids))
    return [*prompts, b"".join(parts)]


def read_ids(raw: bytes) -> TokenIds:
    """A JSON array of ids, read in slices. Raises ValueError or msgspec.DecodeError when it is something else."""
    text, size = raw.strip(), large.PIECE_BYTES
    if len(text) <= size or text[:1] != b"[" or text[-1:] != b"]":
        return pack_ids(msgspec.json.decode(text, type=list[int]))
    packed: list[TokenIds] = []
    at, end = 1, len(text) - 1
    while at <= end:
        comma = text.rfind(b",", at, at + size) if end - at > size else end
        if comma < 0:
            raise ValueError("one id longer than a slice")
        packed.append(pack_ids(msgspec.json.decode(b"[" + text[at:comma] + b"]", type=list[int])))
        at = comma + 1
        if not packed[-1]:
            raise ValueError("an id is missing")
    return b"".join(packed)


def _highest(ids: TokenIds) -> int:
    return max([max(memoryview(ids[at : at + _MAX_STEP]).cast("I")) for at in range(0, len(ids), _MAX_STEP)])
