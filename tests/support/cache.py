"""What one rank of a scripted engine really holds: a paged radix cache that evicts leaves, announced batch by batch."""

from __future__ import annotations

import random
from typing import Any

from router.hashing import Namespace, pack_ids, prompt_keys
from router.index.scheme import WorkerScheme
from tests.support.engine import FakeEngine, stored

Block = tuple[int, ...]
"""The whole prefix up to and with the block, as token ids: prefixes are what a radix cache holds."""


class Cache:
    """`truth(prompt)` is what the router should credit; every change is published on `engine`'s rank."""

    def __init__(self, engine: FakeEngine, rank: int = 0, *, width: int = 4) -> None:
        self.engine = engine
        self.rank = rank
        self.width = width
        self.resident: set[Block] = set()

    def truth(self, prompt: list[int]) -> int:
        """Tokens of the prompt that are resident, capped as an engine caps them (contract, section 2)."""
        tokens = 0
        for end in range(self.width, len(prompt), self.width):
            if tuple(prompt[:end]) not in self.resident:
                break
            tokens = end
        return tokens

    def store_event(self, prompt: list[int]) -> dict[str, Any] | None:
        """Makes every full block of the prompt resident and returns the event that says so; None: all were."""
        width = self.width
        blocks = [tuple(prompt[:end]) for end in range(width, len(prompt) + 1, width)]
        have = 0
        while have < len(blocks) and blocks[have] in self.resident:
            have += 1
        if have == len(blocks):
            return None
        self.resident.update(blocks[have:])
        keys = self.keys(prompt)
        tokens = prompt[have * width : len(blocks) * width]
        return stored(keys[have:], tokens, width, parent=keys[have - 1] if have else None)

    def store(self, *prompts: list[int], **how: Any) -> None:
        """One batch; `how` goes to FakeEngine.publish."""
        events = [event for prompt in prompts if (event := self.store_event(prompt)) is not None]
        if events:
            self.engine.publish(*events, rank=self.rank, **how)

    def evict_event(self, prompt: list[int], keep_blocks: int) -> dict[str, Any]:
        """Of the prompt's chain only the first blocks stay, and what else hangs below the others goes too."""
        gone = [
            b for b in self.resident if len(b) > keep_blocks * self.width and list(b[: len(prompt)]) == prompt[: len(b)]
        ]
        self.resident.difference_update(gone)
        return {"type": "BlockRemoved", "block_hashes": [self.keys(list(b))[-1] for b in gone], "medium": "GPU"}

    def evict(self, prompt: list[int], keep_blocks: int, **how: Any) -> None:
        self.engine.publish(self.evict_event(prompt, keep_blocks), rank=self.rank, **how)

    def clear(self, **how: Any) -> None:
        self.resident.clear()
        self.engine.publish({"type": "AllBlocksCleared"}, rank=self.rank, **how)

    def died(self, next_seq: int = 0) -> None:
        """Another process, with nothing cached, numbers from `next_seq`."""
        self.resident.clear()
        self.engine.restarted(self.rank, next_seq)

    def keys(self, prompt: list[int]) -> list[int]:
        keys = prompt_keys(WorkerScheme(self.width, "sglang").scheme, pack_ids(prompt), Namespace())
        assert keys is not None
        return keys


def prompts(seed: int, count: int = 6, tokens: int = 41) -> list[list[int]]:
    """Distinct prompts in pairs that share their first half."""
    rng = random.Random(seed)
    found = []
    for _ in range((count + 1) // 2):
        head = [rng.randrange(5, 4000) for _ in range(tokens // 2)]
        found += [head + [rng.randrange(5, 4000) for _ in range(tokens - len(head))] for _ in range(2)]
    return found[:count]
