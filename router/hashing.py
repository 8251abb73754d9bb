"""Token ids → block keys, the way a worker's index is keyed. Pure.

Token ids are `bytes` inside the router: u32 little-endian, four bytes a token. A block key is an int in the signed
64-bit domain. Two chains exist: SGLang's own (SHA-256, so that the hashes in its events are the keys) and, for
engines whose hash cannot be recomputed, a chain of our own over the token ids of their events (xxh3).
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import Literal, NamedTuple

from xxhash import xxh3_64_digest

TokenIds = bytes
HashKind = Literal["sglang-sha256", "xxh3"]

_SALT_PREFIX = b"sglang-cache-salt-v1\0"
_ROOT_PREFIX = b"kv-router root\0"


class Scheme(NamedTuple):  # and Namespace: as dictionary keys these are hashed several times a request
    """How one worker's blocks are keyed. `width`: tokens (pairs, if `bigram`) a block."""

    kind: HashKind
    width: int
    bigram: bool = False


class Namespace(NamedTuple):
    """What keeps equal token ids in separate caches."""

    cache_salt: str | None = None
    lora_name: str | None = None
    extra_key: str | None = None


NO_NAMESPACE = Namespace()


def pack_ids(ids: Sequence[int]) -> TokenIds:
    """Ints → TokenIds. Raises ValueError for anything outside 0..2^32-1 or not an integer (case 48)."""
    try:
        packed = array("I", ids)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"a token id is an integer from 0 to 2^32-1: {error}") from None
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def token_count(ids: TokenIds) -> int:
    return len(ids) // 4


def creditable_blocks(scheme: Scheme, prompt_tokens: int) -> int:
    """Blocks an engine can reuse of a prompt: it always recomputes the last token (for pairs, the last two: the cap of
    the contract's section 2), so a prompt of exactly one block earns none (case 47)."""
    return max(0, (prompt_tokens - (2 if scheme.bigram else 1)) // scheme.width)


def prompt_keys(scheme: Scheme, ids: TokenIds, namespace: Namespace = NO_NAMESPACE) -> list[int] | None:
    """Keys of every full block of a prompt, first to last. None: this namespace cannot be reproduced under this scheme,
    so the prompt earns no credit there (cases 40, 41)."""
    units = bigrams(ids) if scheme.bigram else ids
    if scheme.kind == "xxh3":
        return xxh3_chain(xxh3_root(namespace), units, block_bytes(scheme))
    if namespace.lora_name is not None or namespace.extra_key is not None:
        # Adapters seed the hash by a rule the contract does not give; extra_key is not in the default format's hash at
        # all, so nothing in the stream tells these blocks from the base model's.
        return None
    return sglang_chain(units, block_bytes(scheme), namespace.cache_salt)


def block_bytes(scheme: Scheme) -> int:
    return scheme.width * (8 if scheme.bigram else 4)


def full_blocks(scheme: Scheme, tokens: int) -> int:
    """Blocks that so many tokens fill. A block of pairs also reads the first token behind it."""
    return max(0, tokens - scheme.bigram) // scheme.width


def block_units(scheme: Scheme, ids: TokenIds, first: int, end: int) -> bytes:
    """What is hashed for the blocks from `first` up to `end`, the bytes of tokens or of pairs."""
    units = ids[4 * first * scheme.width : 4 * (end * scheme.width + scheme.bigram)]
    return bigrams(units) if scheme.bigram else units


def bigrams(ids: TokenIds) -> TokenIds:
    """t0,t1,t2 → the pairs t0,t1, t1,t2 (the unit EAGLE-family engines page and hash)."""
    tokens = array("I", ids)
    if len(tokens) < 2:
        return b""
    pairs = array("I", bytes(8 * (len(tokens) - 1)))
    pairs[0::2] = tokens[:-1]
    pairs[1::2] = tokens[1:]
    return pairs.tobytes()


def sglang_chain(units: bytes, block_bytes: int, cache_salt: str | None = None) -> list[int]:
    """SGLang's page hashes from the root (releases 0.5.10 and later): digest = sha256(previous digest ‖ block), the
    first one without a predecessor or with the salt's digest; the key is its first 8 bytes, big-endian, signed. The
    chain runs over full digests: the published ints do not suffice to continue it (case 45)."""
    return _keys(_sglang_digests(_sglang_root(cache_salt), units, block_bytes), 4)


def _sglang_root(cache_salt: str | None) -> bytes:
    return b"" if cache_salt is None else sha256(_SALT_PREFIX + cache_salt.encode("utf-8", "surrogatepass")).digest()


def _sglang_digests(digest: bytes, units: bytes, block_bytes: int) -> list[bytes]:
    return [digest := sha256(digest + block).digest() for (block,) in _blocks(units, block_bytes)]


def xxh3_root(namespace: Namespace = NO_NAMESPACE) -> int:
    """The key our own chain starts from: one for every namespace. Field lengths are hashed too, so that no two
    namespaces spell the same bytes."""
    parts = [_ROOT_PREFIX]
    for field in (namespace.cache_salt, namespace.lora_name, namespace.extra_key):
        text = b"" if field is None else field.encode("utf-8", "surrogatepass")
        parts.append(struct.pack("<q", -1 if field is None else len(text)) + text)
    return int.from_bytes(xxh3_64_digest(b"".join(parts)), "big", signed=True)


def xxh3_chain(parent: int, units: bytes, block_bytes: int) -> list[int]:
    """Our own keys of the full blocks in `units`, whose first block follows the block keyed `parent`."""
    return _keys(_xxh3_digests(parent.to_bytes(8, "big", signed=True), units, block_bytes), 1)


def _xxh3_digests(digest: bytes, units: bytes, block_bytes: int) -> list[bytes]:
    return [digest := xxh3_64_digest(digest + block) for (block,) in _blocks(units, block_bytes)]


def _blocks(units: bytes, block_bytes: int) -> Iterator[tuple[bytes]]:
    """The full blocks, one by one (10 to 25 % less than slicing a memoryview costs with the hash)."""
    return struct.iter_unpack(f"{block_bytes}s", memoryview(units)[: len(units) // block_bytes * block_bytes])


def chain_root(scheme: Scheme, namespace: Namespace = NO_NAMESPACE) -> bytes | None:
    """The state a prompt's chain starts from, for `chain_digests`; None where `prompt_keys` is None."""
    if scheme.kind == "xxh3":
        return xxh3_root(namespace).to_bytes(8, "big", signed=True)
    if namespace.lora_name is not None or namespace.extra_key is not None:
        return None
    return _sglang_root(namespace.cache_salt)


def digest_bytes(scheme: Scheme) -> int:
    """The length of one of `chain_digests`."""
    return 8 if scheme.kind == "xxh3" else 32


def chain_digests(scheme: Scheme, state: bytes, units: bytes) -> list[bytes]:
    """One digest for each full block of `units`; each is the state to continue the chain from behind its block."""
    if scheme.kind == "xxh3":
        return _xxh3_digests(state, units, block_bytes(scheme))
    return _sglang_digests(state, units, block_bytes(scheme))


def digest_keys(scheme: Scheme, digests: list[bytes]) -> list[int]:
    """The block keys of `chain_digests`."""
    return _keys(digests, digest_bytes(scheme) // 8)


def _keys(digests: list[bytes], words: int) -> list[int]:
    """The first big-endian signed 64-bit word of each digest of `words` words."""
    keys = array("q", b"".join(digests))
    if sys.byteorder == "little":
        keys.byteswap()
    return keys[::words].tolist()
