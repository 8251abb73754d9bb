"""Reading what the engine says it did (`usage`, `meta_info`) out of an answer that passes by, without touching it."""

from __future__ import annotations

from typing import Final, Protocol, TypeVar

from router.proxy.plan import Usage
from router.proxy.reported import MESSAGES, NATIVE, NATIVE_BATCH, OPENAI, Decode

_JSON_CAP_BYTES: Final = 1 << 20
_TAIL_BYTES: Final = 64 << 10
_SHORTEN_BYTES: Final = 128 << 10
_HEAD_BYTES: Final = 8 << 10
_DONE = b"[DONE]"
_MESSAGES = "/v1/messages"
_NO_SENTINEL = "/v1/responses"
"""Its event streams do not end with a mark of their own in every engine."""


class UsageTap:
    """Fed with every piece of one answer's body; keeps at most 1 MiB of a JSON answer, 136 KiB of an event stream.

    `content_type` and `content_encoding` are the answer's lower-case field values.
    """

    _head: bytes = b""
    """The first bytes of a stream of /v1/messages, once they are no longer among the pieces."""
    _held_bytes: int = 0

    def __init__(self, route: str, content_type: bytes, content_encoding: bytes) -> None:
        plain = content_encoding in (b"", b"identity")
        self._native = route == "/generate"
        self._stream = plain and content_type.startswith(b"text/event-stream")
        self._keep = plain and (self._stream or b"json" in content_type)
        self.expects_mark = self._stream and route != _NO_SENTINEL
        """`broke_off` may be true."""
        self._of_messages = route == _MESSAGES
        self._batch: dict[int, Usage] = {}
        """The last figures of each prompt of a streamed batch, as far as they are no longer among the pieces."""
        self._pieces: list[bytes] = []

    def feed(self, data: bytes) -> None:
        if not self._keep:
            return
        self._pieces.append(data)
        held_bytes = self._held_bytes + len(data)
        self._held_bytes = held_bytes
        if held_bytes > _SHORTEN_BYTES:
            if self._stream:
                self._shorten()
            elif held_bytes > _JSON_CAP_BYTES:
                self._keep = False
                self._replace(b"")

    def _shorten(self) -> None:
        held = b"".join(self._pieces)
        if self._of_messages and not self._head:
            self._head = held[:_HEAD_BYTES]
        cut = len(held) - _TAIL_BYTES
        if self._native and b'"index"' in held:
            cut = held.rfind(b"\n", 0, cut) + 1 or cut  # between two events
            self._read_batch(held[:cut])
        self._replace(held[cut:])

    def _read_batch(self, events: bytes) -> None:
        for line in events.split(b"\n"):
            event = NATIVE(line[5:]) if line.startswith(b"data:") else None
            if event is not None and event.index is not None and event.meta_info is not None:
                self._batch[event.index] = event.meta_info.usage()

    def _replace(self, data: bytes) -> None:
        self._pieces = [data]
        self._held_bytes = len(data)

    def broke_off(self) -> bool:
        """The stream ended without the mark that its route promises, such as `[DONE]` (case 68)."""
        if not self.expects_mark:
            return False
        last = self._last_bytes(48)
        return not (_DONE in last or (self._of_messages and b"message_stop" in last))

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
        held = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        return self._from_stream(held) if self._stream else self._from_json(held)

    def _from_json(self, held: bytes) -> Usage | None:
        if not self._native:
            answer = (MESSAGES if self._of_messages else OPENAI)(held)
            return answer.found() if answer else None
        if held.lstrip()[:1] != b"[":
            single = NATIVE(held)
            return single.found() if single else None
        batch = NATIVE_BATCH(held)
        return _total([item.meta_info.usage() for item in batch or () if item.meta_info])

    def _from_stream(self, held: bytes) -> Usage | None:
        if self._native:
            last = _last(held, b'"meta_info"', NATIVE)
            if last is None or last.index is None:
                return last.found() if last else None
            self._read_batch(held)
            return _total(list(self._batch.values()))
        if not self._of_messages:
            event = _last(held, b'"usage"', OPENAI)
            return event.found() if event else None
        begun = _last(self._head or held[:_HEAD_BYTES], b'"message_start"', MESSAGES)
        ended = _last(held, b'"message_delta"', MESSAGES)
        start = begun.found() if begun else None
        end = ended.found() if ended else None
        if start is None:
            return end
        return Usage(start.prompt_tokens, start.cached_tokens, end.completion_tokens if end else None)


class _Event(Protocol):
    def found(self) -> Usage | None: ...


E = TypeVar("E", bound=_Event)


def _last(held: bytes, needle: bytes, decode: Decode[E]) -> E | None:
    """The last event with `needle` in it that reports usage."""
    end = len(held)
    while (at := held.rfind(needle, 0, end)) >= 0:
        line_start = held.rfind(b"\n", 0, at) + 1
        line_end = held.find(b"\n", at)
        line = held[line_start : line_end if line_end >= 0 else len(held)]
        if line.startswith(b"data:"):
            event = decode(line[5:])
            if event is not None and event.found() is not None:
                return event
        end = line_start
    return None


def _total(parts: list[Usage]) -> Usage | None:
    """Over the prompts of a batch."""
    if not parts:
        return None
    return Usage(
        _sum([part.prompt_tokens for part in parts]),
        _sum([part.cached_tokens for part in parts]),
        _sum([part.completion_tokens for part in parts]),
    )


def _sum(values: list[int | None]) -> int | None:
    return None if None in values else sum(value for value in values if value is not None)
