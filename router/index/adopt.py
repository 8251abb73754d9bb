"""Cold join where our own chain is the key (vLLM, old SGLang): whose child is this block? Pure.

A store below an unheard parent gives that parent's engine hash, which says nothing about the tokens before it. What
tells them is a prompt the router sent to this rank: its blocks from some position on are the stored ones. The store is
then placed in that prompt's chain, which alone earns nothing. When the engine reports that it reused exactly the blocks
before that position, they are counted as resident for as long as the named parent is: eviction is leaf first, and the
parent is the only one of them whose removal can be recognised.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.contract.events import Tier
from router.index.names import Names
from router.index.prefix import PrefixIndex

MAX_EXPECTED = 32  # prompts under way on one rank that a store may belong to


class Expected:
    """One prompt under way: its units (token ids, or pairs), its keys, and where stores were placed in it: block number
    → the engine's hash of the block before it, None when several claimed the place."""

    __slots__ = ("anchors", "keys", "lora_name", "units")

    def __init__(self, units: bytes, keys: Sequence[int], lora_name: str | None) -> None:
        self.units = units
        self.keys = keys
        self.lora_name = lora_name
        self.anchors: dict[int, int | None] = {}


class Adopter:
    """One rank's, over its `names`."""

    def __init__(self, index: PrefixIndex, slot: int, names: Names) -> None:
        self._index = index
        self._slot = slot
        self._names = names
        self._expected: dict[Expected, None] = {}
        self._held: dict[int, Sequence[int]] = {}  # engine's hash of a vouched parent → keys of the blocks above it

    def __len__(self) -> int:
        return sum(len(keys) + 1 for keys in self._held.values())

    def clear(self) -> None:
        self._expected, self._held = {}, {}

    def expect(self, units: bytes, keys: Sequence[int], lora_name: str | None) -> Expected:
        expected = Expected(units, keys, lora_name)
        self._expected[expected] = None
        if len(self._expected) > MAX_EXPECTED:
            del self._expected[next(iter(self._expected))]
        return expected

    def place(self, parent: int, units: bytes, block_bytes: int, lora_name: str | None) -> int | None:
        """Our key of the block the engine calls `parent`, by what was stored below it; None if that is not certain."""
        found: set[int] = set()
        claimed: list[tuple[Expected, int]] = []
        for expected in self._expected:
            if expected.lora_name != lora_name:
                continue
            for number in _positions(expected.units, units, block_bytes):
                if 0 < number < len(expected.keys):
                    found.add(expected.keys[number - 1])
                    claimed.append((expected, number))
        if len(found) != 1:
            return None
        for expected, number in claimed:
            before = expected.anchors.setdefault(number, parent)
            if before != parent:
                expected.anchors[number] = None
                return None
        return found.pop()

    def settle(self, expected: Expected, reused_blocks: int) -> int:
        """The prompt was answered, and the engine had `reused_blocks` of it. Returns how many are vouched for now."""
        placed = expected in self._expected
        self._expected.pop(expected, None)
        parent = expected.anchors.get(reused_blocks)
        if not placed or parent is None or self._names.one(parent) is not None:
            return 0
        if not self._index.holds(self._slot, expected.keys[reused_blocks]):
            return 0
        keys = expected.keys[:reused_blocks]
        if not self._names.add(parent, keys[-1]) or self._index.store(self._slot, Tier.GPU, keys):
            return 0
        self._held[parent] = keys[:-1]
        return len(keys)

    def removed(self, name: int) -> None:
        """A removal of `name` was counted."""
        keys = self._held.get(name)
        if keys is not None and self._names.one(name) is None:
            del self._held[name]
            self._index.remove(self._slot, Tier.GPU, keys)


def _positions(prompt: bytes, stored: bytes, block_bytes: int) -> list[int]:
    """Block numbers of `prompt` from which on it agrees with `stored`, as far as both go."""
    first = stored[:block_bytes]
    found = []
    at = prompt.find(first)
    while at >= 0:
        if at % block_bytes == 0:
            length = min(len(stored), (len(prompt) - at) // block_bytes * block_bytes)
            if prompt[at : at + length] == stored[:length]:
                found.append(at // block_bytes)
        at = prompt.find(first, at + 4)
    return found
