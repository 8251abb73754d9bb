"""What engines report of a request, as msgspec reads it out of an answer or out of one event of a stream.

Apart from router.proxy.usage, because a msgspec.Struct cannot be compiled.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from router.proxy.plan import Usage

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


class OpenAi(msgspec.Struct):
    usage: _UsageFields | None = None
    response: _Envelope | None = None

    def found(self) -> Usage | None:
        fields = self.usage or (self.response.usage if self.response else None)
        return fields.usage() if fields else None


class Native(msgspec.Struct):
    meta_info: _Meta | None = None
    index: int | None = None
    """Which prompt of a batch a stream's event is about."""

    def found(self) -> Usage | None:
        return self.meta_info.usage() if self.meta_info else None


class _MessagesUsage(msgspec.Struct):
    """Anthropic's `usage`: input_tokens are those not read from the cache, and an engine leaves zeros out."""

    input_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None
    output_tokens: int | None = None

    def usage(self) -> Usage:
        prompt = self.input_tokens
        if prompt is not None:
            prompt += (self.cache_read_input_tokens or 0) + (self.cache_creation_input_tokens or 0)
        return Usage(prompt, self.cache_read_input_tokens, self.output_tokens)


class _Message(msgspec.Struct):
    usage: _MessagesUsage | None = None


class MessagesEvent(msgspec.Struct):
    """A whole answer, `message_start` (usage inside `message`) or `message_delta`."""

    usage: _MessagesUsage | None = None
    message: _Message | None = None

    def found(self) -> Usage | None:
        fields = self.usage or (self.message.usage if self.message else None)
        return fields.usage() if fields else None


class Decode(Generic[T]):
    """msgspec's decoder for one type, where anything odd is simply nothing."""

    def __init__(self, type_: type[T]) -> None:
        self._decoder = msgspec.json.Decoder(type_)

    def __call__(self, data: bytes) -> T | None:
        try:
            return self._decoder.decode(data)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            return None


OPENAI = Decode(OpenAi)
NATIVE = Decode(Native)
MESSAGES = Decode(MessagesEvent)
NATIVE_BATCH = Decode(list[Native])
