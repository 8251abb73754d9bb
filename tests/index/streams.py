"""A worker fed with events as an engine packs them, for the tests of the ledger."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgpack

from router.contract.events import decode_batch
from router.hashing import Namespace, creditable_blocks, pack_ids, prompt_keys, sglang_chain
from router.index.ledger import RankLedger, WorkerScheme
from router.index.prefix import PrefixIndex
from router.index.vouch import Chains

NOWHERE = Namespace()


class Worker:
    """One engine as the router sees it: its ranks' ledgers over one index, fed with events as an engine packs them."""

    def __init__(self, width: int = 4, engine: str = "sglang", ranks: int = 1, bigram: bool = False) -> None:
        self.index = PrefixIndex()
        self.scheme = WorkerScheme(width, engine, bigram)
        self.slots = [self.index.open_slot() for _ in range(ranks)]
        self.chains = Chains(self.index.discard)
        self.ledgers = [RankLedger(self.index, slot, self.scheme, self.chains) for slot in self.slots]

    def feed(self, *events: Any, rank: int = 0) -> None:
        self.ledgers[rank].apply(decode_batch(msgpack.packb([1.0, list(events), rank])))

    def depths(self, tokens: Sequence[int], namespace: Namespace = NOWHERE, rank: int = 0) -> tuple[int, ...]:
        scheme = self.scheme.scheme
        keys = prompt_keys(scheme, pack_ids(tokens), namespace) or []
        return self.index.match(keys, creditable_blocks(scheme, len(tokens))).get(self.slots[rank], (0, 0, 0, 0))

    def credit(self, tokens: Sequence[int], namespace: Namespace = NOWHERE, rank: int = 0) -> int:
        """Blocks."""
        return max(self.depths(tokens, namespace, rank))

    def blocks(self, rank: int = 0) -> int:
        return sum(self.index.blocks(self.slots[rank]))

    @property
    def kind(self) -> str:
        return self.scheme.scheme.kind

    @property
    def counters(self) -> Any:
        return self.ledgers[0].counters


def hashes_of(tokens: Sequence[int], width: int = 4, salt: str | None = None) -> list[int]:
    return sglang_chain(pack_ids(tokens), width * 4, salt)


def store(
    tokens: Sequence[Any], hashes: Sequence[Any], parent: Any = None, width: int = 4, **more: Any
) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": list(tokens),
        "block_size": width,
        "lora_id": None,
        "medium": "GPU",
    } | more


def removed(hashes: Sequence[Any], medium: str | None = "GPU", **more: Any) -> dict[str, Any]:
    event = {"type": "BlockRemoved", "block_hashes": list(hashes), **more}
    return event | ({"medium": medium} if medium else {})


CLEARED = {"type": "AllBlocksCleared"}
CHAIN = list(range(100, 124))  # six blocks of four
HASHES = hashes_of(CHAIN)
PROMPT = [*CHAIN, 1]


def other_hash(tokens: Sequence[int], parent: int | None) -> int:
    """Some engine's chained hash that is not SGLang's."""
    return random.Random(repr((parent, list(tokens)))).getrandbits(64) - 2**63


def other_store(tokens: Sequence[int], parent: int | None = None, width: int = 4, **more: Any) -> dict[str, Any]:
    hashes: list[int] = []
    for start in range(0, len(tokens), width):
        hashes.append(other_hash(tokens[start : start + width], hashes[-1] if hashes else parent))
    return store(tokens, hashes, parent, width, **more)
