"""Engine hash → our own key, for one rank whose engine's hashes cannot be recomputed.

The engine's hash only names blocks: a store gives it with the token ids, from which our own key is computed; a removal
gives nothing else. Keys no prompt can reach (`foreign_root`) keep blocks whose place is unknown countable and
removable.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from msgspec import MsgspecError
from msgspec.msgpack import Decoder
from xxhash import xxh3_64_digest

from router.contract.events import BlockStored
from router.hashing import Namespace

# CPython's hash of an empty tuple: SGLang 0.4.10, whose hashes are those of Python tuples, gives it to roots as parent.
EMPTY_TUPLE_HASH = 5740354900026072187
_MAX_KEYS_PER_NAME = 64
# As in the index: no dict may grow so large that its resize stalls the event loop. A name's top bits pick one of 64.
_SHARDS = 64
_SHARD_SHIFT = 58
_MAX_PAST_NAMES = 65_536

_extra_keys = Decoder(list[list[Any] | None] | None)


def is_root(event: BlockStored) -> bool:
    """Whether the store says that it begins a prompt."""
    return event.parent_block_hash is None or event.parent_block_hash == EMPTY_TUPLE_HASH


def foreign_root(name: int) -> int:
    """Where a chain starts that hangs below a block we cannot place: no prompt's keys lead there."""
    digest = xxh3_64_digest(b"kv-router foreign\0" + name.to_bytes(8, "big", signed=True))
    return int.from_bytes(digest, "big", signed=True)


def namespace_of(event: BlockStored) -> tuple[Namespace | None, int]:
    """(the namespace of a root store, blocks it holds for). None: it cannot be told. Blocks after that number have keys
    of their own in their hash (vLLM: images), so that the token ids do not say what they are.

    vLLM hashes per block: the adapter's name, media keys, and in a prompt's first block its cache_salt. All come in
    `extra_keys`, one list a block.
    """
    if event.lora_name is None and event.lora_id is not None:
        return None, len(event.block_hashes)  # vLLM 0.11: an adapter without a name
    salt = event.cache_salt
    try:
        extra = _extra_keys.decode(event.extra_keys) if event.extra_keys is not None else None
    except (MsgspecError, ValueError, RecursionError):
        return None, 0
    for number, keys in enumerate(extra or ()):
        own = keys[1:] if keys and keys[0] == event.lora_name else keys
        if not own:
            continue
        only = own[0]
        if number == 0 and salt is None and is_root(event) and len(own) == 1 and isinstance(only, str):
            salt = only
        else:
            return Namespace(salt, event.lora_name), number
    return Namespace(salt, event.lora_name), len(event.block_hashes)


class Names:
    """The blocks of one rank by the engine's hash. In SGLang ≤ 0.5.3 the hash is that of a page's tokens alone, so one
    name may stand for several blocks: then no child can be hung below it, and a removal takes all of them, because
    crediting too much is worse than too little."""

    def __init__(self) -> None:
        self._keys: list[dict[int, int | tuple[int, ...]]] = [{} for _ in range(_SHARDS)]
        self._past_inner: dict[int, None] = {}
        self.roots: dict[int, None] = {}

    def __len__(self) -> int:
        return sum(map(len, self._keys))

    def one(self, name: int) -> int | None:
        """The block's key; None if unknown or ambiguous."""
        key = self._keys[name >> _SHARD_SHIFT].get(name)
        return key if isinstance(key, int) else None

    def leading(self, names: Sequence[int]) -> list[int]:
        """Keys of the first names, as far as they are known."""
        keys = []
        for name in names:
            key = self.one(name)
            if key is None:
                break
            keys.append(key)
        return keys

    def add(self, name: int, key: int) -> bool:
        """False: the name already stands for too many blocks, leave this one out."""
        keys = self._keys[name >> _SHARD_SHIFT]
        known = keys.get(name)
        if known is None:
            keys[name] = key
        elif isinstance(known, int):
            if known != key:
                keys[name] = (known, key)
        elif key not in known:
            if len(known) >= _MAX_KEYS_PER_NAME:
                return False
            keys[name] = (*known, key)
        return True

    def all(self, names: Iterable[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
        """(name, its keys) of the known ones."""
        for name in names:
            known = self._keys[name >> _SHARD_SHIFT].get(name)
            if known is not None:
                yield name, (known,) if isinstance(known, int) else known

    def pairs(self) -> Iterator[list[tuple[int, int]]]:
        """(name, key) of what is not ambiguous, shard by shard."""
        for shard in self._keys:
            yield [(name, key) for name, key in shard.items() if isinstance(key, int)]

    def forget(self, name: int, keep: Sequence[int]) -> None:
        """The name now stands for `keep` only."""
        keys = self._keys[name >> _SHARD_SHIFT]
        if len(keep) > 1:
            keys[name] = tuple(keep)
        elif keep:
            keys[name] = keep[0]
        else:
            del keys[name]

    def note_inner(self, name: int) -> None:
        """Remember, in bounded memory and beyond its removal, that this hash was seen inside a chain."""
        self._past_inner[name] = None
        if len(self._past_inner) > _MAX_PAST_NAMES:
            del self._past_inner[next(iter(self._past_inner))]

    def was_inner(self, name: int) -> bool:
        return name in self._past_inner

    def take_all(self) -> list[dict[int, int | tuple[int, ...]]]:
        """Forget everything; returns the old mappings, for whoever frees them in slices."""
        old = [keys for keys in self._keys if keys]
        if old:
            self._keys = [{} for _ in range(_SHARDS)]
        self._past_inner, self.roots = {}, {}
        return old
