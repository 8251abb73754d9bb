"""Reading what the engine says it did (`usage`, `meta_info`) out of an answer that passes by, without touching it."""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from router.proxy.plan import Usage

_JSON_CAP_BYTES = 1 << 20
_TAIL_BYTES = 64 << 10
_DONE = b"[DONE]"
_NO_SENTINEL = frozenset({"/v1/responses", "/v1/messages"})
"""Event streams that do not end with `data: [DONE]` by their own definition."""

T = TypeVar("T")


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _UsageFields(msgspec.Struct):
    """OpenAI's `usage`: chat and completions say prompt/completion, the Responses API says input/output."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: _Details | None = None

    def usage(self) -> Usage:
        details = self.prompt_tokens_details or self.input_tokens_details
        return Usage(
            prompt_tokens=self.input_tokens if self.prompt_tokens is None else self.prompt_tokens,
            cached_tokens=details.cached_tokens if details else None,
            completion_tokens=self.output_tokens if self.completion_tokens is None else self.completion_tokens,
        )


class _Meta(msgspec.Struct):
    """SGLang's `meta_info` on /generate, where cached_tokens is always reported (engine contract, section 5)."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None

    def usage(self) -> Usage:
        return Usage(self.prompt_tokens, self.cached_tokens, self.completion_tokens)


class _Envelope(msgspec.Struct):
    usage: _UsageFields | None = None


class _OpenAi(msgspec.Struct):
    usage: _UsageFields | None = None
    response: _Envelope | None = None

    def found(self) -> Usage | None:
        fields = self.usage or (self.response.usage if self.response else None)
        return fields.usage() if fields else None


class _Native(msgspec.Struct):
    meta_info: _Meta | None = None
    index: int | None = None

    def found(self) -> Usage | None:
        # Streams of a batch interleave their prompts and the tail holds only some: no figure beats a wrong one.
        return self.meta_info.usage() if self.meta_info and self.index is None else None


class _Decode(Generic[T]):
    """msgspec's decoder for one type, where anything odd is simply nothing."""

    def __init__(self, type_: type[T]) -> None:
        self._decoder = msgspec.json.Decoder(type_)

    def __call__(self, data: bytes) -> T | None:
        try:
            return self._decoder.decode(data)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            return None


_openai = _Decode(_OpenAi)
_native = _Decode(_Native)
_native_batch = _Decode(list[_Native])


class UsageTap:
    """Fed with every piece of one answer's body; keeps at most 1 MiB of a JSON answer, 128 KiB of an event stream.

    `content_type` and `content_encoding` are the answer's lower-case field values. Anthropic's /v1/messages counts
    tokens differently and is not read.
    """

    def __init__(self, route: str, content_type: bytes, content_encoding: bytes) -> None:
        self._native = route == "/generate"
        plain = content_encoding in (b"", b"identity")
        self._stream = plain and content_type.startswith(b"text/event-stream")
        self._keep = plain and (self._stream or b"json" in content_type) and route != "/v1/messages"
        self._expects_done = self._stream and route not in _NO_SENTINEL
        self._pieces: list[bytes] = []
        self._held_bytes = 0

    def feed(self, data: bytes) -> None:
        if not self._keep:
            return
        self._pieces.append(data)
        self._held_bytes += len(data)
        if self._stream:
            if self._held_bytes > 2 * _TAIL_BYTES:
                self._replace(b"".join(self._pieces)[-_TAIL_BYTES:])
        elif self._held_bytes > _JSON_CAP_BYTES:
            self._keep = False
            self._replace(b"")

    def _replace(self, data: bytes) -> None:
        self._pieces = [data]
        self._held_bytes = len(data)

    def broke_off(self) -> bool:
        """The stream ended without the `[DONE]` that its route promises (case 68)."""
        return self._expects_done and _DONE not in self._last_bytes(len(_DONE) + 26)

    def names_error(self) -> bool:
        """The engine itself said in the stream's last events that it failed."""
        return self._stream and b'"error"' in self._last_bytes(4096)

    def _last_bytes(self, count: int) -> bytes:
        last = b""
        for piece in reversed(self._pieces):
            last = piece[-count:] + last
            if len(last) >= count:
                break
        return last

    def result(self) -> Usage | None:
        """What was reported; None when nothing was, or the answer was compressed, too large or broken."""
        if not self._keep or not self._pieces:
            return None
        held = b"".join(self._pieces)
        return self._from_stream(held) if self._stream else self._from_json(held)

    def _from_json(self, held: bytes) -> Usage | None:
        if not self._native:
            answer = _openai(held)
            return answer.found() if answer else None
        if held.lstrip()[:1] != b"[":
            single = _native(held)
            return single.found() if single else None
        batch = _native_batch(held)
        metas = [item.meta_info for item in batch or () if item.meta_info]
        if not metas:
            return None
        return Usage(
            _sum([meta.prompt_tokens for meta in metas]),
            _sum([meta.cached_tokens for meta in metas]),
            _sum([meta.completion_tokens for meta in metas]),
        )

    def _from_stream(self, held: bytes) -> Usage | None:
        needle = b'"meta_info"' if self._native else b'"usage"'
        end = len(held)
        while (at := held.rfind(needle, 0, end)) >= 0:
            line_start = held.rfind(b"\n", 0, at) + 1
            line_end = held.find(b"\n", at)
            line = held[line_start : line_end if line_end >= 0 else len(held)]
            if line.startswith(b"data:"):
                event = (_native if self._native else _openai)(line[5:])
                if event is not None and (usage := event.found()) is not None:
                    return usage
            end = line_start
        return None


def _sum(values: list[int | None]) -> int | None:
    return None if None in values else sum(value for value in values if value is not None)
