"""How much of one prompt each rank holds: the one place where hashing, index and the engine's cap meet. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from router.hashing import Namespace, Scheme, TokenIds, creditable_blocks, prompt_keys, token_count
from router.index.prefix import PrefixIndex
from router.policy.predicted import PredictedBlocks

NOTHING = (0, 0, 0, 0)


@dataclass(slots=True)
class PromptKeys:
    """A prompt's block keys, made once per distinct scheme of the fleet (design, section 3)."""

    ids: TokenIds | None
    namespace: Namespace
    _by_scheme: dict[Scheme, list[int]] = field(default_factory=dict)

    def under(self, scheme: Scheme) -> list[int]:
        """Keys of the blocks the engine may serve from its cache, in order; empty when nothing can be credited: no ids,
        a prompt too short, or a namespace whose seed cannot be reproduced."""
        keys = self._by_scheme.get(scheme)
        if keys is None:
            keys = self._make(scheme)
            self._by_scheme[scheme] = keys
        return keys

    def _make(self, scheme: Scheme) -> list[int]:
        if self.ids is None:
            return []
        creditable = creditable_blocks(scheme, token_count(self.ids))
        keys = prompt_keys(scheme, self.ids, self.namespace) if creditable else None
        return keys[:creditable] if keys else []


class PrefixMatch:
    """The resident prefix of one prompt on every slot, looked up once per scheme."""

    def __init__(self, index: PrefixIndex, predicted: PredictedBlocks, keys: PromptKeys) -> None:
        self._index = index
        self._predicted = predicted
        self._keys = keys
        self._found: dict[Scheme, dict[int, tuple[int, int, int, int]]] = {}

    def tokens(self, scheme: Scheme, slot: int) -> tuple[tuple[int, int, int, int], int]:
        """(resident tokens by tier, cumulative and fastest first; tokens resident or predicted) on `slot`."""
        keys = self._keys.under(scheme)
        if not keys:
            return NOTHING, 0
        found = self._found.get(scheme)
        if found is None:
            found = self._found[scheme] = self._index.match(keys)
        blocks = found.get(slot, NOTHING)
        depth = self._predicted.depth(slot, keys, blocks[3], len(keys))
        width = scheme.width
        if blocks is NOTHING:
            return NOTHING, depth * width
        gpu, host, disk, external = blocks
        return (gpu * width, host * width, disk * width, external * width), depth * width
