"""Cache events → the bytes an SGLang 0.5.23 publisher sends: maps, nil fields left out except two. No I/O."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable

import msgspec

from router.engine.radix import CacheEvent, Cleared, Removed
from router.hashing import Namespace, Scheme, TokenIds, prompt_keys

_encode = msgspec.msgpack.Encoder().encode


class PageHasher:
    """Token ids → page keys under one engine's settings.

    `format` "default": cache_salt and the adapter are in the hash, extra_key is not (two namespaces share one hash).
    "dynamo": all three are. SGLang's seeds for anything but the plain salt are not known: a seed of our own stands in.
    """

    def __init__(self, width_tokens: int, *, bigram: bool = False, format: str = "default") -> None:
        self.scheme = Scheme("sglang-sha256", width_tokens, bigram)
        self._dynamo = format == "dynamo"

    def full_pages(self, tokens: int) -> int:
        """Whole pages in a sequence of `tokens` tokens; a page of P pairs spans P + 1 tokens."""
        return max(0, tokens - self.scheme.bigram) // self.scheme.width

    def keys(self, ids: TokenIds, namespace: Namespace) -> list[int]:
        keys = prompt_keys(self.scheme, ids, Namespace(cache_salt=self._salt(namespace)))
        assert keys is not None, "a salt alone is always reproducible"
        return keys

    def _salt(self, namespace: Namespace) -> str | None:
        extra_key = namespace.extra_key if self._dynamo else None
        folded = extra_key is not None or namespace.lora_name is not None
        if not folded and not (self._dynamo and namespace.cache_salt is not None):
            return namespace.cache_salt
        return "\0".join(part or "" for part in ("kv-router", namespace.cache_salt, extra_key, namespace.lora_name))


def encode_batch(ts_s: float, events: Iterable[CacheEvent], rank: int, scheme: Scheme) -> bytes:
    """One batch `[ts, [event…], rank]`."""
    return _encode([ts_s, [_event(event, scheme) for event in events], rank])


def _event(event: CacheEvent, scheme: Scheme) -> dict[str, object]:
    if isinstance(event, Cleared):
        return {"type": "AllBlocksCleared"}
    if isinstance(event, Removed):
        return {"type": "BlockRemoved", "block_hashes": event.keys, "medium": "GPU"}
    start = event.first_page * scheme.width
    body: dict[str, object] = {
        "type": "BlockStored",
        "block_hashes": event.keys,
        "parent_block_hash": event.parent_key,
        "token_ids": _units(event.ids, start, start + len(event.keys) * scheme.width, scheme.bigram),
        "block_size": scheme.width,
        "lora_id": None,
        "medium": "GPU",
    }
    if event.namespace.cache_salt is not None:
        body["cache_salt"] = event.namespace.cache_salt
    if event.session_id is not None:
        body["session_id"] = event.session_id
    if event.namespace.lora_name is not None:
        body["lora_name"] = event.namespace.lora_name
    return body


def _units(ids: TokenIds, start: int, end: int, bigram: bool) -> list[int] | list[tuple[int, int]]:
    """Tokens [start, end), or the pairs that begin at them."""
    tokens = struct.unpack(f"<{end - start + bigram}I", ids[4 * start : 4 * (end + bigram)])
    return list(itertools.pairwise(tokens)) if bigram else list(tokens)
